"""Prompts: the one that stands, what it has been, and changes that wait for a person.

The agent's row holds the prompt and counts its changes (`prompt_no`); whoever writes here has locked it. What
a change may be is decided above.
"""

from dataclasses import dataclass
from typing import Final, Literal
from uuid import UUID

import asyncpg

from espalier_protocol.agent import PendingPromptChange, PromptHistoryEntry, PromptPolicy
from espalier_protocol.ids import to_wire
from espalier_store.paging import PAGE_BYTES_MAX, Page, Place, read_page
from espalier_store.pool import Connection

LOCK_PROMPT = """
select immutable_directives, mutable_prompt, mutable_prompt_policy, prompt_no
from agents where owner_id = $1 and id = $2 for no key update
"""


@dataclass(frozen=True, slots=True)
class LockedPrompt:
    """An agent's constitution, held still until the transaction ends. `number` counts the changes."""

    immutable_directives: str
    text: str
    policy: PromptPolicy
    number: int


async def lock_prompt(connection: Connection, owner_id: UUID, agent_id: UUID) -> LockedPrompt | None:
    """It is locked before any run of the agent is."""
    row = await connection.fetchrow(LOCK_PROMPT, owner_id, agent_id)
    return LockedPrompt(*row) if row else None


HAD_RUN = "select exists (select from runs where owner_id = $1 and agent_id = $2)"


async def had_run(connection: Connection, owner_id: UUID, agent_id: UUID) -> bool:
    """Whether the locked agent has a run, or had one. A statement of its own, to see one just created."""
    return bool(await connection.fetchval(HAD_RUN, owner_id, agent_id))


SET_CONSTITUTION = """
update agents set
    immutable_directives = coalesce($3, immutable_directives),
    mutable_prompt_policy = coalesce($4, mutable_prompt_policy),
    updated_at = clock_timestamp()
where owner_id = $1 and id = $2
"""


async def set_constitution(
    connection: Connection,
    owner_id: UUID,
    agent_id: UUID,
    directives: str | None,
    policy: PromptPolicy | None,
) -> None:
    """What is None stays."""
    await connection.execute(SET_CONSTITUTION, owner_id, agent_id, directives, policy)


SUBJECTS: Final = """
array(
    select distinct subject from unnest(
        {agent}.subject_ids
        || coalesce((select r.subject_ids from runs r where r.owner_id = $1 and r.id = {run}), '{{}}')
    ) subject order by subject
)
"""
"""Whom a prompt is about: the agent's subjects, and those of the run that wrote it."""

KNOWN: Final = """
array(
    select distinct subject from unnest(
        prompt_subject_ids
        || coalesce((select r.subject_ids from runs r where r.owner_id = $1 and r.id = $8), '{}')
    ) subject order by subject
)
"""
SET_PROMPT = f"""
with before as (
    select id, owner_id, subject_ids || prompt_subject_ids as subject_ids from agents
    where owner_id = $1 and id = $2
), changed as (
    update agents set
        mutable_prompt = $3,
        prompt_subject_ids = case when $8::uuid is null then '{{}}' else {KNOWN} end,
        prompt_no = prompt_no + 1,
        updated_at = clock_timestamp()
    where owner_id = $1 and id = $2
)
insert into prompt_history (id, owner_id, agent_id, diff, reason, approved_by, subject_ids)
select $4, owner_id, id, $5, $6, $7, {SUBJECTS.format(agent="before", run="$8")} from before
"""
"""The diff holds lines of the prompt that was. A prompt that the embedder wrote knows of nobody else."""


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """`run_id` is the run that wrote it, None where no agent did; `approved_by` None where nobody had to."""

    entry_id: UUID
    text: str
    diff: str
    reason: str
    approved_by: str | None
    run_id: UUID | None


async def set_prompt(connection: Connection, owner_id: UUID, agent_id: UUID, new: NewPrompt) -> None:
    """Replace the locked agent's prompt, and note it in its history."""
    await connection.execute(
        SET_PROMPT,
        owner_id,
        agent_id,
        new.text,
        new.entry_id,
        new.diff,
        new.reason,
        new.approved_by,
        new.run_id,
    )


LIST_HISTORY = """
select * from (
    select page.*, count(*) over () as reached,
        sum(bytes) over (order by created_at, id) - bytes as bytes_before
    from (
        select *, octet_length(diff) + octet_length(reason) as bytes from prompt_history
        where owner_id = $1 and agent_id = $4
            and ($2::uuid is null or (created_at, id) > (
                select b.created_at, b.id from prompt_history b where b.owner_id = $1 and b.id = $2))
        order by created_at, id
        limit $3 + 1
    ) page
) sized
where bytes_before < $5
order by created_at, id
"""


async def list_history(
    connection: Connection, owner_id: UUID, agent_id: UUID, place: Place
) -> Page[PromptHistoryEntry]:
    """Oldest first."""
    rows = await connection.fetch(LIST_HISTORY, owner_id, place.after, place.size, agent_id, PAGE_BYTES_MAX)
    return read_page(rows, place, read_history_entry)


IN_HISTORY = """
select exists (select from prompt_history where owner_id = $1 and agent_id = $2 and id = $3)
"""


async def in_history(connection: Connection, owner_id: UUID, agent_id: UUID, entry_id: UUID) -> bool:
    return bool(await connection.fetchval(IN_HISTORY, owner_id, agent_id, entry_id))


INSERT_CHANGE = f"""
with asked as (
    insert into prompt_changes (id, owner_id, agent_id, run_id, base_no, proposal, diff, reason, subject_ids)
    select $3, a.owner_id, a.id, $4, a.prompt_no, $5, $6, $7, {SUBJECTS.format(agent="a", run="$4")}
    from agents a
    where a.owner_id = $1 and a.id = $2 and $9 > (
        select count(*) from prompt_changes c
        where c.owner_id = $1 and c.agent_id = $2 and c.state = 'pending')
    returning id, owner_id, agent_id, run_id
)
insert into approvals (id, owner_id, agent_id, run_id, kind, change_id)
select $8, owner_id, agent_id, run_id, 'prompt_change', id from asked
returning true
"""


@dataclass(frozen=True, slots=True)
class NewChange:
    """A proposal of a run of the agent, and the id of the approval that asks for a person's word."""

    change_id: UUID
    approval_id: UUID
    run_id: UUID
    proposal: str
    diff: str
    reason: str


async def insert_change(
    connection: Connection, owner_id: UUID, agent_id: UUID, new: NewChange, *, pending_max: int
) -> bool:
    """Keep it with its approval, based on the prompt that stands. False if `pending_max` wait already.

    The agent is locked.
    """
    inserted = await connection.fetchval(
        INSERT_CHANGE,
        owner_id,
        agent_id,
        new.change_id,
        new.run_id,
        new.proposal,
        new.diff,
        new.reason,
        new.approval_id,
        pending_max,
    )
    return bool(inserted)


GET_CHANGE = """
select c.id, c.run_id, c.base_no, c.proposal, c.diff, c.reason, c.state, p.id as approval_id
from prompt_changes c
join approvals p on p.owner_id = c.owner_id and p.agent_id = c.agent_id and p.change_id = c.id
where c.owner_id = $1 and c.agent_id = $2 and c.id = $3
"""


@dataclass(frozen=True, slots=True)
class PromptChange:
    """A change that waits or waited. `base_no` is the number of the prompt that it was made against."""

    change_id: UUID
    run_id: UUID | None
    base_no: int
    proposal: str
    diff: str
    reason: str
    state: Literal["pending", "applied", "rejected"]
    approval_id: UUID


async def get_change(
    connection: Connection, owner_id: UUID, agent_id: UUID, change_id: UUID
) -> PromptChange | None:
    """The agent's lock holds it still."""
    row = await connection.fetchrow(GET_CHANGE, owner_id, agent_id, change_id)
    return PromptChange(*row) if row else None


CLOSE_CHANGE = """
update prompt_changes set state = $3, resolved_at = clock_timestamp()
where owner_id = $1 and id = $2 and state = 'pending'
"""


async def close_change(
    connection: Connection, owner_id: UUID, change_id: UUID, state: Literal["applied", "rejected"]
) -> None:
    await connection.execute(CLOSE_CHANGE, owner_id, change_id, state)


LIST_PENDING = """
select c.*, c.base_no <> a.prompt_no as stale, p.id as approval_id
from prompt_changes c
join agents a on a.owner_id = c.owner_id and a.id = c.agent_id
join approvals p on p.owner_id = c.owner_id and p.agent_id = c.agent_id and p.change_id = c.id
where c.owner_id = $1 and c.agent_id = $2 and c.state = 'pending'
order by c.created_at, c.id limit $3
"""


async def list_pending(
    connection: Connection, owner_id: UUID, agent_id: UUID, count_max: int
) -> list[PendingPromptChange]:
    """Oldest first."""
    rows = await connection.fetch(LIST_PENDING, owner_id, agent_id, count_max)
    return [_pending(row) for row in rows]


def read_history_entry(row: asyncpg.Record) -> PromptHistoryEntry:
    return PromptHistoryEntry(
        id=to_wire("phe", row["id"]),
        agent_id=to_wire("agt", row["agent_id"]),
        diff=row["diff"],
        reason=row["reason"],
        applied_at=row["created_at"],
        approved_by=row["approved_by"],
    )


def _pending(row: asyncpg.Record) -> PendingPromptChange:
    return PendingPromptChange(
        id=to_wire("pch", row["id"]),
        agent_id=to_wire("agt", row["agent_id"]),
        run_id=to_wire("run", row["run_id"]) if row["run_id"] else None,
        approval_id=to_wire("apr", row["approval_id"]),
        diff=row["diff"],
        reason=row["reason"],
        stale=row["stale"],
        created_at=row["created_at"],
    )
