"""Connections to Postgres, and what each of them promises.

A stopped process must not hold a run, a budget or a key: every connection ends a transaction that idles and
a lock that is waited for after half a lease.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, TypeAlias

import anyio
import asyncpg
import orjson
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from espalier_domain.errors import Conflicted, Unavailable

Connection: TypeAlias = (
    "asyncpg.Connection[asyncpg.Record] | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"
)
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

ACQUIRE_WAIT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_S = 30
AGAIN_S = 0.5
COMMIT_WAIT_S = 2.4
ROLLBACK_WAIT_S = 1.0
"""Neither can be given up half-way, so a caller who is owed an answer soon waits this long on top."""

COMMAND_WAIT_S_MIN = 5.0
RETRY_AFTER_MS = 1000
REPEATABLE = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError, asyncpg.LockNotAvailableError)
AWAY = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # what asyncpg says of a connection that broke between two of its steps
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.ReadOnlySQLTransactionError,  # a standby, before or after a fail-over
    asyncpg.PostgresIOError,
)


class PostgresSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ESPALIER_", use_attribute_docstrings=True)

    postgres_url: str = "postgresql://espalier:espalier@127.0.0.1:5432/espalier"
    """Address of the database, `postgresql://user:password@host:port/name`."""
    postgres_connections_max: int = Field(default=10, ge=2)
    """Connections of one process."""
    lease_ttl_s: float = Field(default=4.0, gt=0)
    """Life of a lease in seconds. A dead worker's runs go on elsewhere after at most this."""


@asynccontextmanager
async def open_pool(settings: PostgresSettings) -> AsyncIterator[Pool]:
    """A pool on a database that answers and has its schema; waits for both as long as it takes."""
    pool = await _connect(settings)
    try:
        await _wait_for_schema(pool)
        yield pool
    finally:
        with anyio.move_on_after(CONNECT_TIMEOUT_S, shield=True):
            await pool.close()
        pool.terminate()


async def connect(settings: PostgresSettings) -> Connection:
    """One connection outside the pool, with the same promises."""
    return await asyncpg.connect(
        settings.postgres_url,
        timeout=CONNECT_TIMEOUT_S,
        server_settings=_promises(settings),
    )


@asynccontextmanager
async def reading(pool: Pool) -> AsyncIterator[Connection]:
    """A connection for single statements, which need no transaction around them: reads for the most part.

    Raises Conflicted when Postgres asks for the work to be repeated, Unavailable when no connection can be
    had or the database goes away.
    """
    try:
        # A time limit costs a timer and a task each time; one that is idle is had without waiting.
        async with pool.acquire(timeout=None if pool.get_idle_size() else ACQUIRE_WAIT_S) as connection:
            yield connection
    except REPEATABLE as error:
        raise Conflicted(RETRY_AFTER_MS) from error
    except AWAY as error:
        raise Unavailable(RETRY_AFTER_MS) from error


@asynccontextmanager
async def transaction(pool: Pool) -> AsyncIterator[Connection]:
    """One request or one step. Commits when the block ends well.

    Raises like `reading`. After Conflicted nothing was written; after Unavailable it may have been.
    """
    async with reading(pool) as connection, _one_transaction(connection):
        yield connection


@asynccontextmanager
async def _one_transaction(connection: Connection) -> AsyncIterator[None]:
    """Ends in a whole COMMIT or a whole ROLLBACK, also for a task that is being cancelled.

    A connection on which that is not known to have happened is closed: its next user must not begin inside
    this transaction. Postgres then rolls back, or completes a COMMIT that it had already got.
    """
    block = connection.transaction()
    with _closed_in_doubt(connection):
        await block.start()
    try:
        yield
    except BaseException:
        rolling_back = anyio.move_on_after(ROLLBACK_WAIT_S, shield=True)
        with rolling_back, suppress(*AWAY), _closed_in_doubt(connection):
            await block.rollback()
        raise
    with _closed_in_doubt(connection), anyio.fail_after(COMMIT_WAIT_S, shield=True):
        await block.commit()


@contextmanager
def _closed_in_doubt(connection: Connection) -> Iterator[None]:
    try:
        yield
    except (*AWAY, anyio.get_cancelled_exc_class()):
        connection.terminate()
        raise


async def _connect(settings: PostgresSettings) -> Pool:
    while True:  # bounded by the operator's patience: a service has nothing to do without its database
        try:
            return await asyncpg.create_pool(
                settings.postgres_url,
                min_size=1,
                max_size=settings.postgres_connections_max,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=max(COMMAND_WAIT_S_MIN, settings.lease_ttl_s),
                server_settings=_promises(settings),
                init=_speak_json,
                reset=_keep,
                max_inactive_connection_lifetime=0,  # else a timer is set and stopped around every use
            )
        except (*AWAY, asyncpg.PostgresError):
            await anyio.sleep(AGAIN_S)


def _promises(settings: PostgresSettings) -> dict[str, str]:
    half_lease_ms = str(int(settings.lease_ttl_s * 500))
    return {
        "idle_in_transaction_session_timeout": half_lease_ms,
        "lock_timeout": half_lease_ms,
        "statement_timeout": str(STATEMENT_TIMEOUT_S * 1000),
        "application_name": "espalier",
    }


async def _keep(_: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Nothing here leaves state in a session, so asyncpg's reset between two users would be a wasted trip."""


async def _speak_json(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=_encode, decoder=orjson.loads)


def _encode(value: object) -> str:
    return orjson.dumps(value).decode()


async def _wait_for_schema(pool: Pool) -> None:
    while True:  # bounded by the migrate job, which the operator runs
        with suppress(Unavailable):
            async with reading(pool) as connection:
                if await schema_ready(connection):
                    return
        await anyio.sleep(AGAIN_S)


REVISIONS: Final = ("0001", "0002", "0003", "0004", "0005")
"""The revisions of the schema that this build knows, oldest first."""

REVISION = "select version_num from schema_revision"


async def schema_ready(connection: Connection) -> bool:
    """Whether the schema is at this build's revision. An unknown revision is newer and accepted."""
    try:
        revision = await connection.fetchval(REVISION)
    except asyncpg.UndefinedTableError:
        return False
    return revision is not None and revision not in REVISIONS[:-1]
