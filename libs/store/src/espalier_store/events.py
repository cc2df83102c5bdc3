"""The events of runs, as they were numbered: what a reader is owed whatever Redis holds."""

from dataclasses import dataclass
from uuid import UUID

import asyncpg

from espalier_protocol.events import NumberedEvent
from espalier_store.pool import Connection

PAGE_EVENTS_MAX = 500
PAGE_BYTES_MAX = 1024 * 1024

INSERT_EVENTS = """
insert into events (run_id, owner_id, seq, type, payload, emitted_at)
select $1, $2, * from unnest($3::bigint[], $4::text[], $5::text[], $6::timestamptz[])
"""


async def insert_events(
    connection: Connection, owner_id: UUID, run_id: UUID, events: list[NumberedEvent]
) -> None:
    await connection.execute(
        INSERT_EVENTS,
        run_id,
        owner_id,
        [event.seq for event in events],
        [event.type for event in events],
        [event.payload for event in events],
        [event.emitted_at for event in events],
    )


EVENTS_AFTER = """
select seq, type, payload, emitted_at from (
    select *, sum(octet_length(payload)) over (order by seq) - octet_length(payload) as bytes_before
    from (
        select seq, type, payload, emitted_at from events
        where owner_id = $1 and run_id = $2 and seq > $3 order by seq limit $4
    ) page
) sized
where bytes_before < $5
order by seq
"""


async def events_after(
    connection: Connection, owner_id: UUID, run_id: UUID, seq: int, limit: int = PAGE_EVENTS_MAX
) -> list[NumberedEvent]:
    """The events that follow `seq`, in order: one at least if there is one, at most a page."""
    rows = await connection.fetch(EVENTS_AFTER, owner_id, run_id, seq, limit, PAGE_BYTES_MAX)
    return [_event(row) for row in rows]


LOG_STATE = """
select next_seq - 1 as last_seq, ended_at is not null as ended, log_pruned_at is not null as pruned
from runs where owner_id = $1 and id = $2
"""


@dataclass(frozen=True, slots=True)
class LogState:
    """How far a run's log goes, whether it will grow, and whether it was removed."""

    last_seq: int
    ended: bool
    pruned: bool


async def log_state(connection: Connection, owner_id: UUID, run_id: UUID) -> LogState | None:
    row = await connection.fetchrow(LOG_STATE, owner_id, run_id)
    return LogState(row["last_seq"], row["ended"], row["pruned"]) if row else None


def _event(row: asyncpg.Record) -> NumberedEvent:
    return NumberedEvent(row["seq"], row["type"], row["emitted_at"], row["payload"])
