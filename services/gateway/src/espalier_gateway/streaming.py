"""A response that is sent piece by piece, to a reader that may stop reading or go away."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Final

import anyio
import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

SEND_WAIT_S: Final = 30.0
"""A reader that takes nothing for this long is cut off."""

HANG_UP: Final = "espalier.hang_up"
"""Our server's extension of a request's scope: drops the connection with all that was not taken from it.
Merely closing would wait for a reader that has stopped to take the rest.
"""

log = structlog.get_logger(__name__)


class _ReaderGone(Exception):
    """The connection broke; nothing is left to do."""


class PiecewiseResponse(Response):
    """Closes the producer of its pieces in the task that ran it, and lets go of a reader that has stopped.

    Beside the sending runs one task that waits for the reader to go and looks now and then whether a send has
    been stuck: a timer for each send would cost a busy stream more than the sends do.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        *,
        send_wait_s: float = SEND_WAIT_S,
        status_code: int = 200,
    ) -> None:
        self.status_code = status_code
        self.init_headers(headers)
        self._pieces = pieces
        self._send_wait_s = send_wait_s
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._pieces), anyio.create_task_group() as group:
                group.start_soon(self._watch, scope, receive, group.cancel_scope)
                with suppress(_ReaderGone):
                    await self._send_all(send)
                group.cancel_scope.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the producer's; the watcher raises nothing

    async def _send_all(self, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": self.status_code}
        start["headers"] = self.raw_headers
        await self._send(send, start)
        async for piece in self._pieces:
            await self._send(send, {"type": "http.response.body", "body": piece, "more_body": True})
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        """A server waits for the reader at the beginning of the next send, so that each may be stuck."""
        self._sending_since = time.monotonic()
        try:
            await send(message)
        except OSError as error:  # by which some servers tell it
            raise _ReaderGone from error
        self._sending_since = None

    async def _watch(self, scope: Scope, receive: Receive, sending: anyio.CancelScope) -> None:
        wait_s = self._send_wait_s
        while wait_s > 0:
            with anyio.move_on_after(wait_s):
                while (await receive())["type"] != "http.disconnect":  # bounded by the length of a request
                    pass
                break
            stuck_s = time.monotonic() - self._sending_since if self._sending_since is not None else 0.0
            wait_s = self._send_wait_s - stuck_s
        else:
            log.warning("streaming.stalled")
            if hang_up := scope.get("extensions", {}).get(HANG_UP):
                hang_up()
        sending.cancel()
