"""MCP servers as embedders attach them to agents: their shape, and what is sent to one (AEP spec 6 and 9).

What is wrong with a URL or a credential is said without repeating any of it. Nothing is resolved or asked
here. Which name and which tools a server gets is `espalier_domain.mcp_servers`' business.
"""

import re
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from espalier_protocol.shapes import Name, Params, Resource

SERVERS_MAX: Final = 16
"""Servers of one agent."""

URL_CHARS_MAX: Final = 2048
BEARER_CHARS_MAX: Final = 8192
HEADERS_MAX: Final = 16
HEADER_NAME_CHARS_MAX: Final = 128
HEADER_VALUE_CHARS_MAX: Final = 8192

AUTHORIZATION: Final = "authorization"
_UNSEEN: Final = re.compile(r"[\x00-\x20\x7f]")
_BEARER: Final = re.compile(r"[\x21-\x7e]+")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?")
_OURS: Final = re.compile(
    r"mcp-|accept|content-|proxy-|sec-"
    r"|(?:connection|expect|host|keep-alive|last-event-id|te|trailer|transfer-encoding|upgrade)$"
)


def is_server_url(text: str) -> bool:
    """Whether a text is an absolute http or https URL without user, password, fragment and blanks."""
    if _UNSEEN.search(text):
        return False
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return usable and "@" not in parts.netloc and "#" not in text


def host_of(url: str) -> str:
    """The host of a server's URL, in small letters and without brackets."""
    return urlsplit(url).hostname or ""


def is_header_name(text: str) -> bool:
    return _HEADER_NAME.fullmatch(text) is not None


def is_reserved_header(name: str) -> bool:
    """Whether a header is set by whoever speaks to the server, and by nobody else."""
    return _OURS.match(name.lower()) is not None


def _url(text: str) -> str:
    if not is_server_url(text):
        raise _wrong("should be an absolute http or https URL without user, password and fragment")
    return text


def _bearer(text: str) -> str:
    if not _BEARER.fullmatch(text):
        raise _wrong("should be visible ASCII characters without blanks")
    return text


def _headers(headers: dict[str, str]) -> dict[str, str]:
    """Neither names nor values are repeated: whoever mixed them up would find a secret in an error."""
    for name, value in headers.items():
        if len(name) > HEADER_NAME_CHARS_MAX or not is_header_name(name):
            raise _wrong(f"should have header names of at most {HEADER_NAME_CHARS_MAX} characters as keys")
        if is_reserved_header(name):
            raise _wrong("should not have a header that the runtime sets itself")
        if len(value) > HEADER_VALUE_CHARS_MAX or not _HEADER_VALUE.fullmatch(value):
            most = HEADER_VALUE_CHARS_MAX
            raise _wrong(
                f"should have values of 1 to {most} ASCII characters in one line, without outer blanks"
            )
    if len({name.lower() for name in headers}) < len(headers):
        raise _wrong("should have each header once")
    return headers


def _wrong(reason: str) -> PydanticCustomError:
    return PydanticCustomError("mcp_server", "{reason}", {"reason": reason})


Bearer = Annotated[str, Field(min_length=1, max_length=BEARER_CHARS_MAX), AfterValidator(_bearer)]
Headers = Annotated[dict[str, str], Field(max_length=HEADERS_MAX), AfterValidator(_headers)]


class McpServerAuth(Params):
    """What is sent to a server, and to nobody else, with every request. Both members together are allowed."""

    bearer: Annotated[Bearer | None, Field(repr=False)] = None
    headers: Annotated[Headers, Field(repr=False)] = {}

    def to_send(self) -> dict[str, str]:
        """The headers that carry it."""
        bearer = {} if self.bearer is None else {AUTHORIZATION: f"Bearer {self.bearer}"}
        return {**self.headers, **bearer}


def _one_authorization(auth: McpServerAuth) -> McpServerAuth:
    if auth.bearer is not None and any(name.lower() == AUTHORIZATION for name in auth.headers):
        raise _wrong("should have a bearer or a header Authorization, not both")
    return auth


Auth = Annotated[McpServerAuth, AfterValidator(_one_authorization)]


class ExternalMcpServer(Params):
    """An MCP server that the embedder attaches. `auth` is never returned.

    In an update a server that keeps its URL keeps its credential if `auth` is left out; null takes it away.
    """

    url: Annotated[str, Field(min_length=1, max_length=URL_CHARS_MAX), AfterValidator(_url)]
    auth: Annotated[Auth | None, Field(repr=False)] = None
    name: Name | None = None


ExternalMcpServers = Annotated[list[ExternalMcpServer], Field(max_length=SERVERS_MAX)]


class ExternalMcpServerView(Resource):
    url: str
    name: str
    enabled: bool
