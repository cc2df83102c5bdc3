"""Owners: who everything belongs to."""

from uuid import UUID

from espalier_store.pool import Connection

ENSURE_OWNER = """
with made as (
    insert into owners (id, name) values ($1, $2) on conflict (name) do nothing returning id
)
select id from made union all select id from owners where name = $2 limit 1
"""


async def ensure_owner(connection: Connection, new_id: UUID, name: str) -> UUID:
    """The id of the owner called `name`, who is made with `new_id` if there is none."""
    owner_id = await connection.fetchval(ENSURE_OWNER, new_id, name)
    assert isinstance(owner_id, UUID)
    return owner_id
