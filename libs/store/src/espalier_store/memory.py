"""Memory records: what a tree of agents remembers by namespace and key, and finding it again by its words.

A record that has expired is not there: no statement here returns, counts or keeps it, and a write over it
makes a new one. The database's clock decides. `fleet` deletes the rows later.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final
from uuid import UUID

import asyncpg
import orjson

from espalier_domain.errors import InvalidInput, Unavailable
from espalier_protocol.ids import to_wire
from espalier_protocol.memory import MemoryMatch, MemoryRecord
from espalier_store.paging import PAGE_BYTES_MAX, Page, Place, read_page
from espalier_store.pool import RETRY_AFTER_MS, STATEMENT_TIMEOUT_S, Connection

SEARCH_MS_MAX: Final = 500

LIVE = "(expires_at is null or expires_at > statement_timestamp())"
RECORD = "id, root_id, namespace, key, value, created_by_id, created_at, subject_id, ttl_seconds"
BYTES = "octet_length(namespace) + octet_length(key) + octet_length(value::text)"


IS_ROOT = "select exists (select from agents where owner_id = $1 and id = $2 and root_id = $2)"


async def is_root(connection: Connection, owner_id: UUID, agent_id: UUID) -> bool:
    """Whether a tree of the owner begins with this agent."""
    return bool(await connection.fetchval(IS_ROOT, owner_id, agent_id))


@dataclass(frozen=True, slots=True)
class NewRecord:
    """`record_id` is for a key that is not there yet. `value_json` is text that Postgres can store."""

    record_id: UUID
    root_id: UUID
    namespace: str
    key: str
    value_json: str
    created_by_id: UUID
    subject_id: str | None
    ttl_seconds: int | None


TAKE_TURNS = "select pg_advisory_xact_lock(hashtextextended('memory ' || $1::uuid::text, 0))"


async def take_turns(connection: Connection, root_id: UUID) -> None:
    """Until the transaction ends nobody else writes the tree's memory, or deletes from it by tree.

    So the count of its records holds, and two steps with the same keys in opposite orders do not wait for
    each other.
    """
    await connection.execute(TAKE_TURNS, root_id)


WRITE_RECORD = f"""
insert into memory_records as known
    (id, owner_id, root_id, namespace, key, value, created_by_id, subject_id, ttl_seconds, expires_at)
select $1, $2, $3, $4, $5, $6::json, $7, $8, $9::bigint,
    statement_timestamp() + make_interval(secs => $9::bigint)
where exists (
        select from memory_records
        where owner_id = $2 and root_id = $3 and namespace = $4 and key = $5 and {LIVE})
    or (select count(*) from memory_records where owner_id = $2 and root_id = $3 and {LIVE}) < $10
on conflict (owner_id, root_id, namespace, key) do update set
    (id, created_at, subject_id) = (
        select known.id, known.created_at, coalesce(excluded.subject_id, known.subject_id)
        where known.expires_at is null or known.expires_at > statement_timestamp()
        union all
        select excluded.id, excluded.created_at, excluded.subject_id
        where known.expires_at <= statement_timestamp()
    ),
    value = excluded.value,
    created_by_id = excluded.created_by_id,
    ttl_seconds = excluded.ttl_seconds,
    expires_at = excluded.expires_at,
    updated_at = excluded.updated_at
returning {RECORD}
"""


async def write_record(
    connection: Connection, owner_id: UUID, record: NewRecord, records_max: int
) -> MemoryRecord | None:
    """The record as it stands now; None when its key is not there and the tree has `records_max` already.

    A key that is there keeps its id, its time and, unless another is given, its subject. To be called in
    turn, or the count is a guess. Raises InvalidInput for more words than Postgres can index; nothing else
    can be done in the transaction then.
    """
    try:
        row = await connection.fetchrow(
            WRITE_RECORD,
            record.record_id,
            owner_id,
            record.root_id,
            record.namespace,
            record.key,
            record.value_json,
            record.created_by_id,
            record.subject_id,
            record.ttl_seconds,
            records_max,
        )
    except asyncpg.ProgramLimitExceededError as error:
        raise InvalidInput("value", "has more different words than can be searched") from error
    return _record(row) if row else None


READ_RECORDS = f"""
select * from (
    select page.*, count(*) over () as reached,
        sum(bytes) over (order by created_at desc, id desc) - bytes as bytes_before
    from (
        select {RECORD}, {BYTES} as bytes
        from memory_records
        where owner_id = $1 and root_id = $2 and namespace = $3 and {LIVE} {{narrowed}}
            and (created_at, id) < (
                coalesce(
                    (select b.created_at from memory_records b where b.owner_id = $1 and b.id = $4),
                    'infinity'),
                coalesce($4::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
        order by created_at desc, id desc
        limit $5 + 1
    ) page
) sized
where bytes_before < $6
order by created_at desc, id desc
"""


@dataclass(frozen=True, slots=True)
class Shelf:
    """A namespace of a tree."""

    root_id: UUID
    namespace: str


async def read_records(
    connection: Connection, owner_id: UUID, shelf: Shelf, key: str | None, place: Place
) -> Page[MemoryRecord]:
    """With `key` one at most. A cursor that is not there is read as none: ask `on_shelf` afterwards."""
    asked = [] if key is None else [key]
    rows = await connection.fetch(
        READ_RECORDS.format(narrowed="and key = $7" if asked else ""),
        owner_id,
        shelf.root_id,
        shelf.namespace,
        place.after,
        place.size,
        PAGE_BYTES_MAX,
        *asked,
    )
    return read_page(rows, place, _record)


ON_SHELF = f"""
select exists (
    select from memory_records where owner_id = $1 and root_id = $2 and namespace = $3 and id = $4 and {LIVE}
)
"""


async def on_shelf(connection: Connection, owner_id: UUID, shelf: Shelf, record_id: UUID) -> bool:
    return bool(await connection.fetchval(ON_SHELF, owner_id, shelf.root_id, shelf.namespace, record_id))


# How many of the words a record has comes before how often and how close together: flag 32 keeps the rank
# below 1, so that it only orders those that have equally many. Values are fetched for what is returned.
SEARCH_RECORDS = rf"""
with query as (
    select tsvector_to_array(to_tsvector('simple', $4)) as words
), asked as (
    select words, (
        select string_agg('''' || replace(replace(word, '\', '\\'), '''', '''''') || '''', ' | ')
        from unnest(words) word
    )::tsquery as any_word
    from query
), found as (
    select id, created_at,
        length(search) - length(ts_delete(search, words)) + ts_rank_cd(search, any_word, 32)::float8 as score
    from memory_records, asked
    where owner_id = $1 and root_id = $2 and namespace = $3 and {LIVE} and search @@ any_word
    order by score desc, created_at desc, id desc
    limit $5
)
select * from (
    select match.*, sum(bytes) over (order by score desc, created_at desc, id desc) - bytes as bytes_before
    from (
        select {RECORD}, score, {BYTES} as bytes
        from found join memory_records using (id, created_at)
        where owner_id = $1
    ) match
) sized
where bytes_before < $6
order by score desc, created_at desc, id desc
"""


async def search_records(
    connection: Connection, owner_id: UUID, shelf: Shelf, query: str, limit: int
) -> list[MemoryMatch]:
    """Records that have any word of the query, those with most of them first, fewer if they are large.

    Raises Unavailable when that takes longer than SEARCH_MS_MAX. It needs a transaction, in which nothing
    else can be done then.
    """
    async with _hurried(connection):
        rows = await connection.fetch(
            SEARCH_RECORDS, owner_id, shelf.root_id, shelf.namespace, query, limit, PAGE_BYTES_MAX
        )
    return [MemoryMatch(**_members(row), score=row["score"]) for row in rows]


STATEMENT_LIMIT = "select set_config('statement_timeout', $1, true)"


@asynccontextmanager
async def _hurried(connection: Connection) -> AsyncIterator[None]:
    await connection.execute(STATEMENT_LIMIT, str(SEARCH_MS_MAX))
    try:
        yield
    except asyncpg.QueryCanceledError as error:
        raise Unavailable(RETRY_AFTER_MS) from error
    await connection.execute(STATEMENT_LIMIT, str(STATEMENT_TIMEOUT_S * 1000))


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Columns and what they must hold; None asks for nothing. One of the first two is given."""

    id: UUID | None = None
    root_id: UUID | None = None
    namespace: str | None = None
    subject_id: str | None = None


DELETE_RECORDS = f"""
with gone as (delete from memory_records where owner_id = $1 and {LIVE} {{narrowed}} returning id)
select count(*) from gone
"""


async def delete_records(connection: Connection, owner_id: UUID, wanted: RecordFilter) -> int:
    """How many records were there and are gone."""
    assert wanted.id or wanted.root_id, "an owner's whole memory is never deleted at once"
    asked = {column: value for column, value in asdict(wanted).items() if value is not None}
    narrowed = " ".join(f"and {column} = ${number}" for number, column in enumerate(asked, start=2))
    deleted = await connection.fetchval(DELETE_RECORDS.format(narrowed=narrowed), owner_id, *asked.values())
    return int(deleted)


def _record(row: asyncpg.Record) -> MemoryRecord:
    return MemoryRecord(**_members(row))


def _members(row: asyncpg.Record) -> dict[str, Any]:
    return {
        "id": to_wire("mem", row["id"]),
        "tree_root_id": to_wire("agt", row["root_id"]),
        "namespace": row["namespace"],
        "key": row["key"],
        "value": orjson.loads(row["value"]),
        "created_by_agent_id": to_wire("agt", row["created_by_id"]),
        "created_at": row["created_at"],
        "embedding": None,
        "subject_id": row["subject_id"],
        "ttl_seconds": row["ttl_seconds"],
    }
