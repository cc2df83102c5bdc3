"""AEP sessions: what version and capabilities an embedder agreed on. Only hashes of their ids are here."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from espalier_store.pool import Connection


@dataclass(frozen=True, slots=True)
class AepSession:
    protocol_version: str
    capabilities: frozenset[str]


INSERT_SESSION = """
insert into sessions (session_hash, owner_id, protocol_version, capabilities, client_info)
values ($1, $2, $3, $4, $5)
"""


async def insert_session(
    connection: Connection,
    owner_id: UUID,
    session_hash: bytes,
    session: AepSession,
    client_info: dict[str, Any],
) -> None:
    await connection.execute(
        INSERT_SESSION,
        session_hash,
        owner_id,
        session.protocol_version,
        sorted(session.capabilities),
        client_info,
    )


FIND_SESSION = """
select protocol_version, capabilities, last_seen_at < now() - interval '1 minute' as stale
from sessions where session_hash = $1 and owner_id = $2 and last_seen_at > now() - make_interval(secs => $3)
"""
TOUCH_SESSION = "update sessions set last_seen_at = now() where session_hash = $1 and owner_id = $2"


async def find_session(
    connection: Connection, owner_id: UUID, session_hash: bytes, ttl_s: float
) -> AepSession | None:
    """The session, if it is this owner's and has not idled for `ttl_s`. Finding it keeps it alive."""
    row = await connection.fetchrow(FIND_SESSION, session_hash, owner_id, ttl_s)
    if row is None:
        return None
    if row["stale"]:
        await connection.execute(TOUCH_SESSION, session_hash, owner_id)
    return AepSession(row["protocol_version"], frozenset(row["capabilities"]))
