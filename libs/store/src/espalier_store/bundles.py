"""Rows as a bundle brings them: with the times that they had, at rest, and under a new owner."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from espalier_protocol.agent import AgentCreate
from espalier_protocol.message import SenderKind
from espalier_protocol.run import EndState, RunCreate
from espalier_protocol.shapes import JsonAny
from espalier_store.artifacts import TAKE_TURNS
from espalier_store.pool import Connection

INSERT_AGENT = """
insert into agents (
    id, owner_id, root_id, parent_id, name, immutable_directives, mutable_prompt, mutable_prompt_policy,
    toolset, ceilings, budgets, max_live_runs, subject_ids, metadata, lifecycle_state, created_at
) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)
"""


@dataclass(frozen=True, slots=True)
class NewAgent:
    """`root_id` and `parent_id` need not be there."""

    agent_id: UUID
    root_id: UUID
    parent_id: UUID | None
    wanted: AgentCreate
    lifecycle_state: str
    subject_ids: Sequence[str]
    created_at: datetime


async def insert_agent(connection: Connection, owner_id: UUID, agent: NewAgent) -> None:
    wanted = agent.wanted
    await connection.execute(
        INSERT_AGENT,
        agent.agent_id,
        owner_id,
        agent.root_id,
        agent.parent_id,
        wanted.name,
        wanted.constitution.immutable_directives,
        wanted.constitution.mutable_prompt,
        wanted.constitution.mutable_prompt_policy,
        wanted.toolset,
        wanted.ceilings.model_dump(),
        wanted.budgets.model_dump(),
        wanted.max_live_runs,
        agent.subject_ids,
        wanted.metadata,
        agent.lifecycle_state,
        agent.created_at,
    )


INSERT_ENDED_RUN = """
insert into runs (
    id, owner_id, agent_id, root_id, depth, goal, inputs, subject_ids, state, due_at, wall_at,
    max_cycles, max_subagents, max_tool_calls_per_cycle, max_wall_seconds, cycle_count, result,
    created_at, ended_at, log_pruned_at
) values ($2, $1, $3, $2, 0, $4, $5, $6, $7, $8, $8, 1, 0, 1, 1, $9, $10, $8, $8, clock_timestamp())
"""


async def insert_ended_run(
    connection: Connection,
    owner_id: UUID,
    run_id: UUID,
    agent_id: UUID,
    wanted: RunCreate,
    *,
    state: EndState,
    result: JsonAny,
    cycles: int,
    subject_ids: Sequence[str],
    began_at: datetime,
) -> None:
    """A run that ended elsewhere. Its log stayed there."""
    await connection.execute(
        INSERT_ENDED_RUN,
        owner_id,
        run_id,
        agent_id,
        wanted.goal,
        wanted.inputs,
        subject_ids,
        state,
        began_at,
        cycles,
        result,
    )


BEGIN_BLOB = """
insert into blobs (owner_id, sha256, size_bytes) values ($1, $2, $3) on conflict do nothing returning true
"""


async def begin_blob(connection: Connection, owner_id: UUID, sha256: str, size_bytes: int) -> bool:
    """Whether the owner does not have these bytes yet; then their chunks are to follow."""
    await connection.execute(TAKE_TURNS, owner_id)
    return bool(await connection.fetchval(BEGIN_BLOB, owner_id, sha256, size_bytes))


PUT_CHUNK = "insert into blob_chunks (owner_id, sha256, chunk_no, bytes) values ($1, $2, $3, $4)"


async def put_chunk(connection: Connection, owner_id: UUID, sha256: str, number: int, piece: bytes) -> None:
    await connection.execute(PUT_CHUNK, owner_id, sha256, number, piece)


SIZE_BLOB = "select size_bytes from blobs where owner_id = $1 and sha256 = $2"


async def size_blob(connection: Connection, owner_id: UUID, sha256: str) -> int:
    return int(await connection.fetchval(SIZE_BLOB, owner_id, sha256))


DATE_RECORD = "update memory_records set created_at = $3 where owner_id = $1 and id = $2"


async def date_record(connection: Connection, owner_id: UUID, record_id: UUID, created_at: datetime) -> None:
    """Give a memory record the time that it had."""
    await connection.execute(DATE_RECORD, owner_id, record_id, created_at)


INSERT_READ_MESSAGE = """
insert into messages (
    id, owner_id, root_id, from_agent_id, to_agent_id, sender, body, subject_ids, created_at, delivered_at,
    read_at
) values ($2, $1, $3, $4, $5, $6, $7::json, $8, $9, $9, $9)
"""


@dataclass(frozen=True, slots=True)
class NewMessage:
    """`body` is compact JSON."""

    message_id: UUID
    root_id: UUID
    from_agent_id: UUID
    to_agent_id: UUID
    sender: SenderKind
    body: str
    subject_ids: Sequence[str]
    sent_at: datetime


async def insert_read_message(connection: Connection, owner_id: UUID, message: NewMessage) -> None:
    """It wakes nobody: whoever it was for has read it."""
    await connection.execute(
        INSERT_READ_MESSAGE,
        owner_id,
        message.message_id,
        message.root_id,
        message.from_agent_id,
        message.to_agent_id,
        message.sender,
        message.body,
        message.subject_ids,
        message.sent_at,
    )


INSERT_HISTORY_ENTRY = """
insert into prompt_history (owner_id, id, agent_id, diff, reason, approved_by, subject_ids, created_at)
values ($1, $2, $3, $4, $5, $6, $7, $8)
"""


@dataclass(frozen=True, slots=True)
class NewHistoryEntry:
    entry_id: UUID
    agent_id: UUID
    diff: str
    reason: str
    approved_by: str | None
    subject_ids: Sequence[str]
    applied_at: datetime


async def insert_history_entry(connection: Connection, owner_id: UUID, entry: NewHistoryEntry) -> None:
    await connection.execute(
        INSERT_HISTORY_ENTRY,
        owner_id,
        entry.entry_id,
        entry.agent_id,
        entry.diff,
        entry.reason,
        entry.approved_by,
        entry.subject_ids,
        entry.applied_at,
    )
