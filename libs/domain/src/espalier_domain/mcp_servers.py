"""Which names an agent's attached servers get, and what becomes of those that it had. Pure.

A server's slug is its part of a tool's name (`mcp.<slug>.<tool>`). It is given once, and stays as long as a
server of that name is attached. What a URL or a credential may look like is the protocol's business.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final
from uuid import UUID

from espalier_domain.errors import InvalidInput
from espalier_protocol.mcp_server import ExternalMcpServer, host_of
from espalier_protocol.shapes import NAME_CHARS_MAX

SLUG_CHARS_MAX: Final = 64
SUFFIX_CHARS: Final = 4
NAMELESS: Final = "server"
FIELD: Final = "external_mcp_servers"
_NOT_PLAIN: Final = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class KnownServer:
    """A server that an agent has by now."""

    name: str
    slug: str
    url: str


@dataclass(frozen=True, slots=True)
class PlacedServer:
    """A server as it is to be. `keeps_auth` says that it keeps the credential it has, or that it has none."""

    name: str
    slug: str
    url: str
    keeps_auth: bool


def slug(name: str) -> str:
    """How tools' names spell a server: `Git Hub` is `git_hub`. Empty if a name has no letters and digits."""
    return _NOT_PLAIN.sub("_", name.lower()).strip("_")


def placed_servers(
    wanted: Sequence[ExternalMcpServer], known: Sequence[KnownServer], reserved: Collection[str]
) -> list[PlacedServer]:
    """The servers that an agent has from now on, in the order in which they are wanted.

    `reserved` are the slugs of servers that are not the agent's. A credential stays with the URL that it was
    given for: else whoever may change an agent could have it sent to a place of their own.
    Raises InvalidInput for a name that is wanted twice.
    """
    by_name = {server.name: server for server in known}
    names = _names(wanted)
    taken = {by_name[name].slug for name in names if name in by_name}
    placed = []
    for name, server in zip(names, wanted, strict=True):
        before = by_name.get(name)
        its_slug = before.slug if before else _free_slug(name, taken | set(reserved))
        taken.add(its_slug)
        keeps = "auth" not in server.model_fields_set and before is not None and before.url == server.url
        placed.append(PlacedServer(name, its_slug, server.url, keeps))
    return placed


def auth_place(owner_id: UUID, url: str) -> tuple[str, ...]:
    """Where a sealed credential belongs: to its owner and its URL. A child that inherits it has both."""
    return str(owner_id), "agent_servers", sha256(url.encode()).hexdigest(), "sealed_auth"


def _names(wanted: Sequence[ExternalMcpServer]) -> list[str]:
    names: list[str] = []
    for number, server in enumerate(wanted):
        name = server.name or host_of(server.url)[:NAME_CHARS_MAX]
        if name in names:
            reason = "should differ from the names of the agent's other servers; without one it is the host's"
            raise InvalidInput(f"{FIELD}.{number}.name", reason)
        names.append(name)
    return names


def _free_slug(name: str, taken: Collection[str]) -> str:
    """Bounded: one of the first `len(taken) + 1` candidates is free."""
    stem = slug(name)[:SLUG_CHARS_MAX].strip("_") or NAMELESS
    if stem not in taken:
        return stem
    stem = stem[: SLUG_CHARS_MAX - SUFFIX_CHARS].strip("_")
    numbered = (f"{stem}_{number}" for number in range(2, len(taken) + 3))
    return next(candidate for candidate in numbered if candidate not in taken)
