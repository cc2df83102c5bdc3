"""JSON-RPC 2.0 envelopes: parsed JSON to requests, and answers to bytes.

Reading is pure classification: it never raises for what a client sent, it says what the client sent. Not
here: which methods exist, whether their params fit, which answers become which HTTP status, and the rule that
`initialize` does not come in a batch; those are the dispatcher's. Below: `strict_json` for the bytes. Above:
the gateway's dispatcher (HTTP and WebSocket) and the client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from espalier_protocol.strict_json import INTEGER_MAX, JsonValue, dumps

RequestId: TypeAlias = str | int

BATCH_MAX = 20
ID_CHARS_MAX = 128
METHOD_CHARS_MAX = 128

_MEMBERS = frozenset({"jsonrpc", "id", "method", "params"})


@dataclass(frozen=True, slots=True)
class Request:
    """A well-formed envelope. `params` is None when the member was absent.

    Without an id, or with `id: null`, it is a notification: it gets no response, not even an error.
    """

    id: RequestId | None
    method: str
    params: dict[str, JsonValue] | list[JsonValue] | None


@dataclass(frozen=True, slots=True)
class Malformed:
    """Not a request: answered with -32600 and this id, also when the id is None."""

    id: RequestId | None
    reason: str


Entry: TypeAlias = Request | Malformed


@dataclass(frozen=True, slots=True)
class Single:
    """One answer, or none for a notification. A batch that is refused as a whole is a single `Malformed`."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Batch:
    """At least one entry, in the order of the answers; when all are notifications there is no body at all."""

    entries: tuple[Entry, ...]


Message: TypeAlias = Single | Batch


def read_message(value: JsonValue, *, batch_max: int = BATCH_MAX) -> Message:
    if not isinstance(value, list):
        return Single(_read_entry(value))
    if not value:
        return Single(Malformed(None, "Expected at least one request in the batch."))
    if len(value) > batch_max:
        return Single(Malformed(None, f"Expected at most {batch_max} requests in one batch."))
    return Batch(tuple(_read_entry(entry) for entry in value))


def result_body(request_id: RequestId, result_json: bytes) -> bytes:
    """`result_json` is JSON already (pydantic wrote it); it is copied, not parsed."""
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (dumps(request_id), result_json)


def error_body(
    request_id: RequestId | None, code: int, message: str, data: Mapping[str, JsonValue] | None = None
) -> bytes:
    error: dict[str, JsonValue] = {"code": code, "message": message}
    if data is not None:
        error["data"] = dict(data)
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (dumps(request_id), dumps(error))


def notification_body(method: str, params_json: bytes) -> bytes:
    """What a runtime says unasked, where it can; `params_json` is copied, not parsed."""
    return b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (dumps(method), params_json)


def batch_body(bodies: Sequence[bytes]) -> bytes:
    assert bodies, "a batch of notifications has no body, not an empty array"
    return b"[" + b",".join(bodies) + b"]"


def _read_entry(value: JsonValue) -> Entry:
    if not isinstance(value, dict):
        return Malformed(None, "Expected a request object.")
    request_id = value.get("id")
    if not _is_id_or_null(request_id):
        return Malformed(
            None, f"Expected id to be a string of at most {ID_CHARS_MAX} characters, a safe integer or null."
        )
    return _read_request(request_id, value)


def _is_id_or_null(value: JsonValue) -> TypeGuard[RequestId | None]:
    match value:
        case None:
            return True
        case bool():  # an int to Python, not to JSON
            return False
        case str():
            return len(value) <= ID_CHARS_MAX
        case int():
            return abs(value) <= INTEGER_MAX
        case _:
            return False


def _read_request(request_id: RequestId | None, members: dict[str, JsonValue]) -> Entry:
    if members.get("jsonrpc") != "2.0":
        return Malformed(request_id, 'Expected jsonrpc to be "2.0".')
    if not members.keys() <= _MEMBERS:
        return Malformed(request_id, "Expected no members besides jsonrpc, id, method and params.")
    method = members.get("method")
    if not isinstance(method, str) or len(method) > METHOD_CHARS_MAX:
        reason = f"Expected method to be a string of at most {METHOD_CHARS_MAX} characters."
        return Malformed(request_id, reason)
    if "params" not in members:
        return Request(request_id, method, None)
    params = members["params"]
    if not isinstance(params, dict | list):
        return Malformed(request_id, "Expected params to be an object or an array, or absent.")
    return Request(request_id, method, params)
