"""`GET /aep/v1/runs/{run_id}/events`: who may follow a run, and from where.

The place is `Last-Event-ID`, else `since`, else the beginning: an EventSource that reconnects repeats its
old URL and names the newer place in the header. What is sent from there on is up to `sse`.
"""

from functools import partial
from typing import Final
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from espalier_domain.errors import InvalidInput, NotFound, Unavailable
from espalier_gateway.auth import CallContext, Gatekeeper
from espalier_gateway.errors import LOG_PRUNED, WireError
from espalier_gateway.http import NO_STORE, context_of, plainly, state_of
from espalier_gateway.sse import event_response, event_stream
from espalier_protocol.access import Scope
from espalier_protocol.errors import ErrorCode
from espalier_protocol.ids import from_wire, parse_event_id
from espalier_store.events import LogState, log_state
from espalier_store.pool import Pool, reading

SCOPES: Final[tuple[Scope, ...]] = ("stream.subscribe", "run.read")
OWN_EVENTS: Final = "espalier.events"


async def follow(request: Request) -> Response:
    return await plainly(_open(request), endpoint="events")


async def _open(request: Request) -> Response:
    state, context = state_of(request), context_of(request.headers)
    caller, session = await state.gatekeeper.admit(context, SCOPES, "streaming.sse")
    run_id, log = await _log_of(state.pool, caller.owner_id, request.path_params["run_id"])
    since = _place(request, log)
    if log.ended and since == log.last_seq and "last-event-id" in request.headers:
        return Response(status_code=204, headers=NO_STORE)  # tells an EventSource to stop asking
    frames = event_stream(
        state.tails,
        state.pool,
        caller.owner_id,
        run_id,
        since=since,
        own_events=OWN_EVENTS in session.capabilities,
        closing=state.closing,
        still_allowed=partial(_still_allowed, state.gatekeeper, context),
    )
    return event_response(frames)


async def _log_of(pool: Pool, owner_id: UUID, text: str) -> tuple[UUID, LogState]:
    run_id = from_wire("run", text)
    if run_id is None:
        raise NotFound("run", text)
    async with reading(pool) as connection:
        log = await log_state(connection, owner_id, run_id)
    if log is None:
        raise NotFound("run", text)
    if log.pruned:
        message = "The log of this run has been removed; its result is still there."
        raise WireError(ErrorCode.tool_not_found, message, symbol=LOG_PRUNED, resource="run", id=text)
    return run_id, log


def _place(request: Request, log: LogState) -> int:
    """The seq of the last event that the reader has; 0 is before the first."""
    field, values = "Last-Event-ID", request.headers.getlist("last-event-id")
    if not values:
        field, values = "since", request.query_params.getlist("since")
    if not values:
        return 0
    seq = parse_event_id(values[0]) if len(values) == 1 else None
    if seq is None or seq > log.last_seq:
        raise InvalidInput(field, "should be the id of an event of this run")
    return seq


async def _still_allowed(gatekeeper: Gatekeeper, context: CallContext) -> bool:
    """Asked now and then while a stream is open: the key may be revoked, the session over."""
    try:
        await gatekeeper.admit(context, SCOPES, "streaming.sse")
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
