"""One ladder of checks for every call, and the one place where exceptions become something on the wire.

Bytes and a few header values go in, bytes and a verdict come out: what carried them (HTTP or a WebSocket) is
not known here. The table `espalier_protocol.methods` drives it; there is no second list. Above: `http` and
`ws`. Below: `auth` for the rungs that other endpoints share, `methods` for what is done at the top.
"""

import secrets
from collections.abc import Awaitable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final, TypeVar

import anyio.to_thread
import structlog
from pydantic import ValidationError

from espalier_domain.errors import Conflicted, Unavailable
from espalier_gateway.auth import CallContext, Gatekeeper, require_capability, require_scope
from espalier_gateway.errors import (
    RATE_LIMITED,
    UNAVAILABLE,
    Fault,
    WireError,
    fault,
    fault_of,
    params_refused,
)
from espalier_gateway.idempotency import FIELD as IDEMPOTENCY_KEY
from espalier_gateway.idempotency import AnsweredBefore, create_key
from espalier_gateway.methods import HANDLERS, Handler
from espalier_gateway.methods.call import Call, Desk
from espalier_gateway.subscriptions import Listener
from espalier_protocol.errors import ErrorCode
from espalier_protocol.jsonrpc import (
    Batch,
    Entry,
    Malformed,
    Message,
    Request,
    RequestId,
    Single,
    batch_body,
    error_body,
    read_message,
    result_body,
)
from espalier_protocol.methods import METHODS, Method
from espalier_protocol.session import InitializeResult
from espalier_protocol.shapes import Params
from espalier_protocol.strict_json import JsonError, JsonValue, loads
from espalier_store.idempotency import CreateKey
from espalier_store.keys import Caller
from espalier_store.sessions import AepSession

INITIALIZE: Final = "initialize"
ATTEMPTS_MAX: Final = 3
PARSED_HERE_BYTES_MAX: Final = 32 * 1024
"""A larger body is parsed in a thread, so that the event loop does not stand still meanwhile."""

BATCH_ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
PATIENCE_S: Final = 2.0
"""How long a call may wait for a run to change. In a batch none does, or twenty would wait in turn."""

ANSWER_WAIT_S: Final = 2.5
"""A call that takes longer is given up: with a ROLLBACK or a COMMIT that just began it is answered within
five seconds though Postgres hangs. Above PATIENCE_S, which is part of it.
"""

AGAIN_MS: Final = 1000
REFERENCE_BYTES: Final = 8

log = structlog.get_logger(__name__)
T = TypeVar("T")


class Verdict(Enum):
    """What became of a message as a whole, for the transport to express in its own way."""

    answered = auto()
    silent = auto()  # notifications only: there is no body
    rate_limited = auto()  # nothing of it was done; without a body if all were notifications
    unreadable = auto()  # not JSON, or not JSON-RPC
    unauthenticated = auto()


@dataclass(frozen=True, slots=True)
class Answer:
    verdict: Verdict
    body: bytes = b""
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Reply:
    """The answer to one request: `told` is None for a result, `body` is empty for a notification."""

    body: bytes
    told: Fault | None = None

    @property
    def code(self) -> ErrorCode | None:
        return None if self.told is None else self.told.code


class Dispatcher:
    """Answers messages. One per process; calls may run at the same time."""

    def __init__(self, gatekeeper: Gatekeeper, desk: Desk, *, batch_max: int, json_depth_max: int) -> None:
        self._gatekeeper = gatekeeper
        self._desk = desk
        self._batch_max = batch_max
        self._loads = partial(loads, depth_max=json_depth_max)

    async def answer(self, body: bytes, context: CallContext) -> Answer:
        """Never raises for what a client sent or a handler did."""
        message = await self.read(body)
        return message if isinstance(message, Answer) else await self.answer_message(message, context)

    async def read(self, body: bytes) -> Message | Answer:
        """What the client says; at once the answer if it is no JSON."""
        try:
            return await self._read(body)
        except JsonError as error:
            return _whole(_failure(None, fault(ErrorCode.parse_error, error.reason)))

    async def answer_message(
        self, message: Message, context: CallContext, listener: Listener | None = None
    ) -> Answer:
        """Never raises either. `listener` is there if the client can be told things unasked."""
        match message:
            case Single(entry):
                return _whole(await self._reply(entry, context, listener))
            case Batch(entries):
                return await self._answer_batch(entries, context, listener)

    async def _climb(
        self, request: Request, context: CallContext, listener: Listener | None, *, in_batch: bool
    ) -> str:
        """The ladder, and the JSON of the result.

        Parse and shape lie behind; each rung refuses, or hands on what it found.
        """
        _comes_alone(request, in_batch)
        version = self._gatekeeper.version(context)
        caller = await self._gatekeeper.caller(context)
        if not in_batch:  # a batch was counted as a whole
            self._gatekeeper.count_calls(caller)
        session = await self._session(request, context, caller, version)
        method = _known_method(request.method, listener)
        handler = _supported(method, session)
        _allowed(method, caller)
        params = _fitting_params(method, request.params)
        named = _named_create(method, context, request.params)
        patience_s = 0.0 if in_batch else PATIENCE_S
        call = Call(self._desk, caller, session, patience_s, named, listener)
        result = await _handled(handler, call, params)
        return self._desk.versions[session.protocol_version].shown(method.name, result)

    async def _session(
        self, request: Request, context: CallContext, caller: Caller, version: str
    ) -> AepSession:
        """`initialize` ignores the header: a client whose session has expired must be able to begin again."""
        if request.method == INITIALIZE:
            return AepSession(version, frozenset())
        return await self._gatekeeper.session(context, caller, version)

    async def _read(self, body: bytes) -> Message:
        if len(body) <= PARSED_HERE_BYTES_MAX:
            value: JsonValue = self._loads(body)
        else:
            value = await anyio.to_thread.run_sync(self._loads, body)
        return read_message(value, batch_max=self._batch_max)

    async def _answer_batch(
        self, entries: tuple[Entry, ...], context: CallContext, listener: Listener | None
    ) -> Answer:
        """In sequence and in order: a batch is a list of calls, not a way to run twenty at once."""
        if context.idempotency_key is not None:
            reason = "cannot be used with a batch: it names one call"
            message = f"{IDEMPOTENCY_KEY} {reason}."
            refusal = fault(ErrorCode.invalid_params, message, field=IDEMPOTENCY_KEY, reason=reason)
            return _whole(_failure(None, refusal))
        told = await answered(self._count_batch(entries, context))
        if isinstance(told, Fault) and told.code is ErrorCode.internal_error:
            return _several([_refused(entry, told) for entry in entries])
        replies: list[_Reply] = []
        room, stop = BATCH_ANSWER_BYTES_MAX, None
        for entry in entries:
            if stop is None:
                reply = await self._reply(entry, context, listener, in_batch=True)
                room -= len(reply.body)
                stop = _why_stop(reply, room)
            else:
                reply = _refused(entry, stop)
            replies.append(reply)
        return _several(replies)

    async def _count_batch(self, entries: tuple[Entry, ...], context: CallContext) -> None:
        """All entries count before the first one runs, so that a client may repeat a batch that is refused.

        One whose caller cannot be told right now does not begin either. A caller who is nobody gets as far
        as each entry gets by itself.
        """
        self._gatekeeper.version(context)
        caller = await self._gatekeeper.caller(context)
        self._gatekeeper.count_calls(caller, len(entries))

    async def _reply(
        self, entry: Entry, context: CallContext, listener: Listener | None, *, in_batch: bool = False
    ) -> _Reply:
        if isinstance(entry, Malformed):
            return _failure(entry.id, fault(ErrorCode.invalid_request, entry.reason))
        climb = self._climb(entry, context, listener, in_batch=in_batch)
        outcome = await answered(climb, method=entry.method)
        if isinstance(outcome, Fault):
            return _refused(entry, outcome)
        if entry.id is None:
            return _Reply(b"")
        return _Reply(result_body(entry.id, outcome.encode()))


async def answered(work: Awaitable[T], wait_s: float = ANSWER_WAIT_S, /, **about: str) -> T | Fault:
    """The boundary: what `work` gives within `wait_s` seconds, or what the client is told instead.

    A failure that nobody expected is logged here, once, and reaches the client as a reference and no more.
    """
    reference = secrets.token_hex(REFERENCE_BYTES)
    try:
        with anyio.move_on_after(wait_s):
            return await work
        raise Unavailable(AGAIN_MS)
    except Exception as error:
        told = fault_of(error, reference)
        if told.symbol == ErrorCode.internal_error.name:
            log.exception("call.failed", reference=reference, **about)
        elif told.symbol == UNAVAILABLE:
            log.warning("call.put_off", reference=reference, error=repr(error.__cause__ or error), **about)
        return told


def _comes_alone(request: Request, in_batch: bool) -> None:
    """Nothing in a batch could use the session that an `initialize` in it would begin."""
    if in_batch and request.method == INITIALIZE:
        raise WireError(ErrorCode.invalid_request, "Expected initialize to come alone, not in a batch.")


def _named_create(
    method: Method, context: CallContext, params: dict[str, JsonValue] | list[JsonValue] | None
) -> CreateKey | None:
    """A method that does no harm when it is repeated does not heed the key."""
    if context.idempotency_key is None or not method.keyed:
        return None
    return create_key(method.name, context.idempotency_key, params)


def _why_stop(reply: _Reply, room: int) -> Fault | None:
    """What the rest of a batch is told, of which nothing runs: Postgres is away, or the response is full."""
    if reply.told is not None and reply.told.symbol == UNAVAILABLE:
        return reply.told
    message = "The answers before this one filled the response; call it alone."
    full = fault(ErrorCode.internal_error, message, symbol=UNAVAILABLE, retry_after_ms=0)
    return full if room <= 0 else None


def _known_method(name: str, listener: Listener | None) -> Method:
    method = METHODS.get(name)
    if method is None or (method.duplex and listener is None):
        message = "There is no method of this name" + (" except on a WebSocket." if method else ".")
        raise WireError(ErrorCode.method_not_found, message, resource="method", id=name)
    return method


def _supported(method: Method, session: AepSession) -> Handler:
    if method.capability is not None:
        require_capability(session, method.capability)
    return HANDLERS[method.name]


def _allowed(method: Method, caller: Caller) -> None:
    if method.scope is not None:
        require_scope(caller, method.scope)


def _fitting_params(method: Method, params: dict[str, JsonValue] | list[JsonValue] | None) -> Params:
    if isinstance(params, list):
        reason = "should be an object with named members"
        raise WireError(ErrorCode.invalid_params, f"params {reason}.", field="params", reason=reason)
    try:
        return method.params.model_validate(params or {})
    except ValidationError as error:
        # `from None`: the cause holds what the client sent, and its text would print it.
        raise params_refused(error) from None


async def _handled(handler: Handler, call: Call, params: Params) -> str:
    """A handler writes in one transaction, first thing: one that Postgres could not order wrote nothing."""
    for _ in range(ATTEMPTS_MAX - 1):
        try:
            return await _told(handler, call, params)
        except Conflicted:
            log.info("call.repeated")
    return await _told(handler, call, params)


async def _told(handler: Handler, call: Call, params: Params) -> str:
    try:
        outcome = await handler(call, params)
    except AnsweredBefore as first:
        return first.answer
    if isinstance(outcome, InitializeResult) and call.listener is not None:
        call.listener.session_id = outcome.session_id
    return outcome.model_dump_json()


def _refused(entry: Entry, told: Fault) -> _Reply:
    """A notification gets no answer, whatever became of it."""
    if entry.id is None and isinstance(entry, Request):
        return _Reply(b"", told)
    return _failure(entry.id, told)


def _failure(request_id: RequestId | None, told: Fault) -> _Reply:
    return _Reply(error_body(request_id, told.code, told.message, told.data), told)


def _whole(reply: _Reply) -> Answer:
    """The answer to a message that was no batch."""
    if (told := reply.told) and told.symbol == RATE_LIMITED:
        return Answer(Verdict.rate_limited, reply.body, told.retry_after_ms)
    if not reply.body:
        return Answer(Verdict.silent)
    match reply.code:
        case ErrorCode.parse_error | ErrorCode.invalid_request:
            return Answer(Verdict.unreadable, reply.body)
        case ErrorCode.authn_failed:
            return Answer(Verdict.unauthenticated, reply.body)
        case _:
            return Answer(Verdict.answered, reply.body)


def _several(replies: list[_Reply]) -> Answer:
    """The answer to a batch, which is limited as a whole or not at all."""
    heard = [reply for reply in replies if reply.body]
    body = batch_body([reply.body for reply in heard]) if heard else b""
    if (told := replies[0].told) and told.symbol == RATE_LIMITED:
        return Answer(Verdict.rate_limited, body, told.retry_after_ms)
    if not heard:
        return Answer(Verdict.silent)
    turned_away = any(reply.code is ErrorCode.authn_failed for reply in heard)
    return Answer(Verdict.unauthenticated if turned_away else Verdict.answered, body)
