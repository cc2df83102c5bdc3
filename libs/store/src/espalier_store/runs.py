"""Runs: making, reading and locking them.

`lock_run` locks the row by its token for a step that needs it still; `log.move_run` moves it. Beside them
stand what needs no step: the flag of a cancel and the wake of a sleeper; leases themselves are `fleet`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import asyncpg

from espalier_domain.run import BoundProvider, RunFacts, Runner
from espalier_domain.tools import all_of_server
from espalier_domain.trees import least
from espalier_protocol.agent import Budgets, Ceilings, Constitution
from espalier_protocol.ids import to_wire
from espalier_protocol.run import Run
from espalier_store.paging import PAGE_BYTES_MAX, Page, Place, read_page
from espalier_store.pool import Connection

LOCKED = """
r.id, r.owner_id, r.agent_id, r.state, r.wait_reason, r.lease_token, r.expired_claims, r.next_entry_no,
r.wake_seq, r.wake_seen, r.cancel_requested_at, r.parent_id,
(select p.agent_id from runs p where p.owner_id = r.owner_id and p.id = r.parent_id) as parent_agent_id,
r.max_cycles, r.max_subagents, r.max_tool_calls_per_cycle, r.max_wall_seconds,
coalesce(r.lease_until > clock_timestamp(), false) as leased,
extract(epoch from clock_timestamp() - r.created_at)::float8 as age_s
"""
"""The columns of a `LockedRun`."""


@dataclass(frozen=True, slots=True)
class LockedRun:
    """A run's row as a lock found it, which nobody else changes until the transaction ends.

    `age_s` counts from the run's start and `leased` says whether somebody's lease is alive, both on the
    database's clock. `parent_id` is the run that spawned it, `parent_agent_id` that run's agent.
    """

    run_id: UUID
    owner_id: UUID
    agent_id: UUID
    state: str
    wait_reason: str | None
    lease_token: int
    leased: bool
    expired_claims: int
    next_entry_no: int
    wake_seq: int
    wake_seen: int
    cancel_requested_at: datetime | None
    age_s: float
    ceilings: Ceilings
    parent_id: UUID | None
    parent_agent_id: UUID | None


GET_RUN = "select * from runs where owner_id = $1 and id = $2"


async def get_run(connection: Connection, owner_id: UUID, run_id: UUID) -> Run | None:
    row = await connection.fetchrow(GET_RUN, owner_id, run_id)
    return read_run(row) if row else None


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
    return read_page(rows, place, read_run)


HAS_CHILDREN = """
({run}.subagents_granted > 0 and exists (
    select from runs c
    where c.owner_id = {run}.owner_id and c.parent_id = {run}.id and (
        c.state in ('running', 'sleeping') or exists (
            select from outbox o where o.owner_id = c.owner_id and o.kind = 'wake' and o.child_run_id = c.id)
    )))
"""
"""Whether a child of the run lives, or has ended and its spawner is still to be woken for it."""

OWED_CYCLES = """
exists (
    select from runs c join outbox o on o.owner_id = c.owner_id and o.kind = 'wake' and o.child_run_id = c.id
    where c.owner_id = {run}.owner_id and c.parent_id = {run}.id)
"""
"""Whether a child has ended whose wake is still to return what it did not use; it may wake nobody."""

ABOVE = """
case when r.parent_id is not null then (
    with recursive above as (
        select p.* from runs p where p.owner_id = r.owner_id and p.id = r.parent_id
        union all
        select p.* from above join runs p on p.owner_id = above.owner_id and p.id = above.parent_id
    )
    select jsonb_build_object(
        'overdrawn', bool_or(cycle_count + cycles_granted + cycles_lost > max_cycles),
        'budgets', jsonb_agg(spawner.budgets))
    from above join agents spawner on spawner.owner_id = above.owner_id and spawner.id = above.agent_id
) end
"""
"""What binds a run from above: at most DEPTH_MAX rows. Nothing does any more once these have been erased."""

GIVEN = f"""
r.cycles_granted, {HAS_CHILDREN.format(run="r")} as children, {ABOVE} as above,
r.goal, r.inputs, r.max_cycles, r.max_subagents, r.max_tool_calls_per_cycle, r.max_wall_seconds,
a.id as agent_id, a.root_id as root_agent_id, a.toolset, a.immutable_directives, a.mutable_prompt,
a.mutable_prompt_policy, a.budgets, a.metadata,
array(
    select s.slug from agent_servers s
    where s.owner_id = a.owner_id and s.agent_id = a.id and not s.inherited order by s.place
) as attached,
a.runner_model, p.id as provider_id, p.owner_id as provider_owner_id, p.kind as provider_kind,
p.base_url as provider_base_url, p.sealed_key as provider_key
"""
"""The columns of `RunFacts`."""

LIVED = """
s.body as snapshot,
array(
    select j.body from journal j
    where j.owner_id = r.owner_id and j.run_id = r.id and j.entry_no > coalesce(s.entry_no, 0)
    order by j.entry_no
) as entries
"""
"""The columns that a `LoadedRun` has beside `GIVEN`."""

BOUND_TO = "left join providers p on p.id = a.runner_provider_id and p.owner_id = a.owner_id"
LOADED_FROM = f"""
join agents a on a.id = r.agent_id and a.owner_id = r.owner_id
{BOUND_TO}
left join snapshots s on s.run_id = r.id and s.owner_id = r.owner_id and s.version =
"""
LOAD_RUN = f"""
select {GIVEN}, {LIVED} from runs r {LOADED_FROM} $3
where r.owner_id = $1 and r.id = $2
"""


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """What a run was given, and what it has lived: a snapshot and the entries since, as they were written.

    A snapshot of another version counts as none; the journal rebuilds it.
    """

    facts: RunFacts
    snapshot: str | None
    entries: list[str]


async def load_run(connection: Connection, owner_id: UUID, run_id: UUID, snapshot_version: int) -> LoadedRun:
    """The run must be locked, or its row and its journal could be of different moments."""
    row = await connection.fetchrow(LOAD_RUN, owner_id, run_id, snapshot_version)
    assert row is not None, "the caller holds the run"
    return loaded_run(run_id, row)


def loaded_run(run_id: UUID, row: asyncpg.Record) -> LoadedRun:
    return LoadedRun(_facts(run_id, row), row["snapshot"], row["entries"])


FACTS = f"""
select {GIVEN}
from runs r join agents a on a.id = r.agent_id and a.owner_id = r.owner_id {BOUND_TO}
where r.owner_id = $1 and r.id = $2
"""


async def run_facts(connection: Connection, owner_id: UUID, run_id: UUID) -> RunFacts:
    """What the run was given, as its agent stands now."""
    row = await connection.fetchrow(FACTS, owner_id, run_id)
    assert row is not None, "the caller holds the run"
    return _facts(run_id, row)


LOCK_RUN = f"""
select {LOCKED} from runs r
where r.owner_id = $1 and r.id = $2 and ($3::bigint is null or r.lease_token = $3)
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
        row["next_entry_no"],
        row["wake_seq"],
        row["wake_seen"],
        row["cancel_requested_at"],
        row["age_s"],
        _ceilings(row),
        row["parent_id"],
        row["parent_agent_id"],
    )


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


def _facts(run_id: UUID, row: asyncpg.Record) -> RunFacts:
    above = row["above"] or {}
    return RunFacts(
        run_id=to_wire("run", run_id),
        agent_id=to_wire("agt", row["agent_id"]),
        root_agent_id=to_wire("agt", row["root_agent_id"]),
        toolset=(*row["toolset"], *map(all_of_server, row["attached"])),
        constitution=Constitution(
            immutable_directives=row["immutable_directives"],
            mutable_prompt=row["mutable_prompt"],
            mutable_prompt_policy=row["mutable_prompt_policy"],
        ),
        goal=row["goal"],
        inputs=row["inputs"],
        agent_metadata=row["metadata"],
        ceilings=_ceilings(row),
        budgets=least(Budgets(**row["budgets"]), [Budgets(**each) for each in above.get("budgets") or ()]),
        runner=_runner(row),
        cycles_granted=row["cycles_granted"],
        children=row["children"],
        overdrawn=bool(above.get("overdrawn")),
    )


def _runner(row: asyncpg.Record) -> Runner | None:
    if row["runner_model"] is None and row["provider_id"] is None:
        return None
    provider = row["provider_id"] and BoundProvider(
        row["provider_owner_id"],
        row["provider_id"],
        row["provider_kind"],
        row["provider_base_url"],
        row["provider_key"],
    )
    return Runner(row["runner_model"], provider)


def _ceilings(row: asyncpg.Record) -> Ceilings:
    return Ceilings(
        max_cycles=row["max_cycles"],
        max_subagents=row["max_subagents"],
        max_tool_calls_per_cycle=row["max_tool_calls_per_cycle"],
        max_wall_seconds=row["max_wall_seconds"],
    )


def read_run(row: asyncpg.Record) -> Run:
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


LOCK_LIVE = """
select id, due_at <= clock_timestamp() as due from runs
where owner_id = $1 and agent_id = $2 and state in ('running', 'sleeping')
order by depth, id
for no key update
"""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that lives, held still until the transaction ends; somebody's lease on it may be alive."""

    run_id: UUID
    due: bool


async def lock_live_runs(connection: Connection, owner_id: UUID, agent_id: UUID) -> list[LiveRun]:
    """All of them, at most the agent's `max_live_runs`. The caller has locked the agent."""
    rows = await connection.fetch(LOCK_LIVE, owner_id, agent_id)
    return [LiveRun(row["id"], row["due"]) for row in rows]


SHRINK_RUNS = """
update runs set
    max_cycles = least(max_cycles, $3::integer),
    max_subagents = least(max_subagents, $4::integer),
    max_tool_calls_per_cycle = least(max_tool_calls_per_cycle, $5::integer),
    max_wall_seconds = least(max_wall_seconds, $6::integer),
    wall_at = least(wall_at, created_at + $6::integer * interval '1 second'),
    due_at = least(due_at, created_at + $6::integer * interval '1 second')
where owner_id = $1 and id = any ($2::uuid[])
returning id, due_at <= clock_timestamp() as due
"""


async def shrink_runs(
    connection: Connection, owner_id: UUID, run_ids: Sequence[UUID], ceilings: Ceilings
) -> list[UUID]:
    """Lower the runs' own ceilings to these where they are above them. Those that are due now.

    The columns are no holder's: a lease does not matter. The caller has locked the runs.
    """
    rows = await connection.fetch(
        SHRINK_RUNS,
        owner_id,
        run_ids,
        ceilings.max_cycles,
        ceilings.max_subagents,
        ceilings.max_tool_calls_per_cycle,
        ceilings.max_wall_seconds,
    )
    return [row["id"] for row in rows if row["due"]]


REQUEST_CANCELS = """
update runs set
    cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp()),
    due_at = case when lease_until > clock_timestamp() then due_at else least(due_at, clock_timestamp()) end
where owner_id = $1 and id = any ($2::uuid[])
"""


async def request_cancels(connection: Connection, owner_id: UUID, run_ids: Sequence[UUID]) -> None:
    """Raise the flag, and make due what nobody holds, so that whoever claims it ends it.

    The caller has locked the runs.
    """
    await connection.execute(REQUEST_CANCELS, owner_id, run_ids)


COUNT_LIVE = """
select count(*) from runs where owner_id = $1 and agent_id = $2 and state in ('running', 'sleeping')
"""


async def count_live_runs(connection: Connection, owner_id: UUID, agent_id: UUID) -> int:
    return int(await connection.fetchval(COUNT_LIVE, owner_id, agent_id))
