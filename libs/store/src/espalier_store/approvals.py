"""Approvals: questions that wait for a person, whatever they are about.

A row names what it is about and holds the answer; what that is in full lies with the call or the change. The
agent's lock holds its approvals still. Questions about calls in doubt are written by `log`, with the entry
that tells of the doubt; those about prompts by `prompts`.
"""

from dataclasses import dataclass
from uuid import UUID

import asyncpg
import orjson

from espalier_protocol.approval import (
    Approval,
    ApprovalKind,
    ApprovalState,
    CallInQuestion,
    PromptChangeInQuestion,
    Resolution,
)
from espalier_protocol.ids import to_wire
from espalier_store.paging import PAGE_BYTES_MAX, Page, Place, read_page
from espalier_store.pool import Connection

APPROVAL = """
select p.*, c.diff, c.reason, t.tool, t.args,
    octet_length(coalesce(c.diff, '')) + octet_length(coalesce(c.reason, ''))
        + octet_length(coalesce(t.args::text, '')) + octet_length(coalesce(p.comment, '')) as bytes
from approvals p
left join prompt_changes c on c.owner_id = p.owner_id and c.id = p.change_id
left join tool_calls t on t.owner_id = p.owner_id and t.run_id = p.run_id and t.call_id = p.call_id
"""
"""With what it is about. A call's row goes with the log of its run."""

GET_APPROVAL = f"{APPROVAL} where p.owner_id = $1 and p.id = $2"


async def get_approval(connection: Connection, owner_id: UUID, approval_id: UUID) -> Approval | None:
    row = await connection.fetchrow(GET_APPROVAL, owner_id, approval_id)
    return _approval(row) if row else None


LIST_APPROVALS = f"""
select * from (
    select page.*, count(*) over () as reached,
        sum(bytes) over (order by created_at desc, id desc) - bytes as bytes_before
    from (
        {APPROVAL}
        where p.owner_id = $1
            and ($2::uuid is null or (p.created_at, p.id) < (
                select b.created_at, b.id from approvals b where b.owner_id = $1 and b.id = $2))
            and ($4::uuid is null or p.agent_id = $4)
            and ($5::boolean is null or (p.resolved_at is null) = $5)
        order by p.created_at desc, p.id desc
        limit $3 + 1
    ) page
) sized
where bytes_before < $6
order by created_at desc, id desc
"""


@dataclass(frozen=True, slots=True)
class ApprovalFilter:
    """None asks for nothing."""

    agent_id: UUID | None = None
    state: ApprovalState | None = None


async def list_approvals(
    connection: Connection, owner_id: UUID, wanted: ApprovalFilter, place: Place
) -> Page[Approval]:
    rows = await connection.fetch(
        LIST_APPROVALS,
        owner_id,
        place.after,
        place.size,
        wanted.agent_id,
        None if wanted.state is None else wanted.state == "open",
        PAGE_BYTES_MAX,
    )
    return read_page(rows, place, _approval)


FIND_QUESTION = """
select agent_id, run_id, kind, call_id, change_id, resolution from approvals where owner_id = $1 and id = $2
"""


@dataclass(frozen=True, slots=True)
class Question:
    """What a row says of itself. Only `resolution` ever changes, and only under the agent's lock."""

    agent_id: UUID
    run_id: UUID | None
    kind: ApprovalKind
    call_id: str | None
    change_id: UUID | None
    resolution: Resolution | None


async def find_question(connection: Connection, owner_id: UUID, approval_id: UUID) -> Question | None:
    row = await connection.fetchrow(FIND_QUESTION, owner_id, approval_id)
    return Question(*row) if row else None


RESOLVE_APPROVAL = """
update approvals set
    resolution = $3, comment = $4, resolved_by = $5, resolved_at = clock_timestamp()
where owner_id = $1 and id = $2 and resolved_at is null
"""


async def resolve_approval(
    connection: Connection,
    owner_id: UUID,
    approval_id: UUID,
    *,
    resolution: Resolution,
    comment: str | None,
    by: str,
) -> None:
    """Write the answer down. The first one stays."""
    await connection.execute(RESOLVE_APPROVAL, owner_id, approval_id, resolution, comment, by)


def _approval(row: asyncpg.Record) -> Approval:
    return Approval(
        id=to_wire("apr", row["id"]),
        kind=row["kind"],
        state="open" if row["resolved_at"] is None else "resolved",
        agent_id=to_wire("agt", row["agent_id"]),
        run_id=to_wire("run", row["run_id"]) if row["run_id"] else None,
        about=_change(row) if row["change_id"] else _call(row),
        resolution=row["resolution"],
        comment=row["comment"],
        resolved_by=row["resolved_by"],
        created_at=row["created_at"],
        resolved_at=row["resolved_at"],
    )


def _change(row: asyncpg.Record) -> PromptChangeInQuestion:
    return PromptChangeInQuestion(
        pending_change_id=to_wire("pch", row["change_id"]), diff=row["diff"], reason=row["reason"]
    )


def _call(row: asyncpg.Record) -> CallInQuestion:
    args = row["args"]
    return CallInQuestion(
        call_id=row["call_id"], tool_name=row["tool"], args=None if args is None else orjson.loads(args)
    )
