"""What every test shares: the one event loop that the runtime runs on, and one Postgres and one Redis.

The servers start with the first test that asks for them, once per test process; tests/unit never does. What a
test has of them, and processes, are not here: tests/integration, tests/contract and tests/e2e own theirs.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from espalier_local.folder import throwaway_folder
from espalier_local.servers import LocalServers, local_servers
from espalier_store.migrate import migrate

TEMPLATE = "espalier_template"
NOT_DURABLE = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": "300",
}


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncpg and arq run on asyncio alone. Session-wide, so that fixtures of every scope may be async."""
    return "asyncio"


@pytest.fixture(scope="session")
def servers_folder() -> Iterator[Path]:
    with throwaway_folder() as folder:
        yield folder / "data"


@pytest.fixture(scope="session")
async def servers(anyio_backend: object, servers_folder: Path) -> AsyncIterator[LocalServers]:
    async with local_servers(servers_folder, postgres_options=NOT_DURABLE) as running:
        await _make_template(running.postgres_url)
        yield running


async def _make_template(postgres_url: str) -> None:
    await execute(postgres_url, f"create database {TEMPLATE}")
    await migrate(on_database(postgres_url, TEMPLATE))
    await execute(postgres_url, f"alter database {TEMPLATE} allow_connections false")


def on_database(postgres_url: str, name: str) -> str:
    return urlsplit(postgres_url)._replace(path=f"/{name}").geturl()


async def execute(postgres_url: str, statement: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
