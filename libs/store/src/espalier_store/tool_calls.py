"""Tool calls that the broker carries out: the fence in front of each, and how each came out.

A call is planned by the step of its run (`log.move_run`). Here it is sent, once, by a broker, and settled by
that broker; or found to be in doubt by anyone. Nothing here waits, and nobody's lease is moved.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from espalier_domain.tool_results import CallState
from espalier_store.pool import Connection

SEND_CALL = """
with run as (
    select r.id, r.agent_id, r.root_id, r.subject_ids from runs r
    where r.owner_id = $1 and r.id = $2 and r.lease_token = $4 and r.state = 'running'
        and r.lease_until > clock_timestamp() and r.wall_at > clock_timestamp()
        and r.cancel_requested_at is null
    for share
)
update tool_calls c set
    state = 'sent',
    broker_id = $5,
    sent_at = clock_timestamp(),
    deadline_at = clock_timestamp() + make_interval(secs => $6)
from run
where c.owner_id = $1 and c.run_id = run.id and c.call_id = $3 and c.state = 'planned'
returning c.tool, c.args, run.agent_id, run.root_id, run.subject_ids,
    exists (select from agent_servers s where s.owner_id = $1 and s.agent_id = run.agent_id) as has_servers
"""


@dataclass(frozen=True, slots=True)
class SentCall:
    """What is to be called, and for whom. `has_servers`: some were attached to the agent."""

    tool: str
    args: dict[str, Any]
    agent_id: UUID
    root_run_id: UUID
    subject_ids: list[str]
    has_servers: bool


async def send_call(
    connection: Connection,
    owner_id: UUID,
    run_id: UUID,
    call_id: str,
    *,
    lease_token: int,
    broker_id: UUID,
    deadline_s: float,
) -> SentCall | None:
    """Mark a planned call as sent, for a holder whose lease is alive and whose run is to go on.

    None if it is not so: then no byte of the call may leave. The run's row is locked against the writers of a
    cancel, so that a call is never sent after one has committed.
    """
    row = await connection.fetchrow(SEND_CALL, owner_id, run_id, call_id, lease_token, broker_id, deadline_s)
    if row is None:
        return None
    args = json.loads(row["args"])  # whole numbers of every size stay what they are
    return SentCall(
        row["tool"], args, row["agent_id"], row["root_id"], row["subject_ids"], row["has_servers"]
    )


SETTLE_CALL = """
update tool_calls set state = $5, result = $6::json, settled_at = clock_timestamp()
where owner_id = $1 and run_id = $2 and call_id = $3 and state = 'sent' and broker_id = $4
"""


async def settle_call(
    connection: Connection,
    owner_id: UUID,
    run_id: UUID,
    call_id: str,
    *,
    broker_id: UUID,
    state: CallState,
    result: str,
) -> bool:
    """Write down how a call came out that this broker has sent. False if it counts as in doubt already.

    `result` is JSON text, a `CallToolResult`.
    """
    done = await connection.execute(SETTLE_CALL, owner_id, run_id, call_id, broker_id, state, result)
    return done == "UPDATE 1"


GET_CALLS = """
select c.call_id, c.state, c.result, c.broker_id, b.alive_until,
    c.deadline_at < clock_timestamp() - make_interval(secs => $4) as overdue,
    coalesce(b.alive_until < clock_timestamp(), true) as broker_silent
from tool_calls c left join brokers b on b.id = c.broker_id
where c.owner_id = $1 and c.run_id = $2 and c.call_id = any ($3::text[])
"""


@dataclass(frozen=True, slots=True)
class CallRow:
    """How a call stands. `result` is there once it is settled, if there was an answer.

    `alive_until` is how long its broker said it would live, None if nobody knows the broker; `silent` says
    that this has passed, `overdue` that the call's deadline passed long ago.
    """

    state: CallState
    result: dict[str, Any] | None
    broker_id: UUID | None
    alive_until: datetime | None
    silent: bool
    overdue: bool


async def get_calls(
    connection: Connection, owner_id: UUID, run_id: UUID, call_ids: list[str], *, grace_s: float
) -> dict[str, CallRow]:
    rows = await connection.fetch(GET_CALLS, owner_id, run_id, call_ids, grace_s)
    return {
        row["call_id"]: CallRow(
            row["state"],
            json.loads(row["result"]) if row["result"] else None,
            row["broker_id"],
            row["alive_until"],
            row["broker_silent"],
            bool(row["overdue"]),
        )
        for row in rows
    }


DOUBT_CALL = """
update tool_calls c set state = 'in_doubt', settled_at = clock_timestamp()
where c.owner_id = $1 and c.run_id = $2 and c.call_id = $3 and c.state = 'sent'
    and (c.deadline_at < clock_timestamp() - make_interval(secs => $5)
        or not exists (
            select from brokers b
            where b.id = c.broker_id
                and (b.alive_until is distinct from $4 or b.alive_until > clock_timestamp())))
"""


async def doubt_call(
    connection: Connection,
    owner_id: UUID,
    run_id: UUID,
    call_id: str,
    *,
    alive_until: datetime | None,
    grace_s: float,
) -> None:
    """Say that nobody will know how a sent call came out: its broker has been silent since `alive_until`,
    which the caller has seen twice, or its deadline passed more than `grace_s` ago.
    """
    await connection.execute(DOUBT_CALL, owner_id, run_id, call_id, alive_until, grace_s)
