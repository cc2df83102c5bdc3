"""Runs: reading them, and the two statements by which a step changes one.

A step first locks the row (`lock_run`), decides, and then moves it (`move_run`). The token in both WHEREs is
the fence: whoever lost the lease matches no row. Beside them stand what needs no step: the flag of a cancel
and the wake of a sleeper; leases themselves are `fleet`'s.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from espalier_domain.run import RunFacts, Standing
from espalier_protocol.agent import Budgets, Ceilings, Constitution
from espalier_protocol.ids import to_wire
from espalier_protocol.run import Run
from espalier_store.paging import PAGE_BYTES_MAX, Page, Place, read_page
from espalier_store.pool import Connection

INSERT_RUN = """
insert into runs (
    id, owner_id, agent_id, root_id, depth, goal, inputs, subject_ids,
    max_cycles, max_subagents, max_tool_calls_per_cycle, max_wall_seconds, created_at, due_at, wall_at
)
select $1, $2, $3, $1, 0, $4, $5, $6, $7, $8, $9, $10, born, born, born + $10::integer * interval '1 second'
from clock_timestamp() as born
"""


@dataclass(frozen=True, slots=True)
class NewRun:
    run_id: UUID
    agent_id: UUID
    goal: str
    inputs: dict[str, Any]
    subject_ids: list[str]
    ceilings: Ceilings


async def insert_run(connection: Connection, owner_id: UUID, run: NewRun) -> None:
    """A run at the root of its own tree, due at once."""
    await connection.execute(
        INSERT_RUN,
        run.run_id,
        owner_id,
        run.agent_id,
        run.goal,
        run.inputs,
        run.subject_ids,
        run.ceilings.max_cycles,
        run.ceilings.max_subagents,
        run.ceilings.max_tool_calls_per_cycle,
        run.ceilings.max_wall_seconds,
    )


GET_RUN = "select * from runs where owner_id = $1 and id = $2"


async def get_run(connection: Connection, owner_id: UUID, run_id: UUID) -> Run | None:
    row = await connection.fetchrow(GET_RUN, owner_id, run_id)
    return _run(row) if row else None


LIST_RUNS = """
select * from (
    select page.*, count(*) over () as reached,
        sum(bytes) over (order by created_at desc, id desc) - bytes as bytes_before
    from (
        select *, octet_length(goal) + octet_length(inputs::text)
            + coalesce(octet_length(result::text), 0) as bytes
        from runs
        where owner_id = $1 and agent_id = $4
            and ($2::uuid is null or (created_at, id) < (
                select b.created_at, b.id from runs b where b.owner_id = $1 and b.id = $2))
        order by created_at desc, id desc
        limit $3 + 1
    ) page
) sized
where bytes_before < $5
order by created_at desc, id desc
"""


async def list_runs(connection: Connection, owner_id: UUID, agent_id: UUID, place: Place) -> Page[Run]:
    rows = await connection.fetch(LIST_RUNS, owner_id, place.after, place.size, agent_id, PAGE_BYTES_MAX)
    return read_page(rows, place, _run)


COUNT_LIVE = """
select count(*) from runs where owner_id = $1 and agent_id = $2 and state in ('running', 'sleeping')
"""


async def count_live_runs(connection: Connection, owner_id: UUID, agent_id: UUID) -> int:
    return int(await connection.fetchval(COUNT_LIVE, owner_id, agent_id))


FACTS = """
select r.goal, r.inputs, r.max_cycles, r.max_subagents, r.max_tool_calls_per_cycle, r.max_wall_seconds,
    a.id as agent_id, a.immutable_directives, a.mutable_prompt, a.mutable_prompt_policy,
    a.budgets, a.metadata
from runs r join agents a on a.id = r.agent_id and a.owner_id = r.owner_id
where r.owner_id = $1 and r.id = $2
"""


async def run_facts(connection: Connection, owner_id: UUID, run_id: UUID) -> RunFacts:
    row = await connection.fetchrow(FACTS, owner_id, run_id)
    assert row is not None, "the caller holds the run"
    return RunFacts(
        run_id=to_wire("run", run_id),
        agent_id=to_wire("agt", row["agent_id"]),
        constitution=Constitution(
            immutable_directives=row["immutable_directives"],
            mutable_prompt=row["mutable_prompt"],
            mutable_prompt_policy=row["mutable_prompt_policy"],
        ),
        goal=row["goal"],
        inputs=row["inputs"],
        agent_metadata=row["metadata"],
        ceilings=_ceilings(row),
        budgets=Budgets(**row["budgets"]),
    )


@dataclass(frozen=True, slots=True)
class LockedRun:
    """A run row that nobody else changes until the transaction ends.

    `age_s` counts from the run's start and `leased` says whether somebody's lease is alive, both on the
    database's clock.
    """

    run_id: UUID
    owner_id: UUID
    agent_id: UUID
    state: str
    wait_reason: str | None
    lease_token: int
    leased: bool
    expired_claims: int
    next_seq: int
    next_entry_no: int
    wake_seq: int
    cancel_requested_at: datetime | None
    age_s: float


LOCK_RUN = """
select id, owner_id, agent_id, state, wait_reason, lease_token, expired_claims, next_seq, next_entry_no,
    wake_seq, cancel_requested_at,
    coalesce(lease_until > clock_timestamp(), false) as leased,
    extract(epoch from clock_timestamp() - created_at)::float8 as age_s
from runs
where owner_id = $1 and id = $2 and ($3::bigint is null or lease_token = $3)
for no key update
"""


async def lock_run(
    connection: Connection, owner_id: UUID, run_id: UUID, *, lease_token: int | None = None
) -> LockedRun | None:
    """The row, if it is there and, where a token is given, still held by it."""
    row = await connection.fetchrow(LOCK_RUN, owner_id, run_id, lease_token)
    return locked_run(row) if row else None


def locked_run(row: asyncpg.Record) -> LockedRun:
    return LockedRun(
        row["id"],
        row["owner_id"],
        row["agent_id"],
        row["state"],
        row["wait_reason"],
        row["lease_token"],
        row["leased"],
        row["expired_claims"],
        row["next_seq"],
        row["next_entry_no"],
        row["wake_seq"],
        row["cancel_requested_at"],
        row["age_s"],
    )


MOVE_RUN = """
update runs set
    next_seq = next_seq + $4::integer,
    next_entry_no = next_entry_no + $5::integer,
    state = $6::text,
    wait_reason = $7,
    due_at = case
        when $6::text <> 'sleeping' then due_at
        when $8::boolean and wake_seq > wake_seen then now_
        else least(wall_at, greatest(
            coalesce($9::timestamptz, now_ + make_interval(secs => $10::float8)), now_ + interval '1 second'))
    end,
    cycle_count = greatest(cycle_count, $11::integer),
    wake_seen = coalesce($12::bigint, wake_seen),
    expired_claims = case when $13::boolean then 0 else expired_claims end,
    result = case when $14::boolean then $15::jsonb else result end,
    ended_at = case when $14::boolean then now_ end,
    lease_token = lease_token + $16::boolean::int,
    lease_until = case when $16::boolean then null else now_ + make_interval(secs => $17::float8) end
from clock_timestamp() as now_
where owner_id = $1 and id = $2 and lease_token = $3 and state in ('running', 'sleeping')
returning now_
"""


async def move_run(
    connection: Connection,
    run: LockedRun,
    standing: Standing,
    *,
    events: int,
    entries: int,
    release: bool,
    lease_ttl_s: float,
) -> datetime | None:
    """Number `events` and `entries`, and leave the run as `standing` says.

    `release` gives the lease up and raises the token; otherwise the lease is renewed. Returns the moment that
    the events carry, or None if the run is no longer held by this token or has ended.
    """
    moment = await connection.fetchval(
        MOVE_RUN,
        run.owner_id,
        run.run_id,
        run.lease_token,
        events,
        entries,
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
    )
    assert moment is None or isinstance(moment, datetime)
    return moment


REQUEST_CANCEL = """
update runs set cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp())
where owner_id = $1 and id = $2 and state in ('running', 'sleeping')
"""


async def request_cancel(connection: Connection, owner_id: UUID, run_id: UUID) -> None:
    """Raise the flag that the holder of the lease finds at its next step."""
    await connection.execute(REQUEST_CANCEL, owner_id, run_id)


WAKE_RUN = """
update runs set
    state = 'running', wait_reason = null, due_at = clock_timestamp(), lease_token = lease_token + 1
where owner_id = $1 and id = $2 and state = 'sleeping'
"""


async def wake_run(connection: Connection, owner_id: UUID, run_id: UUID) -> None:
    """Make a sleeping run due now. A timer that was pending has nothing left to wake."""
    await connection.execute(WAKE_RUN, owner_id, run_id)


def _ceilings(row: asyncpg.Record) -> Ceilings:
    return Ceilings(
        max_cycles=row["max_cycles"],
        max_subagents=row["max_subagents"],
        max_tool_calls_per_cycle=row["max_tool_calls_per_cycle"],
        max_wall_seconds=row["max_wall_seconds"],
    )


def _run(row: asyncpg.Record) -> Run:
    return Run(
        id=to_wire("run", row["id"]),
        agent_id=to_wire("agt", row["agent_id"]),
        goal=row["goal"],
        state=row["state"],
        started_at=row["created_at"],
        ended_at=row["ended_at"],
        cycle_count=row["cycle_count"],
        result=row["result"],
        subject_ids=row["subject_ids"],
        metadata=row["inputs"],
        wait_reason=row["wait_reason"],
        next_wake_at=row["due_at"] if row["wait_reason"] in ("timer", "retry") else None,
        cancel_requested_at=row["cancel_requested_at"],
    )
