"""HTTP: the routes, and how calls, refusals and health look on them.

Nothing is decided here. `POST /aep/v1/rpc` hands bytes and header values to the dispatcher and turns its
verdict into a status; the events and bytes endpoints are in `events` and `artifact_bytes`. Every response
also carries the headers that `server` adds.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import anyio
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from espalier_gateway.auth import CallContext, Gatekeeper
from espalier_gateway.body import Refused, read_body
from espalier_gateway.dispatcher import Dispatcher, Verdict, answered
from espalier_gateway.errors import Fault, status_of
from espalier_gateway.settings import GatewaySettings
from espalier_gateway.stream_limits import OpenStreams
from espalier_gateway.tails import Tails
from espalier_protocol.errors import ErrorCode
from espalier_protocol.jsonrpc import error_body
from espalier_protocol.versions import Versions
from espalier_secrets.sealing import Sealer
from espalier_store.pool import Pool, reading, schema_ready

READY_WAIT_S: Final = 1.0
"""Half of what may pass until a probe says that Postgres hangs."""

VERSION_HEADER: Final = b"agent-protocol-version"
RESPONSE_STARTS: Final = ("http.response.start", "websocket.http.response.start", "websocket.accept")
JSON: Final = "application/json"
CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}
NO_STORE: Final = {"Cache-Control": "no-store"}
_STATUSES: Final[Mapping[Verdict, int]] = {
    Verdict.answered: 200,
    Verdict.silent: 204,
    Verdict.unreadable: 400,
    Verdict.unauthenticated: 401,
    Verdict.rate_limited: 429,
}


@dataclass(frozen=True, slots=True)
class State:
    """What the process holds open. `closing` is set when it begins to stop; streams end then."""

    settings: GatewaySettings
    pool: Pool
    gatekeeper: Gatekeeper
    dispatcher: Dispatcher
    tails: Tails
    streams: OpenStreams
    sealer: Sealer
    closing: anyio.Event


def state_of(request: HTTPConnection) -> State:
    state = request.app.state.gateway
    assert isinstance(state, State)
    return state


def context_of(headers: Headers) -> CallContext:
    return CallContext(
        authorization=_one(headers, "authorization"),
        version=_one(headers, "agent-protocol-version"),
        session_id=_one(headers, "x-aep-session-id"),
        idempotency_key=_all(headers, "idempotency-key"),
    )


def _one(headers: Headers, name: str) -> str | None:
    """A repeated header is one value with commas: so two tokens are no token."""
    return _all(headers, name) or None


def _all(headers: Headers, name: str) -> str | None:
    """Empty if it was given without a value."""
    values = headers.getlist(name)
    return ", ".join(values) if values else None


async def rpc(request: Request) -> Response:
    state = state_of(request)
    try:
        body = await read_body(request, state.settings.body_bytes_max)
    except Refused as refused:
        refusal = error_body(
            None,
            ErrorCode.invalid_request,
            refused.reason,
            {"symbol": ErrorCode.invalid_request.name, "reason": refused.reason},
        )
        return Response(refusal, refused.status, refused.headers, JSON)
    answer = await state.dispatcher.answer(body, context_of(request.headers))
    headers = NO_STORE | _wait(answer.retry_after_ms)
    if answer.verdict is Verdict.unauthenticated:
        headers |= CHALLENGE
    return Response(answer.body, _STATUSES[answer.verdict], headers, JSON if answer.body else None)


def _wait(after_ms: int | None) -> dict[str, str]:
    """In whole seconds, because that is all that the header can say; bodies have it in milliseconds."""
    return {} if after_ms is None else {"Retry-After": str(max(1, -(-after_ms // 1000)))}


async def plainly(work: Awaitable[ASGIApp], **about: str) -> ASGIApp:
    """The response, or the refusal in the form of the endpoints that speak no JSON-RPC."""
    outcome = await answered(work, **about)
    return refusal(outcome) if isinstance(outcome, Fault) else outcome


def refusal(told: Fault) -> Response:
    status = status_of(told)
    body = {"error": told.symbol, "message": told.message, "code": int(told.code)}
    extra = {name: value for name, value in told.data.items() if name != "symbol"}
    headers = NO_STORE | _wait(told.retry_after_ms)
    if status == 401:
        headers |= CHALLENGE
    return JSONResponse({**extra, **body}, status, headers)


async def alive(_: Request) -> Response:
    return JSONResponse({"ok": True})


async def ready(request: Request) -> Response:
    """Ready is whoever can reach Postgres. Redis only makes things faster."""
    outcome = await answered(_schema_answers(state_of(request).pool), probe="ready")
    fine = outcome is True
    return JSONResponse({"ok": fine}, 200 if fine else 503)


async def _schema_answers(pool: Pool) -> bool:
    with anyio.move_on_after(READY_WAIT_S):
        async with reading(pool) as connection:
            return await schema_ready(connection)
    return False


async def no_such_route(_: Request, error: Exception) -> Response:
    """Unknown paths and methods; the router raised it and knows which methods are allowed."""
    assert isinstance(error, HTTPException)
    body = {"error": "not_found" if error.status_code == 404 else "refused", "message": error.detail}
    return JSONResponse(body, error.status_code, error.headers)


class SaysVersion:
    """Adds to every response the version it is in: the request's if it is served, else the newest."""

    def __init__(self, app: ASGIApp, versions: Versions) -> None:
        self._app, self._versions = app, {name.encode() for name in versions}
        self._newest = next(iter(versions)).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = next((value for name, value in scope["headers"] if name == VERSION_HEADER), b"")
        spoken = (VERSION_HEADER, asked if asked in self._versions else self._newest)

        async def say(message: Message) -> None:
            if message["type"] in RESPONSE_STARTS:
                message["headers"] = [*message.get("headers", ()), spoken]
            await send(message)

        await self._app(scope, receive, say)


def build_app(state: State, routes: Sequence[BaseRoute]) -> FastAPI:
    """The application: no documentation routes, no redirects."""
    own = [
        Route("/aep/v1/rpc", rpc, methods=["POST"]),
        Route("/healthz", alive),
        Route("/readyz", ready),
    ]
    app = FastAPI(
        routes=[*own, *routes],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: no_such_route},
    )
    app.add_middleware(SaysVersion, versions=state.gatekeeper.versions)
    app.state.gateway = state
    return app
