"""Acts on the MCP servers of an agent: attaching, changing and detaching them, all at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from espalier_domain.mcp_servers import placed_servers
from espalier_protocol.mcp_server import ExternalMcpServer
from espalier_store.agent_servers import keep_servers, known_servers, put_server
from espalier_store.fleet import listed_servers
from espalier_store.pool import Connection


@dataclass(frozen=True, slots=True)
class WantedServer:
    """A server that an embedder wants to attach, and its credential as it will be stored."""

    server: ExternalMcpServer = field(repr=False)
    sealed_auth: bytes | None = field(repr=False)


async def set_servers(
    connection: Connection, owner_id: UUID, agent_id: UUID, wanted: Sequence[WantedServer]
) -> None:
    """The agent has these servers and no others; what it has already is known by its name.

    The caller has locked or just made the agent. Raises InvalidInput for a name that is wanted twice.
    """
    known = await known_servers(connection, owner_id, agent_id)
    if not wanted and not known:
        return
    listed = await listed_servers(connection)
    placed = placed_servers([each.server for each in wanted], known, listed)
    await keep_servers(connection, owner_id, agent_id, [server.slug for server in placed])
    for place, (server, each) in enumerate(zip(placed, wanted, strict=True)):
        await put_server(connection, owner_id, agent_id, server, each.sealed_auth, place)
