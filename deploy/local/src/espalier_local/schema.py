"""The schema's part of a start: migrate, and say in one sentence why not. The work itself is the store's."""

import socket
import ssl
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from espalier_local.errors import LocalError
from espalier_store.migrate import migrate

REFUSALS: Final = {
    "28000": "it refuses this user or password",
    "28P01": "it refuses this user or password",
    "3D000": "it does not exist",
}
"""What Postgres says at the door, by SQLSTATE."""


async def bring_up_to_date(postgres_url: str) -> None:
    """Migrate the database; safe beside another launcher that does the same."""
    try:
        await migrate(postgres_url)
    except Exception as err:  # the network, asyncpg, SQLAlchemy and alembic each have errors of their own
        raise unreachable(postgres_url, err) from err


def unreachable(postgres_url: str, err: Exception) -> LocalError:
    """One sentence for whatever a database at this address answered; its password stays out."""
    return LocalError(f"The database {_named(postgres_url)} cannot be used: {_reason(err)}.")


def _named(postgres_url: str) -> str:
    try:
        address = urlsplit(postgres_url)
        host, port = address.hostname or "localhost", address.port or 5432
    except ValueError:
        return "at the given address"
    return f"{address.path.lstrip('/')} on {host}, port {port},"


def _reason(err: Exception) -> str:
    *_, innermost = chain = list(_chain(err))
    states = [str(getattr(each, "sqlstate", None)) for each in chain]
    for state in states:
        if state in REFUSALS:
            return REFUSALS[state]
    if isinstance(err, socket.gaierror):
        return "no machine of that name is known"
    if isinstance(err, OSError) and type(err) is not ConnectionError and not isinstance(err, ssl.SSLError):
        return "nobody answers there"
    if isinstance(err, ValueError):  # its own words may quote the address
        return "the address is not well-formed"
    return (str(innermost) or type(innermost).__name__).strip().splitlines()[0].rstrip(".")


def _chain(err: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from: libraries wrap what the database said."""
    while err is not None:
        yield err
        err = err.__cause__
