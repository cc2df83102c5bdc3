"""Migrating: the one job that changes the schema, and how services wait for it.

Run as `python -m espalier_store.migrate`, by `espalier up`, or by a deploy job. Two at once are safe: the
second waits for an advisory lock. It polls `pg_try_advisory_lock`, since a session that waits inside
`pg_advisory_lock` holds a snapshot and would deadlock with CREATE INDEX CONCURRENTLY.
"""

from pathlib import Path
from typing import Final

import anyio
from alembic.command import upgrade
from alembic.config import Config
from sqlalchemy import text
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

MIGRATE_LOCK: Final = 0x65737061
LOCK_WAIT_S: Final = 120.0
LOCK_POLL_S: Final = 0.1


class MigrationBusy(Exception):
    """Another migration held the lock for longer than LOCK_WAIT_S."""


async def migrate(postgres_url: str) -> None:
    """Bring the database at `postgres_url` (`postgresql://…`) to the newest revision.

    Raises MigrationBusy, or whatever Postgres says of a statement; nothing is half-applied.
    """
    engine = create_async_engine(_async_url(postgres_url), poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            await _lock(connection)
            try:
                await connection.run_sync(_upgrade)
                await connection.commit()
            finally:
                await connection.rollback()
                await connection.execute(text("select pg_advisory_unlock(:key)"), {"key": MIGRATE_LOCK})
    finally:
        await engine.dispose()


def _async_url(postgres_url: str) -> str:
    _, rest = postgres_url.split("://", 1)
    return f"postgresql+asyncpg://{rest.replace('sslmode=', 'ssl=')}"


async def _lock(connection: AsyncConnection) -> None:
    for _ in range(int(LOCK_WAIT_S / LOCK_POLL_S)):
        taken = await connection.execute(text("select pg_try_advisory_lock(:key)"), {"key": MIGRATE_LOCK})
        await connection.commit()
        if taken.scalar():
            return
        await anyio.sleep(LOCK_POLL_S)
    raise MigrationBusy("Another migration is still running; try again when it has ended.")


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    upgrade(config, "head")


if __name__ == "__main__":
    from espalier_store.pool import PostgresSettings

    anyio.run(migrate, PostgresSettings().postgres_url)
