"""`agent.create`, `agent.get`, `agent.list`, `agent.update`, `agent.cancel`, `agent.archive`."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final
from uuid import UUID

import anyio

from espalier_acts.agents import archive_agent, cancel_agent, create_agent, update_agent
from espalier_domain.errors import InvalidInput, LifecycleConflict, NotFound
from espalier_gateway.auth import require_capability
from espalier_gateway.errors import WireError
from espalier_gateway.methods.call import Call, named, place, unknown_cursor
from espalier_gateway.methods.run import end_run
from espalier_protocol.agent import (
    Agent,
    AgentCreate,
    AgentDone,
    AgentGet,
    AgentList,
    AgentPage,
    AgentRef,
    AgentUpdate,
)
from espalier_protocol.errors import ErrorCode
from espalier_protocol.ids import from_wire, to_wire
from espalier_store.agents import AgentFilter, get_agent, list_agents
from espalier_store.paging import Page
from espalier_store.pool import Connection, reading, transaction
from espalier_store.runs import count_live_runs

NOTHING: Final[Page[Agent]] = Page([], more=False)
ENDED_AT_ONCE_MAX: Final = 50
"""Runs that closing an agent ends before it answers: some milliseconds each. Workers end the others."""

ENDS_POLL_S: Final = 0.05
Close = Callable[[Connection, UUID, UUID], Awaitable[list[UUID]]]


async def create(call: Call, params: AgentCreate) -> Agent:
    if params.external_mcp_servers:
        require_capability(call.session, "tools.mcp_external")
    if params.runner is not None:
        require_capability(call.session, "runner.byo_llm")
    async with transaction(call.pool) as connection:
        return await create_agent(connection, call.owner_id, params)


async def get(call: Call, params: AgentGet) -> Agent:
    agent_id = named("agt", params.agent_id)
    if params.prompt_history_cursor is not None:
        # No prompt has a history yet, so there is no page that could have answered this.
        raise InvalidInput("prompt_history_cursor", "should be one that an earlier page answered")
    async with reading(call.pool) as connection:
        agent = await _agent(connection, call, agent_id)
    return agent.model_copy(update={member: [] for member in params.include})


async def list_(call: Call, params: AgentList) -> AgentPage:
    where = place("agt", params)
    wanted = _filter(params)
    async with reading(call.pool) as connection:
        if where.after is not None and await get_agent(connection, call.owner_id, where.after) is None:
            raise unknown_cursor()
        page = await list_agents(connection, call.owner_id, wanted, where) if wanted else NOTHING
    cursor = page.items[-1].id if page.more else None
    return AgentPage(items=page.items, cursor=cursor, agents=page.items, next_cursor=cursor)


async def update(call: Call, params: AgentUpdate) -> Agent:
    """One transaction; a run that became due by it is rung for."""
    _only_what_can_change(call, params)
    agent_id = named("agt", params.agent_id)
    async with transaction(call.pool) as connection:
        updated = await update_agent(connection, call.owner_id, agent_id, params)
    for run_id in updated.became_due:
        call.desk.couriers.ring(run_id)
    return updated.agent


async def cancel(call: Call, params: AgentRef) -> AgentDone:
    return await _close(call, named("agt", params.agent_id), cancel_agent)


async def archive(call: Call, params: AgentRef) -> AgentDone:
    return await _close(call, named("agt", params.agent_id), archive_agent)


async def _close(call: Call, agent_id: UUID, close: Close) -> AgentDone:
    """Close the agent and ask its runs to end, in one transaction; then end them as `run.cancel` does.

    What this process does not reach, workers do. Those that work on a run have `patience_s` for it. All of
    it may be repeated.
    """
    until = anyio.current_time() + call.patience_s
    async with transaction(call.pool) as connection:
        live = await close(connection, call.owner_id, agent_id)
    for run_id in live[:ENDED_AT_ONCE_MAX]:
        with suppress(LifecycleConflict):  # it ended otherwise in the meantime
            await end_run(call, run_id)
    for run_id in live[ENDED_AT_ONCE_MAX:]:
        call.desk.couriers.ring(run_id)
        call.desk.cancels.later(call.owner_id, run_id)
    await _wait_for_ends(call, agent_id, until)
    async with reading(call.pool) as connection:
        agent = await _agent(connection, call, agent_id)
    return AgentDone(**{name: getattr(agent, name) for name in Agent.model_fields})


async def _wait_for_ends(call: Call, agent_id: UUID, until: float) -> None:
    """Until no run of the agent lives, or the wait is over."""
    while anyio.current_time() < until:
        async with reading(call.pool) as connection:
            if await count_live_runs(connection, call.owner_id, agent_id) == 0:
                return
        await anyio.sleep(ENDS_POLL_S)


def _only_what_can_change(call: Call, params: AgentUpdate) -> None:
    """Given at all is enough: null detaches a runner, and no servers at all removes them."""
    if "external_mcp_servers" in params.model_fields_set:
        require_capability(call.session, "tools.mcp_external")
    if "runner" in params.model_fields_set:
        require_capability(call.session, "runner.byo_llm")
    if params.constitution is not None:
        message = "The constitution cannot be changed by this runtime yet."
        raise WireError(ErrorCode.capability_not_supported, message, field="constitution")


async def _agent(connection: Connection, call: Call, agent_id: UUID) -> Agent:
    agent = await get_agent(connection, call.owner_id, agent_id)
    if agent is None:
        raise NotFound("agent", to_wire("agt", agent_id))
    return agent


def _filter(params: AgentList) -> AgentFilter | None:
    """None when an id is one that no agent can have, so that nothing matches."""
    ids: list[UUID | None] = []
    for text in (params.root_agent_id, params.parent_agent_id):
        ids.append(None if text is None else from_wire("agt", text))
        if text is not None and ids[-1] is None:
            return None
    return AgentFilter(ids[0], ids[1], params.lifecycle_state, params.subject_id)
