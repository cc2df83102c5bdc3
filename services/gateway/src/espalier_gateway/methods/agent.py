"""`agent.create`, `agent.get`, `agent.list`."""

from typing import Final
from uuid import UUID

from espalier_acts.agents import create_agent
from espalier_domain.errors import InvalidInput, NotFound
from espalier_gateway.auth import require_capability
from espalier_gateway.methods.call import Call, named, place, unknown_cursor
from espalier_protocol.agent import Agent, AgentCreate, AgentGet, AgentList, AgentPage
from espalier_protocol.ids import from_wire
from espalier_store.agents import AgentFilter, get_agent, list_agents
from espalier_store.paging import Page
from espalier_store.pool import reading, transaction

NOTHING: Final[Page[Agent]] = Page([], more=False)


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
        agent = await get_agent(connection, call.owner_id, agent_id)
    if agent is None:
        raise NotFound("agent", params.agent_id)
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


def _filter(params: AgentList) -> AgentFilter | None:
    """None when an id is one that no agent can have, so that nothing matches."""
    ids: list[UUID | None] = []
    for text in (params.root_agent_id, params.parent_agent_id):
        ids.append(None if text is None else from_wire("agt", text))
        if text is not None and ids[-1] is None:
            return None
    return AgentFilter(ids[0], ids[1], params.lifecycle_state, params.subject_id)
