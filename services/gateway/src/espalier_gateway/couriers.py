"""What follows a commit: a run's events go to Redis, its doorbell rings, and a message that was sent wakes a
run. No request waits for any of it.

What is dropped here, because Redis is away or a queue is full, is found in Postgres: events and wakes by the
sweeper, due runs by the workers. Above: the handlers in `methods`, which cannot see Redis.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final
from uuid import UUID

import anyio
import structlog

from espalier_acts.log import Written
from espalier_acts.messages import wake_for_message
from espalier_domain.errors import Unavailable
from espalier_eventlog.publisher import Publisher, StreamsAway
from espalier_jobs import Doorbell
from espalier_store.pool import Pool, transaction

RINGS_WAITING_MAX: Final = 1000
RINGERS: Final = 4
WAKES_WAITING_MAX: Final = 1000
WAKERS: Final = 2

CLEAR_WAIT_S: Final = 2.0
CLEAR_AGAIN_MS: Final = 1000

NOT_TAKEN: Final = (anyio.WouldBlock, anyio.ClosedResourceError, anyio.BrokenResourceError)
"""The queue is full, or the process stops: workers and sweepers find in Postgres what is to be done."""

log = structlog.get_logger(__name__)


class Couriers:
    """`publish`, `ring` and `wake` queue and return; `run` carries."""

    def __init__(self, pool: Pool, publisher: Publisher, doorbell: Doorbell) -> None:
        self._pool = pool
        self._publisher = publisher
        self._doorbell = doorbell
        self._send, self._receive = anyio.create_memory_object_stream[UUID](RINGS_WAITING_MAX)
        self._to_wake, self._wakes = anyio.create_memory_object_stream[int](WAKES_WAITING_MAX)

    def in_order(self, run_id: UUID) -> AbstractAsyncContextManager[None]:
        """Held around a commit and its `publish`, so that one run's events are queued in their order."""
        return self._publisher.in_order(run_id)

    def publish(self, written: Written) -> None:
        self._publisher.publish(written.run_id, written.outbox_id, written.events)
        for wake_id in written.wakes:
            self.wake(wake_id)
        for run_id in written.to_ring:
            self.ring(run_id)

    def ring(self, run_id: UUID) -> None:
        try:
            self._send.send_nowait(run_id)
        except NOT_TAKEN:
            log.warning("couriers.rings_full", run_id=str(run_id))

    def wake(self, outbox_id: int) -> None:
        """Carry out the wake that a committed row of the outbox promises."""
        try:
            self._to_wake.send_nowait(outbox_id)
        except NOT_TAKEN:
            log.warning("couriers.wakes_full", outbox_id=outbox_id)

    async def clear_streams(self, run_ids: Sequence[UUID]) -> None:
        """Remove the events of runs from Redis. Somebody waits for this one. Raises Unavailable."""
        try:
            with anyio.fail_after(CLEAR_WAIT_S):
                await self._publisher.clear(run_ids)
        except (StreamsAway, TimeoutError) as error:
            raise Unavailable(CLEAR_AGAIN_MS) from error

    async def run(self) -> None:
        """Ring and wake for ever. A few of each, so that one that waits does not hold up the others."""
        async with (
            self._send,
            self._receive,
            self._to_wake,
            self._wakes,
            anyio.create_task_group() as group,
        ):
            for _ in range(RINGERS):
                group.start_soon(self._ring_on)
            for _ in range(WAKERS):
                group.start_soon(self._wake_on)

    async def _ring_on(self) -> None:
        async for run_id in self._receive:
            await self._doorbell.ring(run_id)

    async def _wake_on(self) -> None:
        async for outbox_id in self._wakes:
            try:
                async with transaction(self._pool) as connection:
                    woken = await wake_for_message(connection, outbox_id)
            except Unavailable as error:
                log.warning("couriers.left_to_the_sweeper", outbox_id=outbox_id, error=type(error).__name__)
                continue
            if woken is not None:
                self.ring(woken)
