"""What a check can come to: nothing to complain of, a failure, or a reason why it could not be tried.

The sentences are for people who wrote the runtime under test; they may know nothing of this kit.
"""

import json
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

SHOWN_CHARS_MAX: Final = 400
Level = Literal["MUST", "SHOULD", "MAY"]
Outcome = Literal["passed", "failed", "skipped"]


class Failed(Exception):
    """The runtime does not do what is required. The text says what it did instead."""


class Skipped(Exception):
    """This cannot be tried here. The text says what is missing."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """`source` is the section of the AEP text, `needs` what trying it takes besides one key."""

    id: str
    level: Level
    capability: str
    source: str
    sentence: str
    needs: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        return self.id.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`excused` is why a skip is allowed, where skips are not."""

    requirement: Requirement
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    excused: str = ""


def fail(sentence: str) -> NoReturn:
    raise Failed(sentence)


def expect(holds: object, sentence: str) -> None:
    if not holds:
        raise Failed(sentence)


def same(found: Any, wanted: Any, what: str) -> None:
    """Equal as JSON; true is not 1."""
    if shown(found) != shown(wanted) or found != wanted:
        raise Failed(f"{what}: expected {brief(wanted)}, got {brief(found)}.")


def shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def brief(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"
