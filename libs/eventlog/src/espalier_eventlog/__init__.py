"""Redis Streams: the hot tail of every run's events.

Postgres holds the log; a stream is a copy that fans out fast and may vanish at any moment. The entry id is
`<seq>-0`, so Redis itself refuses an event that it has already. `publisher` writes, `tail` reads; both know
nothing of rows, and whoever reads must check that seq follows seq.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

import hiredis
from pydantic_settings import BaseSettings, SettingsConfigDict
from redis.asyncio import Connection, ConnectionPool, Redis
from redis.exceptions import ConnectionError as RedisLost

STREAM_LIFE_S: Final = 3600
"""A stream expires this long after its last event; the log stays in Postgres."""

STREAM_EVENTS_MAX: Final = 10_000
"""Length to which a stream is trimmed. A reader that is further behind reads Postgres."""

TYPE_FIELD: Final = b"t"
DATA_FIELD: Final = b"d"
"""The two fields of a stream entry: the event's type, and its envelope as one line of JSON."""


class RedisSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ESPALIER_", use_attribute_docstrings=True)

    redis_url: str = "redis://127.0.0.1:6379/0"
    """Address of Redis or Valkey, `redis://[user:password@]host:port/db`."""
    redis_prefix: str = "espalier:"
    """What our keys begin with and job ids contain, so that deployments can share a server."""


CONNECT_TIMEOUT_S: Final = 1.0
WRITERS_MAX: Final = 16
"""Connections of one process that write to streams; readers have their own."""


class QuickConnection(Connection):
    """The client's connection without the parts that cost more than the command itself.

    It packs commands in C, as the client does elsewhere. Before a command it looks whether the server has
    hung up, but reads nothing: whoever breaks an exchange off disconnects, so there are no stray bytes.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        return [hiredis.pack_command(args)]

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [b"".join(hiredis.pack_command(tuple(command)) for command in commands)]

    async def can_read_destructive(self) -> bool:
        return self._reader is None or self._reader.at_eof()

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """uvloop raises RuntimeError for a connection that broke in this very turn of its loop."""
        try:
            await super().send_packed_command(command, check_health)
        except RuntimeError as error:
            raise RedisLost(str(error)) from error


@asynccontextmanager
async def open_streams(settings: RedisSettings) -> AsyncIterator[Redis]:
    """The connections for publishing. Made lazily: a process starts, works and stops without Redis."""
    connections = ConnectionPool.from_url(
        settings.redis_url,
        connection_class=QuickConnection,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        max_connections=WRITERS_MAX,
    )
    async with Redis(connection_pool=connections) as redis:
        try:
            yield redis
        finally:
            await connections.disconnect()


def stream_key(prefix: str, run_id: UUID) -> str:
    return f"{prefix}run:{run_id}"
