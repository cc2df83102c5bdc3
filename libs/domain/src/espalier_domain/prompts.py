"""Changes of an agent's mutable prompt: what a change did, as a unified diff, and how a diff is applied.

Pure functions over text. A line is what stands between line feeds, whatever else a Unicode reader takes for a
line's end. Not here: who may change a prompt, or whether the change was made against the prompt that stands.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff as differences
from typing import Final

from espalier_domain.errors import InvalidInput

PROMPT_CHARS_MAX: Final = 65_536
"""The longest prompt that an agent may give itself, and the longest diff that it may send."""

REASON_CHARS_MAX: Final = 2_000
PENDING_MAX: Final = 8
"""Changes of one agent that wait for a person."""

COMPARED_LINES_MAX: Final = 400
"""Lines that differ, on each side, that are compared one by one: comparing costs their square."""

TOLD_CHARS_MAX: Final = 65_536
"""What an event tells of a diff. The history keeps all of it."""

SHOWN_CHARS_MAX: Final = 80
CONTEXT_LINES: Final = 3
NO_END: Final = "\\ No newline at end of file"
_HUNK: Final = re.compile(r"@@ -(\d{1,7})(?:,(\d{1,7}))? \+(\d{1,7})(?:,(\d{1,7}))? @@.*")


def unified_diff(before: str, after: str) -> str:
    """What changed, as `diff -u` writes it; empty if nothing did. `patched(before, ...)` gives `after`."""
    old, new = _lines(before), _lines(after)
    lines = _far_apart(old, new) or differences(old, new, "before", "after", n=CONTEXT_LINES)
    return "".join(_ended(line) for line in lines)


def told(diff: str) -> str:
    """The diff as an event tells it."""
    return diff if len(diff) <= TOLD_CHARS_MAX else f"{diff[:TOLD_CHARS_MAX]} [shortened]"


def patched(before: str, diff: str) -> str:
    """The text with a unified diff applied, strictly: every hunk fits exactly where it says, or none is done.

    Raises InvalidInput that says which hunk is refused and why.
    """
    old, new, place = _lines(before), list[str](), 0
    for number, hunk in enumerate(_hunks(diff), start=1):
        if not place <= hunk.place <= len(old):
            raise _refused(f"hunk {number} is refused: it begins at line {hunk.place + 1}, out of its place")
        new += old[place : hunk.place]
        place = hunk.place
        for kind, line in hunk.lines:
            if kind != "+":
                _must_stand(old, place, line, number)
                place += 1
            if kind != "-":
                new.append(line)
    new += old[place:]
    if any(not line.endswith("\n") for line in new[:-1]):
        raise _refused(f"a line that ends without a line feed ({NO_END!r}) is not the last one")
    return "".join(new)


@dataclass(frozen=True, slots=True)
class _Hunk:
    """`place` is the number of lines before it; `lines` are (" ", "-" or "+", the line with its end)."""

    place: int
    lines: list[tuple[str, str]]


def _hunks(diff: str) -> Iterator[_Hunk]:
    lines = diff.split("\n")
    if lines[-1] == "":
        lines.pop()
    at = 2 if len(lines) > 1 and lines[0].startswith("--- ") and lines[1].startswith("+++ ") else 0
    if at == len(lines):
        raise _refused("there is no hunk in it")
    while at < len(lines):  # bounded by the diff: each hunk takes its heading at least
        head = _HUNK.fullmatch(lines[at])
        if head is None:
            raise _refused(f"it is no unified diff: {_shown(lines[at])} should be a hunk's @@ -a,b +c,d @@")
        old_count, new_count = (1 if count is None else int(count) for count in (head[2], head[4]))
        taken, hunk_lines = _hunk_lines(lines[at + 1 :], old_count, new_count)
        yield _Hunk(int(head[1]) - (old_count > 0), hunk_lines)
        at += 1 + taken


def _hunk_lines(lines: list[str], old_left: int, new_left: int) -> tuple[int, list[tuple[str, str]]]:
    """How many lines of the diff the hunk has, and what they say."""
    found: list[tuple[str, str]] = []
    taken = 0
    for line in lines:
        kind = line[:1] or " "  # an empty line of context often loses its blank on the way
        if kind == "\\" and found:
            found[-1] = (found[-1][0], found[-1][1].removesuffix("\n"))
        elif (old_left or new_left) and kind in " -+":
            found.append((kind, f"{line[1:]}\n"))
            old_left -= kind != "+"
            new_left -= kind != "-"
        else:
            break
        taken += 1
    if old_left or new_left:
        raise _refused("a hunk has other lines than its heading counts")
    return taken, found


def _must_stand(old: list[str], place: int, line: str, number: int) -> None:
    stands = old[place] if place < len(old) else None
    if stands == line:
        return
    found = "the prompt ends before it" if stands is None else f"the prompt has {_shown(stands)}"
    raise _refused(f"hunk {number} is refused: at line {place + 1} it has {_shown(line)}, {found}")


def _far_apart(old: list[str], new: list[str]) -> list[str] | None:
    """The diff of texts that differ in too many lines to be compared: one hunk that replaces them all."""
    same = _common(old, new)
    end = _common(old[same:][::-1], new[same:][::-1])
    gone, come = old[same : len(old) - end], new[same : len(new) - end]
    if max(len(gone), len(come)) <= COMPARED_LINES_MAX:
        return None
    heading = f"@@ -{_range(same, len(gone))} +{_range(same, len(come))} @@\n"
    head = ["--- before\n", "+++ after\n", heading]
    return [*head, *(f"-{line}" for line in gone), *(f"+{line}" for line in come)]


def _common(one: list[str], other: list[str]) -> int:
    """How many lines both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _range(lines_before: int, count: int) -> str:
    return f"{lines_before + (count > 0)},{count}"


def _lines(text: str) -> list[str]:
    """With their ends; the last one may have none."""
    lines = [f"{line}\n" for line in text.split("\n")]
    last = lines.pop().removesuffix("\n")
    return [*lines, last] if last else lines


def _ended(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n{NO_END}\n"


def _shown(line: str) -> str:
    return repr(line[:SHOWN_CHARS_MAX])


def _refused(why: str) -> InvalidInput:
    return InvalidInput("content", f"cannot be applied: {why}")
