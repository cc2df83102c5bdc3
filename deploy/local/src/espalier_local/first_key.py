"""Keys from the operator's side: `keys ...`, and the first key, which `up` leaves in a profile.

Opens the connection and the transaction; the key itself is made by `keys.py`. Below it stands the store,
above it `runtime.py` and the command.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from espalier_local.errors import LocalError
from espalier_local.folder import PROFILE
from espalier_local.keys import NewKey, create_key, mint
from espalier_local.preflight import read_settings
from espalier_local.schema import unreachable
from espalier_local.servers import LocalServers
from espalier_protocol.access import SCOPES
from espalier_protocol.ids import from_wire
from espalier_secrets import fingerprint
from espalier_store import keys as store
from espalier_store.pool import Connection, PostgresSettings, connect, schema_ready

FIRST_OWNER = "local"
CLOSE_TIMEOUT_S = 2.0
KEYS_MAX: Final = 10_000
"""The most keys that are read for one list."""


async def ensure_profile(servers: LocalServers, base_url: str) -> str:
    """The profile's key if the database still knows it, else a new one; writes the profile afresh."""
    kept = servers.folder.read(PROFILE).get("api_key", "")
    async with _transaction(servers.postgres_url) as connection:
        known = await store.find_key(connection, fingerprint(kept)) is not None
        api_key = kept if known else await create_key(connection, FIRST_OWNER, SCOPES)
    servers.folder.write(PROFILE, {"base_url": base_url, "api_key": api_key})
    return api_key


async def mint_key(postgres_url: str, owner: str, scopes: Sequence[str]) -> NewKey:
    """A new key in plain text, which exists nowhere else from now on."""
    async with _transaction(postgres_url) as connection:
        return await mint(connection, owner, scopes)


async def known_keys(postgres_url: str, owner: str | None) -> list[store.KeyRecord]:
    """All keys, or those of one owner, revoked ones too; one more than KEYS_MAX if there are more."""
    async with _transaction(postgres_url) as connection:
        return await store.list_keys(connection, owner, KEYS_MAX + 1)


async def revoke_key(postgres_url: str, wire_id: str) -> store.Revoked:
    """Raises LocalError if there is no such key. It is committed on return."""
    key_id = from_wire("key", wire_id)
    async with _transaction(postgres_url) as connection:
        revoked = None if key_id is None else await store.revoke_key(connection, key_id)
    if revoked is None:
        raise LocalError(f"There is no key {wire_id}; `espalier keys list` shows those that there are.")
    return revoked


@asynccontextmanager
async def _transaction(postgres_url: str) -> AsyncIterator[Connection]:
    settings = read_settings(PostgresSettings, postgres_url=postgres_url)
    try:
        connection = await connect(settings)
    except Exception as err:  # the network's errors and the driver's, which only the store names
        raise unreachable(postgres_url, err) from err
    try:
        if not await schema_ready(connection):
            raise LocalError("The database does not have this build's schema; `espalier migrate` makes it.")
        async with connection.transaction():
            yield connection
    finally:
        await connection.close(timeout=CLOSE_TIMEOUT_S)
