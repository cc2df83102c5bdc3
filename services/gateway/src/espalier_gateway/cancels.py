"""Cancels that a worker did not carry out in time: ended over its head before five seconds have passed.

One queue and one task, because all wait equally long. Nothing here must survive: what a dead or full gateway
forgets, the sweeper of any worker does a little later.
"""

from dataclasses import dataclass
from typing import Final
from uuid import UUID

import anyio
import structlog

from espalier_acts.runs import cancel_run
from espalier_domain.errors import DomainError, LeaseLost, LifecycleConflict
from espalier_gateway.couriers import Couriers
from espalier_store.pool import Pool, transaction

FORCE_AFTER_S: Final = 4.5
"""Whoever cancels is promised the end within five seconds; the rest is for Postgres."""

WAITING_MAX: Final = 10_000

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    due: float
    owner_id: UUID
    run_id: UUID


class ForcedCancels:
    def __init__(self, pool: Pool, couriers: Couriers) -> None:
        self._pool = pool
        self._couriers = couriers
        self._send, self._receive = anyio.create_memory_object_stream[_Asked](WAITING_MAX)

    def later(self, owner_id: UUID, run_id: UUID) -> None:
        """End the run in FORCE_AFTER_S if it still lives then."""
        try:
            self._send.send_nowait(_Asked(anyio.current_time() + FORCE_AFTER_S, owner_id, run_id))
        except anyio.WouldBlock:
            log.warning("cancels.left_to_the_sweeper", run_id=str(run_id))

    async def run(self) -> None:
        async with self._send, self._receive:
            async for asked in self._receive:
                await anyio.sleep_until(asked.due)
                await self._force(asked)

    async def _force(self, asked: _Asked) -> None:
        try:
            async with self._couriers.in_order(asked.run_id):
                async with transaction(self._pool) as connection:
                    written = await cancel_run(connection, asked.owner_id, asked.run_id, force=True)
                if written is not None:
                    self._couriers.publish(written)
                    log.info("cancels.forced", run_id=str(asked.run_id))
        except LifecycleConflict:
            return  # it ended otherwise in the meantime
        except (DomainError, LeaseLost) as error:
            log.warning("cancels.left_to_the_sweeper", run_id=str(asked.run_id), error=type(error).__name__)
        except Exception:
            log.exception("cancels.failed", run_id=str(asked.run_id))
