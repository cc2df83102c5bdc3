"""The bench's one clock, and the history while it is being written.

All processes of a machine share the monotonic clock, so that a ledger's line and a frame can be told apart in
time. Records are sorted when they are given away: a call is noted when it is over, a ledger when it is read.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from tests.chaos.history import Began, Ended, Record

T = TypeVar("T")


class Recorder:
    """Everybody in the bench notes what they saw here."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._records: list[Record] = []

    def now(self) -> float:
        """Seconds since the bench began."""
        return self._clock() - self._began_at

    def at(self, monotonic_s: float) -> float:
        """When a moment was that another process read off the same clock."""
        return monotonic_s - self._began_at

    def note(self, record: Record) -> None:
        self._records.append(record)

    def all_of(self, kind: type[T]) -> list[T]:
        return [record for record in self._records if isinstance(record, kind)]

    def history(self) -> list[Record]:
        """What happened, in order; the beginning first and the end last, whatever their times say."""
        return sorted(self._records, key=_place)


def _place(record: Record) -> tuple[int, float]:
    match record:
        case Began():
            return 0, record.at
        case Ended():
            return 2, record.at
        case _:
            return 1, record.at
