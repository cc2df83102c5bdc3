"""The events of runs, as they were numbered: what a reader is owed whatever Redis holds."""

from dataclasses import dataclass
from uuid import UUID

import asyncpg

from espalier_protocol.events import NumberedEvent
from espalier_store.pool import Connection

PAGE_EVENTS_MAX = 500
PAGE_BYTES_MAX = 1024 * 1024

PAGE = """
select seq, type, payload, emitted_at from (
    select *, sum(octet_length(payload)) over (order by seq) - octet_length(payload) as bytes_before
    from (
        select seq, type, payload, emitted_at from events
        where owner_id = $1 and run_id = $2 and seq > $3 order by seq limit $4
    ) page
) sized
where bytes_before < $5
"""
EVENTS_AFTER = f"{PAGE} order by seq"


async def events_after(
    connection: Connection, owner_id: UUID, run_id: UUID, seq: int, limit: int = PAGE_EVENTS_MAX
) -> list[NumberedEvent]:
    """The events that follow `seq`, in order: one at least if there is one, at most a page."""
    rows = await connection.fetch(EVENTS_AFTER, owner_id, run_id, seq, limit, PAGE_BYTES_MAX)
    return [_event(row) for row in rows]


OPEN_LOG = f"""
select next_seq - 1 as last_seq, ended_at is not null as ended, log_pruned_at is not null as pruned, events.*
from runs left join lateral ({PAGE}) events on true
where owner_id = $1 and id = $2
order by seq
"""


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """How far a run's log goes, whether it will grow, whether it was removed, and a page of it."""

    last_seq: int
    ended: bool
    pruned: bool
    events: list[NumberedEvent]


async def open_log(connection: Connection, owner_id: UUID, run_id: UUID, seq: int) -> OpenedLog | None:
    """The log as it stands, with the page that follows `seq`; all of one moment."""
    rows = await connection.fetch(OPEN_LOG, owner_id, run_id, seq, PAGE_EVENTS_MAX, PAGE_BYTES_MAX)
    if not rows:
        return None
    events = [_event(row) for row in rows if row["seq"] is not None]
    return OpenedLog(rows[0]["last_seq"], rows[0]["ended"], rows[0]["pruned"], events)


def _event(row: asyncpg.Record) -> NumberedEvent:
    return NumberedEvent(row["seq"], row["type"], row["emitted_at"], row["payload"])
