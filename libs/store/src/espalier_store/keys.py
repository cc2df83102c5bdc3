"""Keys: how a caller proves whose embedder it is. Only hashes are here."""

from dataclasses import dataclass
from uuid import UUID

from espalier_store.pool import Connection


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is asking: the owner that a key stands for, and what the key may do."""

    owner_id: UUID
    key_id: UUID
    scopes: frozenset[str]


INSERT_KEY = "insert into keys (id, owner_id, key_hash, scopes) values ($1, $2, $3, $4)"


async def insert_key(
    connection: Connection, key_id: UUID, owner_id: UUID, key_hash: bytes, scopes: list[str]
) -> None:
    await connection.execute(INSERT_KEY, key_id, owner_id, key_hash, scopes)


FIND_KEY = """
select id, owner_id, scopes, coalesce(last_seen_at < now() - interval '1 minute', true) as stale
from keys where key_hash = $1 and revoked_at is null
"""
TOUCH_KEY = "update keys set last_seen_at = now() where id = $1 and owner_id = $2"


async def find_key(connection: Connection, key_hash: bytes) -> Caller | None:
    """The caller behind a key, whoever owns it: the one look-up that knows no owner yet."""
    row = await connection.fetchrow(FIND_KEY, key_hash)
    if row is None:
        return None
    if row["stale"]:
        await connection.execute(TOUCH_KEY, row["id"], row["owner_id"])
    return Caller(row["owner_id"], row["id"], frozenset(row["scopes"]))
