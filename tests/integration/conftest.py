"""Real servers for the tests: one Postgres and one Redis per test process, one database per test.

Databases are copies of a migrated template, so a test starts in about a tenth of a second. Nothing is shared
between tests but the servers; every Redis key carries the test's own prefix.
"""

import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import anyio
import asyncpg
import httpx2
import pytest
from forked import Service, start_service
from tests.integration.wire import Gateway, Wire, running_gateway

from espalier_gateway.settings import GatewaySettings
from espalier_local.keys import create_key
from espalier_local.ports import free_port
from espalier_local.servers import LocalServers, local_servers
from espalier_protocol.access import SCOPES
from espalier_secrets import fingerprint
from espalier_store.keys import find_key
from espalier_store.migrate import migrate
from espalier_store.pool import Pool, PostgresSettings, open_pool, transaction

TEMPLATE = "espalier_template"
READY_WAIT_S = 20.0
POLL_S = 0.02
NOT_DURABLE = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "300",
}


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
        }


@pytest.fixture(scope="session")
def servers_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="espalier-test-"))
    folder.chmod(0o755)  # the servers' own user enters it
    yield folder / "data"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
async def servers(anyio_backend: object, servers_folder: Path) -> AsyncIterator[LocalServers]:
    async with local_servers(servers_folder, postgres_options=NOT_DURABLE) as running:
        await _make_template(running.postgres_url)
        yield running


@pytest.fixture
async def stores(servers: LocalServers) -> AsyncIterator[Stores]:
    name = f"test_{uuid4().hex}"
    await _execute(servers.postgres_url, f"create database {name} template {TEMPLATE}")
    yield Stores(_on_database(servers.postgres_url, name), servers.redis_url, f"{name}:")
    await _execute(servers.postgres_url, f"drop database {name} with (force)")


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


async def _make_template(postgres_url: str) -> None:
    await _execute(postgres_url, f"create database {TEMPLATE}")
    await migrate(_on_database(postgres_url, TEMPLATE))
    await _execute(postgres_url, f"alter database {TEMPLATE} allow_connections false")


def _on_database(postgres_url: str, name: str) -> str:
    return urlsplit(postgres_url)._replace(path=f"/{name}").geturl()


async def _execute(postgres_url: str, statement: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


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
    """Nothing is cached, so that what a test changes is seen at once."""
    return GatewaySettings(
        postgres_url=stores.postgres_url,
        redis_url=stores.redis_url,
        redis_prefix=stores.redis_prefix,
        port=0,
        cache_s=0,
        gateway_drain_s=1,
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
            with anyio.fail_after(READY_WAIT_S):
                while not await _is_ready(client):
                    await anyio.sleep(POLL_S)
        return GatewayProcess(service, base_url)

    return start_it


async def _is_ready(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).is_success
    except httpx2.TransportError:
        return False
