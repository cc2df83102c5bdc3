"""A gateway, a tool broker and a worker for each file of the contract, and embedders that drive them.

Embedders are cheap: each test has an owner of its own, so that no test sees what another one made.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import httpx
import httpx2
import pytest
from forked import start_service
from helix_sdk import PROTOCOL_VERSION, HelixClient
from tests.contract.embedder import NINE, Embedder
from tests.integration.conftest import INTERNAL_KEY, Stores, own_stores, until_ready
from tests.integration.wire import ANSWER_WAIT_S, Wire

from espalier_local.keys import create_key
from espalier_local.ports import free_port
from espalier_local.servers import LocalServers
from espalier_protocol.access import SCOPES
from espalier_secrets.sealing import new_sealing_key
from espalier_store.pool import Pool, PostgresSettings, open_pool, transaction


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requirement(id): the requirement of the contract that a test shows")


@dataclass(frozen=True)
class Runtime:
    """Where the runtime is, and the connections that its embedders share.

    On `model_port` of this machine a test may put a model provider: its workers may reach that.
    """

    base_url: str
    model_port: int
    pool: Pool
    published_http: httpx.AsyncClient
    http: httpx2.AsyncClient

    async def embedder(self, scopes: tuple[str, ...] = SCOPES) -> Embedder:
        """A new owner whose key has these scopes; its client asked for all nine capabilities."""
        async with transaction(self.pool) as connection:
            key = await create_key(connection, f"embedder-{uuid4().hex}", scopes)
        client = HelixClient(self.base_url, key, http_client=self.published_http)
        agreed = await client.initialize([PROTOCOL_VERSION], dict.fromkeys(NINE, True))
        wire = Wire(self.http, key, agreed["session_id"], PROTOCOL_VERSION)
        return Embedder(client, wire, agreed["capabilities"])


@pytest.fixture(scope="module")
async def runtime(servers: LocalServers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Runtime]:
    base_url, model_port = f"http://127.0.0.1:{free_port()}", free_port()
    async with (
        own_stores(servers) as stores,
        open_pool(PostgresSettings(postgres_url=stores.postgres_url)) as pool,
        httpx.AsyncClient(timeout=ANSWER_WAIT_S, trust_env=False) as published_http,
        httpx2.AsyncClient(base_url=base_url, timeout=ANSWER_WAIT_S, trust_env=False) as http,
        _running(stores, http, model_port, tmp_path_factory.mktemp("contract")),
    ):
        yield Runtime(base_url, model_port, pool, published_http, http)


@asynccontextmanager
async def _running(
    stores: Stores, http: httpx2.AsyncClient, model_port: int, logs: Path
) -> AsyncIterator[None]:
    """The worker also follows plans that come with a run; without one it answers "ok"."""
    broker = f"http://127.0.0.1:{free_port()}"
    environment = {
        **stores.environment(),
        "ESPALIER_PORT": str(http.base_url.port),
        "ESPALIER_BROKER_PORT": broker.rsplit(":")[-1],
        "ESPALIER_BROKER_URL": broker,
        "ESPALIER_INTERNAL_KEY": INTERNAL_KEY,
        "ESPALIER_SECRETS_KEY": new_sealing_key(),
        "ESPALIER_MODELS_SCRIPTED": "on",
        "ESPALIER_EGRESS_ALLOW": f"127.0.0.1:{model_port}",
    }
    services = [
        start_service(name, environment, logs / f"{name}.log") for name in ("gateway", "broker", "worker")
    ]
    try:
        await until_ready(http)
        async with httpx2.AsyncClient(base_url=broker, trust_env=False) as to_broker:
            await until_ready(to_broker)
        yield
    finally:
        for service in services:
            service.kill()


@pytest.fixture
async def embedder(runtime: Runtime) -> Embedder:
    """Somebody with every scope."""
    return await runtime.embedder()
