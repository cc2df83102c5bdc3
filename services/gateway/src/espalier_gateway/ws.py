"""`GET /aep/v1/ws`: the same calls over one connection, on which the runtime may also speak unasked.

A text message is what the body of `POST /aep/v1/rpc` is, and climbs the same ladder. Up to CALLS_MAX messages
of a connection are under way at once, answered as they are done; an `initialize` is alone, because what
follows it uses its session. Nothing is queued here: whoever has something to say waits for the reader, who
is cut off when it takes nothing. Not here: subscriptions (`subscriptions`), the opening request (`upgrade`),
the connection itself (`sockets`). Below: the dispatcher.
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from espalier_domain.errors import Unavailable
from espalier_gateway.auth import CallContext
from espalier_gateway.dispatcher import INITIALIZE, Answer, Verdict, answered
from espalier_gateway.errors import Fault, WireError
from espalier_gateway.http import NO_STORE, State, context_of, refusal, state_of
from espalier_gateway.sockets import CLOSE_WAIT_S, LINGER
from espalier_gateway.streaming import HANG_UP, SEND_WAIT_S
from espalier_gateway.subscriptions import Listener, Sources, Subscription, Subscriptions
from espalier_gateway.upgrade import WEBSOCKET_PATH, Handshake, handshake_of
from espalier_protocol.jsonrpc import Message, Request, Single

CALLS_MAX: Final = 8
LOOK_EVERY_S: Final = 2.0
RECHECK_S: Final = 30.0
IDLE_S: Final = 600.0
"""A connection without a message or a subscription for this long is closed."""

LAST_ANSWERS_S: Final = 2.5
"""How long a stopping gateway lets calls under way be answered; the drain is longer."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A close code and its reason. Codes from 3000 on are registered with IANA."""

    code: int
    reason: str


TEXT_ONLY: Final = Goodbye(1003, "messages are text")
STOPPING: Final = Goodbye(1012, "stopping; resume elsewhere")
IDLE: Final = Goodbye(1000, "idle")
UNAUTHORIZED: Final = Goodbye(3000, "the token is not valid any more")


async def converse(websocket: WebSocket) -> None:
    """Whoever is refused gets the status and body that other endpoints would answer."""
    state = state_of(websocket)
    admitted = await answered(_admitted(websocket, state), endpoint="ws")
    if isinstance(admitted, Fault):
        await websocket.send_denial_response(refusal(admitted))
        return
    await admitted.run()


async def _admitted(websocket: WebSocket, state: State) -> "Conversation":
    """A session is optional, because `initialize` may be the first message; one that is named must be good.

    Room is looked for before anything is read, and taken by `Conversation.run`.
    """
    handshake = handshake_of(websocket.headers, context_of(websocket.headers), state.gatekeeper.versions)
    context = handshake.context
    version = state.gatekeeper.version(context)
    caller = await state.gatekeeper.caller(context)
    state.gatekeeper.count_calls(caller)
    state.streams.require_room(caller, None)
    if context.session_id is not None:
        await state.gatekeeper.session(context, caller, version)
    return Conversation(websocket, state, handshake, state.streams.open(caller, None))


class Conversation:
    """One open connection, counted as a stream until nothing of it is left."""

    def __init__(self, websocket: WebSocket, state: State, handshake: Handshake, room: ExitStack) -> None:
        self._socket, self._state, self._room = websocket, state, room
        self._subprotocol = handshake.subprotocol
        self._context: CallContext = handshake.context
        self._calls = anyio.Semaphore(CALLS_MAX)
        self._turn = anyio.Lock()
        self._sending_since: float | None = None
        self._broken = False
        self._heard_at = self._checked_at = anyio.current_time()
        self._hearing = anyio.CancelScope()
        self._goodbye: Goodbye | None = None
        sources = Sources(state.tails, state.pool, state.streams, state.gatekeeper)
        self._subscriptions = Subscriptions(sources, self._say)

    async def run(self) -> None:
        with self._room:
            await self._socket.accept(self._subprotocol)
            try:
                async with anyio.create_task_group() as watching:
                    watching.start_soon(self._watch)
                    await self._talk()
                    watching.cancel_scope.cancel()
            finally:
                self._subscriptions.close()
            await self._part()

    async def _talk(self) -> None:
        """Until either side has had enough. Only a stopping gateway finishes what is under way then."""
        async with anyio.create_task_group() as group:
            with self._hearing:
                await self._hear(group)
            if self._goodbye is STOPPING:
                group.cancel_scope.deadline = anyio.current_time() + LAST_ANSWERS_S
            else:
                group.cancel_scope.cancel()

    async def _part(self) -> None:
        """Say goodbye if there is one, give the peer a moment to take it in, and let go."""
        with anyio.move_on_after(CLOSE_WAIT_S), suppress(WebSocketDisconnect, RuntimeError):
            if self._goodbye is not None:
                await self._socket.close(self._goodbye.code, self._goodbye.reason)
        await self._socket.scope["extensions"][LINGER]()

    def _end(self, goodbye: Goodbye | None) -> None:
        self._goodbye = self._goodbye or goodbye
        self._hearing.cancel()

    # ------------------------------------------------------------------ hearing

    async def _hear(self, group: TaskGroup) -> None:
        while True:  # bounded by the connection; a message is taken when one of CALLS_MAX is done
            said = await self._socket.receive()
            self._heard_at = anyio.current_time()
            if said["type"] == "websocket.disconnect":
                return
            if said.get("text") is None:
                self._end(TEXT_ONLY)
                return
            await self._take(said["text"].encode(), group)

    async def _take(self, body: bytes, group: TaskGroup) -> None:
        message = await self._state.dispatcher.read(body)
        if isinstance(message, Answer):
            await self._say(message.body)
        elif _begins_session(message):
            await self._answer_alone(message, group)
        else:
            await self._calls.acquire()
            group.start_soon(self._answer, message, group)

    async def _answer_alone(self, message: Message, group: TaskGroup) -> None:
        for _ in range(CALLS_MAX):
            await self._calls.acquire()
        await self._answer(message, group)
        for _ in range(CALLS_MAX - 1):
            self._calls.release()

    async def _answer(self, message: Message, group: TaskGroup) -> None:
        listener = Listener(self._subscriptions, self._context)
        try:
            answer = await self._state.dispatcher.answer_message(message, self._context, listener)
            if listener.session_id is not None:
                self._context = replace(self._context, session_id=listener.session_id)
            if answer.body:
                await self._say(answer.body)
            listener.start(group)
            if answer.verdict is Verdict.unauthenticated:
                self._end(UNAUTHORIZED)
        finally:
            self._calls.release()

    # ------------------------------------------------------------------ speaking

    async def _say(self, body: bytes, subscription: Subscription | None = None) -> None:
        """One message, when it is its turn and the reader takes it. A broken connection ends the hearing."""
        async with self._turn:
            if self._broken or (subscription is not None and subscription.stopped):
                return
            self._sending_since = anyio.current_time()
            try:
                await self._socket.send_text(body.decode())
            except WebSocketDisconnect:
                self._broken = True
                self._end(None)
            finally:
                self._sending_since = None

    # ------------------------------------------------------------------ watching

    async def _watch(self) -> None:
        while self._goodbye is None:  # bounded by the connection: a look per LOOK_EVERY_S
            with anyio.move_on_after(LOOK_EVERY_S):
                await self._state.closing.wait()
            if self._state.closing.is_set():
                self._end(STOPPING)
            elif self._is_stuck():
                log.warning("ws.stalled")
                self._socket.scope["extensions"][HANG_UP]()
                self._end(None)
                return
            elif self._is_idle():
                self._end(IDLE)
            elif not await self._is_known():
                self._end(UNAUTHORIZED)

    def _is_stuck(self) -> bool:
        since = self._sending_since
        return since is not None and anyio.current_time() - since >= SEND_WAIT_S

    def _is_idle(self) -> bool:
        return not self._subscriptions and anyio.current_time() - self._heard_at >= IDLE_S

    async def _is_known(self) -> bool:
        """Asked every RECHECK_S. Each call is checked by itself; this is for whoever only listens."""
        if anyio.current_time() - self._checked_at < RECHECK_S:
            return True
        self._checked_at = anyio.current_time()
        try:
            await self._state.gatekeeper.caller(self._context)
        except WireError:
            return False
        except Unavailable:
            return True  # nobody can tell right now; it is asked again soon
        return True


def _begins_session(message: Message) -> bool:
    return (
        isinstance(message, Single)
        and isinstance(message.entry, Request)
        and message.entry.method == INITIALIZE
    )


async def upgrade_required(_: HttpRequest) -> Response:
    """For whoever comes without asking for a WebSocket."""
    told = {"error": "upgrade_required", "message": "This is a WebSocket."}
    headers = NO_STORE | {"Upgrade": "websocket", "Connection": "Upgrade"}
    return JSONResponse(told, 426, headers)


def websocket_routes() -> list[BaseRoute]:
    return [
        WebSocketRoute(WEBSOCKET_PATH, converse),
        Route(WEBSOCKET_PATH, upgrade_required, methods=["GET"]),
    ]
