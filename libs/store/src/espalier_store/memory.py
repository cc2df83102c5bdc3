"""Memory records: what a tree of agents remembers by namespace and key, and finding it again.

A record that has expired is not there: no statement here returns, counts or keeps it, and a write over it
makes a new one. The database's clock decides. `fleet` deletes the rows later.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final
from uuid import UUID

import asyncpg
import orjson

from espalier_domain.errors import InvalidInput, Unavailable
from espalier_domain.words import PART_CHARS_MIN, Term
from espalier_protocol.ids import to_wire
from espalier_protocol.memory import MemoryMatch, MemoryRecord
from espalier_store.paging import PAGE_BYTES_MAX, Page, Place, read_page
from espalier_store.pool import RETRY_AFTER_MS, STATEMENT_TIMEOUT_S, Connection

SEARCH_MS_MAX: Final = 1_000
"""A full tree of notes takes some 80 ms, and five times that on a machine that is loaded."""

LIVE = "(expires_at is null or expires_at > statement_timestamp())"
RECORD = "id, root_id, namespace, key, value, created_by_id, created_at, subject_id, ttl_seconds"
BYTES = "octet_length(namespace) + octet_length(key) + octet_length(value::text)"


IS_ROOT = "select exists (select from agents where owner_id = $1 and id = $2 and root_id = $2)"


async def is_root(connection: Connection, owner_id: UUID, agent_id: UUID) -> bool:
    """Whether a tree of the owner begins with this agent."""
    return bool(await connection.fetchval(IS_ROOT, owner_id, agent_id))


@dataclass(frozen=True, slots=True)
class Meaning:
    """A vector of length 1, and the name of the model that made it: only vectors of one model compare."""

    model: str
    vector: Sequence[float]

    @property
    def signs(self) -> int:
        """Those of the first 64 numbers, as the bits of a bigint."""
        bits = sum((number > 0) << place for place, number in enumerate(self.vector[:64]))
        return bits - (1 << 64) if bits >> 63 else bits


@dataclass(frozen=True, slots=True)
class NewRecord:
    """`record_id` is for a key that is not there yet. `value_json` is text that Postgres can store.

    `words` are the normalised words by which it is found, `meaning` that of its text, if somebody took it.
    """

    record_id: UUID
    root_id: UUID
    namespace: str
    key: str
    value_json: str
    created_by_id: UUID
    subject_id: str | None
    ttl_seconds: int | None
    words: str
    meaning: Meaning | None = None


TAKE_TURNS = "select pg_advisory_xact_lock(hashtextextended('memory ' || $1::uuid::text, 0))"


async def take_turns(connection: Connection, root_id: UUID) -> None:
    """Until the transaction ends nobody else writes the tree's memory, or deletes from it by tree.

    So the count of its records holds, and two steps with the same keys in opposite orders do not wait for
    each other.
    """
    await connection.execute(TAKE_TURNS, root_id)


WRITE_RECORD = f"""
insert into memory_records as known
    (id, owner_id, root_id, namespace, key, value, created_by_id, subject_id, ttl_seconds, expires_at,
    words, embedding, embedding_model, embedding_signs)
select $1, $2, $3, $4, $5, $6::json, $7, $8, $9::bigint,
    statement_timestamp() + make_interval(secs => $9::bigint), $11, $12, $13, $14
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
    words = excluded.words,
    embedding = excluded.embedding,
    embedding_model = excluded.embedding_model,
    embedding_signs = excluded.embedding_signs,
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
            record.words,
            record.meaning and record.meaning.vector,
            record.meaning and record.meaning.model,
            record.meaning and record.meaning.signs,
        )
    except asyncpg.ProgramLimitExceededError as error:
        raise InvalidInput("value", "has more different words than can be searched") from error
    return read_record(row) if row else None


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
    return read_page(rows, place, read_record)


ON_SHELF = f"""
select exists (
    select from memory_records where owner_id = $1 and root_id = $2 and namespace = $3 and id = $4 and {LIVE}
)
"""


async def on_shelf(connection: Connection, owner_id: UUID, shelf: Shelf, record_id: UUID) -> bool:
    return bool(await connection.fetchval(ON_SHELF, owner_id, shelf.root_id, shelf.namespace, record_id))


WHOLE, BEGINNING, PART, STEM = 1.0, 0.8, 0.6, 0.4
"""How much of a term a record has: the word itself, a word that begins with it or contains it, or one that
begins like it."""

COMMON = 0.2
"""What a term weighs that every record has; a rarer one weighs the logarithm of its rareness more."""

MISSPELT, MISSPELT_MIN = 0.5, 0.45
"""What the likest word of a record counts, times its likeness, and how like it has to be (trigrams)."""

MISSPELT_LETTERS_MIN = 4
MISSPELT_CHARS_MAX = 400_000
"""Of a namespace's words, times terms that are not in it; trigrams of more would take too long."""

NEARNESS = 0.05
"""The part of a score that full text gives: how close together the words stand that are there."""

MEANING_MIN = 0.3
"""How near a record's meaning has to be to be found by nothing else."""

CANDIDATES = 200
"""How many of the best by words, and of the nearest by signs, are compared in full."""

HAS = f"""
case when strpos(words, ($9::text[])[{{n}}]) = 0 then 0.0
    when strpos(words, ($6::text[])[{{n}}]) > 0 then {WHOLE}
    when strpos(words, ($7::text[])[{{n}}]) > 0 then {BEGINNING}
    when strpos(words, ($8::text[])[{{n}}]) > 0 then {PART}
    when strpos(words, ' ' || ($9::text[])[{{n}}]) > 0 then {STEM}
    else 0.0 end::float8
"""
# Trigrams are taken only of terms that no record of the namespace has, of words that they can see: where the
# database's locale knows ASCII only, and in scripts without accents, a misspelt word is not found.
LIKE = f"""
case when known.n{{n}} and known.misspelt then coalesce((
        select {MISSPELT} * likeness from (
            select strict_word_similarity(($10::text[])[{{n}}], words) as likeness
            from memory_records where owner_id = $1 and id = hits.id
        ) likest where likeness >= {MISSPELT_MIN}), 0.0)
    else h{{n}} end
"""
# How many of the signs differ tells cheaply whose vectors are worth multiplying.
APART = "case when embedding_model = $12 then bit_count((embedding_signs # $14)::bit(64)) end"
MEANING = """
case when embedding_model = $12
    then (select sum(a * b) from unnest(embedding, $13::real[]) as pair (a, b))::float8 end
"""


@dataclass(frozen=True, slots=True)
class Query:
    """What is looked for: normalised words, the terms of them (at least one), their meaning if it counts."""

    words: str
    terms: Sequence[Term]
    meaning: Meaning | None = None


# Words are joined to nothing so that a long text is unpacked once, and not for each term. What is
# materialized would else be computed again wherever it is named.
SEARCH_RECORDS = f"""
with record as (
    select id, created_at, words || '' as words, embedding_model, embedding_signs
    from memory_records
    where owner_id = $1 and root_id = $2 and namespace = $3 and {LIVE}
    offset 0
), hits as materialized (
    select id, created_at, length(words) as size, {{apart}} as apart, {{has}}
    from record
), counted as materialized (
    select count(*) as records, coalesce(sum(size), 0) as chars, {{counts}} from hits
), known as materialized (
    select ({{missing}}) * chars <= {MISSPELT_CHARS_MAX} as misspelt, {{weights}} from counted
), weighed as materialized (
    select hits.id, hits.created_at, hits.apart, ({{sum}}) / ({{whole}}) as share
    from hits, known
), found as materialized (
    (select id, share from weighed where share > 0
        order by share desc, created_at desc, id desc limit {CANDIDATES})
    union
    (select id, share from weighed where apart is not null
        order by apart, created_at desc, id desc limit {CANDIDATES})
), asked as (
    select string_agg(quote_literal(word), ' & ')::tsquery as words
    from unnest(tsvector_to_array(to_tsvector('simple', $11))) word
), compared as materialized (
    select id, share, {{meaning}} as meaning, ts_rank(search, asked.words, 32)::float8 as nearness
    from asked, found join memory_records using (id)
    where owner_id = $1
)
select * from (
    select match.*, sum(bytes) over (order by score desc, created_at desc, id desc) - bytes as bytes_before
    from (
        select {RECORD}, {BYTES} as bytes, {NEARNESS} * coalesce(nearness, 0) + {1 - NEARNESS}
            * case when meaning is null then share else (share + greatest(meaning, 0)) / 2 end as score
        from compared join memory_records using (id)
        where owner_id = $1 and (share > 0 or meaning >= {MEANING_MIN})
        order by score desc, created_at desc, id desc
        limit $4
    ) match
) sized
where bytes_before < $5
order by score desc, created_at desc, id desc
"""


def _search(terms: int, *, by_meaning: bool) -> str:
    """The statement for so many terms: a column for each costs less than a row for each."""
    numbers = range(1, terms + 1)

    def each(text: str, between: str = ", ") -> str:
        return between.join(text.format(n=n) for n in numbers)

    rareness = f"{COMMON} + ln((records + 1)::float8 / (d{{n}} + 1))"
    return SEARCH_RECORDS.format(
        apart=APART if by_meaning else "null::int",
        meaning=MEANING if by_meaning else "null::float8",
        has=each(f"{HAS} as h{{n}}"),
        counts=each("count(*) filter (where h{n} > 0) as d{n}"),
        missing=each("(d{n} = 0)::int", " + "),
        weights=each(f"{rareness} as w{{n}}, d{{n}} = 0 as n{{n}}"),
        sum=each(f"w{{n}} * ({LIKE})", " + "),
        whole=each("w{n}", " + "),
    )


async def search_records(
    connection: Connection, owner_id: UUID, shelf: Shelf, query: Query, limit: int
) -> list[MemoryMatch]:
    """Records that have any term of the query, or mean the like, best first, fewer if they are large.

    A score is 0 to 1: the share of the query that the record has, each term weighing more the fewer records
    of the namespace have it; with a meaning, the mean of that and of how near the meanings are.
    Raises Unavailable when that takes longer than SEARCH_MS_MAX. It needs a transaction, in which nothing
    else can be done then.
    """
    values: list[Any] = [owner_id, shelf.root_id, shelf.namespace, limit, PAGE_BYTES_MAX]
    values += [*_patterns(query.terms), query.words]
    if query.meaning is not None:
        values += [query.meaning.model, query.meaning.vector, query.meaning.signs]
    async with _hurried(connection):
        rows = await connection.fetch(
            _search(len(query.terms), by_meaning=query.meaning is not None), *values
        )
    return [MemoryMatch(**_members(row), score=row["score"]) for row in rows]


def _patterns(terms: Sequence[Term]) -> list[list[str | None]]:
    """By what the terms are found, each in its place: the word itself, a beginning, a part, what all of these
    have, and what may be spelt wrongly."""
    return [list(patterns) for patterns in zip(*map(_pattern, terms), strict=True)]


def _pattern(term: Term) -> tuple[str | None, ...]:
    """A short word is found only whole (one letter) or as a beginning (two): any text has such parts."""
    text, size = term.text, len(term.text)
    if not term.spaced:
        return text, None, None, text, None
    if size < PART_CHARS_MIN:
        return f" {text} ", f" {text}" if size > 1 else None, None, f" {text}", None
    return f" {text} ", f" {text}", text, term.stem, text if size >= MISSPELT_LETTERS_MIN else None


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


def read_record(row: asyncpg.Record) -> MemoryRecord:
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
