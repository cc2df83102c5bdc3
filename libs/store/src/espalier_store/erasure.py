"""Erasing a subject: the statements, a bounded part at a time, and the record of what was done.

Which column becomes what stands in `espalier_domain.erasure`; the assignments here are made of those rules. A
part is one transaction of the caller; what a part has erased is not found by the next one, so an erasure that
was broken off goes on where it stopped. Records with another subject are only stripped of the tag.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import asyncpg
import orjson

from espalier_domain.erasure import MARK, RULES, Becomes, Rule, blanked
from espalier_protocol.ids import IdPrefix, to_wire
from espalier_protocol.subject import ErasureAction, ErasureMode
from espalier_store.artifacts import TAKE_TURNS
from espalier_store.pool import Connection
from espalier_store.subjects import ALONE, LISTED

ROWS_MAX: Final = 500
ARTIFACTS_MAX: Final = 20
LOG_ROWS_MAX: Final = 2000
"""What one part takes on: records of a kind, artifacts with their bytes, and entries of one run's log."""

HASH_OF_NOTHING: Final = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
IN_SQL: Final[dict[Rule, str]] = {
    Becomes.MARK: f"'{MARK}'",
    Becomes.MARKED: """'{"redacted":true}'""",
    Becomes.MARK_AND_ID: f"'{MARK} ' || id::text",
    Becomes.EMPTY_OBJECT: "'{}'",
    Becomes.EMPTY_LIST: "'{}'",
    Becomes.NULL: "null",
    Becomes.OCTETS: "'application/octet-stream'",
    Becomes.HASH_OF_NOTHING: f"'{HASH_OF_NOTHING}'",
}


CHANGED: Final = {
    table: {column: IN_SQL[rule] for column, rule in columns.items() if rule in IN_SQL}
    for table, columns in RULES.items()
}
"""What each column of a redacted row is set to, by table."""

SET: Final = {
    table: ", ".join(f"{column} = {value}" for column, value in columns.items())
    for table, columns in CHANGED.items()
}
DIFFERS: Final = {
    table: " or ".join(f"{column}::text is distinct from {value}" for column, value in columns.items())
    for table, columns in CHANGED.items()
}
"""Whether a row holds anything that redacting would take away."""


@dataclass(frozen=True, slots=True)
class Erased:
    """`record_id` is a wire id."""

    action: ErasureAction
    kind: str
    record_id: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Erasure:
    erasure_id: UUID
    subject_id: str
    mode: ErasureMode


# ------------------------------------------------------------------ beginning and ending

BURY_SUBJECT = """
update subjects set metadata = '{}', erased_at = coalesce(erased_at, clock_timestamp()),
    updated_at = clock_timestamp()
where owner_id = $1 and id = $2
"""


async def bury_subject(connection: Connection, owner_id: UUID, subject_id: str) -> None:
    """From now on nothing is tagged with it. The caller has locked the subject."""
    await connection.execute(BURY_SUBJECT, owner_id, subject_id)


OPEN_ERASURE = """
insert into erasures (id, owner_id, subject_id, mode) values ($1, $2, $3, $4)
on conflict (owner_id, subject_id) where performed_at is null do update set mode = excluded.mode
returning id
"""


async def open_erasure(
    connection: Connection, owner_id: UUID, new_id: UUID, wanted: tuple[str, ErasureMode]
) -> UUID:
    """The erasure of the subject that is under way, in this mode from now on; else a new one."""
    erasure_id = await connection.fetchval(OPEN_ERASURE, new_id, owner_id, *wanted)
    assert isinstance(erasure_id, UUID)
    return erasure_id


CLOSE_ERASURE = """
update erasures set performed_at = clock_timestamp() where owner_id = $1 and id = $2 and performed_at is null
"""


async def close_erasure(connection: Connection, owner_id: UUID, erasure_id: UUID) -> None:
    await connection.execute(CLOSE_ERASURE, owner_id, erasure_id)


NOTE_ERASED = """
insert into erased_records (erasure_id, owner_id, action, kind, record_id, reason)
select $2, $1, * from unnest($3::text[], $4::text[], $5::text[], $6::text[]) on conflict do nothing
"""


async def note_erased(
    connection: Connection, owner_id: UUID, erasure_id: UUID, erased: Sequence[Erased]
) -> None:
    columns = [[getattr(each, name) for each in erased] for name in ("action", "kind", "record_id", "reason")]
    await connection.execute(NOTE_ERASED, owner_id, erasure_id, *columns)


GET_ERASURE = "select * from erasures where owner_id = $1 and id = $2"
LIST_ERASED = """
select action, kind, record_id, reason, count(*) over () as total from erased_records
where owner_id = $1 and erasure_id = $2 order by created_at, kind, record_id limit $3
"""


async def read_erasure(
    connection: Connection, owner_id: UUID, erasure_id: UUID, limit: int
) -> tuple[asyncpg.Record, list[Erased], int]:
    """The erasure's row, what it did as far as `limit`, and how much is left out."""
    row = await connection.fetchrow(GET_ERASURE, owner_id, erasure_id)
    assert row is not None
    rows = await connection.fetch(LIST_ERASED, owner_id, erasure_id, limit)
    erased = [Erased(each["action"], each["kind"], each["record_id"], each["reason"]) for each in rows]
    return row, erased, (rows[0]["total"] if rows else 0) - len(rows)


ERASED_RUNS = """
select record_id from erased_records
where owner_id = $1 and erasure_id = $2 and kind = 'run' and action in ('deleted', 'redacted', 'stripped')
    and record_id > $3 order by record_id limit $4
"""


async def erased_runs(
    connection: Connection, owner_id: UUID, erasure_id: UUID, after: str, limit: int
) -> list[str]:
    """Wire ids of runs whose logs are gone or changed, in order: copies of them are what they were."""
    rows = await connection.fetch(ERASED_RUNS, owner_id, erasure_id, after, limit)
    return [row["record_id"] for row in rows]


# ------------------------------------------------------------------ what lives

LIVE_RUNS = f"""
select id from runs
where owner_id = $1 and state in ('running', 'sleeping')
    and ({LISTED} or agent_id in (select a.id from agents a where a.owner_id = $1 and a.{LISTED}))
order by depth, id limit $3
"""


async def live_runs(connection: Connection, owner_id: UUID, subject_id: str, limit: int) -> list[UUID]:
    """Runs that know of the subject, or belong to its agents, and could still write."""
    return [row["id"] for row in await connection.fetch(LIVE_RUNS, owner_id, subject_id, limit)]


# ------------------------------------------------------------------ one part after the other

SOLE = f"{LISTED} and array_remove(subject_ids, $2::text) = '{{}}'"
SHARED = f"{LISTED} and cardinality(array_remove(subject_ids, $2::text)) > 0"
SOLE_AGENTS = f"""(
    select a.id from agents a
    where a.owner_id = $1 and a.{LISTED} and array_remove(a.subject_ids, $2::text) = '{{}}')"""
SOLE_RUNS = f"""(
    select r.id from runs r
    where r.owner_id = $1 and r.{LISTED} and array_remove(r.subject_ids, $2::text) = '{{}}')"""

PICKED_ARTIFACTS = f"""
picked as (
    select id, sha256 from artifacts
    where owner_id = $1 and ({ALONE} or (
        subject_id is null and run_id in {SOLE_RUNS} and ($4 or {DIFFERS["artifacts"]})))
    order by id limit $3 for update
)
"""
DELETE_ARTIFACTS = f"""
with {PICKED_ARTIFACTS}
delete from artifacts using picked where artifacts.owner_id = $1 and artifacts.id = picked.id
returning picked.id, picked.sha256
"""
REDACT_ARTIFACTS = f"""
with {PICKED_ARTIFACTS}, changed as (
    update artifacts set {SET["artifacts"]}, size_bytes = 0, subject_id = null
    from picked where artifacts.owner_id = $1 and artifacts.id = picked.id
)
select id, sha256 from picked
"""
UNUSED_CHUNKS = """
delete from blob_chunks c where c.owner_id = $1 and c.sha256 = any ($2::text[])
    and not exists (select from artifacts a where a.owner_id = $1 and a.sha256 = c.sha256)
"""
UNUSED_BLOBS = """
delete from blobs b where b.owner_id = $1 and b.sha256 = any ($2::text[])
    and not exists (select from artifacts a where a.owner_id = $1 and a.sha256 = b.sha256)
"""


async def erase_artifacts(
    connection: Connection, owner_id: UUID, subject_id: str, mode: ErasureMode
) -> list[Erased]:
    """The subject's artifacts and untagged ones of its own runs; bytes that no other artifact has go too."""
    await connection.execute(TAKE_TURNS, owner_id)
    hard = mode == "hard_delete"
    statement = DELETE_ARTIFACTS if hard else REDACT_ARTIFACTS
    rows = await connection.fetch(statement, owner_id, subject_id, ARTIFACTS_MAX, hard)
    contents = list({row["sha256"] for row in rows})
    await connection.execute(UNUSED_CHUNKS, owner_id, contents)
    await connection.execute(UNUSED_BLOBS, owner_id, contents)
    return _erased(mode, "artifact", "art", rows)


PICKED_MEMORY = f"""
picked as (select id from memory_records where owner_id = $1 and {ALONE} order by id limit $3 for update)
"""
DELETE_MEMORY = f"""
with {PICKED_MEMORY}
delete from memory_records m using picked where m.owner_id = $1 and m.id = picked.id returning m.id
"""
REDACT_MEMORY = f"""
with {PICKED_MEMORY}
update memory_records set {SET["memory_records"]}, subject_id = null, embedding_signs = null
where owner_id = $1 and id in (select picked.id from picked) returning id
"""


async def erase_memory(
    connection: Connection, owner_id: UUID, subject_id: str, mode: ErasureMode
) -> list[Erased]:
    statement = DELETE_MEMORY if mode == "hard_delete" else REDACT_MEMORY
    rows = await connection.fetch(statement, owner_id, subject_id, ROWS_MAX)
    return _erased(mode, "memory", "mem", rows)


PICKED_MESSAGES = f"""
picked as (
    select id from messages where owner_id = $1 and {SOLE} and (not $4 or read_at is not null)
    order by id limit $3 for update
)
"""
DELETE_MESSAGES = f"""
with {PICKED_MESSAGES}
delete from messages m using picked where m.owner_id = $1 and m.id = picked.id returning m.id
"""
REDACT_MESSAGES = f"""
with {PICKED_MESSAGES}
update messages set {SET["messages"]}, subject_ids = '{{}}'
where owner_id = $1 and id in (select picked.id from picked) returning id
"""


async def erase_messages(
    connection: Connection, owner_id: UUID, subject_id: str, mode: ErasureMode
) -> list[Erased]:
    """An unread one stays without its body in both modes: somebody may sleep until it comes."""
    hard = mode == "hard_delete"
    gone = await connection.fetch(DELETE_MESSAGES, owner_id, subject_id, ROWS_MAX, True) if hard else []
    rows = await connection.fetch(REDACT_MESSAGES, owner_id, subject_id, ROWS_MAX, False)
    reason = "unread" if hard else None
    redacted = [Erased("redacted", "message", to_wire("msg", row["id"]), reason) for row in rows]
    return [*_erased(mode, "message", "msg", gone), *redacted]


OF_SOLE_AGENTS = f"""
array_remove(subject_ids, $2::text) = '{{}}' and ({LISTED} or agent_id in {SOLE_AGENTS})
"""
PICKED_HISTORY = f"""
picked as (
    select id from prompt_history where owner_id = $1 and {OF_SOLE_AGENTS}
        and ({LISTED} or ({DIFFERS["prompt_history"]}))
    order by id limit $3 for update
)
"""
DELETE_HISTORY = f"""
with {PICKED_HISTORY}
delete from prompt_history h using picked where h.owner_id = $1 and h.id = picked.id returning h.id
"""
REDACT_HISTORY = f"""
with {PICKED_HISTORY}
update prompt_history set {SET["prompt_history"]}, subject_ids = '{{}}'
where owner_id = $1 and id in (select picked.id from picked) returning id
"""


async def erase_history(
    connection: Connection, owner_id: UUID, subject_id: str, mode: ErasureMode
) -> list[Erased]:
    """Changes of prompts that were made knowing of the subject, and all of the subject's own agents."""
    statement = DELETE_HISTORY if mode == "hard_delete" else REDACT_HISTORY
    rows = await connection.fetch(statement, owner_id, subject_id, ROWS_MAX)
    return _erased(mode, "prompt_history", "phe", rows)


PICKED_CHANGES = f"""
picked as (
    select id from prompt_changes where owner_id = $1 and {OF_SOLE_AGENTS}
        and ({LISTED} or ({DIFFERS["prompt_changes"]}))
    order by id limit $3 for update
)
"""
DELETE_CHANGES = f"""
with {PICKED_CHANGES}, asked as (
    delete from approvals p using picked where p.owner_id = $1 and p.change_id = picked.id
)
delete from prompt_changes c using picked where c.owner_id = $1 and c.id = picked.id returning c.id
"""
REDACT_CHANGES = f"""
with {PICKED_CHANGES}, asked as (
    delete from approvals p using picked where p.owner_id = $1 and p.change_id = picked.id
)
update prompt_changes set {SET["prompt_changes"]}, subject_ids = '{{}}',
    state = case when state = 'pending' then 'rejected' else state end,
    resolved_at = coalesce(resolved_at, clock_timestamp())
where owner_id = $1 and id in (select picked.id from picked) returning id
"""


async def erase_changes(
    connection: Connection, owner_id: UUID, subject_id: str, mode: ErasureMode
) -> list[Erased]:
    """Changes of prompts that waited for a person; none of them can be approved any more."""
    statement = DELETE_CHANGES if mode == "hard_delete" else REDACT_CHANGES
    rows = await connection.fetch(statement, owner_id, subject_id, ROWS_MAX)
    return _erased(mode, "prompt_change", "pch", rows)


REDACT_AGENTS = f"""
with picked as (
    select id from agents where owner_id = $1 and {SOLE} order by id limit $3 for no key update
), servers as (
    delete from agent_servers s using picked where s.owner_id = $1 and s.agent_id = picked.id
), commented as (
    update approvals p set comment = null from picked where p.owner_id = $1 and p.agent_id = picked.id
)
update agents set {SET["agents"]}, subject_ids = '{{}}', prompt_subject_ids = '{{}}',
    runner_provider_id = null,
    lifecycle_state = 'archived',
    updated_at = clock_timestamp()
where owner_id = $1 and id in (select picked.id from picked) returning id
"""
"""An agent without its directives is an agent without its limits: it takes no run any more."""


async def erase_agents(
    connection: Connection, owner_id: UUID, subject_id: str, mode: ErasureMode
) -> list[Erased]:
    """In both modes an agent stays as a husk, because children and records of others may hang on it."""
    rows = await connection.fetch(REDACT_AGENTS, owner_id, subject_id, ROWS_MAX)
    reason = "agents_stay" if mode == "hard_delete" else None
    return [Erased("redacted", "agent", to_wire("agt", row["id"]), reason) for row in rows]


REDACT_PROMPTS = f"""
update agents set mutable_prompt = {IN_SQL[Becomes.MARK]},
    prompt_subject_ids = '{{}}', prompt_no = prompt_no + 1, updated_at = clock_timestamp()
where owner_id = $1 and id in (
    select id from agents
    where owner_id = $1 and prompt_subject_ids @> array[$2::text]
        and array_remove(prompt_subject_ids, $2::text) = '{{}}'
    order by id limit $3 for no key update)
returning id
"""
STRIP_PROMPTS = """
update agents set prompt_subject_ids = array_remove(prompt_subject_ids, $2::text)
where owner_id = $1 and id in (
    select id from agents
    where owner_id = $1 and prompt_subject_ids @> array[$2::text] order by id limit $3 for no key update)
returning id
"""


async def erase_prompts(
    connection: Connection, owner_id: UUID, subject_id: str, _: ErasureMode
) -> list[Erased]:
    """Prompts that a run which knew of the subject wrote for an agent that is not the subject's."""
    rows = await connection.fetch(REDACT_PROMPTS, owner_id, subject_id, ROWS_MAX)
    shared = await connection.fetch(STRIP_PROMPTS, owner_id, subject_id, ROWS_MAX)
    return [
        *(Erased("redacted", "agent", to_wire("agt", row["id"]), "prompt_only") for row in rows),
        *(Erased("stripped", "agent", to_wire("agt", row["id"]), "prompt_only") for row in shared),
    ]


STRIP_RECORDS = f"""
update {{table}} set subject_ids = array_remove(subject_ids, $2::text)
where owner_id = $1 and id in (
    select id from {{table}} where owner_id = $1 and {SHARED} order by id limit $3 for no key update)
returning id
"""


async def strip_records(
    connection: Connection, owner_id: UUID, subject_id: str, _: ErasureMode
) -> list[Erased]:
    """Take the tag off what others are tagged in too."""
    stripped: list[Erased] = []
    for table, kind, prefix in SHARING:
        rows = await connection.fetch(STRIP_RECORDS.format(table=table), owner_id, subject_id, ROWS_MAX)
        stripped += [Erased("stripped", kind, to_wire(prefix, row["id"])) for row in rows]
    return stripped


SHARING: Final[tuple[tuple[str, str, IdPrefix], ...]] = (
    ("agents", "agent", "agt"),
    ("messages", "message", "msg"),
    ("prompt_history", "prompt_history", "phe"),
    ("prompt_changes", "prompt_change", "pch"),
)

STRIP_RUNS = f"""
update runs set subject_ids = array_remove(subject_ids, $2::text)
where owner_id = $1 and id in (
    select id from runs where owner_id = $1 and {SHARED} order by depth, id limit $3 for no key update)
returning id
"""
STRIP_EVENTS = """
update events set payload = replace(payload, $3, '"subject_id":null')
where owner_id = $1 and run_id = any ($2::uuid[]) and type = 'memory.written' and position($3 in payload) > 0
"""
STRIP_ENTRIES = """
update journal set body = replace(body::text, $3, '"subject_id":null')::json
where owner_id = $1 and run_id = any ($2::uuid[]) and body ->> 'kind' = 'memory_written'
    and position($3 in body::text) > 0
"""


async def strip_runs(connection: Connection, owner_id: UUID, subject_id: str, _: ErasureMode) -> list[Erased]:
    """Take the tag off runs of others too, and out of what their logs say of records that they wrote."""
    rows = await connection.fetch(STRIP_RUNS, owner_id, subject_id, ARTIFACTS_MAX)
    run_ids = [row["id"] for row in rows]
    named = f'"subject_id":{orjson.dumps(subject_id).decode()}'
    await connection.execute(STRIP_EVENTS, owner_id, run_ids, named)
    await connection.execute(STRIP_ENTRIES, owner_id, run_ids, named)
    return [Erased("stripped", "run", to_wire("run", run_id)) for run_id in run_ids]


# ------------------------------------------------------------------ runs and their logs

PICK_RUN = f"""
select id from runs
where owner_id = $1 and {SOLE} and ended_at is not null and ($3 or erased_at is null)
order by id limit 1 for no key update
"""


async def pick_run(connection: Connection, owner_id: UUID, subject_id: str, mode: ErasureMode) -> UUID | None:
    """A run of the subject alone that is still to be erased, locked."""
    run_id = await connection.fetchval(PICK_RUN, owner_id, subject_id, mode == "hard_delete")
    assert run_id is None or isinstance(run_id, UUID)
    return run_id


# By ranges: a list of a thousand numbers takes seconds where Postgres believes that logs are short.
DELETE_ENTRIES = """
delete from journal where owner_id = $1 and run_id = $2 and entry_no <= (
    select max(entry_no) from (
        select entry_no from journal where owner_id = $1 and run_id = $2 order by entry_no limit $3) first)
"""
DELETE_SNAPSHOT = "delete from snapshots where owner_id = $1 and run_id = $2"
DELETE_CALLS = """
delete from tool_calls where owner_id = $1 and run_id = $2 and call_id <= (
    select max(call_id) from (
        select call_id from tool_calls where owner_id = $1 and run_id = $2 order by call_id limit $3) first)
"""
REDACT_CALLS = f"""
update tool_calls set {SET["tool_calls"]},
    state = case state when 'sent' then 'in_doubt' when 'planned' then 'skipped' else state end,
    settled_at = coalesce(settled_at, clock_timestamp())
where owner_id = $1 and run_id = $2 and call_id in (
    select call_id from tool_calls
    where owner_id = $1 and run_id = $2 and (state in ('sent', 'planned') or ({DIFFERS["tool_calls"]}))
    order by call_id limit $3)
"""
"""A call that was sent is settled here: whatever its broker still hears of it finds no row to write to."""

DELETE_QUESTIONS = "delete from approvals where owner_id = $1 and run_id = $2"
FORGET_COMMENTS = (
    "update approvals set comment = null where owner_id = $1 and run_id = $2 and comment is not null"
)


async def erase_lines(connection: Connection, owner_id: UUID, run_id: UUID, mode: ErasureMode) -> bool:
    """A part of what an ended run has lived. Whether that was all of it."""
    await connection.execute(DELETE_SNAPSHOT, owner_id, run_id)
    await connection.execute(DELETE_QUESTIONS if mode == "hard_delete" else FORGET_COMMENTS, owner_id, run_id)
    calls = DELETE_CALLS if mode == "hard_delete" else REDACT_CALLS
    parts = [
        _count(await connection.execute(statement, owner_id, run_id, LOG_ROWS_MAX))
        for statement in (DELETE_ENTRIES, calls)
    ]
    parts.append(await _erase_events(connection, owner_id, run_id, mode))
    return max(parts) < LOG_ROWS_MAX


WAKES_FOR_SPAWNERS = """
select o.id from outbox o join runs r on r.owner_id = o.owner_id and r.id = o.child_run_id
where o.owner_id = $1 and o.kind = 'wake' and $2 = any (r.subject_ids) order by o.id
"""


async def wakes_for_spawners(connection: Connection, owner_id: UUID, subject_id: str) -> list[int]:
    """Rows of the outbox that promise to tell a spawner of the end of a run that knows the subject."""
    return [row["id"] for row in await connection.fetch(WAKES_FOR_SPAWNERS, owner_id, subject_id)]


DELETE_PROMISES = "delete from outbox where owner_id = $1 and run_id = $2 and kind = 'publish'"
DELETE_RUN = "delete from runs where owner_id = $1 and id = $2"
REDACT_RUN = f"update runs set {SET['runs']}, erased_at = clock_timestamp() where owner_id = $1 and id = $2"


async def erase_run(connection: Connection, owner_id: UUID, run_id: UUID, mode: ErasureMode) -> Erased:
    """The row itself, when nothing of its log is left."""
    if mode == "hard_delete":
        await connection.execute(DELETE_PROMISES, owner_id, run_id)
    await connection.execute(DELETE_RUN if mode == "hard_delete" else REDACT_RUN, owner_id, run_id)
    return Erased("deleted" if mode == "hard_delete" else "redacted", "run", to_wire("run", run_id))


BLANK_BEGINS: Final = '{"redacted":true'
DELETE_EVENTS = """
delete from events where owner_id = $1 and run_id = $2 and seq <= (
    select max(seq) from (
        select seq from events where owner_id = $1 and run_id = $2 order by seq limit $3) first)
"""
LIST_UNBLANKED = """
select seq, payload from events
where owner_id = $1 and run_id = $2 and not starts_with(payload, $4) order by seq limit $3
"""
BLANK_EVENTS = """
update events set payload = blank.payload
from unnest($3::bigint[], $4::text[]) as blank (seq, payload)
where events.owner_id = $1 and events.run_id = $2 and events.seq = blank.seq
"""


async def _erase_events(connection: Connection, owner_id: UUID, run_id: UUID, mode: ErasureMode) -> int:
    """Delete them, or blank their words in place: number, type and time stay. How many it were."""
    if mode == "hard_delete":
        return _count(await connection.execute(DELETE_EVENTS, owner_id, run_id, LOG_ROWS_MAX))
    rows = await connection.fetch(LIST_UNBLANKED, owner_id, run_id, LOG_ROWS_MAX, BLANK_BEGINS)
    payloads = [orjson.dumps(blanked(orjson.loads(row["payload"]))).decode() for row in rows]
    await connection.execute(BLANK_EVENTS, owner_id, run_id, [row["seq"] for row in rows], payloads)
    return len(rows)


FORGET_ANSWERS = "delete from idempotency where owner_id = $1 and left(answer, 38) = any ($2::text[])"


async def forget_answers(connection: Connection, owner_id: UUID, created: Collection[str]) -> None:
    """Kept answers to the creates of these wire ids, and with them the keys that named the creates."""
    begins = [f'{{"id":"{record_id}"' for record_id in created]
    await connection.execute(FORGET_ANSWERS, owner_id, begins)


def _erased(mode: ErasureMode, kind: str, prefix: IdPrefix, rows: Sequence[asyncpg.Record]) -> list[Erased]:
    action: ErasureAction = "deleted" if mode == "hard_delete" else "redacted"
    return [Erased(action, kind, to_wire(prefix, row["id"])) for row in rows]


def _count(done: str) -> int:
    """How many rows a statement touched: the last word of what Postgres says of it."""
    return int(done.rsplit(maxsplit=1)[-1])
