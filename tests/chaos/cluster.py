"""The runtime under test: servers that may be crashed, and services that are started again whenever they die.

It only keeps things going and looks on: what is done to them is the nemesis'. Every process is a real one.
"""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit
from uuid import UUID

import anyio
import anyio.to_thread
import asyncpg
import httpx2
import psutil
from anyio.abc import TaskGroup
from forked import Service, preload, start_service
from mcp_servers.running import PROGRAM as LEDGER
from own_servers import OwnServer, own_postgres_server, own_redis_server
from tests.chaos.history import Fault, Orphaned, Probe, Process, Usage
from tests.chaos.proxies import Proxy, proxy_process
from tests.chaos.recording import Recorder

from espalier_local.children import Child, ChildPlan, running
from espalier_local.console import quiet
from espalier_local.folder import throwaway_folder
from espalier_local.ports import free_port
from espalier_protocol.ids import to_wire
from espalier_store.migrate import migrate

LEASE_TTL_S: Final = 3.0
WORKERS, GATEWAYS, BROKERS = 3, 2, 2
PREFIX: Final = "storm:"
INTERNAL_KEY: Final = "only-for-the-storm-0123456789"
SECRETS_KEY: Final = "only-for-the-storm-0123456789-0123456789"
POLL_S: Final = 0.05
READY: Final = 200
CONNECTED: Final = "mcp.connected"
TOOL_SERVERS: Final = 2
PROBE_EVERY_S: Final = 0.5
PROBE_S: Final = 1.0
ASK_S: Final = 1.0
READY_S: Final = 60.0
STOPS_S: Final = 10.0
SIGKILLED: Final = -signal.SIGKILL
AWAY: Final = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)
HELD: Final = """
select r.id, r.lease_token, extract(epoch from clock_timestamp())::float8 as clock, exists (
    select from tool_calls c where c.run_id = r.id and c.state in ('planned', 'sent')) as calling
from runs r where r.lease_until > clock_timestamp()
"""


@dataclass
class Place:
    """Where one service belongs: it is started here as often as it dies."""

    name: str
    service: str
    environment: dict[str, str]
    base_url: str = ""
    running: Service | None = None
    dies_at: str = ""
    """The named moment at which the process that runs here kills itself."""
    next_dies_at: str = ""
    pause_s: float = 0.1
    starts: int = 0
    ready: bool = False
    """Whether this process has been ready; it may not be any more."""
    killed: bool = False
    wanted: bool = True

    @property
    def pid(self) -> int:
        assert self.running is not None and self.running.process.pid is not None
        return self.running.process.pid

    @property
    def lives(self) -> bool:
        return self.running is not None and not self.running.has_died()

    def signal(self, number: signal.Signals) -> bool:
        """Send it, if there is a process to send it to."""
        if not self.lives:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


class Claims:
    """Which worker took which run under which token, as the workers themselves wrote it down."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._by_token: dict[tuple[UUID, int], int] = {}

    def holder(self, run_id: UUID, token: int) -> int | None:
        """The pid of the worker that holds the run by this token."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if line.endswith(b"\n"):
                    self._read += len(line)
                    told = json.loads(line)
                    self._by_token[UUID(told["run"]), told["token"]] = told["pid"]
        return self._by_token.get((run_id, token))


@dataclass
class Cluster:
    """Everything that runs. `places` by name: `worker-0`, `gateway-1`, `broker-0`."""

    recorder: Recorder
    folder: Path
    postgres: OwnServer
    redis: OwnServer
    places: dict[str, Place]
    proxies: dict[str, Proxy]
    ledger: Child
    ledger_path: Path
    claims: Claims
    starters: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))

    @property
    def base_urls(self) -> dict[str, str]:
        return {place.name: place.base_url for place in self.of("gateway")}

    def of(self, service: str) -> list[Place]:
        return [place for place in self.places.values() if place.service == service]

    # ---- the database, as the bench sees it: past all proxies

    @asynccontextmanager
    async def database(self, wait_s: float = ASK_S) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
        """Raises AWAY."""
        connection = await asyncpg.connect(self.postgres.url, timeout=wait_s, command_timeout=wait_s)
        try:
            yield connection
        finally:
            connection.terminate()

    async def note_death(self, place: Place, act: Literal["killed", "stopped"]) -> None:
        """What a worker holds at this moment. Nothing is noted while the database cannot be asked."""
        at, pid = self.recorder.now(), place.pid
        try:
            async with self.database() as connection:
                rows = await connection.fetch(HELD)
        except AWAY:
            return
        mine = [row for row in rows if self.claims.holder(row["id"], row["lease_token"]) == pid]
        run_ids = [to_wire("run", row["id"]) for row in mine if not row["calling"]]
        if run_ids:
            self.recorder.note(Orphaned(at, rows[0]["clock"], place.name, act, run_ids))

    # ---- keeping

    async def keep(self, place: Place) -> None:
        """Start it, note what becomes of it, start it again; until it is no longer wanted."""
        async with _client(place) as client:
            while place.wanted:  # bounded by `wanted`
                await self._start(place)
                assert place.running is not None
                while not place.running.has_died():
                    if not place.ready and await _is_ready(place, client):
                        place.ready = True
                        self._note(place, "ready")
                    await anyio.sleep(POLL_S)
                await self._ended(place)
                await anyio.sleep(place.pause_s)

    async def _start(self, place: Place) -> None:
        """In a thread: a fork takes so long that all lines through the proxies would wait for it."""
        place.starts += 1
        place.ready = place.killed = False
        place.dies_at, place.next_dies_at = place.next_dies_at, ""
        log = self.folder / f"{place.name}.{place.starts}.log"
        claims = self.claims.path if place.service == "worker" else None
        start = partial(start_service, dies_at=place.dies_at, claims=claims)
        place.running = await anyio.to_thread.run_sync(
            start, place.service, place.environment, log, limiter=self.starters
        )
        self._note(place, "started")

    async def _ended(self, place: Place) -> None:
        assert place.running is not None
        code = place.running.process.exitcode
        self._note(place, "exited", code)
        if place.dies_at and code == SIGKILLED and not place.killed:
            row = "F2" if place.service == "gateway" else "F1"
            detail = {"moment": place.dies_at}
            self.recorder.note(Fault(self.recorder.now(), row, f"{place.service}.dies", place.name, detail))
            if place.service == "worker":
                await self.note_death(place, "killed")

    def _note(
        self, place: Place, act: Literal["started", "ready", "exited"], code: int | None = None
    ) -> None:
        self.recorder.note(Process(self.recorder.now(), place.name, place.pid, act, code))

    async def probe(self, place: Place) -> None:
        """Ask for its life and its readiness, for ever."""
        async with _client(place) as client:
            while True:  # bounded: one question each PROBE_EVERY_S
                for path in ("/healthz", "/readyz"):
                    status = await _status(client, path)
                    self.recorder.note(Probe(self.recorder.now(), place.name, path, status))
                await anyio.sleep(PROBE_EVERY_S)

    async def all_ready(self) -> None:
        with anyio.fail_after(READY_S):
            while not all(place.lives and place.ready for place in self.places.values()):
                await anyio.sleep(POLL_S)

    async def all_connected(self) -> None:
        """Until every broker has its tool servers: only then does it hold open what it always holds."""
        with anyio.fail_after(READY_S):
            for place in self.of("broker"):
                while place.running is None or place.running.output().count(CONNECTED) < TOOL_SERVERS:
                    await anyio.sleep(POLL_S)

    def note_usage(self, when: Literal["before", "after"]) -> None:
        for place in self.places.values():
            with suppress(psutil.Error):
                process = psutil.Process(place.pid)
                used = Usage(
                    self.recorder.now(),
                    place.name,
                    when,
                    process.num_fds(),
                    len(process.children(recursive=True)),
                    process.memory_info().rss,
                )
                self.recorder.note(used)

    async def stop(self) -> None:
        """SIGTERM for all of them, and SIGKILL for whoever does not go."""
        for place in self.places.values():
            place.wanted = False
            place.signal(signal.SIGCONT)
            place.signal(signal.SIGTERM)
        with anyio.move_on_after(STOPS_S):
            while any(place.lives for place in self.places.values()):
                await anyio.sleep(POLL_S)
        for place in self.places.values():
            place.signal(signal.SIGKILL)


def errors(logs: Path) -> Iterator[tuple[str, str]]:
    """(event, line) of whatever the services logged as an error."""
    for path in sorted(logs.glob("*.log")):
        for line in path.read_text(errors="replace").splitlines():
            if event := _error(line):
                yield event, f"{path.name}: {line}"


def _error(line: str) -> str | None:
    """The event of a line that tells of an error, be it ours or Python's own."""
    try:
        told = json.loads(line)
    except ValueError:
        return line if line.startswith(("Traceback", "RuntimeError", "ExceptionGroup")) else None
    if isinstance(told, dict) and told.get("level") in ("error", "critical"):
        return str(told.get("event"))
    return None


def _client(place: Place) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=place.base_url, trust_env=False, timeout=PROBE_S)


async def _is_ready(place: Place, client: httpx2.AsyncClient) -> bool:
    if not place.base_url:
        assert place.running is not None
        return place.running.log.exists() and "worker.ready" in place.running.output()
    return await _status(client, "/readyz") == READY


async def _status(client: httpx2.AsyncClient, path: str) -> int | None:
    try:
        with anyio.fail_after(PROBE_S):
            return (await client.get(path)).status_code
    except (httpx2.HTTPError, TimeoutError):
        return None


# --- building it -----------------------------------------------------------------------------------------


@asynccontextmanager
async def open_cluster(recorder: Recorder, model_port: int) -> AsyncIterator[Cluster]:
    """Servers, proxies and tool server run; the services are for `start_all`."""
    preload("espalier_run_worker.models.openai_compatible", "witness")
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(throwaway_folder())
        postgres = await stack.enter_async_context(own_postgres_server(folder / "postgres-data"))
        redis = await stack.enter_async_context(own_redis_server(folder / "redis-data"))
        await migrate(postgres.url)
        ledger_port, ledger_path = free_port(), folder / "ledger.jsonl"
        ledger = await stack.enter_async_context(_ledger(ledger_path, ledger_port))
        proxied = {
            "model": model_port,
            "ledger": ledger_port,
            **{f"postgres/{name}": _port(postgres.url) for name in PROXIED_POSTGRES},
            **{f"redis/{name}": _port(redis.url) for name in PROXIED_REDIS},
        }
        proxies = await stack.enter_async_context(proxy_process(proxied))
        mcp = folder / "mcp.json"
        desk = {"command": sys.executable, "args": [str(LEDGER), str(ledger_path), "--clock"]}
        told = {"url": f"http://127.0.0.1:{proxies['ledger'].port}/mcp"}
        mcp.write_text(json.dumps({"mcpServers": {"ledger": told, "desk": desk}}))
        shared = {
            "ESPALIER_REDIS_PREFIX": PREFIX,
            "ESPALIER_SECRETS_KEY": SECRETS_KEY,
            "ESPALIER_INTERNAL_KEY": INTERNAL_KEY,
            "ESPALIER_LOG_FORMAT": "json",
            "ESPALIER_LEASE_TTL_S": str(LEASE_TTL_S),
            "ESPALIER_EMBEDDINGS": "off",
            "ESPALIER_MODELS_SCRIPTED": "on",
            "ESPALIER_MCP_SERVERS": str(mcp),
            "ESPALIER_EGRESS_ALLOW": f"127.0.0.1:{proxies['model'].port}",
            "ESPALIER_RPC_RATE": "500",
            "ESPALIER_RPC_BURST": "1000",
            "ESPALIER_STREAMS_PER_KEY": "2000",
        }
        places = _places(partial(_environment, shared, postgres.url, redis.url, proxies))
        logs = folder / "logs"
        logs.mkdir()
        yield Cluster(
            recorder,
            logs,
            postgres,
            redis,
            places,
            proxies,
            ledger,
            ledger_path,
            Claims(folder / "claims.jsonl"),
        )


PROXIED_POSTGRES: Final = ("worker-1", "worker-2", "gateway-1", "broker-1")
"""The others reach it directly, so that some of the runtime is undisturbed by what only a proxy does."""
PROXIED_REDIS: Final = ("worker-1", "gateway-1")


def _environment(
    shared: Mapping[str, str], postgres_url: str, redis_url: str, proxies: Mapping[str, Proxy], name: str
) -> dict[str, str]:
    return {
        **shared,
        "ESPALIER_POSTGRES_URL": _through(postgres_url, proxies.get(f"postgres/{name}")),
        "ESPALIER_REDIS_URL": _through(redis_url, proxies.get(f"redis/{name}")),
    }


def _places(environment: Any) -> dict[str, Place]:
    brokers = [f"http://127.0.0.1:{free_port()}" for _ in range(BROKERS)]
    found: list[Place] = []
    for number, url in enumerate(brokers):
        name = f"broker-{number}"
        own = {"ESPALIER_BROKER_PORT": str(_port(url))}
        found.append(Place(name, "broker", environment(name) | own, url))
    for number in range(GATEWAYS):
        name, url = f"gateway-{number}", f"http://127.0.0.1:{free_port()}"
        found.append(Place(name, "gateway", environment(name) | {"ESPALIER_PORT": str(_port(url))}, url))
    for number in range(WORKERS):
        name = f"worker-{number}"
        own = {"ESPALIER_BROKER_URL": brokers[number % BROKERS]}
        found.append(Place(name, "worker", environment(name) | own))
    return {place.name: place for place in found}


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def _through(url: str, proxy: Proxy | None) -> str:
    if proxy is None:
        return url
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{proxy.port}")).geturl()


@asynccontextmanager
async def _ledger(path: Path, port: int) -> AsyncIterator[Child]:
    """The tool server that all brokers share: a program of its own, started again when it dies."""
    command = [sys.executable, str(LEDGER), str(path), "--http", "--port", str(port), "--clock"]
    plan = ChildPlan(name="ledger", command=command, env=dict(os.environ), grace_s=0.5, quiet=True)
    async with running([plan], quiet) as [child]:
        await child.become_ready(partial(_listens, port), within_s=READY_S)
        yield child


async def _listens(port: int) -> bool:
    try:
        async with await anyio.connect_tcp("127.0.0.1", port):
            return True
    except OSError:
        return False


async def start_all(cluster: Cluster, group: TaskGroup) -> None:
    """Start every service, keep it, and ask those that can be asked how they are."""
    for place in cluster.places.values():
        group.start_soon(cluster.keep, place)
    await cluster.all_ready()
    for place in cluster.places.values():
        if place.base_url:
            group.start_soon(cluster.probe, place)
