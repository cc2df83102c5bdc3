"""Moving a run: the one way in which entries, events and the run's row change together."""

from dataclasses import dataclass
from uuid import UUID

from espalier_domain.errors import LeaseLost
from espalier_domain.history import fold
from espalier_domain.journal import (
    CallsPlanned,
    CycleEnded,
    Entry,
    ToolCall,
    ToolReturned,
    decode,
    encode,
)
from espalier_domain.progress import SNAPSHOT_VERSION, Progress, apply, decode_snapshot, encode_snapshot
from espalier_domain.run import RunFacts, standing
from espalier_domain.telling import events_of
from espalier_domain.tools import is_brokered
from espalier_protocol.events import NumberedEvent
from espalier_protocol.ids import to_wire
from espalier_protocol.strict_json import dumps
from espalier_store.log import Lines, Moved, move_run
from espalier_store.pool import Connection
from espalier_store.runs import LoadedRun, LockedRun, load_run


@dataclass(frozen=True, slots=True)
class Written:
    """What a step left behind: the progress after it, and the events to publish once it is committed.

    `released` says that the lease was given up, `due` that the run could go on at once all the same.
    `wake_id` is the wake, to be carried out after the commit, with which an ended run hands messages on.
    """

    run_id: UUID
    progress: Progress
    released: bool
    due: bool
    outbox_id: int | None
    events: tuple[NumberedEvent, ...]
    wake_id: int | None = None


async def write_entries(
    connection: Connection,
    run: LockedRun,
    progress: Progress,
    entries: tuple[Entry, ...],
    *,
    release: bool,
    lease_ttl_s: float,
) -> Written:
    """Append `entries`, which come after `progress`, to the locked run, and leave its row as they say.

    `release` gives the lease up; a run that sleeps or ends is always released. Raises LeaseLost when the
    row is no longer held by the token it was locked with, or has ended.
    """
    for entry in entries:
        progress = apply(progress, entry)
    written = await append_entries(
        connection, run, entries, after=progress, release=release, lease_ttl_s=lease_ttl_s
    )
    if written is None:
        raise LeaseLost("the row refused the token")
    return written


async def append_entries(
    connection: Connection,
    run: LockedRun,
    entries: tuple[Entry, ...],
    *,
    after: Progress,
    release: bool,
    lease_ttl_s: float,
    unless_stopped: bool = False,
) -> Written | None:
    """`write_entries` for a run that need not be locked, because its one statement checks the token.

    `after` is the progress that has taken the entries in. None when the row refused, with `unless_stopped`
    also because a cancel was asked for or the run's time is over.
    """
    row, lines = standing(after, entries), lines_of(run.run_id, entries, after)
    released = release or row.state != "running"
    snapshot = None
    if not row.ended and any(isinstance(entry, CycleEnded) for entry in entries):
        after = fold(after)
        snapshot = encode_snapshot(after)
    moved = await move_run(
        connection,
        run,
        row,
        lines,
        release=released,
        lease_ttl_s=lease_ttl_s,
        unless_stopped=unless_stopped,
        snapshot_version=SNAPSHOT_VERSION,
        snapshot=snapshot,
    )
    if moved is None:
        return None
    due = row.state == "running"
    events = numbered(moved, lines)
    return Written(run.run_id, after, released, due, moved.outbox_id, events, moved.wake_id)


def lines_of(run_id: UUID, entries: tuple[Entry, ...], after: Progress) -> Lines:
    payloads = [payload for entry in entries for payload in events_of(to_wire("run", run_id), entry)]
    returned = [each.call_id for each in entries if isinstance(each, ToolReturned) and is_brokered(each.tool)]
    return Lines(
        [encode(entry) for entry in entries],
        [(each.type, each.text()) for each in payloads],
        [(call.call_id, call.name, dumps(call.args).decode()) for call in _planned(entries, after)],
        returned,
    )


def _planned(entries: tuple[Entry, ...], after: Progress) -> list[ToolCall]:
    planned = {call_id for each in entries if isinstance(each, CallsPlanned) for call_id in each.call_ids}
    return [call for call in after.under_way() if call.call_id in planned]


def numbered(moved: Moved, lines: Lines) -> tuple[NumberedEvent, ...]:
    return tuple(
        NumberedEvent(seq, type_, moved.moment, payload)
        for seq, (type_, payload) in enumerate(lines.events, start=moved.first_seq)
    )


async def load(connection: Connection, owner_id: UUID, run_id: UUID) -> tuple[RunFacts, Progress]:
    """What a locked run was given and what it has lived."""
    return restored(await load_run(connection, owner_id, run_id, SNAPSHOT_VERSION))


def restored(loaded: LoadedRun) -> tuple[RunFacts, Progress]:
    progress = decode_snapshot(loaded.snapshot) if loaded.snapshot else Progress()
    for text in loaded.entries:
        entry = decode(text)
        progress = apply(progress, entry)
        if isinstance(entry, CycleEnded):
            progress = fold(progress)
    return loaded.facts, progress
