"""How many runs live here: each takes a slot, and its whole life is a task in one group."""

from collections.abc import Awaitable, Callable
from typing import Final
from uuid import UUID

import anyio
import anyio.abc
import structlog

from espalier_domain.errors import Unavailable

EMPTY_POLL_S: Final = 0.02

log = structlog.get_logger(__name__)

Live = Callable[[UUID], Awaitable[None]]


class Slots:
    """Runs are offered by the doorbell and the look-out; one that lives here is not taken twice."""

    def __init__(self, count: int, live: Live) -> None:
        self._count = count
        self._live = live
        self._group: anyio.abc.TaskGroup | None = None
        self._living: dict[UUID, bool] = {}
        self._freed = anyio.Event()
        self._closed = False

    @property
    def free(self) -> int:
        return 0 if self._group is None or self._closed else self._count - len(self._living)

    async def run(self) -> None:
        """Hold the group in which runs live; cancelling this ends them all."""
        async with anyio.create_task_group() as group:
            self._group = group
            try:
                await anyio.sleep_forever()
            finally:
                self._group = None

    def offer(self, run_id: UUID) -> bool:
        """Let the run live here if a slot is free. One that lives here already is looked at again after."""
        if run_id in self._living:
            self._living[run_id] = True
            return True
        if self._group is None or self.free <= 0:
            return False
        self._living[run_id] = False
        self._group.start_soon(self._occupy, run_id)
        return True

    def close(self) -> None:
        """Take no more runs; those that live here go on."""
        self._closed = True

    async def wait_free(self) -> None:
        while not self.free > 0:  # bounded by the caller's deadline
            await self._freed.wait()

    async def wait_empty(self) -> None:
        while self._living:  # bounded by the caller's deadline
            await anyio.sleep(EMPTY_POLL_S)

    async def _occupy(self, run_id: UUID) -> None:
        try:
            while True:  # bounded by rings: one more look for each burst of them
                self._living[run_id] = False
                await self._look(run_id)
                if self._closed or not self._living[run_id]:
                    return
        finally:
            del self._living[run_id]
            self._freed.set()
            self._freed = anyio.Event()

    async def _look(self, run_id: UUID) -> None:
        """The boundary of the process: a run that fails here must not take the others with it."""
        try:
            await self._live(run_id)
        except Unavailable:
            log.warning("slots.store_away", run_id=str(run_id))
        except Exception:
            log.exception("slots.run_failed", run_id=str(run_id))
