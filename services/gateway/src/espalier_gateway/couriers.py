"""What follows a commit: a run's events go to Redis, then its doorbell rings. No request waits for either.

Both are hints. What is dropped here, because Redis is away or a queue is full, is found in Postgres: events
by the sweeper, due runs by the workers. Above: the handlers in `methods`, which cannot see Redis.
"""

from contextlib import AbstractAsyncContextManager
from typing import Final
from uuid import UUID

import anyio
import structlog

from espalier_acts.log import Written
from espalier_eventlog.publisher import Publisher
from espalier_jobs import Doorbell

RINGS_WAITING_MAX: Final = 1000
RINGERS: Final = 4

log = structlog.get_logger(__name__)


class Couriers:
    """`publish` and `ring` queue and return; `run` carries."""

    def __init__(self, publisher: Publisher, doorbell: Doorbell) -> None:
        self._publisher = publisher
        self._doorbell = doorbell
        self._send, self._receive = anyio.create_memory_object_stream[UUID](RINGS_WAITING_MAX)

    def in_order(self, run_id: UUID) -> AbstractAsyncContextManager[None]:
        """Held around a commit and its `publish`, so that one run's events are queued in their order."""
        return self._publisher.in_order(run_id)

    def publish(self, written: Written) -> None:
        self._publisher.publish(written.run_id, written.outbox_id, written.events)

    def ring(self, run_id: UUID) -> None:
        try:
            self._send.send_nowait(run_id)
        except anyio.WouldBlock:
            log.warning("couriers.rings_full", run_id=str(run_id))

    async def run(self) -> None:
        """Ring for ever. A few ringers, so that one that waits for Redis does not hold up the others."""
        async with self._send, self._receive, anyio.create_task_group() as group:
            for _ in range(RINGERS):
                group.start_soon(self._ring_on)

    async def _ring_on(self) -> None:
        async for run_id in self._receive:
            await self._doorbell.ring(run_id)
