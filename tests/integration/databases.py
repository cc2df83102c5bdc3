"""Databases for tests: made from the template, and emptied for the next test, which is quicker.

One is used again only if it still has exactly the template's tables, indexes and columns; a test that changed
the schema costs a new one. Whoever was left connected is cut off first: nobody of the last test
writes for the next one.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
import asyncpg
from tests.conftest import TEMPLATE, execute, on_database

from espalier_local.servers import LocalServers

CUT_OFF_S: Final = 5.0
POLL_S: Final = 0.005
SHAPE: Final = """
select md5(string_agg(c.relname || '.' || a.attname, ',' order by c.relname, a.attname))
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
where c.relnamespace = 'public'::regnamespace
"""
OTHERS: Final = """
select count(pg_terminate_backend(pid)) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid()
"""
EMPTY: Final = """
do $$
declare filled text[] := '{}'; found boolean; name text;
begin
    for name in
        select tablename from pg_tables where schemaname = 'public' and tablename <> 'schema_revision'
    loop
        execute format('select exists (select from %I)', name) into found;
        if found then filled := filled || quote_ident(name); end if;
    end loop;
    if filled <> '{}' then
        execute 'truncate ' || array_to_string(filled, ', ') || ' restart identity cascade';
    end if;
end $$
"""

_free: dict[str, list[str]] = {}
_shape: dict[str, str] = {}
"""By the address of the servers."""


async def take_database(servers: LocalServers) -> str:
    """The address of an empty database with the whole schema."""
    if free := _free.get(servers.postgres_url):
        return free.pop()
    name = f"test_{uuid4().hex}"
    await execute(servers.postgres_url, f"create database {name} template {TEMPLATE}")
    address = on_database(servers.postgres_url, name)
    if servers.postgres_url not in _shape:
        async with _connected(address) as connection:
            _shape[servers.postgres_url] = await connection.fetchval(SHAPE)
    return address


async def return_database(servers: LocalServers, address: str) -> None:
    """Make it ready for the next test, or drop it."""
    if await _emptied(address, _shape[servers.postgres_url]):
        _free.setdefault(servers.postgres_url, []).append(address)
    else:
        name = urlsplit(address).path[1:]
        await execute(servers.postgres_url, f"drop database {name} with (force)")


async def _emptied(address: str, shape: str) -> bool:
    async with _connected(address) as connection:
        if await connection.fetchval(SHAPE) != shape:
            return False
        with anyio.fail_after(CUT_OFF_S):
            while await connection.fetchval(OTHERS):
                await anyio.sleep(POLL_S)
        await connection.execute(EMPTY)
    return True


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    connection = await asyncpg.connect(address)
    try:
        yield connection
    finally:
        await connection.close()
