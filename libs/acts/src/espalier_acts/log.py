"""Moving a run: the one way in which entries, events and the run's row change together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from espalier_domain.errors import Conflicted, LeaseLost
from espalier_domain.history import fold
from espalier_domain.journal import (
    ApprovalRequested,
    ApprovalResolved,
    CallsPlanned,
    CycleEnded,
    Entry,
    MessageSent,
    PromptChangeRejected,
    PromptModified,
    RunEnded,
    ToolCall,
    ToolReturned,
    decode,
    encode,
)
from espalier_domain.progress import SNAPSHOT_VERSION, Progress, apply, decode_snapshot, encode_snapshot
from espalier_domain.run import RunFacts, standing
from espalier_domain.telling import events_of
from espalier_domain.tools import is_brokered
from espalier_domain.trees import subagent_result
from espalier_protocol.events import NumberedEvent
from espalier_protocol.ids import to_wire
from espalier_protocol.strict_json import dumps
from espalier_store.ids import new_id
from espalier_store.log import Lines, Moved, append_notice, move_run, pick_live_run
from espalier_store.pool import RETRY_AFTER_MS, Connection
from espalier_store.runs import LoadedRun, LockedRun, load_run
from espalier_store.trees import stop_descendants, tell_spawner

PICKS_MAX: Final = 8
"""Runs that are picked to be told something, and that end before they are, until the act is repeated."""

Notice = PromptModified | PromptChangeRejected | ApprovalResolved
"""Entries that `apply` only counts, so that whoever holds the run need not know of them."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a step left behind: the progress after it, and the events to publish once it is committed.

    `released` says that the lease was given up, `due` that the run could go on at once all the same.
    `wakes` are to be carried out after the commit: an ended run hands messages on and tells its spawner.
    `to_ring` are the runs below it that became due because it ended.
    """

    run_id: UUID
    progress: Progress
    released: bool
    due: bool
    outbox_id: int | None
    events: tuple[NumberedEvent, ...]
    wakes: tuple[int, ...] = ()
    to_ring: tuple[UUID, ...] = ()


@dataclass(frozen=True, slots=True)
class ChildResult:
    """The message with which a run that ends tells its spawner how; `body` is JSON."""

    message_id: UUID
    body: str


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
    doubts = {each.call_id: new_id() for each in entries if isinstance(each, ToolReturned) and each.in_doubt}
    entries = tuple(_asking(entries, doubts))
    entries, result = _with_result(run, entries)
    after = replace(after, entry_no=after.entry_no + len(doubts) + (result is not None))
    row, lines = standing(after, entries), lines_of(run.run_id, entries, after)
    lines = replace(lines, doubted=[(approval_id, call_id) for call_id, approval_id in doubts.items()])
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
    wakes = () if moved.wake_id is None else (moved.wake_id,)
    written = Written(run.run_id, after, released, due, moved.outbox_id, events, wakes)
    return await _end_in_tree(connection, run, written, moved, result) if row.ended else written


async def _end_in_tree(
    connection: Connection, run: LockedRun, written: Written, moved: Moved, result: ChildResult | None
) -> Written:
    """What else an end means: the spawner hears of it, and whoever was spawned is to end too."""
    if result is not None:
        wake_id = await tell_spawner(connection, run.owner_id, run.run_id, result.message_id, result.body)
        written = replace(written, wakes=(*written.wakes, wake_id))
    if moved.spawned:
        stopped = await stop_descendants(connection, run.owner_id, run.run_id)
        written = replace(written, to_ring=tuple(stopped))
    return written


def _with_result(run: LockedRun, entries: tuple[Entry, ...]) -> tuple[tuple[Entry, ...], ChildResult | None]:
    """The entries of a run that ends, and if it was spawned among them the one that tells of its result."""
    end = entries[-1] if entries else None
    if run.parent_agent_id is None or not isinstance(end, RunEnded):
        return entries, None
    message_id, agent_id, run_id = new_id(), to_wire("agt", run.agent_id), to_wire("run", run.run_id)
    body = subagent_result(agent_id, run_id, end.final_state, end.result)
    sent = MessageSent(to_wire("msg", message_id), to_wire("agt", run.parent_agent_id))
    return (*entries[:-1], sent, end), ChildResult(message_id, body)


async def tell_live_run(
    connection: Connection,
    owner_id: UUID,
    agent_id: UUID,
    notices: tuple[Notice, ...],
    *,
    run_id: UUID | None,
) -> Written | None:
    """Append to the agent's run `run_id` if it lives, else to its newest live one; None if it has none.

    The agent is locked, so that it gets no new run meanwhile. What is handed back has no progress: whoever
    holds the run knows it. Raises Conflicted when every run that was picked had ended.
    """
    for _ in range(PICKS_MAX):
        picked = await pick_live_run(connection, owner_id, agent_id, run_id)
        if picked is None:
            return None
        lines = lines_of(picked, notices, Progress())
        if moved := await append_notice(connection, owner_id, picked, lines):
            return Written(picked, Progress(), False, False, moved.outbox_id, numbered(moved, lines))
    raise Conflicted(RETRY_AFTER_MS)


def _asking(entries: tuple[Entry, ...], doubts: dict[str, UUID]) -> Iterator[Entry]:
    """The entries, and after each call in doubt the one that a person is asked about it."""
    for entry in entries:
        yield entry
        if isinstance(entry, ToolReturned) and entry.in_doubt:
            yield ApprovalRequested(to_wire("apr", doubts[entry.call_id]), "in_doubt")


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
