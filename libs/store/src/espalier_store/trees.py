"""Trees of runs: a run grants a part of its headroom to a child, and hears of the child's end.

Whatever a run grants, it grants in one statement on its own row, so that no two of its children share
anything. Not here: what may be granted (`espalier_domain.trees`), and how a run ends (`log`). Locks are taken
from the root downwards; nobody who holds a child locks its spawner.
"""

from dataclasses import dataclass
from uuid import UUID

from espalier_domain.run import RunFacts
from espalier_domain.trees import DEPTH_MAX, Headroom, Spawner, SpawnOrder
from espalier_store.log import APPEND, Lines, Moved, read_moved
from espalier_store.pool import Connection

GET_SPAWNER = """
select r.depth, a.immutable_directives,
    r.max_cycles - r.cycle_count - r.cycles_granted - r.cycles_lost as cycles,
    r.max_subagents - r.subagents_granted as subagents,
    floor(extract(epoch from r.wall_at - clock_timestamp()))::integer as wall_seconds,
    r.max_tool_calls_per_cycle as tool_calls_per_cycle
from runs r join agents a on a.owner_id = r.owner_id and a.id = r.agent_id
where r.owner_id = $1 and r.id = $2
"""


async def get_spawner(connection: Connection, owner_id: UUID, run_id: UUID, facts: RunFacts) -> Spawner:
    """The run as it stands, with the toolset and budgets that its cycle has. Nothing is locked by it."""
    row = await connection.fetchrow(GET_SPAWNER, owner_id, run_id)
    assert row is not None, "the caller holds the run"
    room = Headroom(row["cycles"], row["subagents"], row["wall_seconds"], row["tool_calls_per_cycle"])
    return Spawner(row["depth"], room, facts.budgets, facts.toolset, row["immutable_directives"])


SPAWN = f"""
with granted as (
    update runs set
        cycles_granted = cycles_granted + $16::integer,
        subagents_granted = subagents_granted + 1 + $17::integer
    where owner_id = $1 and id = $2 and state = 'running' and cancel_requested_at is null
        and $16::integer <= max_cycles - cycle_count - cycles_granted - cycles_lost
        and $17::integer < max_subagents - subagents_granted
        and $18::integer <= max_tool_calls_per_cycle
        and clock_timestamp() + $19::integer * interval '1 second' <= wall_at
        and depth < $20::integer
    returning *
), child as (
    insert into agents (
        id, owner_id, root_id, parent_id, name, immutable_directives, mutable_prompt, mutable_prompt_policy,
        toolset, ceilings, budgets, max_live_runs, subject_ids, metadata, runner_provider_id, runner_model
    )
    select $7, a.owner_id, a.root_id, a.id, $8, $9, $10, $11, $12::text[], $13::jsonb, $14::jsonb,
        a.max_live_runs,
        array(select distinct s from unnest(a.subject_ids || granted.subject_ids) as s order by s),
        $15::jsonb, a.runner_provider_id, a.runner_model
    from granted join agents a on a.owner_id = granted.owner_id and a.id = granted.agent_id
    returning id, subject_ids
), moved as (
    insert into runs (
        id, owner_id, agent_id, root_id, parent_id, depth, goal, inputs, subject_ids, cycles_given,
        max_cycles, max_subagents, max_tool_calls_per_cycle, max_wall_seconds, created_at, due_at, wall_at,
        next_entry_no, next_seq
    )
    select $6, granted.owner_id, child.id, granted.root_id, granted.id, granted.depth + 1, $21, '{{}}',
        child.subject_ids, $16::integer, $16::integer, $17::integer, $18::integer, $19::integer, born, born,
        least(granted.wall_at, born + $19::integer * interval '1 second'),
        1 + cardinality($3::json[]), 1 + cardinality($4::text[])
    from granted cross join child cross join clock_timestamp() as born
    returning *, 1::bigint as first_no, 1::bigint as first_seq, created_at as moment
), {APPEND}
select first_seq, moment, outbox_id from moved left join promised on true
"""


@dataclass(frozen=True, slots=True)
class NewChild:
    """A helper and its first run. `directives` are its spawner's and its own."""

    agent_id: UUID
    run_id: UUID
    directives: str
    order: SpawnOrder


async def spawn(
    connection: Connection, owner_id: UUID, spawner_run_id: UUID, child: NewChild, lines: Lines
) -> Moved | None:
    """The child's agent and its run, due at once, out of the spawner's headroom; None if that is too small.

    The spawner's row is checked and charged in the same statement, so that it need not be locked before.
    """
    order = child.order
    row = await connection.fetchrow(
        SPAWN,
        owner_id,
        spawner_run_id,
        *lines.columns(),
        child.run_id,
        child.agent_id,
        order.name,
        child.directives,
        order.constitution.mutable_prompt,
        order.constitution.mutable_prompt_policy,
        order.toolset_subset,
        order.ceilings.model_dump(),
        order.budgets.model_dump(),
        order.metadata,
        order.ceilings.max_cycles,
        order.ceilings.max_subagents,
        order.ceilings.max_tool_calls_per_cycle,
        order.ceilings.max_wall_seconds,
        DEPTH_MAX,
        order.initial_goal,
    )
    return read_moved(row) if row else None


TELL_SPAWNER = """
with told as (
    insert into messages (
        id, owner_id, root_id, from_agent_id, to_agent_id, to_run_id, sender, body, subject_ids
    )
    select $3, r.owner_id, a.root_id, r.agent_id, p.agent_id, p.id, 'agent', $4::json, r.subject_ids
    from runs r
    join runs p on p.owner_id = r.owner_id and p.id = r.parent_id
    join agents a on a.owner_id = r.owner_id and a.id = r.agent_id
    where r.owner_id = $1 and r.id = $2
    returning owner_id, id, to_agent_id
)
insert into outbox (owner_id, kind, agent_id, message_id, child_run_id)
select owner_id, 'wake', to_agent_id, id, $2 from told
returning id
"""


async def tell_spawner(
    connection: Connection, owner_id: UUID, child_run_id: UUID, message_id: UUID, body: str
) -> int:
    """Put what became of a child into its spawner's inbox, whoever is full. The wake that this promises.

    It is for the spawning run alone while that lives, and afterwards for its agent.
    """
    return int(await connection.fetchval(TELL_SPAWNER, owner_id, child_run_id, message_id, body))


STOP_DESCENDANTS = """
with recursive below as (
    select id from runs where owner_id = $1 and parent_id = $2
    union all
    select child.id from below join runs child on child.owner_id = $1 and child.parent_id = below.id
), live as (
    select r.id, coalesce(r.lease_until > clock_timestamp(), false) as leased
    from runs r
    where r.owner_id = $1 and r.id in (select id from below) and r.state in ('running', 'sleeping')
    order by r.depth, r.id
    for no key update
)
update runs set
    cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp()),
    due_at = case when live.leased then due_at else least(due_at, clock_timestamp()) end
from live
where runs.owner_id = $1 and runs.id = live.id
returning runs.id, live.leased
"""


async def stop_descendants(connection: Connection, owner_id: UUID, run_id: UUID) -> list[UUID]:
    """Ask for the cancel of every live run below one that ends; those that became due by it.

    One that is spawned further down at this moment is not seen; its spawner is, and stops it in its turn.
    """
    rows = await connection.fetch(STOP_DESCENDANTS, owner_id, run_id)
    return [row["id"] for row in rows if not row["leased"]]


RETURN_CYCLES = """
update runs p set
    cycles_granted =
        p.cycles_granted - (c.cycles_given - c.cycle_count - c.cycles_granted - c.cycles_lost)
from runs c
where p.owner_id = $1 and p.id = $2 and c.owner_id = $1 and c.id = $3 and c.parent_id = p.id
"""


async def return_cycles(connection: Connection, owner_id: UUID, run_id: UUID, child_run_id: UUID) -> None:
    """Give a locked run back what its child, which has ended, did not use. To be done once for each child.

    A child that forfeited more than it had left takes it from its spawner. What a child granted further down
    counts as used, even if it is not.
    """
    await connection.execute(RETURN_CYCLES, owner_id, run_id, child_run_id)
