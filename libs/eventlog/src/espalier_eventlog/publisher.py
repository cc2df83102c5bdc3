"""Publishing: one task per process that carries committed events to Redis, in order.

Neither a cycle nor a request ever waits for Redis. The queue is bounded and what overflows, fails or finds
Redis away is left to the sweeper, which reads the outbox. An act is acknowledged only when Redis has all of
its events.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

import anyio
import structlog
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from espalier_eventlog import DATA_FIELD, STREAM_EVENTS_MAX, STREAM_LIFE_S, TYPE_FIELD, stream_key
from espalier_protocol.events import NumberedEvent
from espalier_protocol.ids import to_wire

QUEUE_ACTS_MAX: Final = 10_000
DEADLINE_S: Final = 0.25
BREAKER_S: Final = 1.0
ACKNOWLEDGE_EVERY_S: Final = 0.2
PASSING: Final = (OutOfMemoryError, ReadOnlyError)
"""Refusals that concern the whole server and end when it is well again."""

ALREADY_THERE: Final = "equal or smaller"
"""What Redis says of an entry id that is not above the last one."""

ABOVE_ALL: Final = f"{2**53}-0"
CLEARED_FIELD: Final = b"c"

log = structlog.get_logger(__name__)


class StreamsAway(Exception):
    """Redis did not take everything. What is missing is still in the outbox."""


class StreamRefused(Exception):
    """Redis answers and refuses this one stream, and will again. Its readers have Postgres."""


Acknowledge = Callable[[Sequence[int]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Act:
    """The events of one committed transaction of one run."""

    run_id: UUID
    outbox_id: int
    events: tuple[NumberedEvent, ...]


@dataclass
class _RunOrder:
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    users: int = 0


class Publisher:
    """`publish` queues and returns; `run` sends. `acknowledge` hears of finished outbox ids."""

    def __init__(self, redis: Redis, prefix: str, acknowledge: Acknowledge) -> None:
        self._redis = redis
        self._prefix = prefix
        self._acknowledge = acknowledge
        self._send, self._receive = anyio.create_memory_object_stream[_Act](QUEUE_ACTS_MAX)
        self._orders: dict[UUID, _RunOrder] = {}
        self._closed_until = 0.0

    @asynccontextmanager
    async def in_order(self, run_id: UUID) -> AsyncIterator[None]:
        """Held around a commit and its `publish`: two writers of this process queue in commit order."""
        order = self._orders.setdefault(run_id, _RunOrder())
        order.users += 1
        try:
            async with order.lock:
                yield
        finally:
            order.users -= 1
            if not order.users:
                self._orders.pop(run_id, None)

    def publish(self, run_id: UUID, outbox_id: int | None, events: tuple[NumberedEvent, ...]) -> None:
        """Queue the events of a committed act; without an outbox row there are none.

        A full queue leaves them to the sweeper.
        """
        if outbox_id is None:
            return
        try:
            self._send.send_nowait(_Act(run_id, outbox_id, events))
        except (anyio.WouldBlock, anyio.ClosedResourceError, anyio.BrokenResourceError):
            log.warning("publisher.left_to_the_sweeper", run_id=str(run_id))

    async def run(self) -> None:
        """Send what is queued, for ever. Outbox rows are forgotten in batches."""
        sent, done = anyio.create_memory_object_stream[int](QUEUE_ACTS_MAX)
        async with self._send, self._receive, sent, done, anyio.create_task_group() as group:
            group.start_soon(self._acknowledge_in_batches, done)
            async for act in self._receive:
                if anyio.current_time() < self._closed_until or not await self._deliver(act):
                    continue
                try:
                    sent.send_nowait(act.outbox_id)
                except anyio.WouldBlock:
                    log.warning("publisher.acknowledge_full")

    async def send(self, run_id: UUID, events: Sequence[NumberedEvent]) -> None:
        """Add the events to the run's stream now. Those that it has already are refused, which is success.

        Raises StreamsAway or StreamRefused; some of the events may be there then.
        """
        try:
            answers = await _add(self._redis, self._prefix, run_id, events)
        except (RedisError, OSError) as error:
            raise StreamsAway from error
        for answer in answers:
            if not isinstance(answer, Exception) or ALREADY_THERE in str(answer):
                continue
            if isinstance(answer, ResponseError) and not isinstance(answer, PASSING):
                raise StreamRefused from answer
            raise StreamsAway from answer

    async def clear(self, run_ids: Sequence[UUID]) -> None:
        """Empty the streams of ended runs, and let nothing that was queued before come into them any more.

        An entry above all others comes and goes: what Redis refuses from then on is older than it. A tail
        that saw it skips it. Raises StreamsAway; then some may be as they were.
        """
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                for run_id in run_ids:
                    key = stream_key(self._prefix, run_id)
                    pipe.xadd(key, {CLEARED_FIELD: b""}, id=ABOVE_ALL)
                    pipe.xtrim(key, maxlen=0, approximate=False)
                    pipe.expire(key, STREAM_LIFE_S)
                answers: list[object] = await pipe.execute(raise_on_error=False)
        except (RedisError, OSError) as error:
            raise StreamsAway from error
        for answer in answers:
            if isinstance(answer, Exception) and ALREADY_THERE not in str(answer):
                raise StreamsAway from answer

    async def _deliver(self, act: _Act) -> bool:
        with anyio.move_on_after(DEADLINE_S):
            try:
                await self.send(act.run_id, act.events)
            except StreamRefused as error:
                log.warning("publisher.stream_refused", run_id=str(act.run_id), error=str(error.__cause__))
                return False
            except StreamsAway as error:
                log.warning("publisher.redis_away", error=type(error.__cause__).__name__)
            else:
                return True
        self._closed_until = anyio.current_time() + BREAKER_S
        return False

    async def _acknowledge_in_batches(self, done: "anyio.abc.ObjectReceiveStream[int]") -> None:
        while True:  # bounded per turn: at most QUEUE_ACTS_MAX ids wait
            batch = [await done.receive()]
            await anyio.sleep(ACKNOWLEDGE_EVERY_S)
            while len(batch) < QUEUE_ACTS_MAX:
                try:
                    batch.append(done.receive_nowait())  # type: ignore[attr-defined]
                except anyio.WouldBlock:
                    break
            await self._acknowledge(batch)


async def _add(redis: Redis, prefix: str, run_id: UUID, events: Sequence[NumberedEvent]) -> list[object]:
    key = stream_key(prefix, run_id)
    async with redis.pipeline(transaction=False) as pipe:
        for event in events:
            line = event.line(to_wire("run", run_id))
            pipe.xadd(
                key,
                {TYPE_FIELD: line.type, DATA_FIELD: line.data},
                id=f"{line.seq}-0",
                maxlen=STREAM_EVENTS_MAX,
                approximate=True,
            )
        pipe.expire(key, STREAM_LIFE_S)
        answers: list[object] = await pipe.execute(raise_on_error=False)
    return answers
