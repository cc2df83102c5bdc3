"""uvicorn's WebSockets with bounds where it has none, and ends that the other side gets to see.

The protocol itself is `websockets`' sans-I/O implementation. Here is only what becomes of a connection: a
peer that takes nothing is dropped rather than waited for, and one that is told why it is closed is not cut
off in the middle of what it sends. Above: `ws`, which knows messages.
"""

from typing import Any, Final

import anyio
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from espalier_gateway.streaming import HANG_UP

LINGER: Final = "espalier.linger"
"""An extension of a connection's scope: waits until it is gone, `CLOSE_WAIT_S` at most, and drops it then."""

PING_EVERY_S: Final = 20.0
PONG_WAIT_S: Final = 20.0
"""A peer that does not answer a ping within this is gone, or does not read."""

CLOSE_WAIT_S: Final = 2.0
"""For a peer to take in why its connection ends."""

UNSENT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Twice the largest answer. Only a peer that sends pings and reads nothing gets beyond it."""

ABNORMAL: Final = 1006


class BoundedSocket(WebSocketsSansIOProtocol):
    """One connection. It ends by itself when its peer is gone; otherwise its application ends it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failed = False
        self._gone = anyio.Event()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.handshake_complete:  # it was not refused
            extensions: dict[str, Any] = self.scope["extensions"]
            extensions |= {HANG_UP: self.transport.abort, LINGER: self._linger}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._gone.set()

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.transport.abort()

    def keepalive_timeout(self) -> None:
        """Whoever takes nothing will not take the close frame either."""
        super().keepalive_timeout()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def handle_parser_exception(self) -> None:
        """Say why, and read on: closing under what the peer still sends would reset the connection, and take
        the reason with it. The application lingers for it.
        """
        if self._failed:
            return
        self._failed = self.close_sent = True
        self.stop_keepalive()
        close = self.conn.close_sent
        code, reason = (close.code, close.reason) if close is not None else (ABNORMAL, "")
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def shutdown(self) -> None:
        """A stopping server leaves connections to their application, which is told before (`app.stop`)."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()

    async def send(self, message: Any) -> None:
        """Raises an OSError for a connection that is over, whoever ended it."""
        await self.writable.wait()
        if self.close_sent:
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True  # else a refusal is logged as an application that forgot to answer

    async def _linger(self) -> None:
        with anyio.move_on_after(CLOSE_WAIT_S):
            await self._gone.wait()
        self.transport.abort()
