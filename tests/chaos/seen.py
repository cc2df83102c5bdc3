"""A history and a dump, put in order once for all checks: rows by their run, times on the bench's clock.

Pure. It judges nothing.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final, TypeVar
from uuid import UUID

from tests.chaos.history import Began, Dump, Ended, Fault, Record

from espalier_protocol.ids import to_wire

T = TypeVar("T")
Row = dict[str, Any]

LINES_MAX: Final = 10
MARGIN_S: Final = 1.0
"""What connecting again, and a look that has just been missed, add to a fault."""

LIVE: Final = ("running", "sleeping")


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong, in a sentence, with the few rows or records that show it."""

    invariant: str
    subject: str
    sentence: str
    slice: tuple[str, ...] = ()


def violation(invariant: str, subject: str, sentence: str, *shown: Any) -> Violation:
    return Violation(invariant, subject, sentence, tuple(_line(each) for each in shown[:LINES_MAX]))


def _line(shown: Any) -> str:
    return json.dumps(shown if isinstance(shown, dict) else asdict(shown), sort_keys=True, default=str)


class Seen:
    """What all checks ask. Ids of runs are wire ids."""

    def __init__(self, records: Sequence[Record], dump: Dump) -> None:
        self.records, self.dump = records, dump
        first, last = records[0], records[-1]
        assert isinstance(first, Began), "a history begins with Began"
        assert isinstance(last, Ended), "a history ends with Ended"
        self.began, self.ended = first, last
        self.lease_s = float(first.settings.get("lease_ttl_s", 4.0))
        self.sweep_s = float(first.settings.get("sweep_s", 3.0))

    def of(self, kind: type[T]) -> Sequence[T]:
        """All records of a kind, in their order."""
        return self._kinds.get(kind, [])

    @cached_property
    def _kinds(self) -> dict[type[Any], list[Any]]:
        found: dict[type[Any], list[Any]] = defaultdict(list)
        for record in self.records:
            found[type(record)].append(record)
        return found

    def rows(self, table: str) -> list[Row]:
        return self.dump.get(table, [])

    @cached_property
    def runs(self) -> dict[str, Row]:
        return {run_of(row["id"]): row for row in self.rows("runs")}

    def whole(self, run_id: str) -> bool:
        """Whether nothing was taken from the run's log and journal: no retention, no erasure."""
        run = self.runs.get(run_id)
        return run is not None and not run["log_pruned_at"] and not run["erased_at"]

    def ancestors(self, run_id: str) -> list[str]:
        """The run's spawner, that one's spawner, and so on, as far as they are there."""
        found: list[str] = []
        while (parent := self.runs[found[-1] if found else run_id]["parent_id"]) is not None:
            parent_id = run_of(parent)
            if parent_id not in self.runs or parent_id in found:
                break
            found.append(parent_id)
        return found

    @cached_property
    def owners(self) -> dict[str, str]:
        """Names by id."""
        return {row["id"]: row["name"] for row in self.rows("owners")}

    @cached_property
    def events(self) -> dict[str, list[Row]]:
        return self._by_run("events", "seq")

    @cached_property
    def journals(self) -> dict[str, list[Row]]:
        return self._by_run("journal", "entry_no")

    @cached_property
    def entries(self) -> dict[str, dict[str, list[Row]]]:
        """By run and kind, in order."""
        found: dict[str, dict[str, list[Row]]] = {}
        for run_id, rows in self.journals.items():
            kinds: dict[str, list[Row]] = defaultdict(list)
            for row in rows:
                kinds[row["body"]["kind"]].append(row)
            found[run_id] = kinds
        return found

    def entries_of(self, run_id: str, kind: str) -> list[Row]:
        return self.entries.get(run_id, {}).get(kind, [])

    def _by_run(self, table: str, order: str) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows(table):
            found[run_of(row["run_id"])].append(row)
        return {run_id: sorted(rows, key=lambda row: row[order]) for run_id, rows in found.items()}

    def at(self, moment: str) -> float:
        """When a row's time was, on the bench's clock."""
        return self.ended.at + datetime.fromisoformat(moment).timestamp() - self.ended.clock

    def excused_s(self, since: float, until: float, *acts: str) -> float:
        """How much of this time one of these faults lasted, with what it takes to recover from one."""
        found = sorted(
            (max(fault.at - MARGIN_S, since), min(self._over(fault), until))
            for fault in self.of(Fault)
            if fault.act.startswith(acts) and fault.at - MARGIN_S < until and self._over(fault) > since
        )
        total, reached = 0.0, since
        for begins, ends in found:
            total += max(ends - max(begins, reached), 0.0)
            reached = max(reached, ends)
        return total

    def _over(self, fault: Fault) -> float:
        return fault.at + float(fault.detail.get("seconds", 0.0)) + self.lease_s + self.sweep_s + MARGIN_S


def run_of(uuid: str) -> str:
    return to_wire("run", UUID(uuid))


def twice(values: Iterable[T]) -> list[T]:
    """Those that come more than once, in order of their second coming."""
    seen: set[Any] = set()
    again: dict[Any, None] = {}
    for value in values:
        if value in seen:
            again[value] = None
        seen.add(value)
    return list(again)
