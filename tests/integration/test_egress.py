"""The way out against real servers on loopback: what must not be reached counts connections, and has none.

127.0.0.2 plays the world outside where something has to answer: it is on the operator's list, the canary's
127.0.0.1 is not. Names resolve through a resolver that a test brings, as an attacker's DNS would be brought.
"""

import gzip
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from time import monotonic

import anyio
import httpx2
import pytest
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.tls import TLSStream
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.unit.egress.spellings import FORBIDDEN, resolved_like_libc

from espalier_egress import (
    Egress,
    EgressError,
    EgressRefused,
    EgressSettings,
    EgressTooLarge,
    EgressTooSlow,
    EgressUnreachable,
    Response,
    open_egress,
)
from espalier_egress.addresses import Address
from espalier_egress.connections import HEAD_BYTES_MAX, Resolver, resolve
from espalier_egress.errors import TOO_LARGE, TOO_SLOW, UNREACHABLE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

OUTSIDE, INSIDE = "127.0.0.2", "127.0.0.1"
NAME = "site.example"
CHUNK = b"x" * 65536
SOON_S = 5.0
SOCKETS_BYTES_MAX = 8_000_000
"""What the kernel may take from a sender on loopback beyond what was read."""

Stream = SocketStream | TLSStream
Answer = Callable[[Stream], Awaitable[None]]


@dataclass
class Site:
    """A server that says what it is told to, and what it has seen."""

    port: int
    answers: dict[str, bytes | Answer]
    connections: int = 0
    heads: list[str] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)

    @property
    def paths(self) -> list[str]:
        return [head.split(" ")[1] for head in self.heads]

    def headers(self, place: int = -1) -> dict[str, str]:
        lines = self.heads[place].split("\r\n")[1:]
        return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines) if name}

    async def serve(self, stream: Stream) -> None:
        async with stream:
            try:
                head = await read_head(stream)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return
            self.heads.append(head)
            answer = self.answers.get(self.paths[-1], page(b"", status="404 Not Found"))
            try:
                await (stream.send(answer) if isinstance(answer, bytes) else answer(stream))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return

    async def serve_encrypted(self, stream: SocketStream, tls: ssl.SSLContext) -> None:
        tls.sni_callback = lambda _, name, __: self.names.append(name)
        try:
            wrapped = await TLSStream.wrap(
                stream, ssl_context=tls, server_side=True, standard_compatible=False
            )
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            return
        await self.serve(wrapped)


async def read_head(stream: Stream) -> str:
    received = b""
    while b"\r\n\r\n" not in received:
        received += await stream.receive()
    return received.partition(b"\r\n\r\n")[0].decode("latin-1")


def page(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def moved(status: int, location: str) -> bytes:
    return page(b"", f"Location: {location}", status=f"{status} Moved")


@asynccontextmanager
async def site(
    answers: dict[str, bytes | Answer] | None = None,
    *,
    host: str = OUTSIDE,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    handle: Answer | None = None,
) -> AsyncIterator[Site]:
    """A server on loopback for the length of a block."""
    listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
    running = Site(listener.extra_attributes[SocketAttribute.local_port](), answers or {})

    async def serve(stream: SocketStream) -> None:
        running.connections += 1
        async with stream:
            if handle:
                await handle(stream)
            elif tls is None:
                await running.serve(stream)
            else:
                await running.serve_encrypted(stream, tls)

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield running
        tasks.cancel_scope.cancel()


def dns(*answers: Sequence[str]) -> tuple[Resolver, list[str]]:
    """A resolver that gives one list of addresses after another, the last for ever; and what it was asked."""
    asked: list[str] = []

    async def resolver(host: str) -> Sequence[Address]:
        asked.append(host)
        return [ip_address(each) for each in answers[min(len(asked), len(answers)) - 1]]

    return resolver, asked


@asynccontextmanager
async def way_out(
    *ports: int,
    addresses: Sequence[str] = (OUTSIDE,),
    ca_file: Path | None = None,
    resolver: Resolver | None = None,
) -> AsyncIterator[Egress]:
    """Egress for which `addresses` are listed on `ports`, which are also usual ones."""
    settings = EgressSettings(
        egress_allow=tuple(f"{address}:{port}" for address in addresses for port in ports),
        egress_ports=(80, 443, *ports),
        egress_ca_file=ca_file,
    )
    async with open_egress(settings, resolver=resolver or dns([OUTSIDE])[0]) as egress:
        yield egress


# ------------------------------------------------------------------ what must not be reached


async def test_no_spelling_of_an_inner_address_reaches_a_server() -> None:
    async def like_libc(host: str) -> Sequence[Address]:
        return resolved_like_libc(host)

    outcomes: dict[str, str] = {}
    async with (
        site(host=INSIDE) as first,
        site(host=OUTSIDE, port=first.port) as second,
        site(host="::1", port=first.port) as third,
        way_out(first.port, addresses=(), resolver=like_libc) as egress,
    ):
        for spelling in FORBIDDEN:
            url = spelling.replace("PORT", str(first.port))
            try:
                outcomes[url] = str(await egress.get(url, deadline_s=5))
            except EgressError as error:
                outcomes[url] = type(error).__name__
        assert {url: outcome for url, outcome in outcomes.items() if outcome != "EgressRefused"} == {}
        assert [each.connections for each in (first, second, third)] == [0, 0, 0]


async def test_the_canaries_of_these_tests_would_sing() -> None:
    """Once they are listed, the same door leads to each of them."""
    async with site(host=INSIDE) as first, site(host="::1", port=first.port) as third:
        async with way_out(first.port, addresses=(INSIDE, "[::1]")) as egress:
            await egress.get(f"http://127.0.0.1:{first.port}/")
            await egress.get(f"http://[::1]:{first.port}/")
        assert [first.connections, third.connections] == [1, 1]


@pytest.mark.parametrize(
    "answers", [[OUTSIDE, INSIDE], [INSIDE, OUTSIDE], [OUTSIDE, "::1"], [OUTSIDE, "10.0.0.1"]]
)
async def test_one_forbidden_answer_among_good_ones_refuses_the_name(answers: list[str]) -> None:
    resolver, _ = dns(answers)
    async with site() as good, site(host=INSIDE, port=good.port) as canary:
        async with way_out(good.port, resolver=resolver) as egress:
            with pytest.raises(EgressRefused):
                await egress.get(f"http://{NAME}:{good.port}/")
        assert [good.connections, canary.connections] == [0, 0]


async def test_a_name_that_flips_after_the_check_is_connected_to_where_it_was_checked() -> None:
    resolver, asked = dns([OUTSIDE], [INSIDE])
    async with site({"/": page(b"outside")}) as good, site(host=INSIDE, port=good.port) as canary:
        async with way_out(good.port, resolver=resolver) as egress:
            url = f"http://{NAME}:{good.port}/"
            assert (await egress.get(url)).body == b"outside"
            assert asked == [NAME]
            with pytest.raises(EgressRefused):
                await egress.get(url)
            assert asked == [NAME, NAME]
        assert [good.connections, canary.connections] == [1, 0]


async def test_a_name_that_flips_between_redirects_is_refused() -> None:
    resolver, _ = dns([OUTSIDE], [INSIDE])
    async with site() as good, site(host=INSIDE, port=good.port) as canary:
        good.answers["/"] = moved(302, "/again")
        async with way_out(good.port, resolver=resolver) as egress:
            with pytest.raises(EgressRefused):
                await egress.get(f"http://{NAME}:{good.port}/")
        assert [good.paths, canary.connections] == [["/"], 0]


async def test_the_next_address_is_tried_when_one_does_not_answer() -> None:
    resolver, _ = dns(["127.0.0.3", OUTSIDE])
    async with (
        site({"/": page(b"second")}) as good,
        way_out(good.port, addresses=(OUTSIDE, "127.0.0.3"), resolver=resolver) as egress,
    ):
        assert (await egress.get(f"http://{NAME}:{good.port}/")).body == b"second"


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"])
async def test_a_proxy_in_the_environment_is_not_used(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site({"/": page(b"direct")}) as good, site(host=INSIDE) as canary:
        monkeypatch.setenv(variable, f"http://127.0.0.1:{canary.port}")
        monkeypatch.setenv("NO_PROXY", "")
        async with way_out(good.port) as egress:
            assert (await egress.get(f"http://{OUTSIDE}:{good.port}/")).body == b"direct"
            async with egress.checked_client(f"http://{OUTSIDE}:{good.port}/") as client:
                assert (await client.get(f"http://{OUTSIDE}:{good.port}/")).text == "direct"
        assert canary.connections == 0


# ------------------------------------------------------------------ redirects


FORBIDDEN_TARGETS = {
    "an address": "http://127.0.0.1:{canary}/",
    "a name": "http://inner.example:{canary}/",
    "a number": "http://2130706433:{canary}/",
    "a mapped address": "http://[::ffff:7f00:1]:{canary}/",
    "without a scheme": "//127.0.0.1:{canary}/",
    "a file": "file:///etc/passwd",
    "another scheme": "gopher://127.0.0.1:{canary}/_",
    "a user": "http://user:password@127.0.0.2:{good}/",
    "another port": "http://127.0.0.2:22/",
    "nonsense": "http://[::1",
}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("target", FORBIDDEN_TARGETS.values(), ids=FORBIDDEN_TARGETS)
async def test_a_redirect_to_what_is_forbidden_is_refused(status: int, target: str) -> None:
    resolver, _ = dns([INSIDE])
    async with site() as good, site(host=INSIDE) as canary:
        good.answers["/"] = moved(status, target.format(canary=canary.port, good=good.port))
        async with open_egress(
            EgressSettings(egress_allow=(f"{OUTSIDE}:{good.port}",), egress_ports=(80, 443, canary.port)),
            resolver=resolver,
        ) as egress:
            with pytest.raises(EgressRefused):
                await egress.get(f"http://{OUTSIDE}:{good.port}/")
        assert [good.paths, canary.connections] == [["/"], 0]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_three_redirects_are_followed(status: int) -> None:
    async with site({"/c": page(b"there", "X-Kind: last")}) as good, way_out(good.port) as egress:
        here = f"http://{OUTSIDE}:{good.port}"
        good.answers |= {
            "/": moved(status, "a"),
            "/a": moved(status, f"{here}/b"),
            "/b": moved(status, "/c#part"),
        }
        got = await egress.get(f"{here}/")
        headers = {"content-length": "5", "connection": "close", "x-kind": "last"}
        assert got == Response(200, headers, b"there", f"{here}/c")
        assert good.paths == ["/", "/a", "/b", "/c"]


async def test_a_loop_of_redirects_ends_after_three() -> None:
    async with site({"/": moved(302, "/")}) as good, way_out(good.port) as egress:
        with pytest.raises(EgressRefused):
            await egress.get(f"http://{OUTSIDE}:{good.port}/")
        assert good.paths == ["/"] * 4


async def test_credentials_stay_with_their_origin() -> None:
    told = {
        "Authorization": "Bearer secret",
        "X-Api-Key": "secret",
        "Cookie": "a=secret",
        "Accept": "text/html",
    }
    async with (
        site() as first,
        site({"/": page(b"there")}) as second,
        way_out(first.port, second.port) as egress,
    ):
        first.answers |= {"/": moved(302, "/same"), "/same": moved(302, f"http://{OUTSIDE}:{second.port}/")}
        await egress.get(f"http://{OUTSIDE}:{first.port}/", headers=told)
        kept = {name.lower(): value for name, value in told.items()}
        assert {name: value for name, value in first.headers(1).items() if name in kept} == kept
        assert "secret" not in second.heads[0]
        assert second.headers()["accept"] == "text/html"


async def test_no_cookie_is_kept_between_two_fetches() -> None:
    async with site({"/": page(b"", "Set-Cookie: tenant=one")}) as good, way_out(good.port) as egress:
        for _ in range(2):
            await egress.get(f"http://{OUTSIDE}:{good.port}/")
        assert ["cookie" in good.headers(each) for each in range(2)] == [False, False]


# ------------------------------------------------------------------ TLS


@dataclass(frozen=True)
class Authority:
    """A certificate authority of the test, and a server certificate of it for NAME."""

    ca_file: Path
    server: ssl.SSLContext


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    folder = tmp_path_factory.mktemp("tls")
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = certificate("test authority", ca_key, "test authority", ca_key, is_ca=True)
    leaf = certificate(NAME, key, "test authority", ca_key, is_ca=False)
    (folder / "ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + leaf.public_bytes(serialization.Encoding.PEM)
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem")
    return Authority(folder / "ca.pem", server)


def certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    *,
    is_ca: bool,
) -> x509.Certificate:
    now = datetime.now(UTC)

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(signer, hashes.SHA256())
    )


async def test_a_listed_host_is_asked_by_its_own_name_at_the_checked_address(authority: Authority) -> None:
    resolver, asked = dns([INSIDE])
    async with site(
        {"/a?b=c": page(b"hello", "X-Many: 1", "X-Many: 2")}, host=INSIDE, tls=authority.server
    ) as inner:
        settings = EgressSettings(egress_allow=(f"{NAME}:{inner.port}",), egress_ca_file=authority.ca_file)
        async with open_egress(settings, resolver=resolver) as egress:
            url = f"https://SITE.example:{inner.port}/a?b=c"
            got = await egress.get(url, headers={"Host": "forged.example", "Accept-Encoding": "br"})
        headers = {"content-length": "5", "connection": "close", "x-many": "1, 2"}
        assert got == Response(200, headers, b"hello", url.replace("SITE", "site"))
        assert inner.heads[0].startswith("GET /a?b=c HTTP/1.1\r\n")
        assert inner.headers() == {"host": f"{NAME}:{inner.port}", "accept-encoding": "gzip"}
        assert [inner.names, asked] == [[NAME], [NAME]]


async def test_what_was_encrypted_is_not_continued_in_the_open(authority: Authority) -> None:
    async with site() as open_site, site(tls=authority.server) as shut:
        shut.answers["/"] = moved(302, f"http://{OUTSIDE}:{open_site.port}/")
        async with way_out(open_site.port, shut.port, ca_file=authority.ca_file) as egress:
            with pytest.raises(EgressRefused):
                await egress.get(f"https://{NAME}:{shut.port}/")
        assert [shut.paths, open_site.connections] == [["/"], 0]


# ------------------------------------------------------------------ errors that tell nothing


async def silence(_: Stream) -> None:
    await anyio.sleep_forever()


def says(text: bytes) -> Answer:
    async def answer(stream: Stream) -> None:
        await stream.send(text)

    return answer


async def outcome(egress: Egress, url: str, **limits: float) -> tuple[type[EgressError], str]:
    with pytest.raises(EgressError) as caught:
        await egress.get(url, **{"deadline_s": 5.0, **limits})  # type: ignore[arg-type]
    return type(caught.value), str(caught.value)


async def test_closed_filtered_and_wrong_all_look_the_same(authority: Authority) -> None:
    async with (
        site(tls=authority.server) as untrusted,
        site(handle=says(b"220 mail.internal ESMTP\r\n")) as mail,
        site(handle=says(b"SSH-2.0-OpenSSH_9.2\r\n")) as shell,
        site(handle=silence) as silent,
        site({"/": page(b"whole")[:-2]}) as cut,
        site({"/": b""}) as empty,
    ):
        bound = socket.socket()  # and not listening, so that the port is closed and nobody else's
        bound.bind((OUTSIDE, 0))
        closed = bound.getsockname()[1]
        ports = [each.port for each in (untrusted, mail, shell, silent, cut, empty)]
        with bound:
            async with way_out(closed, *ports) as egress:
                seen = {
                    "closed": await outcome(egress, f"http://{OUTSIDE}:{closed}/"),
                    "closed name": await outcome(egress, f"https://{NAME}:{closed}/"),
                    "filtered": await outcome(egress, f"https://{NAME}:{silent.port}/", deadline_s=0.3),
                    "wrong certificate": await outcome(egress, f"https://{NAME}:{untrusted.port}/"),
                    "mail in the open": await outcome(egress, f"http://{OUTSIDE}:{mail.port}/"),
                    "shell in TLS": await outcome(egress, f"https://{NAME}:{shell.port}/"),
                    "cut short": await outcome(egress, f"http://{OUTSIDE}:{cut.port}/"),
                    "nothing": await outcome(egress, f"http://{OUTSIDE}:{empty.port}/"),
                }
    assert seen == dict.fromkeys(seen, (EgressUnreachable, UNREACHABLE))
    assert untrusted.heads == []


async def test_a_name_that_nobody_knows_looks_like_a_closed_port() -> None:
    async def nobody(_: str) -> Sequence[Address]:
        return []

    async with way_out(resolver=nobody) as egress:
        assert await outcome(egress, f"https://{NAME}/") == (EgressUnreachable, UNREACHABLE)
    async with way_out(resolver=resolve) as egress:
        assert await outcome(egress, "https://no-such-name.invalid/") == (EgressUnreachable, UNREACHABLE)


# ------------------------------------------------------------------ limits


class Flood:
    """Sends the same thing again and again, and counts what it got rid of."""

    def __init__(self, start: bytes, again: bytes, pause_s: float = 0) -> None:
        self.sent = 0
        self._start, self._again, self._pause_s = start, again, pause_s

    async def __call__(self, stream: Stream) -> None:
        await stream.send(self._start)
        while True:
            await stream.send(self._again)
            self.sent += len(self._again)
            await anyio.sleep(self._pause_s)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("start", "again"),
    [
        (HEAD, b"X-More: " + b"y" * 1000 + b"\r\n"),
        (HEAD + b"X-Long: ", b"y" * 1000),
        (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"),
    ],
    ids=["headers", "a header", "interim answers"],
)
async def test_an_endless_head_is_cut_off(start: bytes, again: bytes) -> None:
    flood = Flood(start, again)
    async with site({"/": flood}) as good, way_out(good.port) as egress:
        assert await outcome(egress, f"http://{OUTSIDE}:{good.port}/") == (EgressTooLarge, TOO_LARGE)
    assert flood.sent < HEAD_BYTES_MAX + SOCKETS_BYTES_MAX


@pytest.mark.parametrize("spare", [0, 1])
async def test_a_head_may_have_so_many_bytes_and_no_more(spare: int) -> None:
    bare = page(b"", "X-Long: ")
    filled = page(b"", "X-Long: " + "y" * (HEAD_BYTES_MAX - len(bare) + spare))
    async with site({"/": filled}) as good, way_out(good.port) as egress:
        if spare:
            assert await outcome(egress, f"http://{OUTSIDE}:{good.port}/") == (EgressTooLarge, TOO_LARGE)
        else:
            assert (await egress.get(f"http://{OUTSIDE}:{good.port}/")).status == 200


@pytest.mark.parametrize(
    ("start", "again"),
    [
        (HEAD + b"Connection: close\r\n\r\n", CHUNK),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + CHUNK + b"\r\n"),
    ],
    ids=["until closed", "chunked"],
)
async def test_an_endless_body_is_cut_off(start: bytes, again: bytes) -> None:
    flood = Flood(start, again)
    async with site({"/": flood}) as good, way_out(good.port) as egress:
        seen = await outcome(egress, f"http://{OUTSIDE}:{good.port}/", body_bytes_max=1_000_000)
    assert seen == (EgressTooLarge, TOO_LARGE)
    assert flood.sent < 1_000_000 + SOCKETS_BYTES_MAX


async def test_a_body_is_not_counted_as_head() -> None:
    body = bytes(range(256)) * 40 * (HEAD_BYTES_MAX // 8192)
    async with site({"/": page(body)}) as good, way_out(good.port) as egress:
        assert (await egress.get(f"http://{OUTSIDE}:{good.port}/")).body == body


@pytest.mark.parametrize("spare", [0, 1])
async def test_a_body_may_have_so_many_bytes_and_no_more(spare: int) -> None:
    body = b"y" * (1000 + spare)
    packed = page(gzip.compress(body), "Content-Encoding: gzip")
    async with site({"/": page(body), "/packed": packed}) as good, way_out(good.port) as egress:
        for path in ("", "packed"):
            url = f"http://{OUTSIDE}:{good.port}/{path}"
            if spare:
                assert await outcome(egress, url, body_bytes_max=1000) == (EgressTooLarge, TOO_LARGE)
            else:
                assert (await egress.get(url, body_bytes_max=1000)).body == body


async def test_a_bomb_is_not_unpacked() -> None:
    bomb = page(gzip.compress(bytes(50_000_000)), "Content-Encoding: gzip")
    async with site({"/": bomb}) as good, way_out(good.port) as egress:
        tracemalloc.start()
        seen = await outcome(egress, f"http://{OUTSIDE}:{good.port}/", body_bytes_max=1_000_000)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert seen == (EgressTooLarge, TOO_LARGE)
    assert peak < 8_000_000


async def test_a_bomb_inside_a_bomb_is_not_touched() -> None:
    bomb = page(gzip.compress(gzip.compress(bytes(1_000_000))), "Content-Encoding: gzip, gzip")
    async with site({"/": bomb}) as good, way_out(good.port) as egress:
        assert await outcome(egress, f"http://{OUTSIDE}:{good.port}/") == (EgressUnreachable, UNREACHABLE)


async def test_a_packed_answer_that_is_cut_short_is_not_taken_for_whole() -> None:
    packed = gzip.compress(b"all of it" * 1000)
    async with (
        site({"/": page(packed[:-20], "Content-Encoding: gzip")}) as good,
        way_out(good.port) as egress,
    ):
        assert await outcome(egress, f"http://{OUTSIDE}:{good.port}/") == (EgressUnreachable, UNREACHABLE)


@pytest.mark.parametrize(
    ("start", "again"),
    [(HEAD + b"Content-Length: 1000\r\n\r\n", b"y"), (HEAD + b"X-Slow: ", b"y"), (b"", b"")],
    ids=["body", "head", "silence"],
)
async def test_the_deadline_is_for_everything(start: bytes, again: bytes) -> None:
    slow = Flood(start, again, pause_s=0.05)
    async with site({"/": slow if again else silence}) as good, way_out(good.port) as egress:
        begun = monotonic()
        seen = await outcome(egress, f"http://{OUTSIDE}:{good.port}/", deadline_s=0.4)
        assert seen == (EgressTooSlow, TOO_SLOW)
        assert monotonic() - begun < SOON_S


async def test_redirects_do_not_lengthen_the_deadline() -> None:
    async def slowly(stream: Stream) -> None:
        await anyio.sleep(0.3)
        await stream.send(moved(302, "/"))

    async with site({"/": slowly}) as good, way_out(good.port) as egress:
        seen = await outcome(egress, f"http://{OUTSIDE}:{good.port}/", deadline_s=0.4)
        assert seen == (EgressTooSlow, TOO_SLOW)
        assert len(good.heads) == 2


async def test_no_connection_is_left_open() -> None:
    """Also after refusals in mid-answer: the server sees the end of each one."""
    ended = anyio.Event()

    async def until_closed(stream: Stream) -> None:
        await stream.send(HEAD + b"Content-Length: 10\r\n\r\n0123456789")
        try:
            await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            ended.set()

    for bytes_max in (10, 9):
        async with site({"/": until_closed}) as good, way_out(good.port) as egress:
            try:
                await egress.get(f"http://{OUTSIDE}:{good.port}/", body_bytes_max=bytes_max)
            except EgressTooLarge:
                assert bytes_max == 9
            with anyio.fail_after(SOON_S):
                await ended.wait()
        ended = anyio.Event()


# ------------------------------------------------------------------ a client for one server


async def test_a_client_for_one_server_speaks_with_that_server_alone() -> None:
    async with (
        site({"/mcp": page(b"ours")}) as good,
        site(port=0) as other,
        way_out(good.port, other.port) as egress,
    ):
        url = f"http://{OUTSIDE}:{good.port}/mcp"
        async with egress.checked_client(url, headers={"Authorization": "Bearer secret"}) as client:
            answer = await client.post(url, json={"a": 1})
            assert [answer.status_code, answer.text] == [200, "ours"]
            assert good.headers()["authorization"] == "Bearer secret"
            for elsewhere in (
                f"http://{OUTSIDE}:{other.port}/mcp",
                f"http://{NAME}:{good.port}/mcp",
                f"https://{OUTSIDE}:{good.port}/mcp",
                f"http://user@{OUTSIDE}:{good.port}/mcp",
            ):
                with pytest.raises(EgressRefused):
                    await client.get(elsewhere)
        assert [good.connections, other.connections] == [1, 0]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("follow", [False, True])
async def test_no_redirect_of_a_post_is_followed(status: int, follow: bool) -> None:
    async with site({"/": moved(status, "/again")}) as good, way_out(good.port) as egress:
        url = f"http://{OUTSIDE}:{good.port}/"
        async with egress.checked_client(url) as client:
            with pytest.raises(EgressRefused):
                await client.post(url, content=b"secret", follow_redirects=follow)
        assert good.paths == ["/"]


async def test_a_client_for_one_server_checks_each_new_connection() -> None:
    resolver, asked = dns([OUTSIDE], [INSIDE])
    async with site({"/": page(b"once")}) as good, site(host=INSIDE, port=good.port) as canary:
        async with way_out(good.port, resolver=resolver) as egress:
            url = f"http://{NAME}:{good.port}/"
            async with egress.checked_client(url) as client:
                assert (await client.get(url)).text == "once"
                with pytest.raises(EgressRefused):
                    await client.get(url)
        assert [asked, good.connections, canary.connections] == [[NAME, NAME], 1, 0]


async def test_a_client_for_one_server_keeps_its_connection() -> None:
    kept = page(b"again").replace(b"Connection: close\r\n", b"")

    async def twice(stream: Stream) -> None:
        await stream.send(kept)
        await read_head(stream)
        await stream.send(kept)

    resolver, asked = dns([OUTSIDE])
    async with site({"/": twice}) as good, way_out(good.port, resolver=resolver) as egress:
        url = f"http://{NAME}:{good.port}/"
        async with egress.checked_client(url) as client:
            assert [(await client.get(url)).text for _ in range(2)] == ["again", "again"]
        assert [asked, good.connections] == [[NAME], 1]


async def test_plain_http_is_spoken_with_listed_servers_alone() -> None:
    """The same public address may be asked for a page in the open, but not be told a credential."""
    resolver, _ = dns(["93.184.216.34"])
    async with way_out(resolver=resolver) as egress:
        url = f"http://{NAME}/mcp"
        async with egress.checked_client(url, headers={"Authorization": "Bearer secret"}) as client:
            with pytest.raises(EgressRefused):
                await client.post(url)


@pytest.mark.parametrize("url", ["ftp://a.example/", "http://u:p@a.example/", "https://127.1/", "a.example"])
async def test_a_client_is_not_made_for_a_url_that_cannot_be_right(url: str) -> None:
    async with way_out() as egress:
        with pytest.raises(EgressRefused):
            egress.checked_client(url)


async def test_an_answer_to_a_client_is_bounded_and_unpacked_like_a_page() -> None:
    answers: dict[str, bytes | Answer] = {
        "/good": page(gzip.compress(b'{"a": 1}'), "Content-Encoding: gzip", "Content-Type: application/json"),
        "/bomb": page(gzip.compress(bytes(50_000_000)), "Content-Encoding: gzip"),
        "/endless": Flood(HEAD + b"Content-Type: text/event-stream\r\n\r\n", b"data: " + CHUNK + b"\n\n"),
    }
    async with site(answers) as good, way_out(good.port) as egress:
        here = f"http://{OUTSIDE}:{good.port}"
        async with egress.checked_client(here, body_bytes_max=1_000_000) as client:
            assert (await client.get(f"{here}/good")).json() == {"a": 1}
            for path in ("/bomb", "/endless"):
                with pytest.raises(EgressTooLarge):
                    await client.get(here + path)


async def test_errors_of_a_client_are_transport_errors_of_its_library() -> None:
    async with way_out() as egress, egress.checked_client("https://a.example/") as client:
        with pytest.raises(httpx2.TransportError) as caught:
            await client.get("https://127.0.0.1/")
        assert "127.0.0.1" not in str(caught.value)
