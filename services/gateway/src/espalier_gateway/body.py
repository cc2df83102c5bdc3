"""Reading a request's body: the media type, the encoding and the size, checked before a byte is kept."""

from collections.abc import Mapping
from typing import Final

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

BODY_WAIT_S: Final = 10.0
"""A body has to be here by then, however slowly it trickles."""

DRAINED_BYTES_MAX: Final = 8 * 1024 * 1024
"""How much of a body that is too large is thrown away, so that its sender gets to read the answer."""


class Refused(Exception):
    """The request is refused as a whole: a status and one sentence."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.headers = dict(headers or {})


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The whole body. Raises Refused, with whatever is left unread."""
    _check_media_type(request.headers)
    try:
        with anyio.fail_after(BODY_WAIT_S):
            return await _read(request, bytes_max)
    except TimeoutError:
        raise _closing(408, f"Expected the whole body within {BODY_WAIT_S:g} seconds.") from None
    except ClientDisconnect:
        raise _closing(400, "The connection broke before the body was complete.") from None


def _check_media_type(headers: Headers) -> None:
    kind, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().replace('"', "")
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise _closing(415, "Expected Content-Type to be application/json, in UTF-8.")
    if any(
        encoding.strip().lower() not in ("", "identity") for encoding in headers.getlist("content-encoding")
    ):
        raise _closing(415, "Expected a body without Content-Encoding.")
    if any(coding.strip().lower() != "chunked" for coding in headers.getlist("transfer-encoding")):
        raise _closing(400, "Expected Transfer-Encoding to be chunked, or absent.")


async def _read(request: Request, bytes_max: int) -> bytes:
    """Count what arrives, whatever Content-Length says."""
    kept, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > bytes_max + DRAINED_BYTES_MAX:
            break
        if size <= bytes_max:
            kept += chunk
    if size > bytes_max:
        raise _closing(413, f"Expected a body of at most {bytes_max} bytes.")
    return bytes(kept)


def _closing(status: int, reason: str) -> Refused:
    """What is left of the body must not be taken for the next request."""
    return Refused(status, reason, {"Connection": "close"})
