"""Tailing: the streams of many runs, read over a few connections and handed out as they come.

A reader promises speed and order, not completeness: a stream may be trimmed, flushed or late, and Redis may
be away. Whoever watches checks that seq follows seq and has Postgres for the rest (the gateway's `tails`).
Nothing here raises into a watcher; `reaches` says whether a run's lines can be expected at all.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from uuid import UUID, uuid4

import anyio
import structlog
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from espalier_eventlog import DATA_FIELD, TYPE_FIELD, QuickConnection, stream_key
from espalier_protocol.events import EventLine

CONNECTIONS_MAX: Final = 8
READ_EVENTS_MAX: Final = 100
"""Events of one run in one answer."""
BLOCK_S: Final = 1.0
"""How long a read waits on the server: the most that a lost ring can delay a new watch."""
ANSWER_S: Final = 2.5
"""How long a read may take. Above BLOCK_S, or every silent second would look like an outage."""
CONNECT_S: Final = 1.0
CLOSE_S: Final = 1.0
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0
CONTROL_LIFE_S: Final = 60

log = structlog.get_logger(__name__)

OnLines: TypeAlias = Callable[[Sequence[EventLine]], None]
"""Takes some lines of one run, in order. Called in the reader's task: it must neither wait nor raise."""


@dataclass(slots=True)
class _Watch:
    last_seq: int
    on_lines: OnLines

    def hand_out(self, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> None:
        self.last_seq = max(self.last_seq, _seq(entries[-1][0]))
        lines = [
            EventLine(_seq(entry_id), fields[TYPE_FIELD].decode(), fields[DATA_FIELD].decode())
            for entry_id, fields in entries
            if TYPE_FIELD in fields and DATA_FIELD in fields  # what is not ours becomes a hole
        ]
        if lines:
            self.on_lines(lines)


@dataclass(slots=True)
class _Shard:
    """The watches of one connection, and the control stream that ends its read when they change."""

    control: bytes
    watches: dict[bytes, _Watch] = field(default_factory=dict)
    filled: anyio.Event = field(default_factory=anyio.Event)
    control_id: bytes = b"0"
    reading: bool = False
    ring: bool = False
    healthy: bool = True

    def add(self, key: bytes, watch: _Watch) -> None:
        assert key not in self.watches, "one watch per run"
        self.watches[key] = watch
        self.ring = self.ring or self.reading
        self.filled.set()

    async def positions(self) -> dict[bytes, bytes]:
        """Where to read from, as soon as there is anything to read."""
        if not self.watches:
            self.filled = anyio.Event()
            await self.filled.wait()
        self.reading, self.ring = True, False
        places = {key: b"%d-0" % watch.last_seq for key, watch in self.watches.items()}
        return {self.control: self.control_id, **places}

    def hand_out(self, answer: Sequence[Any]) -> None:
        for key, entries in answer:
            if key == self.control:
                self.control_id = entries[-1][0]
            elif entries and key in self.watches:  # it may have gone while the answer was under way
                self.watches[key].hand_out(entries)


class StreamReader:
    """`watch` and `unwatch` are instant; `run` reads, for ever."""

    def __init__(self, redis_url: str, prefix: str, *, connections: int = CONNECTIONS_MAX) -> None:
        self._url = redis_url
        self._prefix = prefix
        name = f"{prefix}tail:{uuid4().hex}"
        self._shards = [_Shard(f"{name}:{place}".encode()) for place in range(connections)]
        self._rung = anyio.Event()

    def watch(self, run_id: UUID, last_seq: int, on_lines: OnLines) -> None:
        """Hand out the run's lines that follow `last_seq`, those that are there already included."""
        shard = self._shard(run_id)
        shard.add(self._key(run_id), _Watch(last_seq, on_lines))
        if shard.ring:
            self._rung.set()

    def unwatch(self, run_id: UUID) -> None:
        self._shard(run_id).watches.pop(self._key(run_id), None)

    def reaches(self, run_id: UUID) -> bool:
        """False while Redis does not answer the connection that this run is read over."""
        return self._shard(run_id).healthy

    @property
    def healthy(self) -> bool:
        return all(shard.healthy for shard in self._shards if shard.watches)

    @property
    def watched(self) -> int:
        return sum(len(shard.watches) for shard in self._shards)

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            for shard in self._shards:
                group.start_soon(self._read, shard)
            group.start_soon(self._ring)

    async def _read(self, shard: _Shard) -> None:
        pause_s = BACKOFF_FIRST_S
        async with self._connection() as redis:
            while True:  # bounded by the task group; a turn waits for a watch, then at most ANSWER_S
                places: dict[Any, Any] = {**await shard.positions()}
                try:
                    with anyio.fail_after(ANSWER_S):
                        answer = await redis.xread(places, count=READ_EVENTS_MAX, block=int(BLOCK_S * 1000))
                except (RedisError, OSError) as error:
                    _turned(shard, healthy=False, error=type(error).__name__)
                    await anyio.sleep(pause_s)
                    pause_s = min(pause_s * 2, BACKOFF_MAX_S)
                    continue
                finally:
                    shard.reading = False
                _turned(shard, healthy=True)
                pause_s = BACKOFF_FIRST_S
                shard.hand_out(answer)

    async def _ring(self) -> None:
        """Write the control streams of changed shards. A ring that is lost costs BLOCK_S at most."""
        async with self._connection() as redis:
            while True:  # bounded by the task group; a turn answers all changes so far
                await self._rung.wait()
                self._rung = anyio.Event()
                changed = [shard for shard in self._shards if shard.ring]
                for shard in changed:
                    shard.ring = False
                try:
                    with anyio.fail_after(ANSWER_S):
                        await _write_controls(redis, [shard.control for shard in changed])
                except (RedisError, OSError) as error:
                    log.warning("tail.ring_lost", error=type(error).__name__)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Redis]:
        """One connection, opened at its first command. Time limits and retries are ours, in every version of
        the client: its own retries would hide an outage from `reaches`.
        """
        connections = ConnectionPool.from_url(
            self._url,
            connection_class=QuickConnection,
            protocol=2,
            max_connections=1,
            socket_connect_timeout=CONNECT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )
        redis = Redis.from_pool(connections)
        try:
            yield redis
        finally:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await redis.aclose()

    def _shard(self, run_id: UUID) -> _Shard:
        return self._shards[run_id.int % len(self._shards)]  # the low bits of an id are random

    def _key(self, run_id: UUID) -> bytes:
        return stream_key(self._prefix, run_id).encode()


async def _write_controls(redis: Redis, controls: Sequence[bytes]) -> None:
    async with redis.pipeline(transaction=False) as pipe:
        for control in controls:
            pipe.xadd(control, {b"n": b"1"}, maxlen=1, approximate=False)
            pipe.expire(control, CONTROL_LIFE_S)
        await pipe.execute()


def _turned(shard: _Shard, *, healthy: bool, error: str | None = None) -> None:
    if shard.healthy != healthy:
        log.warning("tail.redis_back" if healthy else "tail.redis_away", error=error)
    shard.healthy = healthy


def _seq(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])
