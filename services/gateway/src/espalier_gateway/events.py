"""`GET /aep/v1/runs/{run_id}/events`: who may follow a run, and from where.

The place is `Last-Event-ID`, else `since`, else the beginning: an EventSource that reconnects repeats its
old URL and names the newer place in the header. What is sent from there on is up to `sse`.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier_domain.errors import InvalidInput, NotFound, Unavailable
from espalier_gateway.auth import CallContext, Gatekeeper
from espalier_gateway.errors import LOG_PRUNED, WireError
from espalier_gateway.http import NO_STORE, context_of, plainly, state_of
from espalier_gateway.sse import event_response, event_stream
from espalier_protocol import access
from espalier_protocol.errors import ErrorCode
from espalier_protocol.ids import from_wire, parse_event_id, to_wire
from espalier_store.events import OpenedLog, open_log
from espalier_store.pool import Pool, reading

SCOPES: Final[tuple[access.Scope, ...]] = ("stream.subscribe", "run.read")
OWN_EVENTS: Final = "espalier.events"
LAST_EVENT_ID: Final = "Last-Event-ID"


class CountedResponse:
    """A response that is one of the open streams from before its first byte until nothing of it is left.

    Its generator could not tell: one that was closed before its first step runs no line of its own.
    """

    def __init__(self, response: ASGIApp, stream: ExitStack) -> None:
        self._response = response
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream:
            await self._response(scope, receive, send)


async def follow(request: Request) -> ASGIApp:
    return await plainly(_open(request), endpoint="events")


async def _open(request: Request) -> ASGIApp:
    """Whoever finds no room is told so before anything is read, and again if room went meanwhile.

    From counting the stream to handing out its response nothing is awaited: there is no moment at which a
    cancellation could leave it counted for ever.
    """
    state, context = state_of(request), context_of(request.headers)
    caller, session = await state.gatekeeper.admit(context, SCOPES, "streaming.sse")
    run_id = _run_id(request)
    state.streams.require_room(caller, run_id)
    since = _since(request)
    log = await _opened_log(state.pool, caller.owner_id, run_id, since.seq)
    since.require_within(log)
    if log.ended and since.seq == log.last_seq and since.field == LAST_EVENT_ID:
        return Response(status_code=204, headers=NO_STORE)  # tells an EventSource to stop asking
    stream = state.streams.open(caller, run_id)
    frames = event_stream(
        state.tails,
        state.pool,
        caller.owner_id,
        run_id,
        log,
        since=since.seq,
        own_events=OWN_EVENTS in session.capabilities,
        still_allowed=partial(_still_allowed, state.gatekeeper, context),
    )
    return CountedResponse(event_response(frames), stream)


@dataclass(frozen=True, slots=True)
class Since:
    """The seq of the last event that the reader has, 0 before the first, and which field said so."""

    seq: int
    field: str

    def require_within(self, log: OpenedLog) -> None:
        if self.seq > log.last_seq:
            raise _no_such_place(self.field)


def _run_id(request: Request) -> UUID:
    text = request.path_params["run_id"]
    run_id = from_wire("run", text)
    if run_id is None:
        raise NotFound("run", text)
    return run_id


async def _opened_log(pool: Pool, owner_id: UUID, run_id: UUID, since: int) -> OpenedLog:
    async with reading(pool) as connection:
        log = await open_log(connection, owner_id, run_id, since)
    wire_id = to_wire("run", run_id)
    if log is None:
        raise NotFound("run", wire_id)
    if log.pruned:
        message = "The log of this run has been removed; its result is still there."
        raise WireError(ErrorCode.tool_not_found, message, symbol=LOG_PRUNED, resource="run", id=wire_id)
    return log


def _since(request: Request) -> Since:
    field, values = LAST_EVENT_ID, request.headers.getlist("last-event-id")
    if not values:
        field, values = "since", request.query_params.getlist("since")
    if not values:
        return Since(0, field)
    seq = parse_event_id(values[0]) if len(values) == 1 else None
    if seq is None:
        raise _no_such_place(field)
    return Since(seq, field)


def _no_such_place(field: str) -> InvalidInput:
    return InvalidInput(field, "should be the id of an event of this run")


async def _still_allowed(gatekeeper: Gatekeeper, context: CallContext) -> bool:
    """Asked now and then while a stream is open: the key may be revoked, the session over."""
    try:
        await gatekeeper.admit_again(context, SCOPES, "streaming.sse")
    except WireError:
        return False
    except Unavailable:
        return True  # nobody can tell right now; it is asked again soon
    return True


def events_route() -> Route:
    route = Route("/aep/v1/runs/{run_id}/events", follow, methods=["GET"])
    assert route.methods is not None
    route.methods.discard("HEAD")  # a stream has no length to tell
    return route
