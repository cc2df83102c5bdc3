"""Addresses of servers that run already: of the right kind, and somebody answers there.

Postgres is asked by the migration that every start begins with (`schema.py`). Redis is asked here, once: a
service lives without it, but an address that is wrong from the start is a mistake and no outage. Above it
stands `servers.py`.
"""

from urllib.parse import urlsplit

import anyio
from redis.exceptions import AuthenticationError, RedisError

from espalier_eventlog import RedisSettings, open_streams
from espalier_local.errors import LocalError

POSTGRES_SCHEMES = ("postgresql://", "postgres://")
REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
REDIS_WAIT_S = 2.0


def require_kind(url: str | None, schemes: tuple[str, ...], option: str) -> None:
    """Raises LocalError, which never repeats the address: there may be a password in it."""
    if url is None:
        return
    if not url.startswith(schemes):
        raise LocalError(f"The address given with {option} must start with {' or '.join(schemes)}.")
    try:
        _ = urlsplit(url).port
    except ValueError as err:
        raise LocalError(f"The address given with {option} is not well-formed.") from err


async def require_redis(url: str) -> None:
    """Raises LocalError if no Redis at this address takes a command within REDIS_WAIT_S."""
    try:
        with anyio.fail_after(REDIS_WAIT_S):
            async with open_streams(RedisSettings(redis_url=url)) as redis:
                await redis.ping()
    except AuthenticationError as err:
        raise LocalError(f"{_named(url)} refuses this user or password.") from err
    except (OSError, RedisError) as err:  # a bound that has passed is an OSError too
        raise LocalError(f"{_named(url)} does not answer.") from err
    except ValueError as err:
        raise LocalError("The address given with --redis-url is not well-formed.") from err


def _named(url: str) -> str:
    address = urlsplit(url)
    if address.scheme == "unix":
        return f"The Redis at {address.path}"
    return f"The Redis on {address.hostname or 'localhost'}, port {address.port or 6379},"
