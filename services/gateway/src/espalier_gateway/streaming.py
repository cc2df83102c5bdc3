"""A response that is sent piece by piece, to a reader that may stop reading."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import anyio
import structlog
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

SEND_WAIT_S: Final = 30.0
"""A reader that takes nothing for this long is cut off."""

log = structlog.get_logger(__name__)


class PiecewiseResponse(StreamingResponse):
    """Closes the producer of its pieces in the task that ran it, and lets go of a reader that has stopped."""

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        *,
        send_wait_s: float = SEND_WAIT_S,
    ) -> None:
        super().__init__(pieces, headers=headers)
        self._pieces = pieces
        self._send_wait_s = send_wait_s

    async def stream_response(self, send: Send) -> None:
        async def bounded(message: Message) -> None:
            with anyio.fail_after(self._send_wait_s):
                await send(message)

        async with aclosing(self._pieces):
            try:
                await super().stream_response(bounded)
            except TimeoutError:
                log.warning(
                    "streaming.stalled"
                )  # returning without the end of the body closes the connection
