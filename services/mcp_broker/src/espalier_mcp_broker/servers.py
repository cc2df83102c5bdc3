"""The operator's list of MCP servers, in the shape that everybody knows: `{"mcpServers": {"git": {...}}}`.

A server has a `command` (with `args`, `env`, `cwd`) or a `url` (with `headers`), and may have
`call_timeout_s` and `connect_timeout_s`. Every mistake becomes one sentence that begins with its place.
The values hold secrets, so their reprs show a name and little else. Nothing is started or resolved here.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeGuard

import orjson

from espalier_domain.mcp_servers import SLUG_CHARS_MAX, slug
from espalier_egress import Egress
from espalier_protocol.mcp_server import is_header_name, is_reserved_header, is_server_url

FILE_BYTES_MAX: Final = 1024 * 1024
SERVERS_MAX: Final = 64

CALL_TIMEOUT_S: Final = 300.0
CALL_TIMEOUT_BOUNDS_S: Final = (0.1, 3600.0)
CONNECT_TIMEOUT_S: Final = 20.0
"""Longer than the 10 s that the SDK gives a server of the handshake era to ignore its first question."""
CONNECT_TIMEOUT_BOUNDS_S: Final = (0.1, 120.0)

_COMMON: Final = {"call_timeout_s", "connect_timeout_s", "type"}
_OF_STDIO: Final = {"command", "args", "env", "cwd"} | _COMMON
_OF_HTTP: Final = {"url", "headers"} | _COMMON
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, kw_only=True)
class StdioServer:
    """A program that is started here, without a shell, and spoken to over its standard input and output."""

    name: str
    command: str = field(repr=False)
    args: tuple[str, ...] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = field(default=None, repr=False)
    call_timeout_s: float = CALL_TIMEOUT_S
    connect_timeout_s: float = CONNECT_TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class HttpServer:
    """A server at an address that the operator vouches for: loopback and private addresses are allowed."""

    name: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    call_timeout_s: float = CALL_TIMEOUT_S
    connect_timeout_s: float = CONNECT_TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class AttachedServer:
    """A server that an embedder attached to an agent: `egress` is the way to its address."""

    name: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    egress: Egress = field(repr=False)
    call_timeout_s: float = CALL_TIMEOUT_S
    connect_timeout_s: float = CONNECT_TIMEOUT_S


ServerSpec = StdioServer | HttpServer | AttachedServer


class ServersInvalid(Exception):
    """The list cannot be used. `mistakes` has one sentence for each mistake, each with its place."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


def load_servers(path: Path) -> tuple[ServerSpec, ...]:
    """The servers of a file, by name. Raises ServersInvalid."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ServersInvalid([f"the file: cannot be read ({error.strerror})."]) from error
    if len(text) > FILE_BYTES_MAX:
        raise ServersInvalid([f"the file: is longer than {FILE_BYTES_MAX} bytes."])
    return parse_servers(text)


def parse_servers(text: bytes | str) -> tuple[ServerSpec, ...]:
    """The servers of a JSON document, by name. Raises ServersInvalid with every mistake in it."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        # Not the parser's own words, and not `from error`: both quote the document.
        raise ServersInvalid([f"{place}: is not JSON."]) from None
    reading = _Reading()
    servers = reading.document(document)
    if reading.mistakes:
        raise ServersInvalid(reading.mistakes)
    return servers


class _Reading:
    """One pass over a document that goes on after a mistake."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []

    def document(self, document: object) -> tuple[ServerSpec, ...]:
        if not isinstance(document, dict) or not isinstance(entries := document.get("mcpServers"), dict):
            self._wrong("mcpServers", "must be an object of servers")
            return ()
        for key in document.keys() - {"mcpServers"}:
            self._wrong(key, "is not known here")
        if len(entries) > SERVERS_MAX:
            self._wrong("mcpServers", f"has more than {SERVERS_MAX} servers")
            return ()
        servers: dict[str, ServerSpec] = {}
        for key, entry in entries.items():
            place = f"mcpServers.{key}"
            name = self._name(place, key, servers)
            server = self._server(place, name, entry)
            if name and server is not None:
                servers[name] = server
        return tuple(servers[name] for name in sorted(servers))

    def _name(self, place: str, key: str, taken: Mapping[str, ServerSpec]) -> str:
        name = slug(key)
        if not name:
            self._wrong(place, "has a name without letters or digits")
        elif len(name) > SLUG_CHARS_MAX:
            self._wrong(place, f"has a name of more than {SLUG_CHARS_MAX} characters")
        elif name in taken:
            self._wrong(place, f"is called {name} like another server")
        else:
            return name
        return ""

    def _server(self, place: str, name: str, entry: object) -> ServerSpec | None:
        if not isinstance(entry, dict):
            self._wrong(place, "must be an object")
            return None
        if ("command" in entry) == ("url" in entry):
            self._wrong(place, "needs either a command or a url")
            return None
        known = _OF_STDIO if "command" in entry else _OF_HTTP
        before = len(self.mistakes)
        for key in entry.keys() - known:
            self._wrong(f"{place}.{key}", "is not known here")
        made = (self._stdio if known is _OF_STDIO else self._http)(place, name, entry)
        return made if len(self.mistakes) == before else None

    def _stdio(self, place: str, name: str, entry: Mapping[str, object]) -> ServerSpec:
        if entry.get("type", "stdio") != "stdio":
            self._wrong(f"{place}.type", "must be stdio where there is a command")
        return StdioServer(
            name=name,
            command=self._text(f"{place}.command", entry["command"]),
            args=self._texts(f"{place}.args", entry.get("args", [])),
            env=self._pairs(f"{place}.env", entry.get("env", {}), _is_variable, "a variable's name"),
            cwd=self._folder(f"{place}.cwd", entry.get("cwd")),
            call_timeout_s=self._call_timeout(place, entry),
            connect_timeout_s=self._connect_timeout(place, entry),
        )

    def _http(self, place: str, name: str, entry: Mapping[str, object]) -> ServerSpec:
        if entry.get("type", "http") not in ("http", "streamable-http", "streamableHttp"):
            self._wrong(f"{place}.type", "must be http where there is a url")
        headers = self._pairs(f"{place}.headers", entry.get("headers", {}), is_header_name, "a header's name")
        for key, value in headers.items():
            if is_reserved_header(key):
                self._wrong(f"{place}.headers.{key}", "is set by the broker itself")
            if _CONTROL.search(value) or not value.isascii():
                self._wrong(f"{place}.headers.{key}", "must be plain ASCII text in one line")
        return HttpServer(
            name=name,
            url=self._url(f"{place}.url", entry["url"]),
            headers=headers,
            call_timeout_s=self._call_timeout(place, entry),
            connect_timeout_s=self._connect_timeout(place, entry),
        )

    def _url(self, place: str, value: object) -> str:
        text = self._text(place, value)
        if text and not is_server_url(text):
            self._wrong(place, "must be an http or https address without user, password and fragment")
        return text

    def _folder(self, place: str, value: object) -> str | None:
        if value is None:
            return None
        text = self._text(place, value)
        if text and not Path(text).is_absolute():
            self._wrong(place, "must be an absolute path")
        return text

    def _call_timeout(self, place: str, entry: Mapping[str, object]) -> float:
        value = entry.get("call_timeout_s", CALL_TIMEOUT_S)
        return self._seconds(f"{place}.call_timeout_s", value, CALL_TIMEOUT_BOUNDS_S)

    def _connect_timeout(self, place: str, entry: Mapping[str, object]) -> float:
        value = entry.get("connect_timeout_s", CONNECT_TIMEOUT_S)
        return self._seconds(f"{place}.connect_timeout_s", value, CONNECT_TIMEOUT_BOUNDS_S)

    def _seconds(self, place: str, value: object, bounds: tuple[float, float]) -> float:
        least, most = bounds
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            self._wrong(place, f"must be a number of seconds from {least:g} to {most:g}")
            return least
        return float(value)

    def _texts(self, place: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            self._wrong(place, "must be a list of texts")
            return ()
        return tuple(self._text(f"{place}[{i}]", each, may_be_empty=True) for i, each in enumerate(value))

    def _pairs(self, place: str, value: object, is_name: Callable[[str], bool], what: str) -> dict[str, str]:
        if not isinstance(value, dict):
            self._wrong(place, "must be an object of texts")
            return {}
        for key in value:
            if not is_name(key):
                self._wrong(f"{place}.{key}", f"is not {what}")
        return {key: self._text(f"{place}.{key}", each, may_be_empty=True) for key, each in value.items()}

    def _text(self, place: str, value: object, *, may_be_empty: bool = False) -> str:
        if not _is_text(value):
            self._wrong(place, "must be a text without a NUL")
        elif not value and not may_be_empty:
            self._wrong(place, "must not be empty")
        else:
            return value
        return ""

    def _wrong(self, place: str, what: str) -> None:
        shown = _CONTROL.sub("?", place)
        self.mistakes.append(f"{shown}: {what}.")


def _is_variable(text: str) -> bool:
    return _ENV_NAME.fullmatch(text) is not None


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and "\0" not in value
