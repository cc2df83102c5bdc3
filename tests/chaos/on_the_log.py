"""Checks of the event log and of those who read it: INV-1, INV-2, INV-3, INV-19."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from hashlib import sha256
from itertools import pairwise
from typing import Final

from tests.chaos.history import Call, Connection, Frame
from tests.chaos.seen import Row, Seen, Violation, violation

from espalier_protocol.events import LAST_EVENT, NumberedEvent
from espalier_protocol.ids import event_id

KEPT_S_MIN: Final = 24 * 3600.0
DAY_S: Final = 24 * 3600.0
TOLD_S: Final = 20.0
"""A follower that is connected has been told of an end within this."""

OWN: Final = "espalier."
OWN_EVENTS: Final = "espalier.events"
ID_CHARS: Final = 16


def numbered(seen: Seen) -> Iterator[Violation]:
    """INV-1: ids are 1..n, in the order of writing, and an id's bytes never change."""
    for run_id, run in seen.runs.items():
        rows = seen.events.get(run_id, [])
        if run["log_pruned_at"]:
            continue
        wanted = list(range(1, run["next_seq"]))
        if (got := [row["seq"] for row in rows]) != wanted:
            missing = sorted(set(wanted) ^ set(got))[:5]
            yield violation("INV-1", run_id, f"events 1..{len(wanted)} are due; wrong are {missing}")
        for before, after in pairwise(rows):
            if _moment(after) < _moment(before):
                yield violation("INV-1", run_id, f"event {after['seq']} is older than its predecessor", after)
    yield from _same_bytes(seen)


def _same_bytes(seen: Seen) -> Iterator[Violation]:
    stored = {
        (run_id, event_id(row["seq"])): sha256(_data(row, run_id).encode()).hexdigest()
        for run_id, rows in seen.events.items()
        if not seen.runs[run_id]["erased_at"]
        for row in rows
    }
    for frame in seen.of(Frame):
        wanted = stored.setdefault((frame.run_id, frame.event_id), frame.digest)
        if frame.digest != wanted:
            yield violation("INV-1", frame.run_id, f"event {frame.event_id} was told in other bytes", frame)


def _data(row: Row, run_id: str) -> str:
    return NumberedEvent(row["seq"], row["type"], _moment(row), row["payload"]).line(run_id).data


def _moment(row: Row) -> datetime:
    return datetime.fromisoformat(row["emitted_at"])


def followed(seen: Seen) -> Iterator[Violation]:
    """INV-2: whoever reads on from the last id that they saw is told everything once, in order."""
    frames: dict[str, list[Frame]] = defaultdict(list)
    opened: dict[str, Connection] = {}
    since: dict[str, str | None] = {}
    told_own: set[str] = set()
    for frame in seen.of(Frame):
        frames[frame.follower].append(frame)
        if frame.type.startswith(OWN):
            told_own.add(frame.follower)
    for connection in seen.of(Connection):
        if connection.act == "opened":
            opened[connection.follower] = connection
            since.setdefault(connection.follower, connection.since)
    negotiated = _negotiated(seen)
    for follower, last in opened.items():
        if last.run_id not in seen.runs:
            yield violation("INV-2", last.run_id, f"{follower} follows a run that is not there", last)
            continue
        if not seen.whole(last.run_id):
            continue
        owner = seen.owners.get(seen.runs[last.run_id]["owner_id"])
        sees_own = owner in negotiated or follower in told_own
        visible = [
            event_id(row["seq"])
            for row in seen.events.get(last.run_id, [])
            if sees_own or not row["type"].startswith(OWN)
            if event_id(row["seq"]) > (since[follower] or "").zfill(ID_CHARS)
        ]
        yield from _followed(seen, follower, last, frames[follower], visible)


def _negotiated(seen: Seen) -> set[str]:
    """Owners all of whose sessions are told of our own events. A follower is of its run's owner."""
    told: dict[str, bool] = {}
    for call in seen.of(Call):
        if call.method == "initialize" and call.outcome == "ok":
            told[call.owner] = told.get(call.owner, True) and call.answer["capabilities"][OWN_EVENTS]
    return {owner for owner, always in told.items() if always}


def _followed(
    seen: Seen, follower: str, last: Connection, frames: list[Frame], visible: list[str]
) -> Iterator[Violation]:
    for frame, wanted in zip(frames, visible, strict=False):
        if frame.event_id != wanted:
            said = "again" if frame.event_id < wanted else f"where {wanted} was due"
            yield violation("INV-2", last.run_id, f"{follower} was sent {frame.event_id} {said}", frame)
            return
    if len(frames) > len(visible):
        yield violation("INV-2", last.run_id, f"{follower} was sent what is in no log", frames[len(visible)])
    ended_at = seen.runs[last.run_id]["ended_at"]
    late = ended_at and max(seen.at(ended_at), last.at) < seen.ended.at - TOLD_S
    if late and len(frames) < len(visible):
        seconds = seen.ended.at - max(seen.at(ended_at), last.at)
        sentence = f"{follower} saw {len(frames)} of {len(visible)} events, {seconds:.0f} s after the end"
        yield violation("INV-2", last.run_id, sentence, last)


def ended_once(seen: Seen) -> Iterator[Violation]:
    """INV-3: one last event, after which nothing is written, and it says what the row says."""
    for run_id, run in seen.runs.items():
        rows = seen.events.get(run_id, [])
        if run["log_pruned_at"]:
            continue
        ends = [row for row in rows if row["type"] == LAST_EVENT]
        if len(ends) != (run["ended_at"] is not None):
            yield violation("INV-3", run_id, f"{run['state']}, and told {len(ends)} times", *ends)
            continue
        if ends and ends[0] is not rows[-1]:
            yield violation("INV-3", run_id, f"after its end came {rows[-1]['type']}", ends[0], rows[-1])
        if ends and f'"final_state":"{run["state"]}"' not in ends[0]["payload"]:
            yield violation("INV-3", run_id, f"its row says {run['state']}, its log does not", ends[0])
        entries = seen.journals.get(run_id, [])
        if run["ended_at"] and entries and entries[-1]["body"]["kind"] != "run_ended":
            yield violation("INV-3", run_id, "the journal goes on after the end", entries[-1])


def kept(seen: Seen) -> Iterator[Violation]:
    """INV-19: a log is there for a day at least after its run has ended, or as long as was set."""
    due_s = max(KEPT_S_MIN, float(seen.began.settings.get("log_retention_days", 0)) * DAY_S)
    for run_id, run in seen.runs.items():
        if not run["log_pruned_at"]:
            continue
        kept_s = seen.at(run["log_pruned_at"]) - seen.at(run["ended_at"]) if run["ended_at"] else 0.0
        if kept_s < due_s:
            yield violation("INV-19", run_id, f"its log was removed {kept_s:.0f} s after its end", run)
