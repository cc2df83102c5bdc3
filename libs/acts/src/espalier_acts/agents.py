"""Acts on agents."""

from uuid import UUID

from espalier_domain.errors import NotFound
from espalier_protocol.agent import Agent, AgentCreate
from espalier_protocol.ids import to_wire
from espalier_store.agents import get_agent, insert_agent
from espalier_store.ids import new_id
from espalier_store.pool import Connection


async def create_agent(connection: Connection, owner_id: UUID, wanted: AgentCreate) -> Agent:
    """A new agent at the root of its own tree."""
    agent_id = new_id()
    await insert_agent(connection, owner_id, agent_id, wanted)
    agent = await get_agent(connection, owner_id, agent_id)
    if agent is None:
        raise NotFound("agent", to_wire("agt", agent_id))
    return agent
