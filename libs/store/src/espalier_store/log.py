"""A run's log: its row, its journal, its events and the promise to publish them change in one statement.

The token in the WHERE is the fence: whoever lost the lease moves no row, and then nothing else is written
either. What the entries and events say is decided above, in `espalier_acts.log`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from espalier_domain.run import Standing
from espalier_protocol.agent import Ceilings
from espalier_protocol.run import Run
from espalier_store.pool import Connection
from espalier_store.runs import HAS_CHILDREN, OWED_CYCLES, LockedRun, read_run

APPEND = """
entries as (
    insert into journal (run_id, owner_id, entry_no, body)
    select id, owner_id, first_no + place - 1, body
    from moved, unnest($3::json[]) with ordinality as entry (body, place)
), told as (
    insert into events (run_id, owner_id, seq, type, payload, emitted_at)
    select id, owner_id, first_seq + place - 1, type, payload, moment
    from moved, unnest($4::text[], $5::text[]) with ordinality as event (type, payload, place)
), promised as (
    insert into outbox (owner_id, kind, run_id, from_seq)
    select owner_id, 'publish', id, first_seq from moved where cardinality($4::text[]) > 0
    returning id as outbox_id
)
"""
"""What follows a row `moved`: `first_no` and `first_seq` are the places of the first entry and event. The
parameters from $3 on are those of `Lines.columns`.
"""


@dataclass(frozen=True, slots=True)
class Lines:
    """What is appended: encoded entries, and the (type, payload) of the events that tell of them.

    `planned` are calls that get their row for the broker, (call id, tool, encoded arguments); `returned` are
    ids of such calls that have an outcome now: one that was never sent will not be. `doubted` are calls of
    which a person is asked what became of them, (approval id, call id).
    """

    entries: Sequence[str]
    events: Sequence[tuple[str, str]]
    planned: Sequence[tuple[str, str, str]] = ()
    returned: Sequence[str] = ()
    doubted: Sequence[tuple[UUID, str]] = ()

    def columns(self) -> tuple[Sequence[str], list[str], list[str]]:
        return self.entries, [type_ for type_, _ in self.events], [payload for _, payload in self.events]


@dataclass(frozen=True, slots=True)
class Moved:
    """Which seq the first event got and when, and the act's row in the outbox if there were any events.

    `wake_id` is the row in the outbox of a run that ended and left messages to the agent's other runs;
    `spawned` says that the run has, or had, children.
    """

    first_seq: int
    moment: datetime
    outbox_id: int | None
    wake_id: int | None = None
    spawned: bool = False


BEGIN_RUN = f"""
with moved as (
    insert into runs (
        id, owner_id, agent_id, root_id, depth, goal, inputs, subject_ids,
        max_cycles, max_subagents, max_tool_calls_per_cycle, max_wall_seconds, created_at, due_at, wall_at,
        next_entry_no, next_seq, wake_seq
    )
    select $2, $1, $6, $2, 0, $7, $8, $9, $10, $11, $12, $13,
        born, born, born + $13::integer * interval '1 second',
        1 + cardinality($3::json[]), 1 + cardinality($4::text[]),
        exists (
            select from messages where owner_id = $1 and to_agent_id = $6 and read_at is null
                and to_run_id is null
        )::integer
    from clock_timestamp() as born
    where $14 > (
        select count(*) from runs where owner_id = $1 and agent_id = $6 and state in ('running', 'sleeping'))
    returning *, 1::bigint as first_no, 1::bigint as first_seq, created_at as moment
), {APPEND}
select id, agent_id, goal, inputs, subject_ids, state, wait_reason, due_at, cycle_count, result, created_at,
    ended_at, cancel_requested_at, first_seq, moment, outbox_id
from moved left join promised on true
"""


@dataclass(frozen=True, slots=True)
class NewRun:
    run_id: UUID
    agent_id: UUID
    goal: str
    inputs: dict[str, Any]
    subject_ids: list[str]
    ceilings: Ceilings


async def begin_run(
    connection: Connection, owner_id: UUID, run: NewRun, lines: Lines, *, live_max: int
) -> tuple[Run, Moved] | None:
    """A run at the root of its own tree, due at once; None if the agent has `live_max` live ones already.

    Unread messages wake it, so that its first cycle is told of them.

    The agent must be locked, or two that are begun at the same time would not count each other.
    """
    row = await connection.fetchrow(
        BEGIN_RUN,
        owner_id,
        run.run_id,
        *lines.columns(),
        run.agent_id,
        run.goal,
        run.inputs,
        run.subject_ids,
        run.ceilings.max_cycles,
        run.ceilings.max_subagents,
        run.ceilings.max_tool_calls_per_cycle,
        run.ceilings.max_wall_seconds,
        live_max,
    )
    return (read_run(row), read_moved(row)) if row else None


MOVE_RUN = f"""
with held as (
    select id, clock_timestamp() as moment from (
        select id from runs
        where owner_id = $1 and id = $2 and lease_token = $6 and state in ('running', 'sleeping')
            and not ($19::boolean and (
                cancel_requested_at is not null or wall_at <= clock_timestamp()
                or max_tool_calls_per_cycle <> $26::integer
                or $15::boolean and (parent_id is not null or subagents_granted > 0)))
        for no key update
    ) locked
), moved as (
    update runs set
        next_entry_no = next_entry_no + cardinality($3::json[]),
        next_seq = next_seq + cardinality($4::text[]),
        state = $7::text,
        wait_reason = case
            when $8::text = 'child' and not {HAS_CHILDREN.format(run="runs")} then 'message'
            else $8::text
        end,
        due_at = case
            when $7::text <> 'sleeping' then due_at
            when $9::boolean and wake_seq > coalesce($13::bigint, wake_seen) then moment
            when $8::text = 'child' and not $9::boolean and not {HAS_CHILDREN.format(run="runs")} then moment
            when $8::text = 'child' and not $9::boolean and {OWED_CYCLES.format(run="runs")}
                then least(wall_at, moment + interval '1 second')
            else least(wall_at, greatest(
                coalesce($10::timestamptz, moment + make_interval(secs => $11::float8), 'infinity'),
                moment + interval '1 second'))
        end,
        cycle_count = greatest(cycle_count, $12::integer),
        cycles_lost = greatest(cycles_lost, $29::integer),
        wake_seen = coalesce($13::bigint, wake_seen),
        expired_claims = case when $14::boolean then 0 else expired_claims end,
        result = case when $15::boolean then $16::jsonb else result end,
        ended_at = case when $15::boolean then moment end,
        lease_token = lease_token + $17::boolean::int,
        lease_until = case when $17::boolean then null else moment + make_interval(secs => $18::float8) end
    from held
    where runs.owner_id = $1 and runs.id = held.id
    returning runs.id, runs.owner_id, moment,
        next_entry_no - cardinality($3::json[]) as first_no, next_seq - cardinality($4::text[]) as first_seq,
        runs.agent_id, wake_seq > wake_seen as unheard, subagents_granted > 0 as spawned
), {APPEND}, handed_on as (
    insert into outbox (owner_id, kind, agent_id)
    select owner_id, 'wake', agent_id from moved
    where $15::boolean and (unheard or (
        select true from messages m
        where m.owner_id = $1 and m.to_agent_id = agent_id and m.read_at is null limit 1))
    returning id as wake_id
), shown as (
    insert into snapshots (run_id, owner_id, version, entry_no, body)
    select id, owner_id, $20::integer, first_no - 1 + cardinality($3::json[]), $21::json
    from moved where $21::json is not null
    on conflict (run_id) do update
    set version = excluded.version, entry_no = excluded.entry_no, body = excluded.body
), planned as (
    insert into tool_calls (run_id, owner_id, call_id, tool, args)
    select id, owner_id, call_id, tool, args
    from moved, unnest($22::text[], $23::text[], $24::json[]) as call (call_id, tool, args)
), skipped as (
    update tool_calls c set state = 'skipped', settled_at = moment
    from moved
    where c.owner_id = moved.owner_id and c.run_id = moved.id and c.call_id = any ($25::text[])
        and c.state = 'planned'
), asked as (
    insert into approvals (id, owner_id, agent_id, run_id, kind, call_id)
    select approval_id, owner_id, agent_id, id, 'in_doubt', call_id
    from moved, unnest($27::uuid[], $28::text[]) as doubt (approval_id, call_id)
)
select first_seq, moment, outbox_id, wake_id, spawned
from moved left join promised on true left join handed_on on true
"""
"""`moment` is taken above the lock, so that it never lies before what an earlier holder of the lock wrote.

A run that waits for a child has one, or else waits for a message; one that only waits for what its children
have of its headroom goes on at once when they have all ended.

A run that ends hands unread messages on. The statement may have begun before a message that woke the run just
now, and does not see it then; but it does see the wake counter, which is the locked row's. Whether the agent
has another run is left to the wake: one that is being created could not be seen here.
"""


async def move_run(
    connection: Connection,
    run: LockedRun,
    standing: Standing,
    lines: Lines,
    *,
    release: bool,
    lease_ttl_s: float,
    unless_stopped: bool,
    snapshot_version: int,
    snapshot: str | None,
) -> Moved | None:
    """Append `lines` to what is there, and leave the run as `standing` says.

    `release` gives the lease up and raises the token; otherwise the lease is renewed. None if the run is no
    longer held by this token or has ended, and with `unless_stopped` also if somebody asked for its cancel,
    its wall time is over, or its ceiling of tool calls has moved: all that since the caller saw the row. With
    it a run is not ended either that has a spawner or children: that takes a transaction.
    """
    row = await connection.fetchrow(
        MOVE_RUN,
        run.owner_id,
        run.run_id,
        *lines.columns(),
        run.lease_token,
        standing.state,
        standing.wait_reason,
        standing.wakes_on_message,
        standing.wake_at,
        standing.wake_in_s,
        standing.cycles,
        standing.wake_seen,
        standing.progressed,
        standing.ended,
        standing.result,
        release,
        lease_ttl_s,
        unless_stopped,
        snapshot_version,
        snapshot,
        *([call[part] for call in lines.planned] for part in range(3)),
        lines.returned,
        run.ceilings.max_tool_calls_per_cycle,
        *([doubt[part] for doubt in lines.doubted] for part in range(2)),
        standing.cycles_lost,
    )
    return replace(read_moved(row), wake_id=row["wake_id"], spawned=row["spawned"]) if row else None


PICK_LIVE = """
select id from runs
where owner_id = $1 and agent_id = $2 and state in ('running', 'sleeping')
order by id = $3 desc nulls last, created_at desc, id desc
limit 1
"""


async def pick_live_run(
    connection: Connection, owner_id: UUID, agent_id: UUID, preferred: UUID | None
) -> UUID | None:
    """The agent's run `preferred` if it lives, else its newest live one. Nothing is locked by it."""
    run_id = await connection.fetchval(PICK_LIVE, owner_id, agent_id, preferred)
    assert run_id is None or isinstance(run_id, UUID)
    return run_id


NOTE = f"""
with moved as (
    update runs set
        next_entry_no = next_entry_no + cardinality($3::json[]),
        next_seq = next_seq + cardinality($4::text[]),
        lease_token = lease_token + (coalesce(lease_until > clock_timestamp(), false) is false)::int
    where owner_id = $1 and id = $2 and state in ('running', 'sleeping')
    returning id, owner_id, clock_timestamp() as moment,
        next_entry_no - cardinality($3::json[]) as first_no, next_seq - cardinality($4::text[]) as first_seq
), {APPEND}
select first_seq, moment, outbox_id from moved left join promised on true
"""


async def append_notice(connection: Connection, owner_id: UUID, run_id: UUID, lines: Lines) -> Moved | None:
    """Append lines that no progress depends on to a run that somebody else may hold. None if it has ended.

    A holder keeps its lease and does not see them; without one the token rises, as with every other writer.
    """
    row = await connection.fetchrow(NOTE, owner_id, run_id, *lines.columns())
    return read_moved(row) if row else None


def read_moved(row: asyncpg.Record) -> Moved:
    return Moved(row["first_seq"], row["moment"], row["outbox_id"])
