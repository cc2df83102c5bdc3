"""The bundled tools as a client of MCP sees them; `fetch` gets its pages from a server on loopback."""

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from time import monotonic, thread_time
from typing import Any
from zoneinfo import ZoneInfo

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from mcp.client import Client
from mcp_types import CallToolResult, TextContent

from espalier_egress import EgressSettings, open_egress
from espalier_mcp_broker.bundled import (
    PAGE_BYTES_MAX,
    PAGE_CHARS,
    PAGE_CHARS_MAX,
    READING_S_MAX,
    URL_CHARS_MAX,
    bundled_server,
    readable,
)

pytestmark = pytest.mark.anyio

POLL_S = 0.01
QUICK_S = 1.0

Page = tuple[str, bytes, str]
"""Status line, body and further header lines."""


def answer(page: Page) -> bytes:
    status, body, headers = page
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n"
    return head.encode() + body


class Desk:
    """A client of the bundled server, and the pages that can be fetched."""

    def __init__(self, client: Client, port: int, pages: dict[str, Page]) -> None:
        self.client = client
        self.here = f"http://127.0.0.1:{port}"
        self.pages = pages

    async def call(self, tool: str, **args: Any) -> CallToolResult:
        return await self.client.call_tool(tool, args)

    async def refusal(self, tool: str, **args: Any) -> str:
        """The one sentence of a refusal."""
        result = await self.call(tool, **args)
        assert (result.is_error, result.structured_content) == (True, None)
        return text_of(result)

    async def fetch(self, body: bytes, kind: str = "text/html", **args: Any) -> CallToolResult:
        self.pages["/page"] = ("200 OK", body, f"Content-Type: {kind}\r\n" if kind else "")
        return await self.call("fetch", url=f"{self.here}/page", **args)

    async def text(self, body: bytes, kind: str = "text/html") -> str:
        result = await self.fetch(body, kind)
        assert not result.is_error, text_of(result)
        assert result.structured_content is not None
        return str(result.structured_content["text"])


def text_of(result: CallToolResult) -> str:
    (part,) = result.content
    assert isinstance(part, TextContent)
    return part.text


@asynccontextmanager
async def serving(pages: dict[str, Page]) -> AsyncIterator[int]:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")

    async def serve(stream: SocketStream) -> None:
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                head += await stream.receive()
            path = head.split(b" ")[1].decode()
            try:
                await stream.send(answer(pages[path]))
            except anyio.BrokenResourceError:
                return

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield listener.extra_attributes[SocketAttribute.local_port]()
        tasks.cancel_scope.cancel()


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    pages: dict[str, Page] = {}
    async with serving(pages) as port:
        settings = EgressSettings(egress_allow=(f"127.0.0.1:{port}",))
        async with open_egress(settings) as egress, Client(bundled_server(egress)) as client:
            yield Desk(client, port, pages)


async def test_two_tools_are_offered_by_their_bare_names(desk: Desk) -> None:
    listed = (await desk.client.list_tools()).tools
    shapes = {tool.name: tool.input_schema for tool in listed}
    assert {name: (sorted(shape["properties"]), shape.get("required")) for name, shape in shapes.items()} == {
        "time": (["timezone"], None),
        "fetch": (["max_chars", "url"], ["url"]),
    }
    assert all(shape["additionalProperties"] is False for shape in shapes.values())


async def test_a_tool_that_does_not_exist_is_an_error_result(desk: Desk) -> None:
    assert await desk.refusal("espalier.time") == "There is no tool called 'espalier.time' here."


# ------------------------------------------------------------------ time


async def test_the_time_is_told_in_utc_and_there(desk: Desk) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    result = await desk.call("time", timezone="Asia/Kathmandu")
    told = result.structured_content
    assert told is not None and not result.is_error
    utc, local = datetime.fromisoformat(told["utc"]), datetime.fromisoformat(told["local"])
    assert before <= utc <= datetime.now(UTC)
    assert utc.timestamp() == local.timestamp() == told["unix_seconds"]
    assert told == {
        "utc": utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "local": utc.astimezone(ZoneInfo("Asia/Kathmandu")).isoformat(),
        "timezone": "Asia/Kathmandu",
        "unix_seconds": int(utc.timestamp()),
    }
    assert local.utcoffset() == timedelta(hours=5, minutes=45)
    assert text_of(result) == f"{told['utc']} in UTC, {told['local']} in Asia/Kathmandu"


async def test_without_a_zone_the_time_is_utc(desk: Desk) -> None:
    result = await desk.call("time")
    told = result.structured_content
    assert told is not None
    assert told["timezone"] == "UTC"
    assert datetime.fromisoformat(told["local"]) == datetime.fromisoformat(told["utc"])
    assert text_of(result) == f"{told['utc']} in UTC"


@pytest.mark.parametrize(
    "zone",
    ["Mars/Olympus", "", "Europe", "../../etc/passwd", "/etc/passwd", "zone.tab", "Europe/Berlin\0", "."],
)
async def test_what_is_no_zone_is_refused(desk: Desk, zone: str) -> None:
    expected = f"{zone!r} is no IANA time zone; one would be Europe/Berlin."
    assert await desk.refusal("time", timezone=zone) == expected


@pytest.mark.parametrize(
    "args", [{"timezone": 1}, {"timezone": None}, {"zone": "UTC"}, {"timezone": "a" * 65}]
)
async def test_other_arguments_of_time_are_refused(desk: Desk, args: dict[str, Any]) -> None:
    assert await desk.refusal("time", **args) == (
        "time takes nothing or timezone, the IANA name of a zone such as Europe/Berlin."
    )


# ------------------------------------------------------------------ fetch


async def test_a_page_is_returned_as_text_with_where_it_came_from(desk: Desk) -> None:
    kind = "text/html; charset=utf-8"
    body = b"<title>A page</title><p>Hello, <b>world</b>!<script>x = '<p>no</p>'</script><p>Bye."
    desk.pages["/"] = ("302 Found", b"", "Location: /there#part\r\n")
    desk.pages["/there"] = ("404 Not Found", body, f"Content-Type: {kind}\r\n")
    result = await desk.call("fetch", url=f"{desk.here}/")
    text = "A page\n\nHello, world!\n\nBye."
    assert not result.is_error
    assert result.structured_content == {
        "status": 404,
        "url": f"{desk.here}/there",
        "content_type": kind,
        "text": text,
        "is_cut": False,
    }
    assert text_of(result) == f"404 {desk.here}/there {kind}\n\n{text}"


async def test_html_becomes_readable_text(desk: Desk) -> None:
    html = b"""<!DOCTYPE html><html><head><meta charset="utf-8"><title>The  title</title>
    <style>p { color: red }</style><script>document.write("<p>written</p>")</script></head>
    <body><!-- a comment --><h1>Heads &amp; tails</h1><p>One <em>long</em>
      line.<br>Another&nbsp;one.</p><ul><li>first</li><li>second</ul>
    <pre>
  kept
      as it is</pre><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>
    <svg><title>drawn</title></svg><noscript>please</noscript><template><p>unused</p></template>
    <div>end of R&D"""
    assert await desk.text(html) == (
        "The title\n\nHeads & tails\n\nOne long line.\nAnother one.\n\n- first\n- second\n\n  kept\n"
        "      as it is\n\na\tb\n1\t2\n\nend of R&D"
    )


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/markdown",
        "application/json",
        "application/ld+json",
        "APPLICATION/XML;charset=utf-8",
        "",
    ],
)
async def test_other_text_is_returned_as_it_is(desk: Desk, kind: str) -> None:
    assert await desk.text(b"  <p>a &amp; b</p>\n", kind) == "  <p>a &amp; b</p>\n"


@pytest.mark.parametrize(
    ("body", "kind", "name"),
    [
        (b"%PDF-1.7", "application/pdf", "application/pdf"),
        (b"\x89PNG\r\n", "image/png", "image/png"),
        (b"a\0b", "text/plain", "text/plain"),
        (b"\0\1\2", "", "something else"),
        (b"PK", "application/octet-stream", "application/octet-stream"),
    ],
)
async def test_what_is_no_text_is_refused(desk: Desk, body: bytes, kind: str, name: str) -> None:
    assert (
        text_of(await desk.fetch(body, kind))
        == f"fetch returns text, and that is {name}; it was not returned."
    )
    assert (await desk.fetch(body, kind)).is_error


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("Größe".encode(), "text/plain"),
        ("Größe".encode("latin-1"), "text/plain; charset=ISO-8859-1"),
        ("Größe".encode("cp1252"), 'text/plain; charset="windows-1252"'),
        ("Größe".encode("utf-16"), "text/plain"),
        ("Größe".encode("utf-8-sig"), "text/plain; charset=latin-1"),
        ('<meta charset="iso-8859-15">Größe'.encode("iso-8859-15"), "text/html"),
        ("Größe".encode(), "text/plain; charset=punycode"),
        ("Größe".encode(), "text/plain; charset=zlib"),
        ("Größe".encode(), "text/plain; charset=no-such"),
    ],
)
async def test_text_is_decoded_as_browsers_do(desk: Desk, body: bytes, kind: str) -> None:
    assert await desk.text(body, kind) == "Größe"


async def test_bytes_that_are_no_text_of_their_charset_are_replaced(desk: Desk) -> None:
    assert await desk.text(b"a\xffb", "text/plain") == "a\ufffdb"
    assert await desk.text("a\0b".encode("utf-16"), "text/plain") == "a\ufffdb"


async def test_text_is_cut_and_says_so(desk: Desk) -> None:
    result = await desk.fetch(b"abcdef", "text/plain", max_chars=4)
    assert result.structured_content is not None
    assert (result.structured_content["text"], result.structured_content["is_cut"]) == ("abcd", True)
    assert text_of(result) == f"200 {desk.here}/page text/plain\n\nabcd\n\n[cut after 4 characters]"


@pytest.mark.parametrize("kind", ["text/plain", "text/html"])
@pytest.mark.parametrize(
    ("limit", "expected"), [({}, PAGE_CHARS), ({"max_chars": PAGE_CHARS_MAX}, PAGE_CHARS_MAX)]
)
async def test_text_has_a_limit_also_by_itself(
    desk: Desk, kind: str, limit: dict[str, int], expected: int
) -> None:
    whole = await desk.fetch(b"x" * expected, kind, **limit)
    more = await desk.fetch(b"x" * (expected + 1), kind, **limit)
    shown = [each.structured_content for each in (whole, more)]
    assert [(len(each["text"]), each["is_cut"]) for each in shown if each] == [
        (expected, False),
        (expected, True),
    ]


async def test_a_page_that_is_too_large_is_refused_also_when_packed(desk: Desk) -> None:
    desk.pages["/large"] = ("200 OK", b"x" * (PAGE_BYTES_MAX + 1), "")
    desk.pages["/packed"] = ("200 OK", gzip.compress(bytes(PAGE_BYTES_MAX + 1)), "Content-Encoding: gzip\r\n")
    for path in ("/large", "/packed"):
        assert await desk.refusal("fetch", url=desk.here + path) == (
            "fetch got nothing: The answer is larger than what is taken."
        )


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:22/",
        "http://localhost/",
        "http://169.254.169.254/",
        "https://[::1]/",
        "http://10.0.0.1/",
    ],
)
async def test_what_the_way_out_refuses_is_an_error_result_without_the_address(desk: Desk, url: str) -> None:
    assert await desk.refusal("fetch", url=url) == (
        "fetch got nothing: That host or port is not allowed: only public hosts on the usual web ports are."
    )


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "example.com", "http://", "ftp://a.example/", "http://0x7f.1/"]
)
async def test_what_is_no_plain_url_is_an_error_result(desk: Desk, url: str) -> None:
    assert await desk.refusal("fetch", url=url) == (
        "fetch got nothing: That is not an absolute http or https URL in its plain spelling."
    )


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"url": ""},
        {"url": 1},
        {"url": None},
        {"url": "http://a.example/" + "a" * URL_CHARS_MAX},
        {"url": "http://a.example/", "max_chars": 0},
        {"url": "http://a.example/", "max_chars": PAGE_CHARS_MAX + 1},
        {"url": "http://a.example/", "max_chars": True},
        {"url": "http://a.example/", "max_chars": "9"},
        {"url": "http://a.example/", "max_chars": 9.5},
        {"url": "http://a.example/", "headers": {}},
    ],
)
async def test_other_arguments_of_fetch_are_refused(desk: Desk, args: dict[str, Any]) -> None:
    assert await desk.refusal("fetch", **args) == (
        "fetch takes url (an absolute http or https URL of at most 8192 characters) and "
        "max_chars (1 to 200000, 50000 if left out)."
    )


# ------------------------------------------------------------------ hostile markup


@pytest.mark.parametrize("unit", ["<!--", "</", "<?", "<a b='", "<a =", "<![CDATA[", "<script>", "&#1"])
def test_no_markup_takes_quadratic_time(unit: str) -> None:
    """The parser's own end of a page takes 2 to 50 s for most of these."""
    begun = thread_time()
    readable(unit * (100_000 // len(unit)), PAGE_CHARS)
    assert thread_time() - begun < QUICK_S


def test_reading_ends_in_time_whatever_there_is_to_read() -> None:
    begun = thread_time()
    assert readable("<!x>" * (PAGE_BYTES_MAX // 2), PAGE_CHARS) == ("", True)
    assert thread_time() - begun < READING_S_MAX + QUICK_S


def test_a_long_script_does_not_end_a_page() -> None:
    page = "<p>before<script>" + "a</b>" * (PAGE_BYTES_MAX // 6) + "</script><p>after"
    assert readable(page, PAGE_CHARS) == ("before\n\nafter", False)


def test_a_page_that_the_parser_gives_up_is_cut_there() -> None:
    assert readable("<p>before<p><![what is this]>after", PAGE_CHARS) == ("before", True)


async def test_other_calls_are_answered_while_a_page_is_read(desk: Desk) -> None:
    hostile = b"<!x>" * (PAGE_BYTES_MAX // 4)
    answered_after: list[float] = []

    async def fetch() -> None:
        await desk.fetch(hostile)
        tasks.cancel_scope.cancel()

    async def ask() -> None:
        while True:
            begun = monotonic()
            try:
                await anyio.sleep(POLL_S)
                await desk.call("time")
            finally:  # also of the turn in which the page is done
                answered_after.append(monotonic() - begun)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fetch)
        tasks.start_soon(ask)
    assert answered_after and max(answered_after) < READING_S_MAX / 2
