"""The doorbell of a run: an arq job that carries a run id and says "look now".

Losing a ring, or hearing it twice, costs time and nothing else: each worker also looks for due runs itself.
Only this lib and the worker's doorbell say "arq".
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, cast
from uuid import UUID, uuid4

import anyio
import hiredis
import orjson
from arq.connections import ArqRedis
from arq.constants import job_key_prefix
from arq.jobs import serialize_job
from arq.utils import timestamp_ms
from redis.asyncio import Connection, ConnectionPool
from redis.exceptions import ConnectionError as RedisLost
from redis.exceptions import RedisError

RING: Final = "ring"
"""Name of the job; its one argument is the run id as text."""

RING_DEADLINE_S: Final = 0.25
RING_LIFE_S: Final = 60
"""A ring that nobody heard for this long is dropped; the run is found in Postgres."""

TOKENS_MAX: Final = 64
"""Length to which the wake list is trimmed: the id of a job wakes one idle worker. The queue has all jobs."""

CONNECT_TIMEOUT_S: Final = 1.0
CONNECTIONS_MAX: Final = 32

QUEUE_AWAY = (RedisError, OSError)
"""What the queue raises when Redis cannot be asked."""


class _QuickConnection(Connection):
    """Packs commands in C: the client's own way in Python costs more than the rest of a ring."""

    def pack_command(self, *args: Any) -> list[bytes]:
        return [hiredis.pack_command(args)]

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [b"".join(hiredis.pack_command(tuple(command)) for command in commands)]

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """uvloop raises RuntimeError for a connection that broke in this very turn of its loop."""
        try:
            await super().send_packed_command(command, check_health)
        except RuntimeError as error:
            raise RedisLost(str(error)) from error


@asynccontextmanager
async def open_queue(redis_url: str) -> AsyncIterator[ArqRedis]:
    """The connections for ringing and hearing. Made lazily: a process starts and stops without Redis."""
    connections = ConnectionPool.from_url(
        redis_url,
        connection_class=_QuickConnection,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        max_connections=CONNECTIONS_MAX,
    )
    async with ArqRedis(connections, job_serializer=serialize, job_deserializer=deserialize) as queue:
        try:
            yield queue
        finally:
            await connections.disconnect()


@dataclass(frozen=True, slots=True)
class QueueNames:
    """The keys of the queue below the deployment's prefix."""

    prefix: str

    @property
    def queue(self) -> str:
        return f"{self.prefix}arq:queue"

    @property
    def wake_list(self) -> str:
        return f"{self.prefix}arq:wake"

    def health(self, process: str) -> str:
        return f"{self.prefix}arq:health:{process}"


def serialize(job: dict[str, object]) -> bytes:
    """JSON, where arq's own default is pickle and so code execution for whoever can write to Redis."""
    return orjson.dumps(job, default=str)


def deserialize(text: bytes) -> dict[str, Any]:
    job = orjson.loads(text)
    assert isinstance(job, dict)
    return job


async def wait_for_ring(queue: ArqRedis, names: QueueNames, wait_s: float) -> bytes | None:
    """The id of a job that somebody rang with, or None after `wait_s`. Raises QUEUE_AWAY."""
    pop = cast(Callable[..., Awaitable[Any]], queue.blpop)  # its stubs know no fraction of a second
    popped = await pop([names.wake_list], timeout=wait_s)
    return popped[1] if popped else None


async def take_rings(queue: ArqRedis, names: QueueNames, job_ids: Sequence[bytes]) -> list[str]:
    """Take jobs off the queue and give the run ids that they carry; those of another worker are left out.

    Taken is heard: whoever dies now has lost a ring, which costs a second. arq's own way is made for jobs
    that must not be lost, and takes six round trips for each where this takes one for all. Raises QUEUE_AWAY.
    """
    async with queue.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.zrem(names.queue, job_id)
            pipe.getdel(job_key_prefix.encode() + job_id)
        answers = await pipe.execute()
    return [run_id for job in answers[1::2] if job is not None for run_id in _carried(job)]


def _carried(job: bytes) -> list[str]:
    """The arguments of a job; of one that is not ours, none."""
    try:
        arguments = orjson.loads(job)["a"]
    except (ValueError, TypeError, KeyError):
        return []
    return [text for text in arguments if isinstance(text, str)] if isinstance(arguments, list) else []


class Doorbell:
    """Rings for runs. Never raises for an absent Redis and never waits longer than RING_DEADLINE_S."""

    def __init__(self, redis: ArqRedis, names: QueueNames) -> None:
        self._redis = redis
        self._names = names

    async def ring(self, run_id: UUID) -> bool:
        """Whether the ring was heard by Redis. The run is found without it within a second."""
        with anyio.move_on_after(RING_DEADLINE_S):
            try:
                await self._enqueue(run_id)
            except QUEUE_AWAY:
                return False
            return True
        return False

    async def _enqueue(self, run_id: UUID) -> None:
        """What arq's `enqueue_job` writes, and the job's id on the wake list, in one round trip.

        arq watches the job's key first, in case the id is not fresh; ours always is.
        """
        job_id, now_ms = f"{self._names.prefix}{uuid4().hex}", timestamp_ms()
        job = serialize_job(RING, (str(run_id),), {}, None, now_ms, serializer=serialize)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.psetex(job_key_prefix + job_id, RING_LIFE_S * 1000, job)
            pipe.zadd(self._names.queue, {job_id: now_ms})
            pipe.rpush(self._names.wake_list, job_id)
            pipe.ltrim(self._names.wake_list, -TOKENS_MAX, -1)
            await pipe.execute()
