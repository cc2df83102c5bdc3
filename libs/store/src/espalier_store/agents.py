"""Agents. A row becomes the protocol's Agent as it is read; what its runs do to its state is
derived, never stored: `sleeping` while all its live runs sleep, `error` when the newest run failed, and
`complete` when that of an agent that was spawned has reached its goal.
"""

from dataclasses import dataclass
from uuid import UUID

import asyncpg

from espalier_protocol.agent import (
    Agent,
    AgentCreate,
    AgentUpdate,
    Budgets,
    Ceilings,
    ClosedState,
    Constitution,
    RunnerConfig,
)
from espalier_protocol.ids import to_wire
from espalier_protocol.mcp_server import ExternalMcpServerView
from espalier_store.paging import PAGE_BYTES_MAX, Page, Place, read_page
from espalier_store.pool import Connection

AGENT = """
select a.*, life.wakes_at,
    case
        when a.lifecycle_state <> 'active' then a.lifecycle_state
        when life.awake > 0 then 'active'
        when life.live > 0 then 'sleeping'
        when newest.state = 'error' then 'error'
        when newest.state = 'complete' and a.parent_id is not null then 'complete'
        else 'active'
    end as shown_state,
    (
        select coalesce(jsonb_agg(
            jsonb_build_object('url', s.url, 'name', s.name, 'enabled', true) order by s.place), '[]')
        from agent_servers s where s.owner_id = a.owner_id and s.agent_id = a.id
    ) as servers
from agents a
left join lateral (
    select count(*) as live,
        count(*) filter (where r.state = 'running') as awake,
        min(r.due_at) filter (where r.wait_reason in ('timer', 'retry')) as wakes_at
    from runs r
    where r.owner_id = a.owner_id and r.agent_id = a.id and r.state in ('running', 'sleeping')
) life on true
left join lateral (
    select r.state from runs r
    where r.owner_id = a.owner_id and r.agent_id = a.id order by r.created_at desc, r.id desc limit 1
) newest on true
"""

INSERT_AGENT = """
insert into agents (
    id, owner_id, root_id, name, immutable_directives, mutable_prompt, mutable_prompt_policy,
    toolset, ceilings, budgets, max_live_runs, subject_ids, metadata
) values ($1, $2, $1, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
"""


async def insert_agent(connection: Connection, owner_id: UUID, agent_id: UUID, wanted: AgentCreate) -> None:
    """A new agent at the root of its own tree."""
    await connection.execute(
        INSERT_AGENT,
        agent_id,
        owner_id,
        wanted.name,
        wanted.constitution.immutable_directives,
        wanted.constitution.mutable_prompt,
        wanted.constitution.mutable_prompt_policy,
        wanted.toolset,
        wanted.ceilings.model_dump(),
        wanted.budgets.model_dump(),
        wanted.max_live_runs,
        wanted.subject_ids,
        wanted.metadata,
    )


GET_AGENT = f"{AGENT} where a.owner_id = $1 and a.id = $2"


async def get_agent(connection: Connection, owner_id: UUID, agent_id: UUID) -> Agent | None:
    row = await connection.fetchrow(GET_AGENT, owner_id, agent_id)
    return _agent(row) if row else None


LIST_AGENTS = f"""
select * from (
    select page.*, count(*) over () as reached,
        sum(bytes) over (order by created_at desc, id desc) - bytes as bytes_before
    from (
        select a.*, octet_length(a.metadata::text) + octet_length(a.immutable_directives)
            + octet_length(a.mutable_prompt) + octet_length(a.servers::text) as bytes
        from ({AGENT} where a.owner_id = $1) a
        where ($2::uuid is null or (a.created_at, a.id) < (
                select b.created_at, b.id from agents b where b.owner_id = $1 and b.id = $2))
            and ($4::uuid is null or a.root_id = $4)
            and ($5::uuid is null or a.parent_id = $5)
            and ($6::text is null or a.shown_state = $6)
            and ($7::text is null or $7 = any (a.subject_ids))
        order by a.created_at desc, a.id desc
        limit $3 + 1
    ) page
) sized
where bytes_before < $8
order by created_at desc, id desc
"""


@dataclass(frozen=True, slots=True)
class AgentFilter:
    root_id: UUID | None = None
    parent_id: UUID | None = None
    lifecycle_state: str | None = None
    subject_id: str | None = None


async def list_agents(
    connection: Connection, owner_id: UUID, wanted: AgentFilter, place: Place
) -> Page[Agent]:
    rows = await connection.fetch(
        LIST_AGENTS,
        owner_id,
        place.after,
        place.size,
        wanted.root_id,
        wanted.parent_id,
        wanted.lifecycle_state,
        wanted.subject_id,
        PAGE_BYTES_MAX,
    )
    return read_page(rows, place, _agent)


LOCK_AGENT = """
select lifecycle_state, max_live_runs, ceilings,
    array(select distinct unnest(subject_ids || prompt_subject_ids) order by 1) as subject_ids
from agents where owner_id = $1 and id = $2 for no key update
"""


@dataclass(frozen=True, slots=True)
class LockedAgent:
    """What `create_run` must know of an agent, held still until the transaction ends."""

    lifecycle_state: str
    max_live_runs: int
    ceilings: Ceilings
    subject_ids: list[str]


async def lock_agent(connection: Connection, owner_id: UUID, agent_id: UUID) -> LockedAgent | None:
    row = await connection.fetchrow(LOCK_AGENT, owner_id, agent_id)
    if row is None:
        return None
    return LockedAgent(
        row["lifecycle_state"],
        row["max_live_runs"],
        Ceilings(**row["ceilings"]),
        row["subject_ids"],
    )


UPDATE_AGENT = """
update agents set
    name = coalesce($3, name),
    metadata = coalesce($4::jsonb, metadata),
    ceilings = ceilings || coalesce($5::jsonb, '{}'),
    budgets = budgets || coalesce($6::jsonb, '{}'),
    updated_at = clock_timestamp()
where owner_id = $1 and id = $2
"""


async def change_agent(connection: Connection, owner_id: UUID, agent_id: UUID, change: AgentUpdate) -> None:
    """Write what `change` names of name, metadata, ceilings and budgets."""
    await connection.execute(
        UPDATE_AGENT,
        owner_id,
        agent_id,
        change.name,
        change.metadata,
        change.ceilings.model_dump(exclude_none=True) if change.ceilings else None,
        change.budgets.model_dump(exclude_none=True) if change.budgets else None,
    )


SET_RUNNER = """
update agents set runner_provider_id = $3, runner_model = $4, updated_at = clock_timestamp()
where owner_id = $1 and id = $2
"""


async def set_runner(
    connection: Connection, owner_id: UUID, agent_id: UUID, provider_id: UUID | None, model: str | None
) -> None:
    """Who thinks for the agent. The caller holds the provider, or it could be gone by now."""
    await connection.execute(SET_RUNNER, owner_id, agent_id, provider_id, model)


CLOSE_AGENT = """
update agents set lifecycle_state = $3, updated_at = clock_timestamp()
where owner_id = $1 and id = $2 and lifecycle_state <> $3
"""


async def close_agent(connection: Connection, owner_id: UUID, agent_id: UUID, closed: ClosedState) -> None:
    """The agent takes no new run from now on. One that is `closed` already is left as it is."""
    await connection.execute(CLOSE_AGENT, owner_id, agent_id, closed)


def _agent(row: asyncpg.Record) -> Agent:
    return Agent(
        id=to_wire("agt", row["id"]),
        name=row["name"],
        constitution=Constitution(
            immutable_directives=row["immutable_directives"],
            mutable_prompt=row["mutable_prompt"],
            mutable_prompt_policy=row["mutable_prompt_policy"],
        ),
        toolset=row["toolset"],
        ceilings=Ceilings(**row["ceilings"]),
        budgets=Budgets(**row["budgets"]),
        root_agent_id=to_wire("agt", row["root_id"]),
        parent_agent_id=to_wire("agt", row["parent_id"]) if row["parent_id"] else None,
        lifecycle_state=row["shown_state"],
        next_wake_at=row["wakes_at"] if row["shown_state"] == "sleeping" else None,
        subject_ids=row["subject_ids"],
        external_mcp_servers=[ExternalMcpServerView(**server) for server in row["servers"]],
        metadata=row["metadata"],
        runner=_runner(row),
        max_live_runs=row["max_live_runs"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def _runner(row: asyncpg.Record) -> RunnerConfig | None:
    provider_id, model = row["runner_provider_id"], row["runner_model"]
    if provider_id is None and model is None:
        return None
    return RunnerConfig(provider_id=to_wire("prv", provider_id) if provider_id else None, model=model)
