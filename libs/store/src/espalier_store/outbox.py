"""The outbox: what must still happen after a commit. Rows go when it has happened."""

from uuid import UUID

from espalier_store.pool import Connection

INSERT_PUBLISH = """
insert into outbox (owner_id, kind, run_id, from_seq) values ($1, 'publish', $2, $3) returning id
"""


async def insert_publish(connection: Connection, owner_id: UUID, run_id: UUID, from_seq: int) -> int:
    """The events of `run_id` from `from_seq` on are to be published. A fresh row for each act."""
    return int(await connection.fetchval(INSERT_PUBLISH, owner_id, run_id, from_seq))
