"""Keys from the operator's side: `keys create`, and the first key, which `up` leaves in a profile.

Opens the connection and the transaction; the key itself is made by `keys.py`. Below it stands the store,
above it `runtime.py` and the command.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from espalier_local.folder import PROFILE
from espalier_local.keys import create_key
from espalier_local.preflight import read_settings
from espalier_local.schema import unreachable
from espalier_local.servers import LocalServers
from espalier_protocol.access import SCOPES
from espalier_secrets import fingerprint
from espalier_store.keys import find_key
from espalier_store.pool import Connection, PostgresSettings, connect

FIRST_OWNER = "local"
CLOSE_TIMEOUT_S = 2.0


async def ensure_profile(servers: LocalServers, base_url: str) -> str:
    """The profile's key if the database still knows it, else a new one; writes the profile afresh."""
    kept = servers.folder.read(PROFILE).get("api_key", "")
    async with _transaction(servers.postgres_url) as connection:
        known = await find_key(connection, fingerprint(kept)) is not None
        api_key = kept if known else await create_key(connection, FIRST_OWNER, SCOPES)
    servers.folder.write(PROFILE, {"base_url": base_url, "api_key": api_key})
    return api_key


async def mint_key(postgres_url: str, owner: str, scopes: Sequence[str]) -> str:
    """A new key in plain text, which exists nowhere else from now on."""
    async with _transaction(postgres_url) as connection:
        return await create_key(connection, owner, scopes)


@asynccontextmanager
async def _transaction(postgres_url: str) -> AsyncIterator[Connection]:
    settings = read_settings(PostgresSettings, postgres_url=postgres_url)
    try:
        connection = await connect(settings)
    except Exception as err:  # the network's errors and the driver's, which only the store names
        raise unreachable(postgres_url, err) from err
    try:
        async with connection.transaction():
            yield connection
    finally:
        await connection.close(timeout=CLOSE_TIMEOUT_S)
