"""The servers of one machine as a context manager: Postgres and Redis on a data folder, or at URLs.

Does not know the schema, and no service. Above it stand `runtime.py` and the tests, below it `postgres.py`,
`redis.py`, `addresses.py` and `folder.py`.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from espalier_local.addresses import POSTGRES_SCHEMES, REDIS_SCHEMES, require_kind, require_redis
from espalier_local.console import OnLine, quiet
from espalier_local.folder import RUNTIME, DataFolder, open_folder
from espalier_local.postgres import run_postgres
from espalier_local.redis import run_redis


@dataclass(frozen=True, slots=True)
class LocalServers:
    """The URLs have passwords in them: never log these."""

    folder: DataFolder
    postgres_url: str = field(repr=False)
    redis_url: str = field(repr=False)


@asynccontextmanager
async def local_servers(
    data_dir: Path,
    *,
    postgres_url: str | None = None,
    redis_url: str | None = None,
    postgres_options: Mapping[str, str] | None = None,
    on_line: OnLine = quiet,
) -> AsyncIterator[LocalServers]:
    """Hold the data folder and run what no URL was given for. Enter it from the main thread.

    While it is open, `runtime.json` tells other commands where the servers are. Raises LocalError.
    """
    require_kind(postgres_url, POSTGRES_SCHEMES, "--postgres-url")
    require_kind(redis_url, REDIS_SCHEMES, "--redis-url")
    if redis_url is not None:
        await require_redis(redis_url)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(open_folder(data_dir))
        if postgres_url is None:
            postgres = run_postgres(folder, on_line, options=postgres_options)
            postgres_url = await stack.enter_async_context(postgres)
        if redis_url is None:
            redis_url = await stack.enter_async_context(run_redis(folder, on_line))
        folder.write(RUNTIME, {"postgres_url": postgres_url, "redis_url": redis_url})
        stack.callback(folder.remove, RUNTIME)
        yield LocalServers(folder, postgres_url, redis_url)
