"""Repairing what a process left undone when it died: events that missed Redis, cancels nobody carried out.

Any number of sweepers may work at once; each takes rows that no other has locked, a few at a time.
"""

from typing import Final

import anyio
import structlog

from espalier_acts.runs import cancel_run
from espalier_domain.errors import DomainError, LeaseLost
from espalier_eventlog.publisher import Act, Publisher, StreamsAway
from espalier_store.events import events_after
from espalier_store.fleet import Unpublished, delete_published, overdue_cancels, unpublished
from espalier_store.pool import Connection, Pool, transaction

SWEEP_EVERY_S: Final = 1.0
PUBLISH_AFTER_S: Final = 1.0
FORCE_CANCEL_AFTER_S: Final = 5.0
ROWS_MAX: Final = 100
REDIS_WAIT_S: Final = 0.5

log = structlog.get_logger(__name__)


async def sweep(pool: Pool, publisher: Publisher) -> None:
    """Sweep once a second, for ever."""
    while True:  # bounded: at most ROWS_MAX rows of each kind a turn
        await anyio.sleep(SWEEP_EVERY_S)
        try:
            await publish_again(pool, publisher)
            await force_cancels(pool, publisher)
        except (DomainError, LeaseLost, StreamsAway, TimeoutError) as error:
            log.warning("sweeper.put_off", error=type(error).__name__)


async def publish_again(pool: Pool, publisher: Publisher) -> None:
    """Send the events of acts whose outbox row is still there after PUBLISH_AFTER_S."""
    async with transaction(pool) as connection:
        for act in await unpublished(connection, PUBLISH_AFTER_S, ROWS_MAX):
            with anyio.fail_after(REDIS_WAIT_S):
                await _send_again(connection, publisher, act)
            await delete_published(connection, [act.outbox_id])


async def force_cancels(pool: Pool, publisher: Publisher) -> None:
    """End runs whose cancel has waited too long, over the head of whoever holds them."""
    async with transaction(pool) as connection:
        overdue = await overdue_cancels(connection, FORCE_CANCEL_AFTER_S, ROWS_MAX)
    for run_id, owner_id in overdue:
        async with publisher.in_order(run_id):
            async with transaction(pool) as connection:
                written = await cancel_run(connection, owner_id, run_id, force=True)
            if written and written.outbox_id is not None:
                publisher.publish(Act(written.run_id, written.outbox_id, written.events))


async def _send_again(connection: Connection, publisher: Publisher, act: Unpublished) -> None:
    seq = act.from_seq - 1
    while events := await events_after(connection, act.owner_id, act.run_id, seq):  # bounded by the run's log
        await publisher.send(act.run_id, events)
        seq = events[-1].seq
