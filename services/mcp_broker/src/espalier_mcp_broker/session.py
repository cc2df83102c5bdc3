"""One MCP server as the broker sees it: a connection that opens on first use, and calls with an outcome.

A connection has one owner task (`McpSession.run`), which alone enters and leaves the SDK's client: the scopes
in there belong to the task that opened them. Everybody else puts messages into the connection's bounded queue
and waits; so calls run side by side, and whoever gives up waiting disturbs nobody.

Nothing that a server can do wrong is raised; it becomes a value of `outcomes.py`. No call is sent twice: the
client's own `call_tool`, which lists again and repeats on some errors and answers a server's questions by
repeating, is not used. Above stand `catalog.py` and `calls.py`, below `stdio.py` and `streamable_http.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
import structlog
from mcp.client import Client, Transport
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp.server import Server as BundledServer
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    CallToolRequest,
    CallToolRequestParams,
    Implementation,
    ListToolsResult,
    PaginatedRequestParams,
    ToolListChangedNotification,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import RootModel, ValidationError

from espalier_egress import EgressRefused
from espalier_mcp_broker.flight import CALLS_MAX, Connection, Fault, Flight, flight_of_task
from espalier_mcp_broker.mask import Mask
from espalier_mcp_broker.outcomes import Answer, Answered, NotSent, Reason, TooLarge, Unknown, failed
from espalier_mcp_broker.servers import (
    CALL_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    AttachedServer,
    HttpServer,
    ServerSpec,
    StdioServer,
)
from espalier_mcp_broker.stdio import stdio_transport
from espalier_mcp_broker.streamable_http import http_transport

log = structlog.get_logger(__name__)

CLIENT: Final = Implementation(name="espalier", version="0.1.0")

BACKOFF_FIRST_S: Final = 0.25
BACKOFF_MAX_S: Final = 30.0
BACKOFF_DOUBLINGS_MAX: Final = 10
LISTEN_AGAIN_S: Final = 30.0
SERVER_WORDS_MAX: Final = 2_000
"""Characters that are kept of a JSON-RPC error's message."""

REFUSED_TEXT: Final = "The server refused the call."
REDIRECTED_TEXT: Final = "The server answered with a redirect, which is not followed."
ASKED_TEXT: Final = "The server asked for input, which agents cannot give."


class _Json(RootModel[dict[str, Any]]):
    """A result as it came; the SDK checks it against the protocol before."""


@dataclass(frozen=True)
class _Link:
    """An open connection."""

    client: Client
    connection: Connection
    is_direct: bool


@dataclass
class _Attempt:
    """One try at opening a connection, and what became of it."""

    done: anyio.Event = field(default_factory=anyio.Event)
    outcome: _Link | Reason = Reason.CLOSING

    def settle(self, outcome: _Link | Reason) -> None:
        self.outcome = outcome
        self.done.set()


class McpSession:
    """The calls to one server. Safe for many tasks at once, as long as `run` is under way in one."""

    def __init__(self, name: str, server: ServerSpec | BundledServer[Any]) -> None:
        self.name = name
        self.tools_version = 0
        """Grows when what the server offers may have changed: a new connection, or the server said so."""
        self._server = server
        outside = None if isinstance(server, BundledServer) else server
        self._call_timeout_s = outside.call_timeout_s if outside else CALL_TIMEOUT_S
        self.connect_timeout_s = outside.connect_timeout_s if outside else CONNECT_TIMEOUT_S
        self.mask = Mask(server.headers.values() if isinstance(server, AttachedServer) else ())
        self._slots = anyio.Semaphore(CALLS_MAX)
        self._wanted = anyio.Event()
        self._attempt: _Attempt | None = None
        self._link: _Link | None = None
        self._failures = 0
        self._not_before = -math.inf
        self._trouble = Reason.CANNOT_CONNECT
        self._closing = False

    # --------------------------------------------------------------------- for everybody

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        meta: Mapping[str, Any] | None = None,
        seconds: float,
        may_leave: Callable[[], bool] = lambda: True,
    ) -> Answer:
        """Carry out one call, at most once, within `seconds` and the server's own `call_timeout_s`.

        `may_leave` is asked again right before the first byte leaves.
        When the time is over or the caller is cancelled, the server is told. Cancellation is the only thing
        that is raised.
        """
        flight = Flight(may_leave)
        token = flight_of_task.set(flight)
        try:
            with anyio.move_on_after(min(seconds, self._call_timeout_s)):
                return await self._call(tool, arguments, meta, flight)
            return Unknown(Reason.DEADLINE) if flight.sent else NotSent(self._unsent_reason())
        finally:
            flight.given_up = True
            flight_of_task.reset(token)

    async def page_of_tools(self, cursor: str | None) -> ListToolsResult | Reason:
        """One page of what the server offers; the caller bounds the time."""
        link = await self._linked()
        if isinstance(link, Reason):
            return link
        try:
            return await link.client.session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        except MCPError as error:
            return error.data.reason if isinstance(error.data, Fault) else self._listing_reason(link)
        except (ValidationError, RuntimeError):
            return Reason.GARBAGE

    # --------------------------------------------------------------------- a call

    async def _call(
        self, tool: str, arguments: Mapping[str, Any], meta: Mapping[str, Any] | None, flight: Flight
    ) -> Answer:
        async with self._slots:
            link = await self._linked()
            if isinstance(link, Reason):
                return NotSent(link)
            if flight.is_void:
                return NotSent(Reason.FENCED)
            flight.sent = link.is_direct
            try:
                return _answered(self.mask.json(await self._send(link, tool, arguments, meta)))
            except MCPError as error:
                return self._of_error(error, link, flight)
            except ValidationError:
                return _without_answer(Reason.GARBAGE, flight)
            except Exception as error:  # boundary: whatever the SDK raises, the call has an outcome
                log.error("mcp.call.failed", server=self.name, error=type(error).__name__)
                return _without_answer(Reason.GARBAGE, flight)

    async def _send(
        self, link: _Link, tool: str, arguments: Mapping[str, Any], meta: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        params = {"name": tool, "arguments": dict(arguments)} | ({"_meta": dict(meta)} if meta else {})
        request = CallToolRequest(params=CallToolRequestParams.model_validate(params, by_name=False))
        return (await link.client.session.send_request(request, _Json)).root

    def _of_error(self, error: MCPError, link: _Link, flight: Flight) -> Answer:
        if isinstance(error.data, Fault):
            match error.data.reason:
                case Reason.TOO_LARGE:
                    return TooLarge()
                case Reason.REFUSED:
                    return failed(REFUSED_TEXT)
                case Reason.NOT_ALLOWED if flight.sent:
                    return failed(REDIRECTED_TEXT)
                case reason:
                    return _without_answer(reason, flight)
        if error.code == CONNECTION_CLOSED and link.connection.ended.is_set():
            return _without_answer(Reason.CONNECTION_LOST, flight)
        return failed(self.mask.text(error.message)[:SERVER_WORDS_MAX])

    def _unsent_reason(self) -> Reason:
        """Why the time of a call ran out before it was sent."""
        if self._slots.value == 0:
            return Reason.BUSY
        return Reason.DEADLINE if self._link is not None else Reason.CONNECT_TIMEOUT

    def _listing_reason(self, link: _Link) -> Reason:
        return Reason.CONNECTION_LOST if link.connection.ended.is_set() else Reason.SERVER_FAILED

    # --------------------------------------------------------------------- the connection

    async def _linked(self) -> _Link | Reason:
        """The open connection, or the one that is being opened; a reason while opening is put off."""
        if self._closing:
            return Reason.CLOSING
        if self._link is not None and not self._link.connection.ended.is_set():
            return self._link
        if self._attempt is None:
            if anyio.current_time() < self._not_before:
                return self._trouble
            self._attempt = _Attempt()
            self._wanted.set()
        attempt = self._attempt
        with anyio.move_on_after(self.connect_timeout_s):
            await attempt.done.wait()
            return attempt.outcome
        return Reason.CONNECT_TIMEOUT

    async def run(self) -> None:
        """Own the connections, one after the other, until cancelled."""
        try:
            while True:  # bounded by whoever runs it: one turn for each connection that somebody wanted
                await self._wanted.wait()
                self._wanted = anyio.Event()
                assert self._attempt is not None
                await self._hold(self._attempt)
        finally:
            self._closing = True
            if self._attempt is not None:
                self._attempt.settle(Reason.CLOSING)

    async def _hold(self, attempt: _Attempt) -> None:
        """One life of a connection. Leaving the client happens here too, in the task that entered it."""
        connection = Connection()
        reason = Reason.CONNECT_TIMEOUT
        try:
            with anyio.move_on_after(self.connect_timeout_s) as opening:
                async with self._client(connection) as client:
                    opening.deadline = math.inf
                    self._opened(attempt, client, connection)
                    try:
                        await self._attend(client, connection)
                    finally:
                        connection.end()  # first, so that whoever is told of the close knows what it means
        except Exception as error:  # boundary: one server's connection must not end the broker
            reason = _reason_of(error)
            if not attempt.done.is_set():
                log.warning("mcp.connect.failed", server=self.name, reason=reason.name)
        finally:
            self._link = None
        if not attempt.done.is_set():
            self._put_off(attempt, reason)

    def _opened(self, attempt: _Attempt, client: Client, connection: Connection) -> None:
        self._failures = 0
        self.tools_version += 1
        self._link = _Link(client, connection, isinstance(self._server, BundledServer))
        self._attempt = None
        attempt.settle(self._link)
        log.info("mcp.connected", server=self.name, version=client.protocol_version)

    def _put_off(self, attempt: _Attempt, reason: Reason) -> None:
        pause_s = min(BACKOFF_FIRST_S * 2 ** min(self._failures, BACKOFF_DOUBLINGS_MAX), BACKOFF_MAX_S)
        self._failures += 1
        self._not_before = anyio.current_time() + pause_s
        self._trouble = reason
        self._attempt = None
        attempt.settle(reason)

    async def _attend(self, client: Client, connection: Connection) -> None:
        async with anyio.create_task_group() as tasks:
            tools = client.server_capabilities.tools
            if client.protocol_version in MODERN_PROTOCOL_VERSIONS and tools and tools.list_changed:
                tasks.start_soon(self._listen, client)
            await connection.ended.wait()
            tasks.cancel_scope.cancel()

    async def _listen(self, client: Client) -> None:
        """Hear of changed tools where that has to be asked for; without, a listing grows old by time."""
        while True:  # bounded by the connection, one turn per LISTEN_AGAIN_S
            try:
                async with client.listen(tools_list_changed=True) as changes:
                    async for _ in changes:
                        self.tools_version += 1
            except (MCPError, SubscriptionLost, TimeoutError) as error:
                log.debug("mcp.listen.ended", server=self.name, error=type(error).__name__)
            await anyio.sleep(LISTEN_AGAIN_S)

    async def _hear(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.tools_version += 1

    def _client(self, connection: Connection) -> Client:
        """Sampling, elicitation and roots are not offered; without a callback the SDK refuses them."""
        target: Transport | BundledServer[Any]
        match self._server:
            case StdioServer() as server:
                target = stdio_transport(server, connection)
            case HttpServer() | AttachedServer() as server:
                target = http_transport(server, connection)
            case bundled:
                target = bundled
        return Client(
            target,
            mode="auto",
            cache=None,
            client_info=CLIENT,
            message_handler=self._hear,
            input_required_max_rounds=0,
            # Behind the caller's own bound, which tells more.
            read_timeout_seconds=self._call_timeout_s + self.connect_timeout_s,
        )


def _answered(result: dict[str, Any]) -> Answer:
    """Without what only the two ends of the connection have to know; it differs between the eras."""
    if result.get("resultType", "complete") != "complete":
        return failed(ASKED_TEXT)
    return Answered({key: value for key, value in result.items() if key not in ("resultType", "_meta")})


def _without_answer(reason: Reason, flight: Flight) -> Answer:
    return Unknown(reason) if flight.sent else NotSent(reason)


def _reason_of(error: BaseException) -> Reason:
    """The category of what ended an attempt to connect."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    match error:
        case MCPError(data=Fault(reason=reason)):
            return reason
        case MCPError(code=code) if code == CONNECTION_CLOSED:
            return Reason.CANNOT_CONNECT
        case MCPError():
            return Reason.REFUSED
        case EgressRefused():
            return Reason.NOT_ALLOWED
        case OSError():
            return Reason.CANNOT_START
        case ValidationError():
            return Reason.GARBAGE
        case _:
            return Reason.INCOMPATIBLE
