"""Connections to the servers that embedders attached to their agents.

Addresses and credentials are read from the rows each time they are needed, so that a changed one counts at
once. A connection belongs to one owner, one agent and one state of a row; it is never shared. At most
`open_max` are kept: the one that was not used for longest gives way, and one that rests long is closed. The
way there is `libs/egress`, since an embedder may write down any address. Beside: `catalog`, which has the
operator's own servers. Above: `app` and `calls`.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final
from uuid import UUID

import anyio
from anyio.abc import TaskGroup
from pydantic import ValidationError

from espalier_domain.mcp_servers import auth_place
from espalier_domain.tools import EXTERNAL
from espalier_egress import Egress
from espalier_mcp_broker.catalog import OwnServers, Shelf
from espalier_mcp_broker.outcomes import Reason
from espalier_mcp_broker.servers import AttachedServer
from espalier_mcp_broker.session import McpSession
from espalier_protocol.ids import to_wire
from espalier_protocol.mcp_server import McpServerAuth
from espalier_secrets.sealing import SealBroken, Sealer, place_of
from espalier_store.agent_servers import AttachedRow, attached_servers
from espalier_store.pool import Pool, reading

RESTS_S_MAX: Final = 120.0
"""For so long a connection is kept that nobody uses."""

LOOK_EVERY_S: Final = 5.0
_Key = tuple[UUID, UUID, str]


@dataclass(eq=False)
class _Open:
    """A session that is kept. It is left when its row has changed and nobody uses it any more."""

    shelf: Shelf
    version: datetime
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    users: int = 0
    used_at: float = 0.0
    outdated: bool = False


class AttachedServers:
    """All connections to attached servers of this process. Their tasks live in the group that it was given.

    An `open_max` of 0 serves none: then no agent has servers of its own.
    """

    def __init__(
        self, pool: Pool, egress: Egress, sealer: Sealer, tasks: TaskGroup, *, open_max: int
    ) -> None:
        self._pool, self._egress, self._sealer, self._tasks = pool, egress, sealer, tasks
        self._open_max = open_max
        self._open: OrderedDict[_Key, _Open] = OrderedDict()
        self._outdated: set[_Open] = set()

    @asynccontextmanager
    async def of_agent(
        self, owner_id: UUID, agent_id: UUID, slugs: Collection[str]
    ) -> AsyncIterator[OwnServers]:
        """Those of the agent's servers that have these slugs. Their connections stay while the block lasts.

        Nothing is connected by this. Raises Unavailable.
        """
        rows = await self._rows(owner_id, agent_id, slugs)
        used: dict[str, _Open] = {}
        troubles: dict[str, Reason] = {}
        for row in rows:
            match self._opened((owner_id, agent_id, row.slug), row):
                case Reason() as reason:
                    troubles[row.slug] = reason
                case opened:
                    opened.users += 1
                    used[row.slug] = opened
        try:
            yield OwnServers({slug: opened.shelf for slug, opened in used.items()}, troubles)
        finally:
            for opened in used.values():
                self._release(opened)

    async def close_rested(self) -> None:
        """Close what rests, for ever."""
        while True:  # bounded: one look at what is open a turn
            await anyio.sleep(LOOK_EVERY_S)
            before = anyio.current_time() - RESTS_S_MAX
            for key, opened in list(self._open.items()):
                if not opened.users and opened.used_at < before:
                    self._close(key)

    async def _rows(self, owner_id: UUID, agent_id: UUID, slugs: Collection[str]) -> list[AttachedRow]:
        if not slugs or not self._open_max:
            return []
        async with reading(self._pool) as connection:
            rows = await attached_servers(connection, owner_id, agent_id)
        return [row for row in rows if row.slug in slugs]

    def _opened(self, key: _Key, row: AttachedRow) -> _Open | Reason:
        known = self._open.get(key)
        if known is not None and known.version == row.updated_at:
            self._open.move_to_end(key)
            return known
        if known is not None:
            self._close(key)
        if len(self._open) + len(self._outdated) >= self._open_max and not self._close_idlest():
            return Reason.CROWDED
        headers = self._headers(key[0], row)
        return headers if isinstance(headers, Reason) else self._begin(key, row, headers)

    def _begin(self, key: _Key, row: AttachedRow, headers: Mapping[str, str]) -> _Open:
        name = f"{to_wire('agt', key[1])}.{row.slug}"
        session = McpSession(
            name, AttachedServer(name=name, url=row.url, headers=headers, egress=self._egress)
        )
        opened = self._open[key] = _Open(Shelf(EXTERNAL + row.slug, session), row.updated_at)
        self._tasks.start_soon(self._own, session, opened.scope)
        return opened

    async def _own(self, session: McpSession, scope: anyio.CancelScope) -> None:
        with scope:
            await session.run()

    def _headers(self, owner_id: UUID, row: AttachedRow) -> Mapping[str, str] | Reason:
        if row.sealed_auth is None:
            return {}
        try:
            plain = self._sealer.open(row.sealed_auth, place_of(*auth_place(owner_id, row.url)))
            return McpServerAuth.model_validate_json(plain).to_send()
        except (SealBroken, ValidationError):
            return Reason.NO_CREDENTIAL

    def _release(self, opened: _Open) -> None:
        opened.users -= 1
        opened.used_at = anyio.current_time()
        if opened.outdated and not opened.users:
            self._outdated.discard(opened)
            opened.scope.cancel()

    def _close(self, key: _Key) -> None:
        """Nobody finds it any more. Calls under way on it come to their end."""
        opened = self._open.pop(key)
        opened.outdated = True
        if opened.users:
            self._outdated.add(opened)
        else:
            opened.scope.cancel()

    def _close_idlest(self) -> bool:
        idlest = next((key for key, opened in self._open.items() if not opened.users), None)
        if idlest is not None:
            self._close(idlest)
        return idlest is not None
