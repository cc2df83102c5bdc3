"""Hearing the doorbell: an arq worker whose only job offers a run to a slot and returns.

No run lives inside an arq job, so neither arq nor Redis can end one. When Redis goes, the poller is started
again with back-off, and the look-out finds due runs in Postgres once a second all the while.
"""

from typing import Any, Final, cast
from uuid import UUID, uuid4

import anyio
import structlog
from arq.connections import ArqRedis
from arq.typing import WorkerCoroutine
from arq.worker import Worker, func

from espalier_domain.errors import Unavailable
from espalier_jobs import QUEUE_AWAY, RING, QueueNames, deserialize, serialize, take_rings, wait_for_ring
from espalier_run_worker.slots import Slots
from espalier_store.fleet import due_runs
from espalier_store.pool import Pool, transaction

POLL_S: Final = 0.001
"""Least time between two looks at the queue; the wait itself is the pop of the wake list."""

WAKE_WAIT_S: Final = 0.25
QUEUE_READ_MAX: Final = 1000
HEALTH_EVERY_S: Final = 10
ANSWER_WAIT_S: Final = 2.0
"""A Redis that does not answer for this long is away. Without it a connection that died unseen would leave
the poller deaf for ever."""

RESTART_S: Final = (0.1, 5.0)
STEADY_S: Final = 10.0
"""A poller that lived this long was well; the next pause is the first one again."""

LOOK_OUT_EVERY_S: Final = 1.0

log = structlog.get_logger(__name__)


class _Poller(Worker):
    """arq's worker with the latency of a blocking queue, reading only while a slot is free."""

    def __init__(self, slots: Slots, names: QueueNames, queue: ArqRedis) -> None:
        super().__init__(
            [func(cast(WorkerCoroutine, self._ring), name=RING)],
            queue_name=names.queue,
            redis_pool=queue,
            handle_signals=False,
            poll_delay=POLL_S,
            queue_read_limit=QUEUE_READ_MAX,
            keep_result=0,
            health_check_key=names.health(uuid4().hex),
            health_check_interval=HEALTH_EVERY_S,
            job_serializer=serialize,
            job_deserializer=deserialize,
            log_results=False,
        )
        self._slots = slots
        self._names = names
        self._queue = queue
        self._read_queue_at = 0.0

    async def _ring(self, _: dict[str, Any], run_id: str) -> None:
        try:
            self._slots.offer(UUID(run_id))
        except ValueError:
            log.warning("doorbell.not_a_run")

    async def main(self) -> None:
        """Instead of arq's, which first talks to Redis without a bound."""
        while True:  # bounded by ANSWER_WAIT_S in each turn
            await self._poll_iteration()
            await anyio.sleep(POLL_S)

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Instead of arq's, which guards each job as if it could not be lost (see `take_rings`)."""
        if taken := job_ids[: self._slots.free]:
            for run_id in await take_rings(self._queue, self._names, taken):
                await self._ring(self.ctx, run_id)

    async def _poll_iteration(self) -> None:
        """One job whose id was popped, and now and then the whole queue: more may wait than ids were kept."""
        with anyio.move_on_after(WAKE_WAIT_S):
            await self._slots.wait_free()
        if self._slots.free > 0:
            with anyio.fail_after(ANSWER_WAIT_S):
                job_id = await wait_for_ring(self._queue, self._names, WAKE_WAIT_S)
                if job_id is not None:
                    await self.start_jobs([job_id])
                if anyio.current_time() >= self._read_queue_at:
                    self._read_queue_at = anyio.current_time() + WAKE_WAIT_S
                    await super()._poll_iteration()


async def listen(slots: Slots, names: QueueNames, queue: ArqRedis) -> None:
    """Hear rings, for ever; whatever ends the poller only costs the time until the next one."""
    pause_s = RESTART_S[0]
    while True:  # bounded: at least RESTART_S[0] between two pollers
        began_at = anyio.current_time()
        try:
            await _Poller(slots, names, queue).main()
        except QUEUE_AWAY as error:
            log.warning("doorbell.redis_away", error=type(error).__name__)
        if anyio.current_time() - began_at > STEADY_S:
            pause_s = RESTART_S[0]
        await anyio.sleep(pause_s)
        pause_s = min(pause_s * 2, RESTART_S[1])


async def look_out(slots: Slots, pool: Pool) -> None:
    """Find due runs in Postgres once a second, so that a lost ring costs a second."""
    while True:  # bounded: one statement a second for at most as many runs as there are free slots
        if slots.free > 0:
            try:
                async with transaction(pool) as connection:
                    due = await due_runs(connection, slots.free)
            except Unavailable:
                due = []
            for run_id in due:
                slots.offer(run_id)
        await anyio.sleep(LOOK_OUT_EVERY_S)
