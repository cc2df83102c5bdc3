"""`GET /aep/v1/runs/{run_id}/events`: who may follow a run, and from where.

The place is `Last-Event-ID`, else `since`, else the beginning: an EventSource that reconnects repeats its
old URL and names the newer place in the header. What is sent from there on is up to `sse`.
"""

from contextlib import ExitStack
from functools import partial
from typing import Final
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier_domain.errors import NotFound
from espalier_gateway import following
from espalier_gateway.following import (
    CAPABILITY,
    OWN_EVENTS,
    SCOPES,
    Since,
    no_such_place,
    opened_log,
    still_allowed,
)
from espalier_gateway.http import NO_STORE, context_of, plainly, state_of
from espalier_gateway.sse import event_response, event_stream
from espalier_protocol.ids import from_wire

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
    caller, session = await state.gatekeeper.admit(context, SCOPES, CAPABILITY)
    run_id = _run_id(request)
    state.streams.require_room(caller, run_id)
    since = _since(request)
    log = await opened_log(state.pool, caller.owner_id, run_id, since.seq)
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
        still_allowed=partial(still_allowed, state.gatekeeper, context),
    )
    return CountedResponse(event_response(frames), stream)


def _run_id(request: Request) -> UUID:
    text = request.path_params["run_id"]
    run_id = from_wire("run", text)
    if run_id is None:
        raise NotFound("run", text)
    return run_id


def _since(request: Request) -> Since:
    field, values = LAST_EVENT_ID, request.headers.getlist("last-event-id")
    if not values:
        field, values = "since", request.query_params.getlist("since")
    if not values:
        return Since(0, field)
    if len(values) > 1:
        raise no_such_place(field)
    return following.since(values[0], field)


def events_route() -> Route:
    route = Route("/aep/v1/runs/{run_id}/events", follow, methods=["GET"])
    assert route.methods is not None
    route.methods.discard("HEAD")  # a stream has no length to tell
    return route
