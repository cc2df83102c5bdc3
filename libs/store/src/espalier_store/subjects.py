"""Data subjects: who they are, and the index that finds what is theirs.

A record is a subject's when it is tagged with its id: in the list of an agent, a run, a message or a change
of a prompt, or as the one subject of an artifact or a memory record. Whoever writes a tag locks the subject
against its erasure; so after an erasure has begun no tag of it appears any more. Erasing itself is
`erasure`'s.
"""

from collections.abc import Collection
from typing import Any
from uuid import UUID

import asyncpg

from espalier_protocol.agent import PromptHistoryEntry
from espalier_protocol.memory import MemoryRecord
from espalier_protocol.message import Message
from espalier_protocol.run import Run
from espalier_protocol.shapes import JsonObject
from espalier_protocol.subject import Subject, SubjectCounts
from espalier_store.memory import read_record
from espalier_store.messages import read_message
from espalier_store.paging import PAGE_BYTES_MAX, Page, Place, read_page
from espalier_store.pool import Connection
from espalier_store.prompts import read_history_entry
from espalier_store.runs import read_run

REGISTER = """
insert into subjects (owner_id, id) select $1, id from unnest($2::text[]) id order by id
on conflict do nothing
"""
LOCK_AGAINST_ERASURE = """
select id, erased_at from subjects where owner_id = $1 and id = any ($2::text[]) order by id for key share
"""


async def register_subjects(
    connection: Connection, owner_id: UUID, subject_ids: Collection[str]
) -> list[str]:
    """Make known whoever is not, and hold off their erasures until the transaction ends.

    Those that have been erased, or are being erased, and must not be named.
    """
    if not subject_ids:
        return []
    await connection.execute(REGISTER, owner_id, list(subject_ids))
    rows = await connection.fetch(LOCK_AGAINST_ERASURE, owner_id, list(subject_ids))
    return [row["id"] for row in rows if row["erased_at"] is not None]


TAG_RUN = """
update runs set subject_ids = array(select distinct unnest(subject_ids || $3::text[]) order by 1)
where owner_id = $1 and id = $2 and not subject_ids @> $3::text[]
"""


async def tag_run(connection: Connection, owner_id: UUID, run_id: UUID, subject_ids: Collection[str]) -> None:
    """Say that the run knows of these subjects. The caller has locked the run."""
    await connection.execute(TAG_RUN, owner_id, run_id, list(subject_ids))


TAG_LIVE_RUNS = """
with live as (
    select id from runs
    where owner_id = $1 and agent_id = $2 and state in ('running', 'sleeping')
        and not subject_ids @> $3::text[]
    order by depth, id for no key update
)
update runs set subject_ids = array(select distinct unnest(subject_ids || $3::text[]) order by 1)
where owner_id = $1 and id in (select live.id from live)
"""


async def tag_live_runs(
    connection: Connection, owner_id: UUID, agent_id: UUID, subject_ids: Collection[str]
) -> None:
    """Say that each live run of the agent knows of these subjects. The caller has locked the agent."""
    await connection.execute(TAG_LIVE_RUNS, owner_id, agent_id, list(subject_ids))


SUBJECTS_OF_RUN = "select subject_ids from runs where owner_id = $1 and id = $2"


async def subjects_of_run(connection: Connection, owner_id: UUID, run_id: UUID) -> list[str]:
    """Whom the run knows of, as the transaction sees it."""
    return await connection.fetchval(SUBJECTS_OF_RUN, owner_id, run_id) or []


SUBJECTS_OF_AGENT = """
select array(select distinct unnest(subject_ids || prompt_subject_ids) order by 1)
from agents where owner_id = $1 and id = $2
"""


async def subjects_of_agent(connection: Connection, owner_id: UUID, agent_id: UUID) -> list[str]:
    """Whose agent it is, and whom its prompt knows of."""
    return await connection.fetchval(SUBJECTS_OF_AGENT, owner_id, agent_id) or []


# ------------------------------------------------------------------ the subjects themselves

INSERT_SUBJECT = """
insert into subjects (owner_id, id, metadata, legal_hold) values ($1, $2, $3, $4)
on conflict (owner_id, id) do update set metadata = excluded.metadata, legal_hold = excluded.legal_hold,
    erased_at = null, updated_at = clock_timestamp()
where subjects.erased_at is not null
    and not exists (
        select from erasures e where e.owner_id = $1 and e.subject_id = $2 and e.performed_at is null)
returning *
"""


async def insert_subject(
    connection: Connection, owner_id: UUID, subject_id: str, metadata: JsonObject, *, legal_hold: bool
) -> Subject | None:
    """A new subject, or one that was erased and is known again from now on. None if there is one already."""
    row = await connection.fetchrow(INSERT_SUBJECT, owner_id, subject_id, metadata, legal_hold)
    return _subject(row) if row else None


GET_SUBJECT = "select * from subjects where owner_id = $1 and id = $2"


async def get_subject(connection: Connection, owner_id: UUID, subject_id: str) -> Subject | None:
    row = await connection.fetchrow(GET_SUBJECT, owner_id, subject_id)
    return _subject(row) if row else None


LIST_SUBJECTS = """
select * from (
    select page.*, count(*) over () as reached,
        sum(bytes) over (order by created_at desc, id desc) - bytes as bytes_before
    from (
        select *, octet_length(metadata::text) as bytes from subjects
        where owner_id = $1 and ($2::text is null or (created_at, id) < (
            select b.created_at, b.id from subjects b where b.owner_id = $1 and b.id = $2))
        order by created_at desc, id desc
        limit $3 + 1
    ) page
) sized
where bytes_before < $4
order by created_at desc, id desc
"""


async def list_subjects(
    connection: Connection, owner_id: UUID, after: str | None, size: int
) -> Page[Subject]:
    """Newest first. After a subject that is not there comes nothing."""
    rows = await connection.fetch(LIST_SUBJECTS, owner_id, after, size, PAGE_BYTES_MAX)
    return read_page(rows, Place(None, size), _subject)


CHANGE_SUBJECT = """
update subjects set
    metadata = coalesce($3::jsonb, metadata),
    legal_hold = coalesce($4::boolean, legal_hold),
    updated_at = clock_timestamp()
where owner_id = $1 and id = $2
returning *
"""


async def change_subject(
    connection: Connection,
    owner_id: UUID,
    subject_id: str,
    metadata: JsonObject | None,
    legal_hold: bool | None,
) -> Subject | None:
    """Write what is not None."""
    row = await connection.fetchrow(CHANGE_SUBJECT, owner_id, subject_id, metadata, legal_hold)
    return _subject(row) if row else None


LOCK_SUBJECT = "select * from subjects where owner_id = $1 and id = $2 for update"


async def lock_subject(connection: Connection, owner_id: UUID, subject_id: str) -> Subject | None:
    """Held until the transaction ends, also against everybody who would tag something with it."""
    row = await connection.fetchrow(LOCK_SUBJECT, owner_id, subject_id)
    return _subject(row) if row else None


DELETE_SUBJECT = "delete from subjects where owner_id = $1 and id = $2"


async def delete_subject(connection: Connection, owner_id: UUID, subject_id: str) -> None:
    await connection.execute(DELETE_SUBJECT, owner_id, subject_id)


# ------------------------------------------------------------------ what is theirs

LISTED = "subject_ids @> array[$2::text]"
ALONE = "subject_id = $2::text"
IN_HISTORY = f"""({LISTED} or agent_id in (
    select a.id from agents a where a.owner_id = $1 and a.{LISTED}))"""

COUNT_RECORDS = f"""
select
    (select count(*) from agents where owner_id = $1 and {LISTED}) as agents,
    (select count(*) from runs where owner_id = $1 and {LISTED}) as runs,
    (select count(*) from artifacts where owner_id = $1 and {ALONE}) as artifacts,
    (select count(*) from memory_records where owner_id = $1 and {ALONE}) as memory,
    (select count(*) from messages where owner_id = $1 and {LISTED}) as messages,
    (select count(*) from prompt_history where owner_id = $1 and {IN_HISTORY}) as prompt_history
"""


async def count_records(connection: Connection, owner_id: UUID, subject_id: str) -> SubjectCounts:
    row = await connection.fetchrow(COUNT_RECORDS, owner_id, subject_id)
    assert row is not None
    return SubjectCounts(**row)


TAGGED = """
select * from (
    select page.*, count(*) over () as reached,
        sum(bytes) over (order by created_at desc, id desc) - bytes as bytes_before
    from (
        select *, octet_length({table}::text) as bytes from {table}
        where owner_id = $1 and {tagged} and (created_at, id) < (
            coalesce(
                (select b.created_at from {table} b where b.owner_id = $1 and b.id = $3), 'infinity'),
            coalesce($3::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
        order by created_at desc, id desc
        limit $4 + 1
    ) page
) sized
where bytes_before < $5
order by created_at desc, id desc
"""


async def _tagged(
    connection: Connection, owner_id: UUID, subject_id: str, place: Place, *, table: str, tagged: str
) -> list[asyncpg.Record]:
    """Rows of one of our tables, newest first."""
    statement = TAGGED.format(table=table, tagged=tagged)
    return await connection.fetch(statement, owner_id, subject_id, place.after, place.size, PAGE_BYTES_MAX)


async def runs_of_subject(connection: Connection, owner_id: UUID, subject_id: str, place: Place) -> Page[Run]:
    rows = await _tagged(connection, owner_id, subject_id, place, table="runs", tagged=LISTED)
    return read_page(rows, place, read_run)


async def memory_of_subject(
    connection: Connection, owner_id: UUID, subject_id: str, place: Place
) -> Page[MemoryRecord]:
    """Expired ones that are still there too: they are data."""
    rows = await _tagged(connection, owner_id, subject_id, place, table="memory_records", tagged=ALONE)
    return read_page(rows, place, read_record)


async def messages_of_subject(
    connection: Connection, owner_id: UUID, subject_id: str, place: Place
) -> Page[Message]:
    rows = await _tagged(connection, owner_id, subject_id, place, table="messages", tagged=LISTED)
    return read_page(rows, place, read_message)


async def prompt_history_of_subject(
    connection: Connection, owner_id: UUID, subject_id: str, place: Place
) -> Page[PromptHistoryEntry]:
    """Changes that were made knowing of the subject, and all of agents that are the subject's."""
    rows = await _tagged(connection, owner_id, subject_id, place, table="prompt_history", tagged=IN_HISTORY)
    return read_page(rows, place, read_history_entry)


FIRST_BYTES = """
select sha256, substring(bytes from 1 for $3) as head from blob_chunks
where owner_id = $1 and sha256 = any ($2::text[]) and chunk_no = 0
"""


async def first_bytes(
    connection: Connection, owner_id: UUID, sha256s: Collection[str], count: int
) -> dict[str, bytes]:
    """How each of these contents begins; one that is empty has no entry."""
    rows = await connection.fetch(FIRST_BYTES, owner_id, list(sha256s), count)
    return {row["sha256"]: row["head"] for row in rows}


def _subject(row: asyncpg.Record) -> Subject:
    members: dict[str, Any] = {
        name: row[name] for name in ("id", "metadata", "legal_hold", "created_at", "updated_at", "erased_at")
    }
    return Subject(**members, subject_id=row["id"])
