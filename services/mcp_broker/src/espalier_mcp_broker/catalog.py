"""Which tools there are, under which names, and whom to ask for them.

`open_catalog` holds the owner task of every server, so that all connections live and end with its block. A
server is asked for its tools when an agent's toolset names it, and not again until it says that they changed,
its connection is a new one, or KEPT_S have passed. Everything that it says about them is bounded and cleaned
of what a reader would not see: it ends up in front of a model. What may be called is not decided here.
"""

import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import anyio
import orjson
from mcp.server import Server as BundledServer
from mcp_types import Tool

from espalier_domain.tools import BUNDLED, EXTERNAL, canonical, has_tool, server_of
from espalier_mcp_broker.mask import Mask
from espalier_mcp_broker.outcomes import Reason
from espalier_mcp_broker.servers import ServerSpec
from espalier_mcp_broker.session import McpSession
from espalier_protocol.broker import OfferedTool

LISTING_S: Final = 10.0
"""How long one server may take to list its tools, beyond the time that it has for being connected to."""

KEPT_S: Final = 60.0
TROUBLE_KEPT_S: Final = 5.0
"""How long a server that could not be listed is not asked again."""
PAGES_MAX: Final = 50
TOOLS_MAX: Final = 256
SCHEMA_BYTES_MAX: Final = 64 * 1024
LISTING_BYTES_MAX: Final = 2 * 1024 * 1024
DESCRIPTION_BYTES_MAX: Final = 4 * 1024

TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_./-]{1,64}")
"""What a tool may be called. Another name is left out and not mended: the server knows only its own."""

_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u3164\ufeff\uffa0"  # zero width, and fillers
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f"  # zero width, separators, bidirectional
    "\ud800-\udfff\ufff0-\ufffb\ufe00-\ufe0f"  # surrogates, specials, variation selectors
    "\U000e0000-\U000e0fff]"  # tags
)
_HTML_COMMENT: Final = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)


@dataclass(frozen=True)
class _Listing:
    """What a server offers, and what is wrong with it in one sentence, if anything is."""

    tools: tuple[OfferedTool, ...] = ()
    trouble: str = ""


class Shelf:
    """One server's tools, as they were when last asked for."""

    def __init__(self, prefix: str, session: McpSession) -> None:
        self.prefix = prefix
        self.session = session
        self._asking = anyio.Lock()
        self._kept: _Listing | None = None
        self._kept_version = 0
        self._kept_until = 0.0

    async def listing(self) -> _Listing:
        """Whoever comes while the server is asked waits for the same answer."""
        with anyio.move_on_after(self.session.connect_timeout_s + LISTING_S):
            async with self._asking:
                if (kept := self._fresh()) is not None:
                    return kept
                return self._keep(await self._ask())
        return self._keep(self._trouble(Reason.DEADLINE))

    def _fresh(self) -> _Listing | None:
        old = anyio.current_time() >= self._kept_until or self._kept_version != self.session.tools_version
        return None if old else self._kept

    def _keep(self, listing: _Listing) -> _Listing:
        self._kept = listing
        self._kept_until = anyio.current_time() + (KEPT_S if listing.tools else TROUBLE_KEPT_S)
        if not listing.tools:
            self._kept_version = self.session.tools_version
        return listing

    async def _ask(self) -> _Listing:
        reading = _Reading(self.prefix, self.session.mask)
        cursor: str | None = None
        for number in range(PAGES_MAX):
            page = await self.session.page_of_tools(cursor)
            if isinstance(page, Reason):
                return self._trouble(page)
            if number == 0:
                self._kept_version = self.session.tools_version  # what changes from now on is asked for again
            cursor = page.next_cursor
            if not reading.take(page.tools) or cursor is None:
                break
        else:
            reading.flaws.append(f"its list has more than {PAGES_MAX} pages")
        return reading.listing()

    def _trouble(self, reason: Reason) -> _Listing:
        return _Listing(trouble=_not_listed(self.prefix, reason))


@dataclass(frozen=True)
class OwnServers:
    """The servers that were attached to the agent itself, by slug, and why some of them cannot be used."""

    shelves: Mapping[str, Shelf]
    troubles: Mapping[str, Reason]


NO_SERVERS: Final = OwnServers({}, {})


class Found(NamedTuple):
    """Whom to call for a tool, and what the tool is called there."""

    session: McpSession
    tool: str


class Catalog:
    """The servers that this broker reaches, and their tools."""

    def __init__(self, sessions: Mapping[str, McpSession], bundled: McpSession | None) -> None:
        self._shelves = {name: Shelf(EXTERNAL + name, session) for name, session in sessions.items()}
        self._bundled = None if bundled is None else Shelf(BUNDLED.rstrip("."), bundled)

    def find(self, name: str, own: OwnServers = NO_SERVERS) -> Found | None:
        """Whom to call for a tool, and what the tool is called there; None if there is no such server.

        Where a server of the agent's own has the name of a listed one, its own is meant.
        """
        shelf = self._shelf_of(name, own)
        if shelf is None:
            return None
        return Found(shelf.session, canonical(name).removeprefix(f"{shelf.prefix}."))

    async def definitions(
        self, toolset: Sequence[str], own: OwnServers = NO_SERVERS
    ) -> tuple[tuple[OfferedTool, ...], tuple[str, ...]]:
        """The tools that a toolset names, by name, and one sentence for each server that has a trouble.

        Takes at most LISTING_S, however many servers are asked.
        """
        brokered = [canonical(entry) for entry in toolset if "." in entry]
        listings: dict[str, _Listing] = {}
        async with anyio.create_task_group() as tasks:
            for prefix, shelf in self._asked(brokered, own).items():
                if shelf is not None:
                    tasks.start_soon(_put_listing, listings, prefix, shelf)
                elif reason := own.troubles.get(prefix.removeprefix(EXTERNAL)):
                    listings[prefix] = _Listing(trouble=_not_listed(prefix, reason))
                else:
                    listings[prefix] = _Listing(trouble=f"There is no server {cleaned(prefix)[:100]!r}.")
        offered = [tool for each in listings.values() for tool in each.tools if has_tool(brokered, tool.name)]
        troubles = [each.trouble for _, each in sorted(listings.items()) if each.trouble]
        return tuple(sorted(offered, key=lambda tool: tool.name)), tuple(troubles)

    def _asked(self, entries: Iterable[str], own: OwnServers) -> dict[str, Shelf | None]:
        asked: dict[str, Shelf | None] = {}
        for entry in entries:
            shelf = self._shelf_of(entry, own)
            asked[shelf.prefix if shelf else _server_of(entry)] = shelf
        return asked

    def _shelf_of(self, name: str, own: OwnServers) -> Shelf | None:
        spelled = canonical(name)
        if spelled.startswith(BUNDLED):
            return self._bundled
        server = server_of(spelled)
        return None if server in own.troubles else own.shelves.get(server) or self._shelves.get(server)


@asynccontextmanager
async def open_catalog(
    servers: Sequence[ServerSpec], bundled: BundledServer[Any] | None
) -> AsyncIterator[Catalog]:
    """The catalog of the operator's servers and the bundled one. Nothing connects before it is asked for.

    Leaving ends all connections and processes, side by side, within the bounds of their transports.
    """
    sessions = {server.name: McpSession(server.name, server) for server in servers}
    own = None if bundled is None else McpSession(BUNDLED.rstrip("."), bundled)
    async with anyio.create_task_group() as tasks:
        for session in (*sessions.values(), *([] if own is None else [own])):
            tasks.start_soon(session.run)
        try:
            yield Catalog(sessions, own)
        finally:
            tasks.cancel_scope.cancel()


def _not_listed(prefix: str, reason: Reason) -> str:
    return f"The tools of {prefix} could not be listed: {reason}."


async def _put_listing(listings: dict[str, _Listing], prefix: str, shelf: Shelf) -> None:
    listings[prefix] = await shelf.listing()


class _Reading:
    """Takes tools in until a bound is reached."""

    def __init__(self, prefix: str, mask: Mask) -> None:
        self.flaws: list[str] = []
        self._prefix, self._mask = prefix, mask
        self._tools: dict[str, OfferedTool] = {}
        self._bytes = 0
        self._left_out = 0

    def take(self, tools: Iterable[Tool]) -> bool:
        """Whether there is room for more."""
        for tool in tools:
            schema = self._mask.json(cleaned_json(tool.input_schema))
            size = _json_bytes(schema)
            if not self._is_name(tool.name) or tool.name in self._tools or size > SCHEMA_BYTES_MAX:
                self._left_out += 1
                continue
            described = described_in(tool, self._mask)
            self._bytes += size + len(described.encode())
            if len(self._tools) == TOOLS_MAX or self._bytes > LISTING_BYTES_MAX:
                self.flaws.append(f"only the first {len(self._tools)} are offered")
                return False
            name = f"{self._prefix}.{tool.name}"
            self._tools[tool.name] = OfferedTool(name=name, description=described, input_schema=schema)
        return True

    def _is_name(self, name: str) -> bool:
        return TOOL_NAME.fullmatch(name) is not None and self._mask.text(name) == name

    def listing(self) -> _Listing:
        if self._left_out:
            self.flaws.append(f"{self._left_out} were left out for their name or their schema")
        trouble = f"Of the tools of {self._prefix} {', and '.join(self.flaws)}." if self.flaws else ""
        return _Listing(tuple(self._tools.values()), trouble)


def described_in(tool: Tool, mask: Mask) -> str:
    """A description as a reader sees it, of at most DESCRIPTION_BYTES_MAX."""
    text = mask.text(cleaned(_HTML_COMMENT.sub("", tool.description or tool.title or "")))
    return text.encode()[:DESCRIPTION_BYTES_MAX].decode("utf-8", "ignore").strip()


def cleaned(text: str) -> str:
    """Without the characters that a reader does not see and a model does."""
    return _UNSEEN.sub("", text)


def cleaned_json(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with cleaned texts; its depth is bounded by the parser that read it."""
    return {cleaned(key): _cleaned_value(value) for key, value in schema.items()}


def _cleaned_value(value: object) -> object:
    match value:
        case str():
            return cleaned(value)
        case dict():
            return cleaned_json(value)
        case list():
            return [_cleaned_value(each) for each in value]
        case _:
            return value


def _json_bytes(schema: dict[str, Any]) -> int:
    try:
        return len(orjson.dumps(schema))
    except orjson.JSONEncodeError:
        return SCHEMA_BYTES_MAX + 1  # a number or a depth that is no JSON of ours


def _server_of(entry: str) -> str:
    return ".".join(entry.split(".")[:2])
