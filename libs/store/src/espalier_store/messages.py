"""Messages: what agents of one tree, and their embedder, say to each other, and whom a message wakes.

A message is a row and, in the same statement, the promise of a wake in the outbox. The statements that carry
the promise out are here too, but for those that look at the outbox of all owners (`fleet`). A body is JSON
text and is never looked into. When a message is read, and by whom, is decided above.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

import asyncpg
import orjson

from espalier_protocol.ids import to_wire
from espalier_protocol.message import Message, MessageSender, SenderKind
from espalier_store.paging import PAGE_BYTES_MAX, Page, Place, read_page
from espalier_store.pool import Connection

ENVELOPE_BYTES: Final = 200
"""More than a message has beside its body where it is shown."""

FOR_THIS_RUN = """
(to_run_id is null or to_run_id = {run} or (
    select addressed.state in ('running', 'sleeping') from runs addressed
    where addressed.owner_id = $1 and addressed.id = to_run_id) is not true)
"""
"""A message to one run is for that run alone as long as it lives; afterwards it is for the whole agent."""

RECIPIENT = "select root_id, lifecycle_state from agents where owner_id = $1 and id = $2"


@dataclass(frozen=True, slots=True)
class Recipient:
    root_id: UUID
    lifecycle_state: str


async def get_recipient(connection: Connection, owner_id: UUID, agent_id: UUID) -> Recipient | None:
    """The agent as a message finds it. It is not locked: a step that sends has its run locked already."""
    row = await connection.fetchrow(RECIPIENT, owner_id, agent_id)
    return Recipient(row["root_id"], row["lifecycle_state"]) if row else None


INSERT_MESSAGE = """
with sent as (
    insert into messages (id, owner_id, root_id, from_agent_id, to_agent_id, sender, body, subject_ids)
    select $2, $1, $3, $4, $5, $6, $7::json, $9
    where $8 > (
        select count(*) from (
            select from messages where owner_id = $1 and to_agent_id = $5 and read_at is null limit $8
        ) unread)
    returning *
), promised as (
    insert into outbox (owner_id, kind, agent_id, message_id)
    select owner_id, 'wake', to_agent_id, id from sent
    returning id as wake_id
)
select sent.*, wake_id from sent cross join promised
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


async def insert_message(
    connection: Connection, owner_id: UUID, message: NewMessage, *, unread_max: int
) -> tuple[Message, int] | None:
    """The message and the id of its wake in the outbox; None if the inbox holds `unread_max` already.

    Those who send at the same moment do not count each other.
    """
    row = await connection.fetchrow(
        INSERT_MESSAGE,
        owner_id,
        message.message_id,
        message.root_id,
        message.from_agent_id,
        message.to_agent_id,
        message.sender,
        message.body,
        unread_max,
        message.subject_ids,
    )
    return (read_message(row), row["wake_id"]) if row else None


TAKE_UNREAD = f"""
with oldest as (
    select id, created_at, octet_length(body::text) + {ENVELOPE_BYTES} as bytes from messages
    where owner_id = $1 and to_agent_id = $2 and read_at is null and {FOR_THIS_RUN.format(run="$3")}
    order by created_at, id limit $4 + 1
    for no key update
), sized as (
    select id, bytes, sum(bytes) over by_age as reached, row_number() over by_age as place
    from oldest window by_age as (order by created_at, id)
), taken as (
    update messages set delivered_at = moment, read_at = moment
    from sized, clock_timestamp() as moment
    where messages.owner_id = $1 and messages.id = sized.id
        and place <= $4 and (place = 1 or reached <= $5)
    returning messages.id, from_agent_id, body, created_at, subject_ids
)
select taken.*, count(*) over () < (select count(*) from sized) as more from taken order by created_at, id
"""


@dataclass(frozen=True, slots=True)
class TakenMessage:
    """A message as its reader gets it. `body` is compact JSON."""

    message_id: UUID
    from_agent_id: UUID
    body: str
    sent_at: datetime
    subject_ids: list[str]


async def take_unread(
    connection: Connection, owner_id: UUID, agent_id: UUID, run_id: UUID, *, count_max: int, bytes_max: int
) -> tuple[list[TakenMessage], bool]:
    """Mark the oldest unread messages of the agent read, as far as they fit, and whether others are left.

    At least one is taken, however large. Two runs of an agent that read at once take turns, and each message
    goes to one of them.
    """
    rows = await connection.fetch(TAKE_UNREAD, owner_id, agent_id, run_id, count_max, bytes_max)
    taken = [
        TakenMessage(row["id"], row["from_agent_id"], row["body"], row["created_at"], row["subject_ids"])
        for row in rows
    ]
    return taken, bool(rows) and rows[0]["more"]


UNREAD = f"""
select * from (
    select oldest.*, sum(bytes) over (order by created_at, id) - bytes as bytes_before
    from (
        select *, octet_length(body::text) + {ENVELOPE_BYTES} as bytes from messages
        where owner_id = $1 and to_agent_id = $2 and read_at is null
        order by created_at, id limit $3
    ) oldest
) sized
where bytes_before < $4
order by created_at, id
"""


async def list_unread(
    connection: Connection, owner_id: UUID, agent_id: UUID, *, count_max: int
) -> list[Message]:
    """The oldest messages that the agent has not read, PAGE_BYTES_MAX of them at most. Nothing changes."""
    rows = await connection.fetch(UNREAD, owner_id, agent_id, count_max, PAGE_BYTES_MAX)
    return [read_message(row) for row in rows]


GET_MESSAGE = "select * from messages where owner_id = $1 and id = $2"


async def get_message(connection: Connection, owner_id: UUID, message_id: UUID) -> Message | None:
    row = await connection.fetchrow(GET_MESSAGE, owner_id, message_id)
    return read_message(row) if row else None


LIST_MESSAGES = f"""
select * from (
    select page.*, count(*) over () as reached,
        sum(bytes) over (order by created_at desc, id desc) - bytes as bytes_before
    from (
        select *, octet_length(body::text) + {ENVELOPE_BYTES} as bytes
        from messages
        where owner_id = $1 {{narrowed}} and (created_at, id) < (
            coalesce(
                (select b.created_at from messages b where b.owner_id = $1 and b.id = $2), 'infinity'),
            coalesce($2::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
        order by created_at desc, id desc
        limit $3 + 1
    ) page
) sized
where bytes_before < $4
order by created_at desc, id desc
"""


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Columns and what they must hold; None asks for nothing."""

    to_agent_id: UUID | None = None
    root_id: UUID | None = None


async def list_messages(
    connection: Connection, owner_id: UUID, wanted: MessageFilter, place: Place
) -> Page[Message]:
    """Read ones too. Only the filters that are asked for are in the text, so that each finds its index.

    A cursor that is not there is read as none; whether it is there, the caller asks.
    """
    asked = {column: value for column, value in asdict(wanted).items() if value is not None}
    narrowed = " ".join(f"and {column} = ${number}" for number, column in enumerate(asked, start=5))
    statement = LIST_MESSAGES.format(narrowed=narrowed)
    rows = await connection.fetch(
        statement, owner_id, place.after, place.size, PAGE_BYTES_MAX, *asked.values()
    )
    return read_page(rows, place, read_message)


PICK_RUN = """
select id from runs
where owner_id = $1 and agent_id = $2 and state in ('running', 'sleeping')
order by
    id = (select to_run_id from messages where owner_id = $1 and id = $3) desc nulls last,
    coalesce(array_position(array['message', 'child', 'timer'], wait_reason), 4),
    created_at desc, id desc
limit 1
"""


async def pick_run(
    connection: Connection, owner_id: UUID, agent_id: UUID, message_id: UUID | None
) -> UUID | None:
    """Which live run of the agent a message is to wake; None if there is none. Nothing is locked by it.

    The one that the message is for; else the newest that waits for a message, else for a child, else for a
    time; else the newest of all.
    """
    run_id = await connection.fetchval(PICK_RUN, owner_id, agent_id, message_id)
    assert run_id is None or isinstance(run_id, UUID)
    return run_id


LOCK_PICKED = """
select from runs where owner_id = $1 and id = $2 and state in ('running', 'sleeping') for no key update
"""


async def lock_picked(connection: Connection, owner_id: UUID, run_id: UUID) -> bool:
    """Lock the run until the transaction ends. False if it has ended in the meantime."""
    return await connection.fetchrow(LOCK_PICKED, owner_id, run_id) is not None


AWAIT_NEW_RUNS = "select from agents where owner_id = $1 and id = $2 for share"


async def await_new_runs(connection: Connection, owner_id: UUID, agent_id: UUID) -> None:
    """Wait for runs of the agent that are being created: they hold the agent until they can be seen.

    One that is created later can read every message that is there now.
    """
    await connection.execute(AWAIT_NEW_RUNS, owner_id, agent_id)


STILL_UNREAD = f"""
select exists (
    select from messages
    where owner_id = $1 and to_agent_id = $2 and read_at is null and ($4::uuid is null or id = $4)
        and {FOR_THIS_RUN.format(run="$3")})
"""


async def is_unread(
    connection: Connection, owner_id: UUID, agent_id: UUID, run_id: UUID, message_id: UUID | None
) -> bool:
    """Whether the message, or without one any message, is there for the run to read.

    A statement of its own, so that it sees what was read by whoever held the run's lock before.
    """
    return bool(await connection.fetchval(STILL_UNREAD, owner_id, agent_id, run_id, message_id))


AT_REST = "(state = 'sleeping' and wait_reason in ('message', 'child', 'timer'))"
RAISE_WAKE = f"""
update runs set
    wake_seq = wake_seq + 1,
    due_at = case when {AT_REST} then least(due_at, clock_timestamp()) else due_at end,
    lease_token = lease_token + {AT_REST}::int
where owner_id = $1 and id = $2
returning {AT_REST}
"""


async def raise_wake(connection: Connection, owner_id: UUID, run_id: UUID) -> bool:
    """Count a wake of the locked run, and make it due if it rests between two cycles; whether it does.

    A run that waits in mid-cycle is left to wait: it takes the wake in when its cycle ends.
    """
    return bool(await connection.fetchval(RAISE_WAKE, owner_id, run_id))


def read_message(row: asyncpg.Record) -> Message:
    return Message(
        id=to_wire("msg", row["id"]),
        from_agent_id=to_wire("agt", row["from_agent_id"]),
        to_agent_id=to_wire("agt", row["to_agent_id"]),
        tree_root_id=to_wire("agt", row["root_id"]),
        body=orjson.loads(row["body"]),
        sent_at=row["created_at"],
        delivered_at=row["delivered_at"],
        read_at=row["read_at"],
        sender=MessageSender(kind=row["sender"]),
    )
