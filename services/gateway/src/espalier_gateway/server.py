"""The HTTP server: uvicorn with our limits, our headers and our way of stopping.

`httptools` is quick, but bounds neither the size of a request's head nor the wait for one: that
is done here. Signals are `__main__`'s: uvicorn's own handling would end streams only after waiting for them.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from espalier_gateway.settings import GatewaySettings
from espalier_gateway.streaming import HANG_UP
from espalier_protocol.versions import SERVED_VERSIONS

HEAD_BYTES_MAX: Final = 32 * 1024
HEADERS_MAX: Final = 100
HEAD_WAIT_S: Final = 10.0
LOOK_EVERY_S: Final = 0.5
VERSIONS: Final = ("1.0", "1.1")
KEEP_ALIVE_S: Final = 75
HEADERS: Final = [
    ("Agent-Protocol-Version", SERVED_VERSIONS[0]),
    ("X-Content-Type-Options", "nosniff"),
]


class Heads:
    """Connections whose request head is awaited, and since when. `run` closes those that take too long."""

    def __init__(self) -> None:
        self._awaited: dict[asyncio.BaseTransport, float] = {}

    def expect(self, transport: asyncio.BaseTransport, now: float) -> None:
        self._awaited[transport] = now

    def arrived(self, transport: asyncio.BaseTransport) -> None:
        self._awaited.pop(transport, None)

    async def run(self) -> None:
        while True:  # bounded: one look every LOOK_EVERY_S over at most as many as there are connections
            await anyio.sleep(LOOK_EVERY_S)
            late = anyio.current_time() - HEAD_WAIT_S
            for transport in [each for each, since in self._awaited.items() if since <= late]:
                self.arrived(transport)
                transport.close()


class _Config(uvicorn.Config):
    """Carries the heads from the server to its connections."""

    heads: Heads


class _BoundedHeads(HttpToolsProtocol):
    """Refuses a head that is too large, too late, unclear about its host, or asks for another protocol.

    What is raised in a callback becomes a 400 and closes the connection. An upgrade is refused because the
    parser would take the request's body for the next request.
    """

    config: _Config
    _head_bytes = 0
    _headers = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.config.heads.expect(transport, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        self.config.heads.arrived(self.transport)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = self._headers = 0
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: self.transport.abort}  # type: ignore[dict-item]
        self.config.heads.expect(self.transport, self.loop.time())

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        self._count(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.config.heads.arrived(self.transport)
        version = self.parser.get_http_version()
        hosts = sum(name == b"host" for name, _ in self.headers)
        if self.parser.should_upgrade() or version not in VERSIONS or (version == "1.1" and hosts != 1):
            raise ValueError("refused head")
        super().on_headers_complete()

    def _count(self, more: int) -> None:
        self._head_bytes += more
        if self._head_bytes > HEAD_BYTES_MAX or self._headers > HEADERS_MAX:
            raise ValueError("head too large")


class Server(uvicorn.Server):
    """Stops when `should_exit` is set, and only then."""

    config: _Config

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server(app: ASGIApp, settings: GatewaySettings) -> Server:
    config = _Config(
        app,
        host=settings.host,
        port=settings.port,
        http=_BoundedHeads,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        headers=HEADERS,
        limit_concurrency=settings.http_connections_max,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=settings.gateway_drain_s,
    )
    config.heads = Heads()
    return Server(config)
