"""The HTTP server: uvicorn with our limits, our headers and our way of stopping.

`httptools` is quick and bounds neither the size of a request's head nor waits for one, so the size is counted
here. Signals are `__main__`'s: uvicorn's own handling would end streams only after waiting for them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from espalier_gateway.settings import GatewaySettings
from espalier_protocol.versions import SERVED_VERSIONS

HEAD_BYTES_MAX: Final = 32 * 1024
KEEP_ALIVE_S: Final = 75
HEADERS: Final = [
    ("Agent-Protocol-Version", SERVED_VERSIONS[0]),
    ("X-Content-Type-Options", "nosniff"),
]


class _BoundedHeads(HttpToolsProtocol):
    """A connection that is closed when the head of a request does not end."""

    _head_bytes = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()


class Server(uvicorn.Server):
    """Stops when `should_exit` is set, and only then."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server(app: ASGIApp, settings: GatewaySettings) -> Server:
    config = uvicorn.Config(
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
    return Server(config)
