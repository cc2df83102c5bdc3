"""What the endpoints beside AEP share: who calls, a small JSON body, and how a refusal looks.

They want the same bearer keys and count as the same calls, but need no version and no session. An error is
`{"error": "<slug>", "message": "..."}`. Nothing is decided here about providers or subjects: each has a file
of routes. Above: `app`, which mounts them. Below: `auth`, `body`, and the dispatcher's one boundary.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio.to_thread
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from espalier_gateway.auth import require_scope
from espalier_gateway.body import Refused, read_body
from espalier_gateway.dispatcher import ANSWER_WAIT_S, PARSED_HERE_BYTES_MAX, answered
from espalier_gateway.errors import Fault, params_refused
from espalier_gateway.http import NO_STORE, State, context_of, refusal, state_of
from espalier_protocol.access import Scope
from espalier_protocol.errors import ErrorCode
from espalier_protocol.shapes import Params, Resource
from espalier_protocol.strict_json import JsonError, JsonValue, loads
from espalier_store.keys import Caller

_SLUGS: Final[Mapping[str, str]] = {
    ErrorCode.authn_failed.name: "unauthorized",
    ErrorCode.authz_denied.name: "forbidden",
    ErrorCode.tool_not_found.name: "not_found",
    ErrorCode.subject_not_found.name: "not_found",
    ErrorCode.lifecycle_conflict.name: "conflict",
    ErrorCode.invalid_params.name: "invalid_request",
}
"""Where these endpoints have a word of their own for what AEP's symbol says."""

_SLUGS_OF_STATUSES: Final[Mapping[int, str]] = {
    408: "timeout",
    413: "too_large",
    415: "unsupported_media_type",
}


class RestRefusal(Exception):
    """An expected refusal with a status and a slug. `more` are members beside the two usual ones."""

    def __init__(self, status: int, slug: str, message: str, **more: int | str) -> None:
        super().__init__(message)
        self.status, self.slug, self.message, self.more = status, slug, message, more


@dataclass(frozen=True, slots=True)
class RestCall:
    """A request whose key was found, was counted, and has the scope of the verb."""

    request: Request
    state: State
    caller: Caller


RestHandler = Callable[[RestCall, Any], Awaitable[Response]]
"""Its second argument is the body in the shape that the verb takes, None if it takes none."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One HTTP method of a route: its scope, what it does within `wait_s`, and what body it takes."""

    scope: Scope
    handler: RestHandler
    takes: type[Params] | None = None
    wait_s: float = ANSWER_WAIT_S


def rest_route(path: str, verbs: Mapping[str, Verb]) -> Route:
    """The route of one resource. `verbs` are keyed by HTTP method: GET, POST, PATCH, DELETE."""

    async def endpoint(request: Request) -> Response:
        # HEAD comes with GET: the server leaves the body out.
        verb = verbs[request.method if request.method in verbs else "GET"]
        about = {"endpoint": path, "verb": request.method}
        call = await answered(_admitted(request, verb), **about)
        if isinstance(call, Fault):
            return _as_rest(call)
        try:
            # A body has a wait of its own, so it is read between the two that may need Postgres.
            value = await _body(call) if verb.takes else None
        except Refused as refused:
            slug = _SLUGS_OF_STATUSES.get(refused.status, "invalid_request")
            return _told(refused.status, slug, refused.reason, {}, refused.headers)
        outcome = await answered(_done(verb, call, value), verb.wait_s, **about)
        return _as_rest(outcome) if isinstance(outcome, Fault) else outcome

    return Route(path, endpoint, methods=list(verbs))


def shown(resource: Resource, status: int = 200) -> Response:
    return Response(resource.model_dump_json(), status, NO_STORE, "application/json")


async def _admitted(request: Request, verb: Verb) -> RestCall:
    state = state_of(request)
    caller = await state.gatekeeper.caller(context_of(request.headers))
    state.gatekeeper.count_calls(caller)
    require_scope(caller, verb.scope)
    return RestCall(request, state, caller)


async def _body(call: RestCall) -> JsonValue:
    """One JSON value, read strictly. Raises Refused."""
    settings = call.state.settings
    body = await read_body(call.request, settings.body_bytes_max)
    depth_max = settings.json_depth_max
    try:
        if len(body) <= PARSED_HERE_BYTES_MAX:
            return loads(body, depth_max=depth_max)
        return await anyio.to_thread.run_sync(lambda: loads(body, depth_max=depth_max))
    except JsonError as error:
        raise Refused(400, error.reason) from error


async def _done(verb: Verb, call: RestCall, value: JsonValue) -> Response:
    """The handler's response, or its refusal: that is no failure, so the boundary does not get to see it."""
    try:
        return await verb.handler(call, _fitting(verb.takes, value) if verb.takes else None)
    except RestRefusal as refused:
        return _told(refused.status, refused.slug, refused.message, refused.more, {})


def _fitting(shape: type[Params], value: JsonValue) -> Params:
    if not isinstance(value, dict):
        raise RestRefusal(400, "invalid_request", "The body should be a JSON object.")
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        # `from None`: the cause holds what the client sent, and its text would print it.
        raise params_refused(error) from None


def _as_rest(told: Fault) -> Response:
    """The plain form of a fault, with this surface's word for it."""
    return refusal(
        Fault(told.code, told.message, {**told.data, "symbol": _SLUGS.get(told.symbol, told.symbol)})
    )


def _told(
    status: int, slug: str, message: str, more: Mapping[str, int | str], headers: Mapping[str, str]
) -> Response:
    return JSONResponse({**more, "error": slug, "message": message}, status, {**NO_STORE, **headers})
