"""Lists and single things as a person reads them: a line a thing, ids first and whole, times in UTC.

The last column takes what room there is, so lines can be printed while pages still arrive; only on a
terminal is it cut at the edge. What the wire says is neither markup nor obeyed. Lists are bounded here, too.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from espalier_client.lists import Page
from espalier_client.timeline import printable
from espalier_protocol.shapes import PAGE_DEFAULT, PAGE_MAX
from espalier_protocol.strict_json import dumps

LISTED_MAX: Final = 100_000
"""The most that one command lists."""

COLUMNS_MIN: Final = 80
"""Terminals that are narrower fold the lines by themselves: an id that is cut is of no use."""

ID_COLUMNS: Final = 30
TIME_COLUMNS: Final = len("2026-01-01 00:00")
GAP: Final = "  "

Limit = Annotated[int, typer.Option(min=1, max=LISTED_MAX, help="How many, newest first.")]
All = Annotated[bool, typer.Option("--all", help=f"All of them, up to {LISTED_MAX}.")]
LIMIT_DEFAULT: Final = PAGE_DEFAULT

Thing = TypeVar("Thing")
Fetch = Callable[[str | None, int], Awaitable[Page[Thing]]]
"""Takes a cursor and how many are wanted."""


async def each(fetch: Fetch[Thing], number: int, show: Callable[[Thing], None]) -> bool:
    """Show up to `number` things, page by page. Returns whether there are more."""
    cursor, more = None, True
    for _ in range(number):  # a page that brings nothing is the last, so there are no more pages than things
        page = await fetch(cursor, min(number, PAGE_MAX))
        for item in page.items[:number]:
            show(item)
        cursor, more = page.cursor, page.cursor is not None or len(page.items) > number
        number -= len(page.items)
        if cursor is None or number <= 0 or not page.items:
            break
    return more


class Listing:
    """Prints rows below a heading. `columns` are names and widths; `last` takes the rest of the line."""

    def __init__(self, console: Console, columns: Sequence[tuple[str, int]], last: str) -> None:
        self._console = wide_enough(console)
        self._widths = [width for _, width in columns]
        self._heading: Sequence[str] = (*(name for name, _ in columns), last)

    def row(self, *cells: str) -> None:
        if self._heading:
            heading, self._heading = self._heading, ()
            self._print(heading, "dim")
        self._print(cells)

    def note(self, text: str) -> None:
        """What belongs to the last row and finds no place in it, whole."""
        self._console.print(Text(printable(text), style="dim"), soft_wrap=True)

    def _print(self, cells: Sequence[str], style: str = "") -> None:
        *fixed, last = (printable(cell) for cell in cells)
        padded = [cell.ljust(width) for cell, width in zip(fixed, self._widths, strict=True)]
        line = Text(GAP.join((*padded, last)), style=style)
        if self._console.is_terminal:
            self._console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            self._console.print(line, soft_wrap=True)


def tell(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """One thing in full: a fact a line, further lines of a text below its first. Empty facts are left out."""
    told = [(name, text) for name, text in facts if text]
    width = max(len(name) for name, _ in told)
    for name, text in told:
        for number, line in enumerate(text.splitlines()):
            label = "" if number else name
            console.print(Text.assemble((label.ljust(width) + GAP, "dim"), printable(line)), soft_wrap=True)


def wide_enough(console: Console) -> Console:
    console.width = max(console.width, COLUMNS_MIN)
    return console


def moment(at: datetime | None) -> str:
    """To the minute, for lists."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M") if at else ""


def instant(at: datetime | None) -> str:
    """To the second, for one thing in full."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at else ""


def plain(value: Any) -> str:
    """A JSON value in a table: a text as it is, anything else on one line."""
    return value if isinstance(value, str) else dumps(value).decode()


def compact(value: Any) -> str:
    """A JSON value on one line; nothing for an empty one."""
    return "" if value in (None, "", [], {}) else dumps(value).decode()
