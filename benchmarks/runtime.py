"""A runtime under measurement: real processes on a throwaway folder, their clocks, a view of the servers.

Starts nothing in its own way: `espalier_local` starts the services and servers as `espalier up` does. Below
it stands `load.py`, which runs as a process of its own; above it the scenarios.
"""

import json
import resource
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import anyio
import asyncpg
import httpx2
import psutil
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from redis.asyncio import Redis

from espalier_local.children import ChildPlan, guarded, running
from espalier_local.console import quiet
from espalier_local.folder import throwaway_folder
from espalier_local.options import RuntimeOptions
from espalier_local.ports import free_port
from espalier_local.runtime import READY_TIMEOUT_S, LocalRuntime, local_runtime
from espalier_protocol.ids import from_wire

ROOT: Final = Path(__file__).parents[1]
LINE_BYTES_MAX: Final = 16 * 1024 * 1024
TRIES_MAX: Final = 10
TRAILING_S: Final = 0.3
"""What a run leaves to do after its end (its publish rows are swept every 200 ms) is part of its cost."""

OPEN_FILES: Final = 8192
ECHO_PORT: Final = "echo"
POSTGRES_SHOWN: Final = "server_version fsync synchronous_commit full_page_writes shared_buffers".split()
WRITES: Final = "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
"""Rises by one for each transaction that writes, and is exact at any moment, unlike Postgres' statistics."""

Sql: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Clocks = dict[str, float]
"""CPU seconds by process."""


@dataclass(frozen=True)
class Runtime:
    """One gateway, one worker, their servers, and an eye on each."""

    local: LocalRuntime
    sql: Sql = field(repr=False)
    ports: Mapping[str, int]
    pids: Mapping[str, int]
    facts: Mapping[str, str]

    def clocks(self) -> Clocks:
        return {name: cpu_s(pid) for name, pid in self.pids.items()}

    def resident_bytes(self, name: str) -> int:
        return psutil.Process(_itself(self.pids[name])).memory_info().rss

    async def count(self, query: str, *values: object) -> int:
        """One number that Postgres knows."""
        return int(await self.sql.fetchval(query, *values))

    async def events_of(self, run_id: str) -> int:
        """How many events the run has in Postgres. Raises RuntimeError if they are not numbered 1..n."""
        query = "select count(*), max(seq) from events where run_id = $1"
        row = await self.sql.fetchrow(query, from_wire("run", run_id))
        assert row is not None
        if row["count"] != row["max"]:
            raise RuntimeError(f"Postgres holds {row['count']} events up to number {row['max']}")
        return int(row["count"])

    @asynccontextmanager
    async def second_gateway(self) -> AsyncIterator[str]:
        """Another gateway of the same runtime; gives its URL."""
        plan, port = self.local.gateway.plan, free_port()
        env = {**plan.env, "ESPALIER_PORT": str(port)}
        second = ChildPlan(name="gateway-2", command=plan.command, env=env, grace_s=plan.grace_s)
        url = f"http://127.0.0.1:{port}"
        async with (
            running([second], quiet, restart=False) as [child],
            httpx2.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            await child.become_ready(lambda: _is_ready(client), within_s=READY_TIMEOUT_S)
            yield url

    @asynccontextmanager
    async def load(self, kind: str, **job: Any) -> AsyncIterator["Load"]:
        """A load generator that is connected and warm. It ends with the block, whatever it is doing."""
        wanted = {"kind": kind, "base_urls": [self.local.base_url], "key": self.local.api_key, **job}
        command = guarded([sys.executable, "-m", "benchmarks.load"])
        async with await anyio.open_process(command, stderr=None, cwd=ROOT) as process:
            try:
                load = Load(process)
                await load.tell(wanted)
                await load.hear()
                yield load
            finally:
                with suppress(ProcessLookupError):
                    process.kill()

    async def measure(self, kind: str, **job: Any) -> tuple[dict[str, Any], Clocks]:
        """A load's figures, and the CPU seconds that each process spent on what they were measured of.

        `writes` among the figures is the number of transactions that wrote something meanwhile.
        """
        async with self.load(kind, **job) as load:
            before, written = self.clocks(), await self.count(WRITES)
            figures = await load.go()
            await anyio.sleep(TRAILING_S)
            figures["writes"] = await self.count(WRITES) - written
            spent = {name: after - before[name] for name, after in self.clocks().items()}
        return figures, {**spent, "load generator": figures["cpu_s"]}


class Load:
    """The near end of a load generator's two lines."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self._process = process
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def tell(self, members: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        await self._process.stdin.send(json.dumps(members).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        """Its next line. Raises RuntimeError with what it says went wrong."""
        answer: dict[str, Any] = json.loads(await self._lines.receive_until(b"\n", LINE_BYTES_MAX))
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    async def go(self) -> dict[str, Any]:
        await self.tell({})
        return await self.hear()


@asynccontextmanager
async def open_runtime(
    env: Mapping[str, str], *, script: str = "", postgres_options: Mapping[str, str] | None = None
) -> AsyncIterator[Runtime]:
    """A runtime in a folder that goes with it. `script` is the text of the operator's plan.

    Its broker knows the bench's own MCP server by the names `stdio` and `http`; neither is started before a
    scenario asks for it.
    """
    ports = {ECHO_PORT: free_port()}
    servers = {
        "stdio": {"command": sys.executable, "args": ["-m", "benchmarks.echo_server"], "cwd": str(ROOT)},
        "http": {"url": f"http://127.0.0.1:{ports[ECHO_PORT]}/mcp"},
    }
    with throwaway_folder() as folder:
        options = RuntimeOptions(
            port=0,
            data_dir=folder / "data",
            script=_kept(folder / "plan.yaml", script),
            mcp_servers=_kept(folder / "mcp.json", json.dumps({"mcpServers": servers})),
            postgres_options=postgres_options or {},
            env=env,
            restart=False,  # a crash in mid-measurement must show
        )
        async with local_runtime(options) as local:
            sql = await asyncpg.connect(local.servers.postgres_url)
            try:
                yield await _watched(local, sql, ports)
            finally:
                await sql.close()


async def _watched(local: LocalRuntime, sql: Sql, ports: Mapping[str, int]) -> Runtime:
    gateway, worker = local.gateway.pid, local.workers[0].pid
    assert gateway is not None
    assert worker is not None
    backend = psutil.Process(await sql.fetchval("select pg_backend_pid()"))
    async with Redis.from_url(local.servers.redis_url) as redis:
        server = cast(dict[str, Any], await redis.info("server"))
        stored = await redis.config_get("appendonly", "save")
    pids = {
        "gateway": gateway,
        "worker": worker,
        "postgres": backend.ppid(),
        "redis": int(server["process_id"]),
    }
    shown = [f"{name} {await sql.fetchval(f'show {name}')}" for name in POSTGRES_SHOWN]
    product = server.get("server_name", "redis")
    version = server.get("valkey_version", server["redis_version"])
    kept = [f"{name} {text or 'none'}" for name, text in stored.items()]
    facts = {
        "Postgres": ", ".join(shown).removeprefix("server_version "),
        "Redis": ", ".join([f"{product} {version}", *kept]),
    }
    return Runtime(local, sql, ports, pids, facts)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of all that it started, those that have ended included.

    A process that has ended counts in its parent, once that has collected it. So whoever ends between two
    looks is counted as long as the set of children is the same before and after; else we look again.
    """
    root, total = psutil.Process(pid), 0.0
    for _ in range(TRIES_MAX):
        children = root.children(recursive=True)
        total = 0.0
        for process in (root, *children):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
                total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        if root.children(recursive=True) == children:
            break
    return total


def allow_open_files() -> tuple[str, str] | None:
    """Room for a thousand followers and their ends in the gateway; what it was and is, if that changed it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return str(soft), str(wanted)


def _itself(pid: int) -> int:
    """The process behind the launcher's stub, which on some systems stays as its parent."""
    children: Sequence[psutil.Process] = psutil.Process(pid).children()
    return children[0].pid if children else pid


def _kept(path: Path, text: str) -> Path | None:
    if not text:
        return None
    path.write_text(text)
    return path


async def _is_ready(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).is_success
    except httpx2.TransportError:
        return False
