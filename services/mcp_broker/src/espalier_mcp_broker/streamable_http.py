"""MCP over Streamable HTTP, for addresses that the operator listed and for those that embedders chose.

Not the SDK's own transport: there an error of one request ends all others, what the transport made up cannot
be told from what the server answered, redirects are followed, bodies have no bound, and a stream that broke
off is asked for again. Here a request is one POST that is never repeated, and ends in one message: the
server's answer or a fault. Knows both eras: a lost session (handshake era) makes the connection lost; a
cancellation is a message in the handshake era and a closed stream since 2026-07-28.
Where the two kinds differ is the client: for an address of an embedder it is `libs/egress` that makes it.
Above stands `session.py`.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import anyio
import httpx2
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client import Transport
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import (
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
    jsonrpc_message_adapter,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from espalier_egress import EgressError, EgressRefused, EgressTooLarge, EgressTooSlow
from espalier_mcp_broker.flight import CALLS_MAX, Connection, Flight, fault_message, flight_of_task
from espalier_mcp_broker.outcomes import RESULT_BYTES_MAX, Reason
from espalier_mcp_broker.servers import AttachedServer, HttpServer

REFUSAL_BYTES_MAX: Final = 64 * 1024
"""What is read of a body that comes with an error status."""
CONNECTIONS_MAX: Final = CALLS_MAX + 8
KEEPALIVE_S: Final = 2.0
"""Well below the 5 s after which common servers close: a request that crosses with the close is in doubt."""
FAREWELL_S: Final = 1.0
LISTEN_PAUSE_S: Final = 2.0
LISTEN_FAILURES_MAX: Final = 5

SESSION_HEADER: Final = "mcp-session-id"
VERSION_HEADER: Final = "mcp-protocol-version"

Messages = MemoryObjectSendStream[SessionMessage | Exception]


def http_transport(server: HttpServer | AttachedServer, connection: Connection) -> Transport:
    """Nothing is connected until the first message. Leaving takes at most FAREWELL_S."""
    return _connected(server, connection)


@asynccontextmanager
async def _connected(
    server: HttpServer | AttachedServer, connection: Connection
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[SessionMessage | Exception], "_Outgoing"]]:
    messages, inbox = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    with messages, inbox:
        async with _http_client(server) as http, anyio.create_task_group() as tasks:
            exchange = _Exchange(server.url, http, messages, connection)
            try:
                yield inbox, _Outgoing(exchange, tasks)
            finally:
                tasks.cancel_scope.cancel()
                await exchange.say_farewell()


def _http_client(server: HttpServer | AttachedServer) -> httpx2.AsyncClient:
    if isinstance(server, AttachedServer):
        return server.egress.checked_client(
            server.url, headers=server.headers, body_bytes_max=RESULT_BYTES_MAX + REFUSAL_BYTES_MAX
        )
    timeout = httpx2.Timeout(server.call_timeout_s, connect=server.connect_timeout_s)
    limits = httpx2.Limits(
        max_connections=CONNECTIONS_MAX, max_keepalive_connections=CALLS_MAX, keepalive_expiry=KEEPALIVE_S
    )
    # Unpacked answers have a size that can be seen in advance.
    headers = {**server.headers, "accept-encoding": "identity"}
    return httpx2.AsyncClient(
        headers=headers, timeout=timeout, limits=limits, trust_env=False, follow_redirects=False
    )


@dataclass(frozen=True)
class _Underway:
    scope: anyio.CancelScope
    modern: bool


class _Outgoing:
    """Where the SDK writes. Every message becomes a POST in a task of its own; only the handshake waits."""

    def __init__(self, exchange: "_Exchange", tasks: TaskGroup) -> None:
        self._exchange = exchange
        self._tasks = tasks

    async def send(self, item: SessionMessage, /) -> None:
        message, exchange = item.message, self._exchange
        headers = exchange.headers_of(item)
        if isinstance(message, JSONRPCRequest):
            underway = _Underway(anyio.CancelScope(), exchange.is_modern)
            exchange.underway[message.id] = underway
            self._tasks.start_soon(exchange.request, message, headers, underway, flight_of_task.get())
        elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            self._cancel(message, headers)
        elif isinstance(message, JSONRPCNotification):
            await exchange.tell(message, headers)
            if message.method == "notifications/initialized":
                self._tasks.start_soon(exchange.listen)
        else:
            self._tasks.start_soon(exchange.tell, message, headers)

    def _cancel(self, message: JSONRPCNotification, headers: Mapping[str, str]) -> None:
        flight = flight_of_task.get()
        underway = self._exchange.underway.get((message.params or {}).get("requestId", ""))
        if underway is not None and (underway.modern or (flight is not None and not flight.sent)):
            underway.scope.cancel()
        elif underway is not None:
            self._tasks.start_soon(self._exchange.tell, message, headers)

    async def aclose(self) -> None:
        """Nothing to close: the task group ends with the transport."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Exchange:
    """Requests and their answers on one connection."""

    def __init__(
        self, url: str, http: httpx2.AsyncClient, messages: Messages, connection: Connection
    ) -> None:
        self.underway: dict[RequestId, _Underway] = {}
        self._url = url
        self._http = http
        self._messages = messages
        self._connection = connection
        self._session_id: str | None = None
        self._version: str | None = None
        self._is_forgotten = False

    @property
    def is_modern(self) -> bool:
        return self._version in MODERN_PROTOCOL_VERSIONS

    def headers_of(self, item: SessionMessage) -> dict[str, str]:
        """A message's own headers and those of the connection, as of the moment it is handed over."""
        own = item.metadata.headers if isinstance(item.metadata, ClientMessageMetadata) else None
        if isinstance(item.message, JSONRPCRequest) and item.message.method == "initialize":
            self._version = None  # of the question before, which the handshake must not repeat
        elif own is not None and VERSION_HEADER in (lowered := {k.lower(): v for k, v in own.items()}):
            self._version = lowered[VERSION_HEADER]
        return {**self._standing_headers(), **{key.lower(): value for key, value in (own or {}).items()}}

    def _standing_headers(self) -> dict[str, str]:
        headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        if self._session_id is not None:
            headers[SESSION_HEADER] = self._session_id
        if self._version is not None:
            headers[VERSION_HEADER] = self._version
        return headers

    async def request(
        self, message: JSONRPCRequest, headers: dict[str, str], underway: _Underway, flight: Flight | None
    ) -> None:
        """One POST and what it is answered with: exactly one message comes of it, unless it is cancelled."""
        try:
            with underway.scope, suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                answer = await self._answer(message, headers, flight)
                if isinstance(answer, Reason):
                    answer = fault_message(message.id, answer)
                await self._messages.send(answer)
            if self._is_forgotten:
                self._connection.lose()  # only now, because leaving the connection ends all waits
        finally:
            if self.underway.get(message.id) is underway:
                del self.underway[message.id]

    async def _answer(
        self, message: JSONRPCRequest, headers: dict[str, str], flight: Flight | None
    ) -> SessionMessage | Reason:
        try:
            async with self._post(message, headers, flight) as response:
                return await self._taken(message, headers, response)
        except EgressError as error:
            return _reason_of(error, was_sent=flight is not None and flight.sent)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout):
            return Reason.CANNOT_CONNECT
        except httpx2.TransportError:
            return Reason.CONNECTION_LOST
        except _TooLong:
            return Reason.TOO_LARGE
        except (httpx2.HTTPError, httpx2.StreamError, ValidationError, UnicodeError):
            return Reason.GARBAGE

    @asynccontextmanager
    async def _post(
        self, message: JSONRPCMessage, headers: Mapping[str, str], flight: Flight | None
    ) -> AsyncIterator[httpx2.Response]:
        async def look(event: str, _info: Mapping[str, Any]) -> None:
            if flight is not None and event.endswith("send_request_headers.started"):
                if flight.is_void:
                    raise httpx2.ConnectError("the call may not leave any more")
                flight.sent = True

        content = message.model_dump_json(by_alias=True, exclude_unset=True)
        async with self._http.stream(
            "POST", self._url, content=content, headers=headers, extensions={"trace": look}
        ) as response:
            yield response

    async def _taken(
        self, message: JSONRPCRequest, headers: Mapping[str, str], response: httpx2.Response
    ) -> SessionMessage | Reason:
        if not response.is_success:
            return await self._refusal(message, headers, response)
        if message.method == "initialize":
            self._session_id = response.headers.get(SESSION_HEADER)
        if "content-encoding" in response.headers:
            return Reason.GARBAGE
        match _content_type(response):
            case "application/json":
                answer = jsonrpc_message_adapter.validate_json(await _body(response, RESULT_BYTES_MAX))
                return SessionMessage(answer) if _answers(message, answer) else Reason.GARBAGE
            case "text/event-stream":
                return await self._from_stream(message, response)
            case _:
                return Reason.GARBAGE

    async def _refusal(
        self, message: JSONRPCRequest, headers: Mapping[str, str], response: httpx2.Response
    ) -> SessionMessage | Reason:
        """A status that is no success: a JSON-RPC error in the body is the answer, else the status tells."""
        self._is_forgotten |= response.status_code == httpx2.codes.NOT_FOUND and SESSION_HEADER in headers
        if _content_type(response) == "application/json":
            with suppress(ValidationError, _TooLong):
                answer = jsonrpc_message_adapter.validate_json(await _body(response, REFUSAL_BYTES_MAX))
                if isinstance(answer, JSONRPCError) and answer.id in (None, message.id):
                    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=message.id, error=answer.error))
        return Reason.SERVER_FAILED if response.is_server_error else Reason.REFUSED

    async def _from_stream(
        self, message: JSONRPCRequest, response: httpx2.Response
    ) -> SessionMessage | Reason:
        async with aclosing(_events(response)) as events:
            async for received in events:
                if _answers(message, received):
                    return SessionMessage(received)
                if not isinstance(received, JSONRPCResponse | JSONRPCError):
                    await self._messages.send(SessionMessage(received))
        return Reason.CONNECTION_LOST

    async def tell(self, message: JSONRPCMessage, headers: Mapping[str, str]) -> None:
        """Post what has no answer. That it did not arrive shows in what follows, or not at all."""
        with suppress(httpx2.HTTPError):
            async with self._post(message, headers, None):
                pass

    async def listen(self) -> None:
        """Take in what a server of the handshake era says on its own; ends where it has no such stream."""
        for _ in range(LISTEN_FAILURES_MAX):
            with suppress(httpx2.HTTPError, httpx2.StreamError, ValidationError, _TooLong):
                headers = {**self._standing_headers(), "accept": "text/event-stream"}
                async with self._http.stream("GET", self._url, headers=headers) as response:
                    if not response.is_success:
                        return
                    async for received in _events(response):  # bounded by the connection
                        if not isinstance(received, JSONRPCResponse | JSONRPCError):
                            await self._messages.send(SessionMessage(received))
            await anyio.sleep(LISTEN_PAUSE_S)

    async def say_farewell(self) -> None:
        """End the session at the server, so that it need not wait for it to run out."""
        if self._session_id is not None and not self._is_forgotten:
            with anyio.move_on_after(FAREWELL_S, shield=True), suppress(httpx2.HTTPError):
                await self._http.delete(self._url, headers=self._standing_headers())


class _TooLong(Exception):
    """A body or an event is longer than what is kept."""


def _reason_of(error: EgressError, *, was_sent: bool) -> Reason:
    match error:
        case EgressRefused():
            return Reason.NOT_ALLOWED
        case EgressTooLarge():
            return Reason.TOO_LARGE
        case EgressTooSlow():
            return Reason.DEADLINE
        case _:
            return Reason.CONNECTION_LOST if was_sent else Reason.CANNOT_CONNECT


async def _body(response: httpx2.Response, bytes_max: int) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > bytes_max:
            raise _TooLong
    return bytes(body)


async def _events(response: httpx2.Response) -> AsyncGenerator[JSONRPCMessage, None]:
    """The messages of a stream. Raises _TooLong, and ValidationError for what is no message."""
    try:
        async for event in httpx2.EventSource(response, max_event_size=RESULT_BYTES_MAX):
            if event.event == "message" and event.data:
                yield jsonrpc_message_adapter.validate_json(event.data, by_name=False)
    except httpx2.SSEError:
        raise _TooLong from None


def _answers(request: JSONRPCRequest, received: JSONRPCMessage) -> bool:
    return isinstance(received, JSONRPCResponse | JSONRPCError) and str(received.id) == str(request.id)


def _content_type(response: httpx2.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()
