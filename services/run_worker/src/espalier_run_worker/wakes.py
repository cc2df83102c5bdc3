"""Carrying out the wakes that this worker's steps have promised, right after they are committed.

A step never waits for it. What is dropped here, or dies with the process, the sweeper of any worker does a
second later.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Final
from uuid import UUID

import anyio
import structlog

from espalier_acts.messages import wake_for_message
from espalier_domain.errors import Unavailable
from espalier_store.pool import Pool, transaction

WAKES_WAITING_MAX: Final = 1000

log = structlog.get_logger(__name__)


class Wakes:
    """`soon` queues and returns; `run` carries out and rings for the runs that became due."""

    def __init__(self, pool: Pool, ring: Callable[[UUID], Awaitable[object]]) -> None:
        self._pool = pool
        self._ring = ring
        self._send, self._receive = anyio.create_memory_object_stream[int | UUID](WAKES_WAITING_MAX)

    def soon(self, promised: Iterable[int | UUID]) -> None:
        """Rows of the outbox whose wakes are to be carried out, and due runs that are only rung for."""
        for one in promised:
            try:
                self._send.send_nowait(one)
            except (anyio.WouldBlock, anyio.ClosedResourceError, anyio.BrokenResourceError):
                log.warning("wakes.left_to_the_sweeper", promised=str(one))

    async def run(self) -> None:
        """One after the other, for ever."""
        async with self._send, self._receive:
            async for one in self._receive:
                run_id = one if isinstance(one, UUID) else await self._wake(one)
                if run_id is not None:
                    await self._ring(run_id)

    async def _wake(self, outbox_id: int) -> UUID | None:
        try:
            async with transaction(self._pool) as connection:
                return await wake_for_message(connection, outbox_id)
        except Unavailable as error:
            log.warning("wakes.left_to_the_sweeper", outbox_id=outbox_id, error=type(error).__name__)
            return None
