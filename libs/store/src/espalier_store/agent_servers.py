"""MCP servers that embedders attached to agents. Credentials pass through here sealed, and are never opened.

Whoever writes has locked the agent. The view that embedders get is part of the agent's own (`agents`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from espalier_domain.mcp_servers import KnownServer, PlacedServer
from espalier_store.pool import Connection

KNOWN_SERVERS = """
select name, slug, url from agent_servers where owner_id = $1 and agent_id = $2 order by place
"""


async def known_servers(connection: Connection, owner_id: UUID, agent_id: UUID) -> list[KnownServer]:
    rows = await connection.fetch(KNOWN_SERVERS, owner_id, agent_id)
    return [KnownServer(row["name"], row["slug"], row["url"]) for row in rows]


PUT_SERVER = """
insert into agent_servers (agent_id, slug, owner_id, name, url, sealed_auth, place)
values ($2, $3, $1, $4, $5, $6, $7)
on conflict (agent_id, slug) do update set
    name = excluded.name,
    url = excluded.url,
    sealed_auth = case when $8 then agent_servers.sealed_auth else excluded.sealed_auth end,
    place = excluded.place,
    inherited = false,
    updated_at = case when $8 then agent_servers.updated_at else clock_timestamp() end
where agent_servers.owner_id = $1
"""


async def put_server(
    connection: Connection,
    owner_id: UUID,
    agent_id: UUID,
    server: PlacedServer,
    sealed_auth: bytes | None,
    place: int,
) -> None:
    """Attach a server, or change the one that has its slug. `place` is its number in the agent's list.

    One that keeps its credential has not changed, so that its connections may stay.
    """
    await connection.execute(
        PUT_SERVER,
        owner_id,
        agent_id,
        server.slug,
        server.name,
        server.url,
        sealed_auth,
        place,
        server.keeps_auth,
    )


KEEP_SERVERS = """
delete from agent_servers where owner_id = $1 and agent_id = $2 and slug <> all ($3::text[])
"""


async def keep_servers(connection: Connection, owner_id: UUID, agent_id: UUID, slugs: Sequence[str]) -> None:
    """Detach all servers but these."""
    await connection.execute(KEEP_SERVERS, owner_id, agent_id, slugs)


HAND_DOWN = """
insert into agent_servers (agent_id, slug, owner_id, name, url, sealed_auth, place, inherited)
select $3, slug, owner_id, name, url, sealed_auth, place, true
from agent_servers where owner_id = $1 and agent_id = $2 and slug = any ($4::text[])
"""


async def hand_down_servers(
    connection: Connection, owner_id: UUID, parent_id: UUID, child_id: UUID, slugs: Sequence[str]
) -> None:
    """Give a new child these servers of its parent, as far as the parent has them.

    The child has of their tools what its own toolset names, not all.
    """
    await connection.execute(HAND_DOWN, owner_id, parent_id, child_id, slugs)


ATTACHED = """
select slug, url, sealed_auth, updated_at from agent_servers where owner_id = $1 and agent_id = $2
"""


@dataclass(frozen=True, slots=True)
class AttachedRow:
    """A server as whoever connects to it needs it. With another `updated_at` it is another connection's."""

    slug: str
    url: str
    sealed_auth: bytes | None
    updated_at: datetime


async def attached_servers(connection: Connection, owner_id: UUID, agent_id: UUID) -> list[AttachedRow]:
    rows = await connection.fetch(ATTACHED, owner_id, agent_id)
    return [AttachedRow(row["slug"], row["url"], row["sealed_auth"], row["updated_at"]) for row in rows]
