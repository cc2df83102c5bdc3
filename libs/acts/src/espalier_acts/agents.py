"""Acts on agents: making, changing and closing them."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from espalier_acts.agent_servers import WantedServer, set_servers
from espalier_acts.providers import bind_runner
from espalier_acts.subjects import admit_subjects
from espalier_domain.errors import LifecycleConflict, NotFound
from espalier_protocol.agent import Agent, AgentCreate, AgentUpdate, Ceilings, CeilingsChange
from espalier_protocol.ids import to_wire
from espalier_store.agents import (
    LockedAgent,
    change_agent,
    close_agent,
    get_agent,
    insert_agent,
    lock_agent,
)
from espalier_store.ids import new_id
from espalier_store.pool import Connection
from espalier_store.runs import lock_live_runs, request_cancels, shrink_runs


async def create_agent(
    connection: Connection, owner_id: UUID, wanted: AgentCreate, servers: Sequence[WantedServer] = ()
) -> Agent:
    """A new agent at the root of its own tree, with these servers attached. Raises InvalidInput."""
    agent_id = new_id()
    await admit_subjects(connection, owner_id, wanted.subject_ids)
    await insert_agent(connection, owner_id, agent_id, wanted)
    await set_servers(connection, owner_id, agent_id, servers)
    if wanted.runner is not None:
        await bind_runner(connection, owner_id, agent_id, wanted.runner)
    return await _agent(connection, owner_id, agent_id)


@dataclass(frozen=True, slots=True)
class Updated:
    """The agent after the update, and the runs that became due by it; they are rung for after the commit."""

    agent: Agent
    became_due: list[UUID]


async def update_agent(
    connection: Connection,
    owner_id: UUID,
    agent_id: UUID,
    change: AgentUpdate,
    servers: Sequence[WantedServer] | None = None,
) -> Updated:
    """Write name, metadata, ceilings and budgets as far as `change` names them; its other members it ignores.

    `servers` are all that the agent has from now on; None leaves them alone.
    Ceilings that shrink, shrink in the live runs too, whoever holds them. Raises NotFound, or
    LifecycleConflict when a ceiling would grow under a live run.
    """
    agent = await _lock(connection, owner_id, agent_id)
    became_due: list[UUID] = []
    if change.ceilings is not None:
        became_due = await _shrink_live_runs(connection, owner_id, agent_id, agent.ceilings, change.ceilings)
    if servers is not None:
        await set_servers(connection, owner_id, agent_id, servers)
    if servers is not None or _names_something(change):
        await change_agent(connection, owner_id, agent_id, change)
    if "runner" in change.model_fields_set:
        await bind_runner(connection, owner_id, agent_id, change.runner)
    return Updated(await _agent(connection, owner_id, agent_id), became_due)


async def cancel_agent(connection: Connection, owner_id: UUID, agent_id: UUID) -> list[UUID]:
    """The agent takes no new run from now on, and its live runs are asked to end. Those runs.

    It may be repeated. Raises NotFound, or LifecycleConflict for an archived agent.
    """
    agent = await _lock(connection, owner_id, agent_id)
    if agent.lifecycle_state == "archived":
        raise LifecycleConflict("The agent is archived.")
    await close_agent(connection, owner_id, agent_id, "cancelled")
    return await _ask_live_runs_to_end(connection, owner_id, agent_id)


async def archive_agent(connection: Connection, owner_id: UUID, agent_id: UUID) -> list[UUID]:
    """Like `cancel_agent`, from every state. Raises NotFound."""
    await _lock(connection, owner_id, agent_id)
    await close_agent(connection, owner_id, agent_id, "archived")
    return await _ask_live_runs_to_end(connection, owner_id, agent_id)


def _names_something(change: AgentUpdate) -> bool:
    limits = [part.model_fields_set for part in (change.ceilings, change.budgets) if part is not None]
    return change.name is not None or change.metadata is not None or any(limits)


async def _shrink_live_runs(
    connection: Connection, owner_id: UUID, agent_id: UUID, before: Ceilings, change: CeilingsChange
) -> list[UUID]:
    """The runs that became due by it."""
    live = await lock_live_runs(connection, owner_id, agent_id)
    if not live:
        return []
    named = change.model_dump(exclude_none=True)
    for ceiling, value in named.items():
        if value > getattr(before, ceiling):
            reason = f"ceilings.{ceiling} cannot grow while the agent has a live run."
            raise LifecycleConflict(reason)
    after = before.model_copy(update=named)
    due_before = {run.run_id for run in live if run.due}
    due = await shrink_runs(connection, owner_id, [run.run_id for run in live], after)
    return [run_id for run_id in due if run_id not in due_before]


async def _ask_live_runs_to_end(connection: Connection, owner_id: UUID, agent_id: UUID) -> list[UUID]:
    """The flag stays when this process dies before it has ended the runs: workers and sweepers find it."""
    live = [run.run_id for run in await lock_live_runs(connection, owner_id, agent_id)]
    await request_cancels(connection, owner_id, live)
    return live


async def _lock(connection: Connection, owner_id: UUID, agent_id: UUID) -> LockedAgent:
    agent = await lock_agent(connection, owner_id, agent_id)
    if agent is None:
        raise NotFound("agent", to_wire("agt", agent_id))
    return agent


async def _agent(connection: Connection, owner_id: UUID, agent_id: UUID) -> Agent:
    agent = await get_agent(connection, owner_id, agent_id)
    if agent is None:
        raise NotFound("agent", to_wire("agt", agent_id))
    return agent
