"""What a test has of the real servers: a database of its own, its part of Redis, and services on them.

Databases are copies of a migrated template, emptied and used again by the next test, so that a test starts
in a fraction of a second. Nothing is shared between tests but the servers; every Redis key carries the test's
own prefix.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID, uuid4

import anyio
import httpx2
import pytest
from forked import Service, start_service
from own_servers import OwnServer, own_postgres_server, own_redis_server
from pydantic import SecretStr
from scripted_runs import Plan, make_agent, start_run
from tests.integration.databases import return_database, take_database
from tests.integration.wire import Gateway, Wire, running_gateway

from espalier_client.client import AepClient
from espalier_gateway.settings import GatewaySettings
from espalier_local.folder import throwaway_folder
from espalier_local.keys import create_key
from espalier_local.ports import free_port
from espalier_local.servers import LocalServers
from espalier_protocol.access import SCOPES
from espalier_secrets import fingerprint
from espalier_store.keys import find_key
from espalier_store.migrate import migrate
from espalier_store.pool import Pool, PostgresSettings, open_pool, transaction

READY_WAIT_S = 20.0
POLL_S = 0.02


@dataclass(frozen=True)
class Stores:
    """Where a test's database and its part of Redis are."""

    postgres_url: str
    redis_url: str
    redis_prefix: str

    def environment(self) -> dict[str, str]:
        """What a service process needs to use them."""
        return {
            "ESPALIER_POSTGRES_URL": self.postgres_url,
            "ESPALIER_REDIS_URL": self.redis_url,
            "ESPALIER_REDIS_PREFIX": self.redis_prefix,
            "ESPALIER_SECRETS_KEY": SECRETS_KEY,
        }


@asynccontextmanager
async def own_stores(servers: LocalServers) -> AsyncIterator[Stores]:
    """A database that nobody else has now, and a part of Redis that nobody has had."""
    postgres_url = await take_database(servers)
    yield Stores(postgres_url, servers.redis_url, f"test_{uuid4().hex}:")
    await return_database(servers, postgres_url)


@pytest.fixture
async def stores(servers: LocalServers) -> AsyncIterator[Stores]:
    async with own_stores(servers) as own:
        yield own


@pytest.fixture
def postgres_settings(stores: Stores) -> PostgresSettings:
    return PostgresSettings(postgres_url=stores.postgres_url)


@pytest.fixture
async def pool(postgres_settings: PostgresSettings) -> AsyncIterator[Pool]:
    async with open_pool(postgres_settings) as opened:
        yield opened


@pytest.fixture
async def api_key(pool: Pool) -> str:
    """A key of the owner `one` with every scope."""
    async with transaction(pool) as connection:
        return await create_key(connection, "one", SCOPES)


# --- processes ---------------------------------------------------------------------------------------------


Start = Callable[..., Service]


@pytest.fixture
def start(stores: Stores, tmp_path: Path) -> Iterator[Start]:
    """Start services on the test's stores; whatever still runs when the test ends is killed."""
    started: list[Service] = []

    def start_it(service: str, *, dies_at: str = "", **settings: str) -> Service:
        log = tmp_path / f"{service}-{len(started)}.log"
        environment = {**stores.environment(), "ESPALIER_LOG_FORMAT": "json", **settings}
        started.append(start_service(service, environment, log, dies_at=dies_at))
        return started[-1]

    yield start_it
    for service in started:
        service.kill()


@pytest.fixture
async def owner_id(pool: Pool, api_key: str) -> UUID:
    async with transaction(pool) as connection:
        caller = await find_key(connection, fingerprint(api_key))
    assert caller is not None
    return caller.owner_id


# ------------------------------------------------------------------ a gateway on loopback


@pytest.fixture
def gateway_settings(stores: Stores) -> GatewaySettings:
    """Nothing is cached, so that what a test changes is seen at once; memory is searched by words alone."""
    return GatewaySettings(
        postgres_url=stores.postgres_url,
        redis_url=stores.redis_url,
        redis_prefix=stores.redis_prefix,
        port=0,
        secrets_key=SecretStr(SECRETS_KEY),
        cache_s=0,
        gateway_drain_s=1,
        embeddings="off",
    )


@pytest.fixture
async def gateway(gateway_settings: GatewaySettings, pool: Pool) -> AsyncIterator[Gateway]:
    async with running_gateway(gateway_settings, pool) as running:
        yield running


@pytest.fixture
async def wire(gateway: Gateway) -> Wire:
    """A caller of the owner `one` with every scope and a session."""
    return await gateway.caller("one")


@dataclass
class GatewayProcess:
    """A gateway process and where it listens."""

    service: Service
    base_url: str


StartGateway = Callable[..., Awaitable[GatewayProcess]]


@pytest.fixture
async def start_gateway(start: Start) -> StartGateway:
    """Start a gateway and wait until it is ready; on `port`, the place of one that has died."""

    async def start_it(port: int | None = None, **settings: str) -> GatewayProcess:
        base_url = f"http://127.0.0.1:{port or free_port()}"
        service = start("gateway", ESPALIER_PORT=base_url.rsplit(":")[-1], **settings)
        async with httpx2.AsyncClient(base_url=base_url, trust_env=False) as client:
            await until_ready(client)
        return GatewayProcess(service, base_url)

    return start_it


INTERNAL_KEY = "only-for-tests-0123456789"
SECRETS_KEY = "only-for-tests-0123456789-0123456789"


@dataclass
class BrokerProcess:
    """A tool broker's process and where it listens; `worker_settings` make a worker use it."""

    service: Service
    base_url: str

    @property
    def port(self) -> int:
        return int(self.base_url.rsplit(":")[-1])

    @property
    def worker_settings(self) -> dict[str, str]:
        return {"ESPALIER_BROKER_URL": self.base_url, "ESPALIER_INTERNAL_KEY": INTERNAL_KEY}


StartBroker = Callable[..., Awaitable[BrokerProcess]]


@pytest.fixture
async def start_broker(start: Start, tmp_path: Path) -> StartBroker:
    """Start a broker on MCP servers by name and wait until it is ready; on `port`, a dead one's place."""

    async def start_it(
        mcp_servers: dict[str, Any] | None = None, *, port: int | None = None, **settings: str
    ) -> BrokerProcess:
        listed = tmp_path / "mcp.json"
        listed.write_text(json.dumps({"mcpServers": mcp_servers or {}}))
        base_url = f"http://127.0.0.1:{port or free_port()}"
        settings = {"ESPALIER_INTERNAL_KEY": INTERNAL_KEY, "ESPALIER_MCP_SERVERS": str(listed), **settings}
        service = start("broker", ESPALIER_BROKER_PORT=base_url.rsplit(":")[-1], **settings)
        async with httpx2.AsyncClient(base_url=base_url, trust_env=False) as client:
            await until_ready(client)
        return BrokerProcess(service, base_url)

    return start_it


async def until_ready(client: httpx2.AsyncClient) -> None:
    with anyio.fail_after(READY_WAIT_S):
        while not await _is_ready(client):
            await anyio.sleep(POLL_S)


async def _is_ready(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).is_success
    except httpx2.TransportError:
        return False


# ------------------------------------------------------------------ what a test may harm

T = TypeVar("T")


@dataclass
class Deployment:
    """Two workers, a gateway, a caller of it with an agent, and how long its calls took."""

    workers: list[Service]
    gateway: GatewayProcess
    client: AepClient
    agent_id: str
    took_s: list[float] = field(default_factory=list)

    async def timed(self, call: Awaitable[T]) -> T:
        began_at = anyio.current_time()
        answer = await call
        self.took_s.append(anyio.current_time() - began_at)
        return answer

    async def run(self, plan: Plan) -> str:
        """The id of a new run that follows the plan."""
        return (await self.timed(start_run(self.client, plan, self.agent_id))).id


@pytest.fixture
async def deployment(start: Start, start_gateway: StartGateway, api_key: str) -> AsyncIterator[Deployment]:
    workers = [start("worker", ESPALIER_MODELS_SCRIPTED="on") for _ in range(2)]
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as client:
        yield Deployment(workers, gateway, client, (await make_agent(client)).id)


@pytest.fixture
async def own_redis(anyio_backend: object) -> AsyncIterator[OwnServer]:
    with throwaway_folder() as folder:
        async with own_redis_server(folder) as server:
            yield server


@pytest.fixture
async def own_postgres(anyio_backend: object) -> AsyncIterator[OwnServer]:
    """With our schema in the database of its URL."""
    with throwaway_folder() as folder:
        async with own_postgres_server(folder) as server:
            await migrate(server.url)
            yield server
