"""Keys: how a caller proves whose embedder it is. Only hashes are here.

Listing and revoking are an operator's acts: they name no owner, because operators serve all of them, and no
gateway calls them.
"""

from dataclasses import dataclass
from datetime import datetime
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


LIST_KEYS = """
select k.id, o.name, k.scopes, k.created_at, k.last_seen_at, k.revoked_at
from keys k join owners o on o.id = k.owner_id
where $1::text is null or o.name = $1
order by o.name, k.created_at, k.id
limit $2
"""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What an operator may see of a key: neither the key nor its hash. `last_seen_at` is to the minute."""

    key_id: UUID
    owner_name: str
    scopes: list[str]
    created_at: datetime
    last_seen_at: datetime | None
    revoked_at: datetime | None


async def list_keys(connection: Connection, owner_name: str | None, number_max: int) -> list[KeyRecord]:
    """Keys of the owner called `owner_name`, or of all owners; by owner, oldest first, revoked ones too."""
    return [KeyRecord(*row) for row in await connection.fetch(LIST_KEYS, owner_name, number_max)]


REVOKE_KEY = """
with before as (
    select k.id, k.revoked_at, o.name from keys k join owners o on o.id = k.owner_id
    where k.id = $1 for update of k
)
update keys k set revoked_at = coalesce(before.revoked_at, clock_timestamp())
from before where k.id = before.id
returning before.name, k.key_hash, before.revoked_at is not null as already
"""


@dataclass(frozen=True, slots=True)
class Revoked:
    """`already`: it had been before, and its time stays the first one."""

    owner_name: str
    key_hash: bytes
    already: bool


async def revoke_key(connection: Connection, key_id: UUID) -> Revoked | None:
    """From the commit on no look-up finds the key; None if there is no such key."""
    row = await connection.fetchrow(REVOKE_KEY, key_id)
    return Revoked(*row) if row else None
