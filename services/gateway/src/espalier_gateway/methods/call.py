"""What a handler works with, and how it reads the ids it is given.

A handler turns params into an act and the outcome into a resource. One transaction each; what follows a
commit is handed to the couriers. Handlers raise errors of the domain and know no codes.
"""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from uuid import UUID

from espalier_domain.errors import InvalidInput, NotFound
from espalier_embeddings import Embedder
from espalier_gateway.cancels import ForcedCancels
from espalier_gateway.couriers import Couriers
from espalier_gateway.idempotency import Creation, creating
from espalier_gateway.subscriptions import Listener
from espalier_protocol.ids import IdPrefix, from_wire
from espalier_protocol.shapes import PageParams
from espalier_protocol.versions import Versions
from espalier_secrets.sealing import Sealer
from espalier_store.idempotency import CreateKey
from espalier_store.keys import Caller
from espalier_store.paging import Place
from espalier_store.pool import Pool
from espalier_store.sessions import AepSession


@dataclass(frozen=True, slots=True)
class Desk:
    """What all calls of a process share.

    `build` is the version of this runtime, `capabilities` what its operator lets it offer, `versions` are
    those of the protocol that it serves.
    """

    pool: Pool
    couriers: Couriers
    cancels: ForcedCancels
    session_ttl_s: int
    build: str
    capabilities: frozenset[str]
    versions: Versions
    sealer: Sealer
    embedder: Embedder | None


@dataclass(frozen=True, slots=True)
class Call:
    """`session` of `initialize` is the one that every caller has: the header's version, no capability.

    `patience_s` is how long the call may wait for something to happen. `create_key` is what the caller named
    a create, `listener` whoever gets the events that the call subscribes to.
    """

    desk: Desk
    caller: Caller
    session: AepSession
    patience_s: float
    create_key: CreateKey | None = None
    listener: Listener | None = None

    @property
    def pool(self) -> Pool:
        return self.desk.pool

    @property
    def owner_id(self) -> UUID:
        return self.caller.owner_id

    def creating(self) -> AbstractAsyncContextManager[Creation]:
        """The transaction of a create, which ends with `keep`: its answer is its only one."""
        return creating(self.pool, self.owner_id, self.create_key)


_RESOURCES: dict[IdPrefix, str] = {
    "agt": "agent",
    "run": "run",
    "art": "artifact",
    "prv": "provider",
    "pch": "prompt_change",
    "apr": "approval",
}


def named(prefix: IdPrefix, text: str) -> UUID:
    """The id; one that we cannot have given out is as unknown as one that we did not."""
    found = from_wire(prefix, text)
    if found is None:
        raise NotFound(_RESOURCES[prefix], text)
    return found


def place(prefix: IdPrefix, params: PageParams) -> Place:
    """Where the page begins. Whether the caller could have seen the cursor's item, the handler asks."""
    after = None if params.cursor is None else from_wire(prefix, params.cursor)
    if params.cursor is not None and after is None:
        raise unknown_cursor()
    return Place(after, params.page_size())


def unknown_cursor() -> InvalidInput:
    return InvalidInput("cursor", "should be one that an earlier page answered")
