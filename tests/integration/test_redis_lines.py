"""A line to Redis that breaks in the same turn of the event loop in which something is sent over it.

Services run on uvloop, which says RuntimeError of a closed handle where asyncio says nothing yet. Nobody who
asks Redis expects that: it ended a gateway with all its streams.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from espalier_eventlog import RedisSettings, open_streams
from espalier_jobs import QUEUE_AWAY, open_queue
from espalier_local.servers import LocalServers

pytestmark = pytest.mark.anyio


def streams(redis_url: str) -> AbstractAsyncContextManager[Any]:
    return open_streams(RedisSettings(redis_url=redis_url))


async def on_uvloop(act: Callable[[], Awaitable[None]]) -> None:
    await anyio.to_thread.run_sync(lambda: anyio.run(act, backend_options={"use_uvloop": True}))


@pytest.mark.parametrize("opened", [open_queue, streams], ids=["the doorbell's", "the event log's"])
async def test_a_connection_that_broke_in_this_turn_of_the_loop_is_away_like_any_other(
    opened: Callable[[str], AbstractAsyncContextManager[Any]], servers: LocalServers
) -> None:
    async def breaks() -> None:
        async with opened(servers.redis_url) as redis:
            connection = await redis.connection_pool.get_connection()
            try:
                connection._writer.transport.abort()
                await anyio.lowlevel.checkpoint()
                with pytest.raises(QUEUE_AWAY):
                    await connection.send_command("PING")
            finally:
                await redis.connection_pool.release(connection)
            assert await redis.ping(), "the next one gets a connection that works"

    await on_uvloop(breaks)
