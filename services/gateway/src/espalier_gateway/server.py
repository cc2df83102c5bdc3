"""The HTTP server: uvicorn with our limits, our headers and our way of stopping.

`httptools` is quick, but bounds neither the size of a request's head nor the wait for one: that is done here,
and which request may become a WebSocket (`sockets`). Signals are `__main__`'s: uvicorn's own handling would
end streams only after waiting for them.
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
from espalier_gateway.sockets import PING_EVERY_S, PONG_WAIT_S, BoundedSocket
from espalier_gateway.streaming import HANG_UP
from espalier_gateway.upgrade import WEBSOCKET_PATH

HEAD_BYTES_MAX: Final = 32 * 1024
HEADERS_MAX: Final = 100
HEAD_WAIT_S: Final = 10.0
LOOK_EVERY_S: Final = 0.5
FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
VERSIONS: Final = ("1.0", "1.1")
KEEP_ALIVE_S: Final = 75
HEADERS: Final = [
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

    What is raised in a callback becomes a 400 and closes the connection. Of all upgrades one is let through,
    to a WebSocket and without a body: the parser would take a body for what comes after the upgrade.
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
        if version not in VERSIONS or (version == "1.1" and hosts != 1):
            raise ValueError("refused head")
        if self.parser.should_upgrade() and not self._may_upgrade():
            raise ValueError("refused upgrade")
        super().on_headers_complete()

    def _may_upgrade(self) -> bool:
        named = [name for name, _ in self.headers]
        return (
            self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and self.url == WEBSOCKET_PATH.encode()  # without a query, which would be logged
            and named.count(b"upgrade") == named.count(b"connection") == 1
            and self._should_upgrade()
            and not {b"content-length", b"transfer-encoding", b"expect"} & set(named)
        )

    def handle_websocket_upgrade(self) -> None:
        """As many as there may be, and none that nobody would close: the other parser may refuse the head."""
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self.transport.write(FULL)
            self.transport.close()
            return
        super().handle_websocket_upgrade()
        socket = self.transport.get_protocol()
        if not (isinstance(socket, BoundedSocket) and socket.handshake_initiated):
            self.transport.close()

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
        ws=BoundedSocket,
        ws_max_size=settings.body_bytes_max,
        ws_ping_interval=PING_EVERY_S,
        ws_ping_timeout=PONG_WAIT_S,
        ws_per_message_deflate=False,  # a compressor's window per connection, and bodies are bounded unpacked
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
