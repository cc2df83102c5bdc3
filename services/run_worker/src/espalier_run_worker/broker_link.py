"""The worker's connection to the tool broker: signed requests, and nothing about runs.

Above: `brokered_calls` and `toolbox`. Whatever keeps an answer away is BrokerAway, and says nothing about
whether a call was sent: only its row does. The leg is plain HTTP/1.1 over connections that stay open, written
and parsed here (`httptools`) and not by a client library: that alone cost half of what a call may cost more
than one made directly (docs/decisions/0016).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar, cast
from urllib.parse import urlsplit

import anyio
import httptools
from pydantic import BaseModel, ValidationError

from espalier_protocol.broker import (
    CALL_PATH,
    LIST_PATH,
    SIGNATURE_HEADER,
    CallOrder,
    CallStanding,
    ToolsOffered,
    ToolsWanted,
)
from espalier_secrets import signature

CONNECT_WAIT_S: Final = 2.0
LIST_WAIT_S: Final = 135.0
"""More than the slowest server may take to be connected to and to list its tools."""

ASK_WAIT_S: Final = 3.0
"""So long one asking waits. A call may take longer: whoever asks again joins it, and a broker that
stands still is found out in between.
"""

CONNECTIONS_MAX: Final = 200
ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
"""More than the tools of a full catalog."""

OK: Final = 200
DEFAULT_PORT: Final = 80

Answer = TypeVar("Answer", bound=BaseModel)


class BrokerAway(Exception):
    """The broker could not be asked, or gave no answer that makes sense."""


class BrokerSilent(BrokerAway):
    """It may be at work; whoever waits should look at the row and ask again."""


class _Connection(asyncio.Protocol):
    """One connection, for one request at a time. `usable` while another may follow."""

    def __init__(self) -> None:
        self.usable = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body. Raises BrokerAway; a caller that gives up closes the connection."""
        assert self._transport is not None
        self.usable = False
        self._begin()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._answer = None
            if not self.usable:
                self.close()

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.close()

    # --- what the loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.usable = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("what came is no HTTP")

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._fail("the connection was lost" if exc is None else type(exc).__name__)

    # --- what the parser tells

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > ANSWER_BYTES_MAX:
            self._fail("the answer is too large")

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self.usable = self._parser.should_keep_alive()
            self._answer.set_result((self._parser.get_status_code(), bytes(self._body)))

    def _fail(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(BrokerAway(why))
        self.close()


class BrokerLink:
    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or DEFAULT_PORT
        self._authority, self._key = parts.netloc, key
        self._idle: deque[_Connection] = deque(maxlen=CONNECTIONS_MAX)
        self._open = anyio.CapacityLimiter(CONNECTIONS_MAX)

    async def call(self, order: CallOrder) -> CallStanding:
        """Have a planned call carried out, or hear how it stands. Raises BrokerAway or BrokerSilent."""
        return await self._post(CALL_PATH, order, CallStanding, ASK_WAIT_S)

    async def offered(self, wanted: ToolsWanted) -> ToolsOffered:
        """The tools that a toolset names. Raises BrokerAway."""
        return await self._post(LIST_PATH, wanted, ToolsOffered, LIST_WAIT_S)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _post(self, path: str, words: BaseModel, answer: type[Answer], wait_s: float) -> Answer:
        request = self._request(path, words.model_dump_json().encode())
        try:
            with anyio.fail_after(wait_s):
                async with self._open:
                    status, body = await self._exchange(request)
            if status != OK:
                raise BrokerAway(f"the broker answered {status}")
            return answer.model_validate_json(body)
        except TimeoutError as error:
            raise BrokerSilent("it did not answer") from error
        except (OSError, ValidationError) as error:
            raise BrokerAway(type(error).__name__) from error

    def _request(self, path: str, body: bytes) -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._authority}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{SIGNATURE_HEADER}: {signature(self._key, path, body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        connection = await self._connected()
        answer = await connection.ask(request)
        if connection.usable:
            self._idle.append(connection)
        return answer

    async def _connected(self) -> _Connection:
        """The connection that rested least, since the broker closes those that rest long; else a new one."""
        while self._idle:  # bounded by CONNECTIONS_MAX
            if (idle := self._idle.pop()).usable:
                return idle
        with anyio.fail_after(CONNECT_WAIT_S):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection


@asynccontextmanager
async def open_broker_link(url: str, key: str) -> AsyncIterator[BrokerLink]:
    link = BrokerLink(url, key)
    try:
        yield link
    finally:
        link.close()
