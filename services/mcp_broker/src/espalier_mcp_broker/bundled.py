"""The tools that come with the runtime: an MCP server in the broker's own process, with `time` and `fetch`.

It offers bare names; the catalog puts `espalier.` before them. What `fetch` may reach is the way out's
business, not this module's. Whatever a caller did wrong is a result with `is_error` and one sentence that a
model can act on.
"""

import codecs
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from html.parser import HTMLParser
from time import thread_time
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import anyio
import anyio.to_thread
from mcp.server.lowlevel import Server
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool

from espalier_egress import Egress, EgressError, Response

NAME_CHARS_MAX: Final = 200
ZONE_CHARS_MAX: Final = 64
URL_CHARS_MAX: Final = 8192
PAGE_CHARS: Final = 50_000
PAGE_CHARS_MAX: Final = 200_000
PAGE_BYTES_MAX: Final = 5_000_000
PAGE_DEADLINE_S: Final = 30.0
READERS_MAX: Final = 2
"""Pages that are made into text at the same time: it is work for the processor, which others need too."""
HEADERS: Final = {
    "accept": "text/html, application/xhtml+xml, text/*;q=0.9, application/json;q=0.9, */*;q=0.1",
    "user-agent": "espalier-fetch",
}

TIME: Final = Tool(
    name="time",
    description="The current time in UTC and, if a zone is given, there.",
    input_schema={
        "type": "object",
        "properties": {
            "timezone": {
                "type": "string",
                "maxLength": ZONE_CHARS_MAX,
                "description": "IANA name, such as Europe/Berlin; UTC if left out",
            }
        },
        "additionalProperties": False,
    },
)
FETCH: Final = Tool(
    name="fetch",
    description="Get a public web page or text file. Of HTML you get the readable text.",
    input_schema={
        "type": "object",
        "properties": {
            "url": {
                "type": "string",
                "minLength": 1,
                "maxLength": URL_CHARS_MAX,
                "description": "absolute http or https URL",
            },
            "max_chars": {
                "type": "integer",
                "minimum": 1,
                "maximum": PAGE_CHARS_MAX,
                "default": PAGE_CHARS,
                "description": "how much of the text to return",
            },
        },
        "required": ["url"],
        "additionalProperties": False,
    },
)


class ToolRefused(Exception):
    """The call cannot be answered as it is; the text is for the model."""


Handler = Callable[[dict[str, Any]], Awaitable[CallToolResult]]


def bundled_server(egress: Egress) -> Server:
    """The server; whoever opens the client to it owns its life. It keeps nothing between calls."""

    readers = anyio.CapacityLimiter(READERS_MAX)

    async def fetch(args: dict[str, Any]) -> CallToolResult:
        return await _fetch(egress, readers, args)

    handlers: dict[str, Handler] = {TIME.name: _time, FETCH.name: fetch}

    async def list_tools(*_: object) -> ListToolsResult:
        return ListToolsResult(tools=[TIME, FETCH])

    async def call_tool(_: object, params: CallToolRequestParams) -> CallToolResult:
        handler = handlers.get(params.name)
        if handler is None:
            return _error(f"There is no tool called {params.name[:NAME_CHARS_MAX]!r} here.")
        try:
            return await handler(params.arguments or {})
        except ToolRefused as refused:
            return _error(str(refused))

    return Server("espalier-bundled", on_list_tools=list_tools, on_call_tool=call_tool)


def _answer(text: str, structured: dict[str, Any]) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=structured)


def _error(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)


# ------------------------------------------------------------------ time


async def _time(args: dict[str, Any]) -> CallToolResult:
    zone = _read_zone(args)
    now = datetime.now(UTC).replace(microsecond=0)
    utc, local = now.isoformat().replace("+00:00", "Z"), now.astimezone(zone).isoformat()
    return _answer(
        f"{utc} in UTC" if zone.key == "UTC" else f"{utc} in UTC, {local} in {zone.key}",
        {"utc": utc, "local": local, "timezone": zone.key, "unix_seconds": int(now.timestamp())},
    )


def _read_zone(args: dict[str, Any]) -> ZoneInfo:
    match args:
        case {**rest} if not rest:
            return ZoneInfo("UTC")
        case {"timezone": str(name), **rest} if not rest and len(name) <= ZONE_CHARS_MAX:
            try:
                return ZoneInfo(name)
            except (ZoneInfoNotFoundError, ValueError, OSError):
                # also the name of a folder, or of another file in one
                raise ToolRefused(f"{name!r} is no IANA time zone; one would be Europe/Berlin.") from None
    raise ToolRefused("time takes nothing or timezone, the IANA name of a zone such as Europe/Berlin.")


# ------------------------------------------------------------------ fetch


@dataclass(frozen=True, slots=True)
class Wanted:
    url: str
    max_chars: int


async def _fetch(egress: Egress, readers: anyio.CapacityLimiter, args: dict[str, Any]) -> CallToolResult:
    wanted = _read_wanted(args)
    try:
        page = await egress.get(
            wanted.url, headers=HEADERS, body_bytes_max=PAGE_BYTES_MAX, deadline_s=PAGE_DEADLINE_S
        )
    except EgressError as error:
        raise ToolRefused(f"fetch got nothing: {error}") from error
    kind = page.headers.get("content-type", "")
    # A page of megabytes takes a while to read; other calls go on meanwhile.
    text, is_cut = await anyio.to_thread.run_sync(_read_page, page, wanted.max_chars, limiter=readers)
    structured = {
        "status": page.status,
        "url": page.url,
        "content_type": kind[:NAME_CHARS_MAX],
        "text": text,
        "is_cut": is_cut,
    }
    head = f"{page.status} {page.url} {kind[:NAME_CHARS_MAX]}".rstrip()
    tail = f"\n\n[cut after {len(text)} characters]" if is_cut else ""
    return _answer(f"{head}\n\n{text}{tail}", structured)


def _read_wanted(args: dict[str, Any]) -> Wanted:
    match args:
        case {"url": str(url), **rest} if set(rest) <= {"max_chars"} and 0 < len(url) <= URL_CHARS_MAX:
            max_chars = rest.get("max_chars", PAGE_CHARS)
            if type(max_chars) is int and 0 < max_chars <= PAGE_CHARS_MAX:
                return Wanted(url, max_chars)
    raise ToolRefused(
        f"fetch takes url (an absolute http or https URL of at most {URL_CHARS_MAX} characters) and "
        f"max_chars (1 to {PAGE_CHARS_MAX}, {PAGE_CHARS} if left out)."
    )


HTML: Final = ("text/html", "application/xhtml+xml")
TEXT: Final = re.compile(
    r"text/.*|application/(?:json|xml|yaml|x-yaml|toml|javascript|x-javascript|ecmascript|x-ndjson|ld\+json"
    r"|sql|graphql|x-sh|x-www-form-urlencoded)|(?:application|image)/[^/]*\+(?:json|xml|yaml)"
)
CHARSET: Final = re.compile(r"charset\s*=\s*[\"']?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
CHARSETS: Final = re.compile(
    r"ascii|utf-(?:8|16|16-be|16-le|32)|iso8859-\d+|cp125\d|koi8-[ru]|mac-roman|shift_jis|euc_jp|iso2022_jp"
    r"|euc_kr|gb2312|gbk|gb18030|big5|tis-620"
)
"""Python's names of what is decoded: its list also holds packers, and decoders that take quadratic time."""
MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
SNIFFED_BYTES: Final = 1024


def _read_page(page: Response, chars_max: int) -> tuple[str, bool]:
    """The text of a page, and whether there is more. Raises ToolRefused for what is no text."""
    declared = page.headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    charset = _charset(page.body, declared)
    if not page.body:
        return "", False
    if (kind and not TEXT.fullmatch(kind) and kind not in HTML) or _looks_binary(page.body, charset):
        raise ToolRefused(f"fetch returns text, and that is {kind or 'something else'}; it was not returned.")
    text = page.body.decode(charset, errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
    if kind in HTML:
        return readable(text, chars_max)
    return text[:chars_max], len(text) > chars_max


def _charset(body: bytes, declared: str) -> str:
    """As browsers find it: the mark at the start, the header, what the page says of itself, UTF-8."""
    for mark, name in MARKS:
        if body.startswith(mark):
            return name
    said = CHARSET.search(declared) or CHARSET.search(body[:SNIFFED_BYTES].decode("latin-1"))
    try:
        name = codecs.lookup(said[1]).name if said else "utf-8"
    except LookupError:
        return "utf-8"
    return name if CHARSETS.fullmatch(name) else "utf-8"


def _looks_binary(body: bytes, charset: str) -> bool:
    return b"\0" in body[:SNIFFED_BYTES] and not charset.startswith(("utf-16", "utf-32"))


# ------------------------------------------------------------------ HTML

FED_CHARS: Final = 32_768
READING_S_MAX: Final = 1.0
"""The most that is spent on the text of one page, measured between two feedings."""

DROPPED: Final = frozenset("script style noscript template svg iframe object canvas".split())
LINES: Final = frozenset(
    """address article aside body caption dd details dialog div dl dt fieldset figcaption figure footer form
    header hr li main nav option section select summary tbody tfoot thead tr""".split()
)
PARAGRAPHS: Final = frozenset("blockquote h1 h2 h3 h4 h5 h6 ol p pre table title ul".split())
CELLS: Final = frozenset(("td", "th"))
END: Final = "<br>"
"""Makes the parser give out what it holds back. Its own `close` takes quadratic time for some pages."""
SPACES: Final = re.compile(r"[ \t\r\f\v\n\u00a0]+")
EMPTY_LINES: Final = re.compile(r"\n{3,}")


def readable(html: str, chars_max: int) -> tuple[str, bool]:
    """The text of an HTML page without markup, scripts and styles, and whether it was cut.

    It is cut at `chars_max`, where the parser finds the markup unreadable, and where it takes too long.
    """
    reader, begun, fed = _Reader(), thread_time(), 0
    html += END
    with suppress(AssertionError):  # how the parser says that it does not know what to make of a declaration
        while fed < len(html) and reader.chars <= 2 * chars_max and thread_time() - begun < READING_S_MAX:
            # What is unfinished is read again with the next piece, so a long script gets ever longer ones.
            piece = html[fed : fed + max(FED_CHARS, len(reader.rawdata))]
            reader.feed(piece)
            fed += len(piece)
    text = reader.text()
    return text[:chars_max], fed < len(html) or len(text) > chars_max


class _Reader(HTMLParser):
    """Collects text by lines. `chars` counts what was collected before empty lines fall out."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.chars = 0
        self._parts: list[str] = []
        self._dropped_tag: str | None = None
        self._dropped_depth = 0
        self._pre_depth = 0

    def text(self) -> str:
        lines = "".join(self._parts).split("\n")
        return EMPTY_LINES.sub("\n\n", "\n".join(line.rstrip() for line in lines)).strip("\n")

    def handle_starttag(self, tag: str, _attributes: object) -> None:
        if self._dropped_tag is not None:
            self._dropped_depth += tag == self._dropped_tag
        elif tag in DROPPED:
            self._dropped_tag, self._dropped_depth = tag, 1
        else:
            self._pre_depth += tag == "pre"
            self._break(tag)
            if tag == "li":
                self._add("- ")

    def handle_endtag(self, tag: str) -> None:
        if self._dropped_tag is not None:
            self._dropped_depth -= tag == self._dropped_tag
            if self._dropped_depth == 0:
                self._dropped_tag = None
        else:
            self._pre_depth -= tag == "pre" and self._pre_depth > 0
            self._break(tag)

    def handle_data(self, data: str) -> None:
        if self._dropped_tag is not None:
            return
        if self._pre_depth:
            self._add(data)
            return
        words = SPACES.sub(" ", data)
        self._add(words.lstrip() if self._at_edge() else words)

    def _break(self, tag: str) -> None:
        last = self._parts[-1] if self._parts else "\n\n"
        if tag in PARAGRAPHS and not last.endswith("\n\n"):
            self._add("\n\n")
        elif tag == "br" or (tag in LINES and not last.endswith("\n")):
            self._add("\n")
        elif tag in CELLS and not self._at_edge():
            self._add("\t")

    def _at_edge(self) -> bool:
        """Whether a space would be at the beginning of a line, or the second in a row."""
        return not self._parts or self._parts[-1][-1] in "\n\t "

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self.chars += len(text)
