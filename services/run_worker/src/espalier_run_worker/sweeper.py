"""Repairing what a process left undone when it died: events that missed Redis, and cancels and wakes that
nobody carried out. And forgetting memory that has expired, and answers that were kept for long enough.

Any number of sweepers may work at once; each takes rows that no other has locked, a few at a time.
"""

from typing import Final
from uuid import UUID

import anyio
import structlog

from espalier_acts.calls import DOUBT_GRACE_S
from espalier_acts.messages import wake_for_message
from espalier_acts.runs import cancel_run
from espalier_domain.errors import DomainError, LeaseLost
from espalier_eventlog.publisher import Publisher, StreamRefused, StreamsAway
from espalier_store.events import events_after
from espalier_store.fleet import (
    Unpublished,
    delete_published,
    doubt_overdue,
    forget_answers,
    forget_brokers,
    forget_expired,
    overdue_cancels,
    overdue_wakes,
    unpublished,
)
from espalier_store.idempotency import KEPT_S
from espalier_store.pool import Connection, Pool, transaction

SWEEP_EVERY_S: Final = 1.0
PUBLISH_AFTER_S: Final = 1.0
WAKE_AFTER_S: Final = 1.0
FORCE_CANCEL_AFTER_S: Final = 5.0
FORGET_BROKERS_AFTER_S: Final = 3600.0
ROWS_MAX: Final = 100
ANSWERS_MAX: Final = 1_000
"""As many creates a second as the sweepers keep up with."""

REDIS_WAIT_S: Final = 0.5

log = structlog.get_logger(__name__)


async def sweep(pool: Pool, publisher: Publisher) -> None:
    """Sweep once a second, for ever. Cancels come first: they must not wait for Redis."""
    while True:  # bounded: at most ROWS_MAX rows of each kind a turn
        await anyio.sleep(SWEEP_EVERY_S)
        for repair in (force_cancels, wake_again, settle_calls, forget_memory, forget_creates, publish_again):
            try:
                await repair(pool, publisher)
            except (DomainError, TimeoutError) as error:
                log.warning("sweeper.put_off", error=type(error).__name__)


async def force_cancels(pool: Pool, publisher: Publisher) -> None:
    """End runs whose cancel has waited too long, over the head of whoever holds them."""
    async with transaction(pool) as connection:
        overdue = await overdue_cancels(connection, FORCE_CANCEL_AFTER_S, ROWS_MAX)
    for run_id, owner_id in overdue:
        try:
            await _force(pool, publisher, run_id, owner_id)
        except (DomainError, LeaseLost) as error:
            log.warning("sweeper.cancel_put_off", run_id=str(run_id), error=type(error).__name__)
        except Exception:
            log.exception("sweeper.cancel_failed", run_id=str(run_id))


async def wake_again(pool: Pool, _: Publisher) -> None:
    """Carry out wakes whose promise is older than WAKE_AFTER_S; the look-outs find the runs."""
    async with transaction(pool) as connection:
        overdue = await overdue_wakes(connection, WAKE_AFTER_S, ROWS_MAX)
    for outbox_id in overdue:
        try:
            async with transaction(pool) as connection:
                await wake_for_message(connection, outbox_id)
        except DomainError as error:
            log.warning("sweeper.wake_put_off", outbox_id=outbox_id, error=type(error).__name__)
        except Exception:
            log.exception("sweeper.wake_failed", outbox_id=outbox_id)


async def settle_calls(pool: Pool, _: Publisher) -> None:
    """Hold for doubtful what no broker has settled, and forget brokers that are long gone."""
    async with transaction(pool) as connection:
        await doubt_overdue(connection, DOUBT_GRACE_S, ROWS_MAX)
    async with transaction(pool) as connection:
        await forget_brokers(connection, FORGET_BROKERS_AFTER_S, ROWS_MAX)


async def forget_memory(pool: Pool, _: Publisher) -> None:
    """Delete memory records that have expired."""
    async with transaction(pool) as connection:
        await forget_expired(connection, ROWS_MAX)


async def forget_creates(pool: Pool, _: Publisher) -> None:
    """Delete the first answers of creates that nobody may ask for any more."""
    async with transaction(pool) as connection:
        await forget_answers(connection, KEPT_S, ANSWERS_MAX)


async def publish_again(pool: Pool, publisher: Publisher) -> None:
    """Send the events of acts whose outbox row is still there after PUBLISH_AFTER_S, run by run.

    A stream that Redis refuses for good is given up, or its rows would stand before those of every other run.
    """
    async with transaction(pool) as connection:
        by_run: dict[UUID, list[Unpublished]] = {}
        for act in await unpublished(connection, PUBLISH_AFTER_S, ROWS_MAX):
            by_run.setdefault(act.run_id, []).append(act)
        for acts in by_run.values():
            try:
                with anyio.fail_after(REDIS_WAIT_S):
                    await _send_again(connection, publisher, acts[0])
            except StreamRefused as error:
                log.error("sweeper.stream_refused", run_id=str(acts[0].run_id), error=str(error.__cause__))
            except (StreamsAway, TimeoutError):
                log.warning("sweeper.redis_away")
                return
            await delete_published(connection, [act.outbox_id for act in acts])


async def _force(pool: Pool, publisher: Publisher, run_id: UUID, owner_id: UUID) -> None:
    async with publisher.in_order(run_id):
        async with transaction(pool) as connection:
            written = await cancel_run(connection, owner_id, run_id, force=True)
        if written:
            publisher.publish(written.run_id, written.outbox_id, written.events)


async def _send_again(connection: Connection, publisher: Publisher, first: Unpublished) -> None:
    seq = first.from_seq - 1
    while events := await events_after(connection, first.owner_id, first.run_id, seq):  # bounded by the log
        await publisher.send(first.run_id, events)
        seq = events[-1].seq
