"""Real servers for the tests: one Postgres and one Redis per test process, one database per test.

Databases are copies of a migrated template, so a test starts in about a tenth of a second. Nothing is shared
between tests but the servers; every Redis key carries the test's own prefix.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import asyncpg
import pytest

from espalier_local.keys import create_key
from espalier_local.servers import LocalServers, local_servers
from espalier_protocol.access import SCOPES
from espalier_secrets import fingerprint
from espalier_store.keys import find_key
from espalier_store.migrate import migrate
from espalier_store.pool import Pool, PostgresSettings, open_pool, transaction

TEMPLATE = "espalier_template"
STOP_WAIT_S = 10
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


@dataclass
class Process:
    """A service of the product, as a real process whose log is kept."""

    popen: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.popen.terminate()
        return self.popen.wait(STOP_WAIT_S)

    def output(self) -> str:
        return self.log.read_text()


Start = Callable[..., Process]


@pytest.fixture
def start(stores: Stores, tmp_path: Path) -> Iterator[Start]:
    """Start `python -m MODULE` on the test's stores; everything is killed when the test ends."""
    started: list[Process] = []

    def start_process(*command: str, **settings: str) -> Process:
        log = tmp_path / f"process-{len(started)}.log"
        environment = {**os.environ, **stores.environment(), **settings, "ESPALIER_LOG_FORMAT": "json"}
        with log.open("wb") as file:
            popen = subprocess.Popen(
                [sys.executable, "-m", *command], env=environment, stdout=file, stderr=file
            )
        started.append(Process(popen, log))
        return started[-1]

    yield start_process
    for process in started:
        process.kill()


@pytest.fixture
async def owner_id(pool: Pool, api_key: str) -> UUID:
    async with transaction(pool) as connection:
        caller = await find_key(connection, fingerprint(api_key))
    assert caller is not None
    return caller.owner_id
