"""The least that a durable tool call through a second process costs: its commits and hops, no code of ours.

Here stands the worker's part: commit `planned`, ask over a kept-open connection, be answered, commit `told`.
`python -m benchmarks.floor PORT` is the broker's: commit `sent`, call the echo server, commit the result,
answer with the ms that the call took. It takes Postgres' URL from `FLOOR_POSTGRES_URL`. Each commit is a
single statement of one row.
"""

import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from statistics import median
from typing import Final

import anyio
import asyncpg
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from benchmarks.runtime import ROOT, Runtime
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

from espalier_local.children import guarded
from espalier_local.ports import free_port

FRAME_BYTES: Final = 200
STARTING_S: Final = 15.0
URL_NAME: Final = "FLOOR_POSTGRES_URL"

TABLE: Final = "floor_calls (id int primary key, state text not null, result text)"
PLANNED: Final = "insert into floor_calls values ($1, 'planned')"
SENT: Final = "update floor_calls set state = 'sent' where id = $1 and state = 'planned' returning id"
DONE: Final = "update floor_calls set state = 'done', result = $2 where id = $1 returning id"
TOLD: Final = "update floor_calls set state = 'told' where id = $1 and state = 'done' returning id"


async def floor(runtime: Runtime, warm: int, calls: int, apart_s: float) -> tuple[float, float]:
    """p50 in ms from before `planned` to the answer, with and without the far side's call of the server.

    `apart_s` lies between an answer and the next call.
    """
    spent, around = [], []
    await runtime.sql.execute(f"create table {TABLE}")
    try:
        async with _far_side(runtime.local.servers.postgres_url) as far:
            answers = BufferedByteReceiveStream(far)
            for number in range(warm + calls):
                began = time.perf_counter()
                await runtime.sql.execute(PLANNED, number)
                await far.send(str(number).encode().ljust(FRAME_BYTES))
                called_ms = float(await answers.receive_exactly(FRAME_BYTES))
                spent.append((time.perf_counter() - began) * 1e3)
                around.append(spent[-1] - called_ms)
                next_at = anyio.current_time() + apart_s
                if await runtime.sql.fetchval(TOLD, number) != number:
                    raise RuntimeError(f"call {number} was answered before it was done")
                await anyio.sleep_until(next_at)
    finally:
        await runtime.sql.execute("drop table floor_calls")
    return median(spent[warm:]), median(around[warm:])


@asynccontextmanager
async def _far_side(postgres_url: str) -> AsyncIterator[SocketStream]:
    port = free_port()
    command = guarded([sys.executable, "-m", "benchmarks.floor", str(port)])
    env = {**os.environ, URL_NAME: postgres_url}
    async with await anyio.open_process(command, cwd=ROOT, env=env, stderr=None) as process:
        try:
            with anyio.fail_after(STARTING_S):
                while (far := await _connected(port)) is None:
                    await anyio.sleep(0.05)
            async with far:
                yield far
        finally:
            with suppress(ProcessLookupError):
                process.kill()


async def _connected(port: int) -> SocketStream | None:
    try:
        return await anyio.connect_tcp("127.0.0.1", port)
    except OSError:
        return None


async def _answer(near: SocketStream) -> None:
    sql = await asyncpg.connect(os.environ[URL_NAME])
    server = StdioServerParameters(command=sys.executable, args=["-m", "benchmarks.echo_server"], cwd=ROOT)
    frames = BufferedByteReceiveStream(near)
    async with near, Client(server) as client:
        while True:  # bounded by the near side, which kills this process
            number = int(await frames.receive_exactly(FRAME_BYTES))
            if await sql.fetchval(SENT, number) != number:
                raise RuntimeError(f"call {number} is not planned")
            began = time.perf_counter()
            result = await client.call_tool("echo", {"text": str(number)})
            called_ms = (time.perf_counter() - began) * 1e3
            await sql.fetchval(DONE, number, result.model_dump_json())
            await near.send(str(called_ms).encode().ljust(FRAME_BYTES))


async def _serve(port: int) -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port) as listener:
        await listener.serve(_answer)


if __name__ == "__main__":
    anyio.run(_serve, int(sys.argv[1]), backend_options={"use_uvloop": True})
