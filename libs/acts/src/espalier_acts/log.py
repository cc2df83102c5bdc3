"""Moving a run: the one way in which entries, events and the run's row change together."""

from dataclasses import dataclass
from uuid import UUID

from espalier_domain.errors import LeaseLost
from espalier_domain.history import fold
from espalier_domain.journal import CycleEnded, Entry, decode, encode, events_of
from espalier_domain.progress import SNAPSHOT_VERSION, Progress, apply, decode_snapshot, encode_snapshot
from espalier_domain.run import standing
from espalier_protocol.events import NumberedEvent
from espalier_protocol.ids import to_wire
from espalier_store.events import insert_events
from espalier_store.journal import get_snapshot, insert_entries, load_entries, put_snapshot
from espalier_store.outbox import insert_publish
from espalier_store.pool import Connection
from espalier_store.runs import LockedRun, move_run


@dataclass(frozen=True, slots=True)
class Written:
    """What a step left behind: the progress after it, and the events to publish once it is committed.

    `released` says that the lease was given up, `due` that the run could go on at once all the same.
    """

    run_id: UUID
    progress: Progress
    released: bool
    due: bool
    outbox_id: int | None
    events: tuple[NumberedEvent, ...]


async def write_entries(
    connection: Connection,
    run: LockedRun,
    progress: Progress,
    entries: tuple[Entry, ...],
    *,
    release: bool,
    lease_ttl_s: float,
) -> Written:
    """Append `entries` to the locked run and leave its row as they say.

    `release` gives the lease up; a run that sleeps or ends is always released. Raises LeaseLost when the
    row is no longer held by the token it was locked with, or has ended.
    """
    for entry in entries:
        progress = apply(progress, entry)
    row = standing(progress, entries)
    payloads = [payload for entry in entries for payload in events_of(to_wire("run", run.run_id), entry)]
    released = release or row.state != "running"
    moment = await move_run(
        connection,
        run,
        row,
        events=len(payloads),
        entries=len(entries),
        release=released,
        lease_ttl_s=lease_ttl_s,
    )
    if moment is None:
        raise LeaseLost("the row refused the token")
    bodies = [encode(entry) for entry in entries]
    await insert_entries(connection, run.owner_id, run.run_id, run.next_entry_no, bodies)
    if not row.ended and any(isinstance(entry, CycleEnded) for entry in entries):
        progress = await _snapshot(connection, run, progress)
    events = [
        NumberedEvent(run.next_seq + place, payload.type, moment, payload.text())
        for place, payload in enumerate(payloads)
    ]
    outbox_id = None
    if events:
        await insert_events(connection, run.owner_id, run.run_id, events)
        outbox_id = await insert_publish(connection, run.owner_id, run.run_id, run.next_seq)
    due = row.state == "running"
    return Written(run.run_id, progress, released, due, outbox_id, tuple(events))


async def load_progress(connection: Connection, owner_id: UUID, run_id: UUID) -> Progress:
    """What the run has lived: its snapshot and the entries since."""
    body = await get_snapshot(connection, owner_id, run_id, SNAPSHOT_VERSION)
    progress = decode_snapshot(body) if body else Progress()
    for text in await load_entries(connection, owner_id, run_id, progress.entry_no):
        entry = decode(text)
        progress = apply(progress, entry)
        if isinstance(entry, CycleEnded):
            progress = fold(progress)
    return progress


async def _snapshot(connection: Connection, run: LockedRun, progress: Progress) -> Progress:
    progress = fold(progress)
    await put_snapshot(
        connection, run.owner_id, run.run_id, SNAPSHOT_VERSION, progress.entry_no, encode_snapshot(progress)
    )
    return progress
