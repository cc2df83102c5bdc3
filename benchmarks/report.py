"""What the benches found out, and how it is shown: a Markdown table for people, lines of JSON for machines.

A figure has one value for each round it was taken in; shown are their median and how far they lie apart. A
figure that could not be taken shows the error that it met. Nothing here knows how anything is measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import orjson

ERROR_CHARS_MAX: Final = 120
MACHINE_LINES: Final = "One line of JSON for each figure, with the value of every round:"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `values` is empty when there is an `error` instead."""

    scenario: str
    what: str
    unit: str
    values: tuple[float, ...] = ()
    wanted: str = ""
    error: str = ""

    @property
    def shown(self) -> str:
        return number(median(self.values)) if self.values else f"failed: {self.error or 'no value'}"

    @property
    def spread(self) -> str:
        low, high = (min(self.values), max(self.values)) if self.values else (0.0, 0.0)
        return "" if low == high else f"{number(low)} to {number(high)}"


class Taken:
    """The figures of one scenario while it runs. A figure that is added again has one more round."""

    def __init__(self, scenario: str) -> None:
        self._scenario = scenario
        self._values: dict[tuple[str, str, str], list[float]] = {}
        self._error = ""

    def add(self, what: str, value: float | None, unit: str, wanted: str = "") -> None:
        """None if there was nothing to take the figure of."""
        values = self._values.setdefault((what, unit, wanted), [])
        if value is not None:
            values.append(value)

    def failed(self, error: BaseException) -> None:
        self._error = said(error)

    def figures(self) -> list[Figure]:
        """What was taken, and as a last line why there is no more."""
        taken = [
            Figure(self._scenario, what, unit, tuple(values), wanted)
            for (what, unit, wanted), values in self._values.items()
        ]
        return [*taken, Figure(self._scenario, "the rest", "", error=self._error)] if self._error else taken


@dataclass
class Report:
    """Everything that is printed. `facts` say on what the figures were taken, `limits` what was raised."""

    facts: dict[str, str] = field(default_factory=dict)
    limits: dict[str, tuple[str, str]] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)

    def tables(self) -> str:
        """The tables, as Markdown that can be read as it is."""
        limits = [(name, usual, raised) for name, (usual, raised) in sorted(self.limits.items())]
        rows = [
            (each.scenario, each.what, each.shown, each.unit, each.spread, each.wanted)
            for each in self.figures
        ]
        return "\n".join(
            (
                _table(("machine", ""), self.facts.items()),
                _table(("setting", "default", "in the benches"), limits),
                _table(("scenario", "figure", "median", "unit", "rounds", "wanted"), rows),
            )
        )

    def machine_lines(self) -> str:
        return "".join(f"{orjson.dumps(_members(each)).decode()}\n" for each in self.figures)

    def page(self) -> str:
        return f"{self.tables()}\n{MACHINE_LINES}\n\n```json\n{self.machine_lines()}```\n"


def number(value: float) -> str:
    """Three digits are more than a busy machine can promise; counts are shown whole."""
    if float(value).is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def said(error: BaseException) -> str:
    """An error in one line; of a group the first that is no group. A RuntimeError's words are a sentence."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    kind, words = type(error).__name__, " ".join(str(error).split())
    said_so = words if isinstance(error, RuntimeError) else f"{kind}: {words}"
    return said_so[:ERROR_CHARS_MAX] if words else kind


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of all lies below. Raises ValueError when there is none."""
    if not values:
        raise ValueError("nothing was measured")
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def _members(figure: Figure) -> dict[str, object]:
    known = {"scenario": figure.scenario, "figure": figure.what, "unit": figure.unit}
    if not figure.values:
        return {**known, "error": figure.error or "no value"}
    return {**known, "median": median(figure.values), "rounds": figure.values}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    rule = "-|-".join("-" * width for width in widths)
    return "".join(f"| {line} |\n" for line in (lines[0], *lines[1:])).replace("\n", f"\n|-{rule}-|\n", 1)
