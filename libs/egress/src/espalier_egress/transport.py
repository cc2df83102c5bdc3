"""HTTP over checked connections: URLs are checked, answers unpacked and bounded, errors made categories.

It stands below `client` and below any httpx2 client that `client` hands out. It follows no redirects, keeps
no cookies and reads nothing from the environment.
"""

import ssl
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Final, Self, cast

import httpcore2
import httpx2

from espalier_egress.connections import CheckedNetwork, MeteredStream, Resolver
from espalier_egress.errors import (
    OTHER_ORIGIN,
    REDIRECTED,
    EgressError,
    EgressRefused,
    EgressTooLarge,
    EgressTooSlow,
    EgressUnreachable,
)
from espalier_egress.policy import Policy, check_url, origin_of

BODY_BYTES_MAX: Final = 10_000_000
PIECE_BYTES_MAX: Final = 256 * 1024
"""The most that is unpacked at once, so that one small packet cannot hold up everybody else."""

CONNECTIONS_MAX: Final = 100
REDIRECTS: Final = (301, 302, 303, 307, 308)
PACKED: Final = ("gzip", "x-gzip")
PLAIN: Final = ("", "identity")
GZIP_WINDOW: Final = zlib.MAX_WBITS | 16


class CheckedTransport(httpx2.AsyncBaseTransport):
    """What an httpx2 client sends through. Raises EgressError and nothing else.

    With `only`, a URL of another origin is refused: redirects, and addresses that a server names, lead
    nowhere else, so what the client knows of one server is not told to another.
    """

    def __init__(
        self,
        policy: Policy,
        resolver: Resolver,
        ssl_context: ssl.SSLContext,
        *,
        keep_s: float,
        only: httpx2.URL | None = None,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        self._only = None if only is None else origin_of(only)
        self._body_bytes_max = body_bytes_max
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=CONNECTIONS_MAX,
            max_keepalive_connections=CONNECTIONS_MAX if keep_s else 0,
            keepalive_expiry=keep_s,
            network_backend=CheckedNetwork(policy, resolver),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """As httpx2 asks for it. A redirect of anything but a look (GET, HEAD) is refused."""
        response = await self.send(request, self._body_bytes_max)
        if request.method not in ("GET", "HEAD") and response.has_redirect_location:
            await response.aclose()
            raise EgressRefused(REDIRECTED)
        return response

    async def send(self, request: httpx2.Request, body_bytes_max: int) -> httpx2.Response:
        """The answer with its body still to come; `aclose` it in any case."""
        check_url(request.url)
        if self._only not in (None, origin_of(request.url)):
            raise EgressRefused(OTHER_ORIGIN)
        with _as_categories():
            answer = await self._pool.handle_async_request(_to_send(request))
        stream = answer.extensions["network_stream"]
        assert isinstance(stream, MeteredStream)
        stream.head_is_complete()
        return _received(answer, body_bytes_max)

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._pool.__aexit__(exc_type, exc_value, traceback)

    async def aclose(self) -> None:
        await self._pool.aclose()


def _to_send(request: httpx2.Request) -> httpcore2.Request:
    # Both say where the request goes and how the answer may come; no caller may say otherwise.
    request.headers["host"] = request.url.netloc.decode("ascii")
    request.headers["accept-encoding"] = "gzip"
    return httpcore2.Request(
        method=request.method,
        url=httpcore2.URL(
            scheme=request.url.raw_scheme,
            host=request.url.raw_host,
            port=request.url.port,
            target=request.url.raw_path,
        ),
        headers=request.headers.raw,
        content=request.stream,
        extensions=request.extensions,
    )


def _received(answer: httpcore2.Response, body_bytes_max: int) -> httpx2.Response:
    headers = httpx2.Headers(answer.headers)
    coding = headers.pop("content-encoding", "").strip().lower()
    if coding:
        headers.pop("content-length", None)  # it told of the packed bytes
    return httpx2.Response(answer.status, headers=headers, stream=_Body(answer, coding, body_bytes_max))


class _Body(httpx2.AsyncByteStream):
    """The bytes of an answer, unpacked. More than the most, packed or unpacked, is EgressTooLarge."""

    def __init__(self, answer: httpcore2.Response, coding: str, bytes_max: int) -> None:
        self._answer = answer
        self._coding = coding
        self._bytes_max = bytes_max

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        bytes_left = self._bytes_max
        async with aclosing(self._unpacked()) as pieces:
            async for piece in pieces:
                bytes_left -= len(piece)
                if bytes_left < 0:
                    raise EgressTooLarge
                yield piece

    async def aclose(self) -> None:
        with _as_categories():
            await self._answer.aclose()

    async def _unpacked(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._raw()) as chunks:
            if self._coding in PLAIN:
                async for chunk in chunks:
                    yield chunk
            elif self._coding in PACKED:
                async with aclosing(_gunzip(chunks)) as pieces:
                    async for piece in pieces:
                        yield piece
            else:
                raise EgressUnreachable  # we asked for nothing else, least of all for several in a row

    async def _raw(self) -> AsyncGenerator[bytes, None]:
        bytes_left = self._bytes_max
        assert isinstance(self._answer.stream, AsyncIterable)
        stream = cast(AsyncGenerator[bytes, None], aiter(self._answer.stream))
        with _as_categories():
            async with aclosing(stream):
                async for chunk in stream:
                    bytes_left -= len(chunk)
                    if bytes_left < 0:
                        raise EgressTooLarge
                    yield chunk


async def _gunzip(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """One gzip member; what follows it is dropped. One that is cut short must not be taken for whole."""
    unpacker, begun = zlib.decompressobj(GZIP_WINDOW), False
    with _as_categories():
        async for chunk in chunks:
            begun = True
            packed = chunk
            while packed and not unpacker.eof:
                yield unpacker.decompress(packed, PIECE_BYTES_MAX)
                packed = unpacker.unconsumed_tail
    if begun and not unpacker.eof:
        raise EgressUnreachable


@contextmanager
def _as_categories() -> Iterator[None]:
    """Whatever happens on the wire becomes one of the categories, with the cause chained for the log."""
    try:
        yield
    except EgressError:
        raise
    except (httpcore2.PoolTimeout, httpcore2.ReadTimeout, httpcore2.WriteTimeout) as error:
        raise EgressTooSlow from error
    except (
        httpcore2.ConnectTimeout,
        httpcore2.NetworkError,
        httpcore2.ProtocolError,
        OSError,
        zlib.error,
    ) as error:
        raise EgressUnreachable from error
