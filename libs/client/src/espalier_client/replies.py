"""Bytes to and from the runtime: a JSON-RPC request as text, its reply as a value or an error.

No sockets here; `transport` has them. Replies are read leniently (a runtime may say more than we know), but
an answer that is not an answer to the question is never taken for one.
"""

import json
from typing import Any

from pydantic import BaseModel, ValidationError

from espalier_client.errors import AepError, Cause, ClientError, TransportError, code_of_status, symbol_of
from espalier_protocol.jsonrpc import RequestId
from espalier_protocol.shapes import JsonAny, Params
from espalier_protocol.strict_json import dumps

SERVER_ERROR = 500
TOO_MANY_REQUESTS = 429
RATE_LIMITED = "rate_limited"
UNAVAILABLE = "unavailable"


class _Fault(BaseModel):
    code: int
    message: str
    data: JsonAny = None


class _Reply(BaseModel):
    id: RequestId | None = None
    result: JsonAny = None
    error: _Fault | None = None


class _Refusal(BaseModel):
    """The error body of the endpoints beside RPC."""

    error: str
    message: str = ""
    code: int | None = None
    retry_after_ms: float | None = None


def request_body(request_id: RequestId, method: str, params: Params) -> bytes:
    """Only members that were given travel: a runtime of another kind refuses extensions it does not know."""
    given = params.model_dump_json(exclude_unset=True).encode()
    return b'{"jsonrpc":"2.0","id":%b,"method":%b,"params":%b}' % (dumps(request_id), dumps(method), given)


def read_reply(status: int, body: bytes, request_id: RequestId) -> Any:
    """The result. Raises what the runtime said instead."""
    try:
        reply = _Reply.model_validate_json(body)
    except ValidationError as err:
        raise _not_a_reply(status) from err
    if reply.error is not None:
        fault = reply.error
        raise AepError(fault.code, symbol_of(fault.code, fault.data), fault.message, fault.data)
    if "result" not in reply.model_fields_set:
        raise _not_a_reply(status)
    if reply.id != request_id:
        raise TransportError("The runtime answered another request than the one sent.", Cause.senseless)
    return reply.result


def read_json(body: bytes) -> Any:
    """Raises TransportError for a body that is no JSON."""
    try:
        return json.loads(body)
    except ValueError as err:
        raise TransportError("The runtime answered what is no JSON.", Cause.senseless) from err


def read_refusal(status: int, body: bytes) -> ClientError:
    """What a status other than 200 means where no JSON-RPC is spoken (events, bytes).

    Of a failure only a passing one is believed to be the runtime's own word: it says when to come again.
    """
    try:
        said = _Refusal.model_validate_json(body)
    except ValidationError:
        said = _Refusal(error="")
    if status >= SERVER_ERROR and said.error != UNAVAILABLE:
        return _not_a_reply(status)
    code = code_of_status(status) if said.code is None else said.code
    symbol = RATE_LIMITED if status == TOO_MANY_REQUESTS else said.error or symbol_of(code, None)
    message = said.message or f"The runtime refused with status {status}."
    return AepError(code, symbol, message, {"symbol": symbol, "retry_after_ms": said.retry_after_ms})


def _not_a_reply(status: int) -> ClientError:
    if status == TOO_MANY_REQUESTS:  # a proxy's limit: the runtime has not heard of the request
        return read_refusal(status, b"")
    if status >= SERVER_ERROR:
        return TransportError(f"The runtime failed with status {status}.")
    return TransportError(f"What answered with status {status} does not speak AEP.", Cause.senseless)
