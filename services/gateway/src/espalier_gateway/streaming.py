"""A response that is sent piece by piece, to a reader that may stop reading or go away."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Final

import anyio
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SEND_WAIT_S: Final = 30.0
"""A reader that takes nothing for this long is cut off."""

log = structlog.get_logger(__name__)


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
    ) -> None:
        self.status_code = 200
        self.init_headers(headers)
        self._pieces = pieces
        self._send_wait_s = send_wait_s
        self._sending_since: float | None = None

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._pieces), anyio.create_task_group() as group:
                group.start_soon(self._watch, receive, group.cancel_scope)
                with suppress(OSError):  # by which some servers tell that the reader has gone
                    await self._send_all(send)
                group.cancel_scope.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the producer's; the watcher raises nothing

    async def _send_all(self, send: Send) -> None:
        """Not reaching the last message, which ends the body, makes the server close the connection."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for piece in self._pieces:
            self._sending_since = time.monotonic()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._sending_since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, receive: Receive, sending: anyio.CancelScope) -> None:
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
        sending.cancel()
