"""The journal and its snapshots: writing entries, and loading what a run has lived."""

from uuid import UUID

from espalier_store.pool import Connection

INSERT_ENTRIES = """
insert into journal (run_id, owner_id, entry_no, body)
select $1, $2, $3 + place - 1, body from unnest($4::json[]) with ordinality as entry (body, place)
"""


async def insert_entries(
    connection: Connection, owner_id: UUID, run_id: UUID, first_no: int, bodies: list[str]
) -> None:
    await connection.execute(INSERT_ENTRIES, run_id, owner_id, first_no, bodies)


LOAD_ENTRIES = """
select body from journal where owner_id = $1 and run_id = $2 and entry_no > $3 order by entry_no
"""


async def load_entries(connection: Connection, owner_id: UUID, run_id: UUID, after_no: int) -> list[str]:
    return [row["body"] for row in await connection.fetch(LOAD_ENTRIES, owner_id, run_id, after_no)]


PUT_SNAPSHOT = """
insert into snapshots (run_id, owner_id, version, entry_no, body) values ($1, $2, $3, $4, $5)
on conflict (run_id) do update
set version = excluded.version, entry_no = excluded.entry_no, body = excluded.body
where snapshots.owner_id = $2
"""


async def put_snapshot(
    connection: Connection, owner_id: UUID, run_id: UUID, version: int, entry_no: int, body: str
) -> None:
    await connection.execute(PUT_SNAPSHOT, run_id, owner_id, version, entry_no, body)


GET_SNAPSHOT = "select body from snapshots where owner_id = $1 and run_id = $2 and version = $3"


async def get_snapshot(connection: Connection, owner_id: UUID, run_id: UUID, version: int) -> str | None:
    """The run's snapshot, unless it was written in another version; the journal rebuilds it then."""
    body = await connection.fetchval(GET_SNAPSHOT, owner_id, run_id, version)
    assert body is None or isinstance(body, str)
    return body
