"""`agent.create`, `agent.get`, `agent.list`, `agent.update`, `agent.cancel`, `agent.archive`, and
`agent.approve_prompt_change`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final
from uuid import UUID

import anyio

from espalier_acts.agents import archive_agent, cancel_agent, create_agent, update_agent
from espalier_acts.log import Written
from espalier_acts.prompts import change_constitution, resolve_change
from espalier_domain.errors import InvalidInput, LifecycleConflict, NotFound
from espalier_domain.prompts import PENDING_MAX
from espalier_gateway.auth import require_capability
from espalier_gateway.methods.agent_servers import sealed_servers
from espalier_gateway.methods.call import Call, named, place, unknown_cursor
from espalier_gateway.methods.run import end_run
from espalier_protocol.agent import (
    Agent,
    AgentCreate,
    AgentDone,
    AgentGet,
    AgentInFull,
    AgentList,
    AgentPage,
    AgentRef,
    AgentUpdate,
    ApprovePromptChange,
    PromptChangeResult,
)
from espalier_protocol.ids import from_wire, to_wire
from espalier_protocol.shapes import PAGE_DEFAULT
from espalier_store.agents import AgentFilter, get_agent, list_agents
from espalier_store.log import pick_live_run
from espalier_store.paging import Page, Place
from espalier_store.pool import Connection, reading, transaction
from espalier_store.prompts import get_change, in_history, list_history, list_pending
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
    servers = sealed_servers(call, params.external_mcp_servers)
    async with call.creating() as creation:
        agent = await create_agent(creation.connection, call.owner_id, params, servers)
        await creation.keep(agent)
    return agent


async def get(call: Call, params: AgentGet) -> AgentInFull:
    """The agent and what is asked for beside it: its prompt's history in pages, what waits as a whole."""
    agent_id = named("agt", params.agent_id)
    after = _history_cursor(params)
    beside: dict[str, Any] = {}
    async with reading(call.pool) as connection:
        agent = await _agent(connection, call, agent_id)
        if after is not None and not await in_history(connection, call.owner_id, agent_id, after):
            raise _unknown_history_cursor()
        if "prompt_history" in params.include:
            page = await list_history(connection, call.owner_id, agent_id, Place(after, PAGE_DEFAULT))
            beside["prompt_history"] = page.items
            if page.more:
                beside["prompt_history_cursor"] = page.items[-1].id
        if "pending_prompt_changes" in params.include:
            pending = await list_pending(connection, call.owner_id, agent_id, PENDING_MAX)
            beside["pending_prompt_changes"] = pending
    return AgentInFull(**{name: getattr(agent, name) for name in Agent.model_fields}, **beside)


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
    """One transaction; a run that became due by it is rung for, and a live one is told of a new prompt."""
    _only_what_can_change(call, params)
    agent_id = named("agt", params.agent_id)
    change, told = params.constitution, None
    wanted = params.external_mcp_servers
    servers = None if wanted is None else sealed_servers(call, wanted)
    async with AsyncExitStack() as stack:
        if change is not None and change.mutable_prompt is not None:
            await stack.enter_async_context(telling(call, agent_id))
        async with transaction(call.pool) as connection:
            if change is not None:
                told = await change_constitution(connection, call.owner_id, agent_id, change, by=key_id(call))
            updated = await update_agent(connection, call.owner_id, agent_id, params, servers)
        publish(call, told)
    for run_id in updated.became_due:
        call.desk.couriers.ring(run_id)
    return updated.agent


async def approve_prompt_change(call: Call, params: ApprovePromptChange) -> PromptChangeResult:
    agent_id, change_id = named("agt", params.agent_id), named("pch", params.pending_change_id)
    async with reading(call.pool) as connection:
        change = await get_change(connection, call.owner_id, agent_id, change_id)
    async with telling(call, agent_id, change.run_id if change else None):
        async with transaction(call.pool) as connection:
            resolved = await resolve_change(
                connection,
                call.owner_id,
                agent_id,
                change_id,
                approve=params.approve,
                comment=params.comment,
                by=key_id(call),
            )
        publish(call, resolved.written)
    if resolved.entry_id is None:
        return PromptChangeResult(applied=False)
    return PromptChangeResult(applied=True, history_entry_id=to_wire("phe", resolved.entry_id))


@asynccontextmanager
async def telling(call: Call, agent_id: UUID, run_id: UUID | None = None) -> AsyncIterator[None]:
    """Held around a commit that tells a live run of the agent something, and its `publish`.

    It is the run that the act will pick, unless that one ends meanwhile; then an event may be published out
    of its order, and readers find the ones before it in Postgres.
    """
    async with reading(call.pool) as connection:
        picked = await pick_live_run(connection, call.owner_id, agent_id, run_id)
    async with AsyncExitStack() as stack:
        if picked is not None:
            await stack.enter_async_context(call.desk.couriers.in_order(picked))
        yield


def publish(call: Call, told: Written | None) -> None:
    if told is not None:
        call.desk.couriers.publish(told)


def key_id(call: Call) -> str:
    """Who is asking, as histories and answers name them."""
    return to_wire("key", call.caller.key_id)


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


async def _agent(connection: Connection, call: Call, agent_id: UUID) -> Agent:
    agent = await get_agent(connection, call.owner_id, agent_id)
    if agent is None:
        raise NotFound("agent", to_wire("agt", agent_id))
    return agent


def _history_cursor(params: AgentGet) -> UUID | None:
    if params.prompt_history_cursor is None:
        return None
    after = from_wire("phe", params.prompt_history_cursor)
    if after is None:
        raise _unknown_history_cursor()
    return after


def _unknown_history_cursor() -> InvalidInput:
    return InvalidInput("prompt_history_cursor", "should be one that an earlier page answered")


def _filter(params: AgentList) -> AgentFilter | None:
    """None when an id is one that no agent can have, so that nothing matches."""
    ids: list[UUID | None] = []
    for text in (params.root_agent_id, params.parent_agent_id):
        ids.append(None if text is None else from_wire("agt", text))
        if text is not None and ids[-1] is None:
            return None
    return AgentFilter(ids[0], ids[1], params.lifecycle_state, params.subject_id)
