"""Minting keys, the operator's act that lets an embedder in."""

from collections.abc import Sequence

from espalier_secrets import fingerprint, new_key
from espalier_store.ids import new_id
from espalier_store.keys import insert_key
from espalier_store.owners import ensure_owner
from espalier_store.pool import Connection


async def create_key(connection: Connection, owner_name: str, scopes: Sequence[str]) -> str:
    """A new key of the owner called `owner_name`, who is made if there is none. Only its hash is stored."""
    key = new_key()
    owner_id = await ensure_owner(connection, new_id(), owner_name)
    await insert_key(connection, new_id(), owner_id, fingerprint(key), list(scopes))
    return key
