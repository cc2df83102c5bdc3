"""The connection to a provider: bounded in time, and in the bytes of an answer.

Redirects are not followed, because the key would go where nobody pointed it. Above: the adapter, which hands
this client to the SDK.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final

import httpx2

ANSWER_BYTES_MAX: Final = 2 * 1024 * 1024
"""Size of an answer's body: far more than the tokens of any answer that we ask for."""

CONNECT_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 600.0
"""Silence after which an answer is not waited for; the cycle's own limit usually ends the wait before."""

CONNECTIONS_MAX: Final = 1000
"""As many as a worker can have slots; each has one answer under way at most."""


class AnswerTooLarge(Exception):
    """The provider sent more than ANSWER_BYTES_MAX; the rest was not read."""


def open_http(read_timeout_s: float = READ_TIMEOUT_S) -> AbstractAsyncContextManager[httpx2.AsyncClient]:
    """A client that asks for plain bytes, so that what is counted is what has to be held."""
    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(CONNECT_TIMEOUT_S, read=read_timeout_s),
        limits=httpx2.Limits(max_connections=CONNECTIONS_MAX),
        follow_redirects=False,
        trust_env=False,
        event_hooks={"response": [_bound]},
    )


async def _bound(response: httpx2.Response) -> None:
    """Before the body is read. Compressed bytes would unfold to any size, so they are not taken at all."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise AnswerTooLarge
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _Bounded(response.stream)


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        taken = 0
        async for piece in self._stream:
            taken += len(piece)
            if taken > ANSWER_BYTES_MAX:
                raise AnswerTooLarge
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
