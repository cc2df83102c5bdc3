"""Minting keys, the operator's act that lets an embedder in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from espalier_secrets import fingerprint, new_key
from espalier_store.ids import new_id
from espalier_store.keys import insert_key
from espalier_store.owners import ensure_owner
from espalier_store.pool import Connection


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key in plain text, which exists nowhere else, and the id by which it can be revoked."""

    key_id: UUID
    key: str = field(repr=False)


async def mint(connection: Connection, owner_name: str, scopes: Sequence[str]) -> NewKey:
    """A new key of the owner called `owner_name`, who is made if there is none. Only its hash is stored."""
    minted = NewKey(new_id(), new_key())
    owner_id = await ensure_owner(connection, new_id(), owner_name)
    await insert_key(connection, minted.key_id, owner_id, fingerprint(minted.key), list(scopes))
    return minted


async def create_key(connection: Connection, owner_name: str, scopes: Sequence[str]) -> str:
    """`mint` for callers that will never speak of the key again, only call with it."""
    return (await mint(connection, owner_name, scopes)).key
