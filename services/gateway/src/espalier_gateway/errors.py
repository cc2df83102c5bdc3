"""The one table from what happened to what a client is told.

Errors of the domain carry facts and know no codes; here each type gets its code, its text and its `data`.
`WireError` is for refusals that only the wire can make: a version, a scope, the shape of params. Who catches
them is the dispatcher; nothing here logs or decides a JSON-RPC status. A test proves the table complete.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from espalier_domain.errors import (
    Conflicted,
    DomainError,
    InvalidInput,
    LifecycleConflict,
    NotFound,
    SubjectNotFound,
    TreeBoundary,
    Unavailable,
)
from espalier_protocol.errors import ErrorCode
from espalier_protocol.shapes import ID_CHARS_MAX
from espalier_protocol.strict_json import JsonValue

FIELD_CHARS_MAX: Final = 200
UNAVAILABLE: Final = "unavailable"
RATE_LIMITED: Final = "rate_limited"
LOG_PRUNED: Final = "log_pruned"


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as the client gets it. `data` always has the member `symbol`."""

    code: ErrorCode
    message: str
    data: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def symbol(self) -> str:
        return str(self.data["symbol"])

    @property
    def retry_after_ms(self) -> int | None:
        after_ms = self.data.get("retry_after_ms")
        return after_ms if isinstance(after_ms, int) else None


def fault(code: ErrorCode, message: str, **data: JsonValue) -> Fault:
    """The symbol is the code's own name unless `data` has a finer one."""
    return Fault(code, message, {"symbol": code.name, **data})


class WireError(Exception):
    """A refusal of the ladder itself, which carries its fault ready made."""

    def __init__(self, code: ErrorCode, message: str, **data: JsonValue) -> None:
        super().__init__(message)
        self.fault = fault(code, message, **data)


def rate_limited(limit: str, message: str, retry_after_ms: int) -> WireError:
    """A caller at one of its limits, which is no failure: the setting that it met, and nothing was done."""
    data: dict[str, JsonValue] = {"limit": limit, "retry_after_ms": retry_after_ms}
    return WireError(ErrorCode.internal_error, message, symbol=RATE_LIMITED, **data)


def _not_found(error: NotFound) -> Fault:
    # An id of another owner and one that was never given out must read the same, so nothing else is said.
    return fault(ErrorCode.tool_not_found, str(error), resource=error.resource, id=error.id[:ID_CHARS_MAX])


def _invalid_input(error: InvalidInput) -> Fault:
    message = f"{error.field} {error.reason}."
    return fault(ErrorCode.invalid_params, message, field=error.field, reason=error.reason)


def _lifecycle_conflict(error: LifecycleConflict) -> Fault:
    return fault(ErrorCode.lifecycle_conflict, error.reason, reason=error.reason)


def _tree_boundary(error: TreeBoundary) -> Fault:
    return fault(ErrorCode.tree_boundary_violation, error.reason, id=error.id[:ID_CHARS_MAX])


def _subject_not_found(error: SubjectNotFound) -> Fault:
    return fault(ErrorCode.subject_not_found, str(error), id=error.id[:ID_CHARS_MAX])


def _unavailable(error: Unavailable) -> Fault:
    after_ms = error.retry_after_ms
    return fault(ErrorCode.internal_error, str(error), symbol=UNAVAILABLE, retry_after_ms=after_ms)


TABLE: Final[Mapping[type[DomainError], Callable[[Any], Fault]]] = {
    NotFound: _not_found,
    InvalidInput: _invalid_input,
    LifecycleConflict: _lifecycle_conflict,
    TreeBoundary: _tree_boundary,
    SubjectNotFound: _subject_not_found,
    Unavailable: _unavailable,
    Conflicted: _unavailable,
}


def fault_of(error: Exception, reference: str) -> Fault:
    """What the client is told. `reference` names the line in our log where the cause can be read."""
    if isinstance(error, WireError):
        return _referring(error.fault, reference)
    if isinstance(error, DomainError):
        return _referring(TABLE[type(error)](error), reference)
    message = f"The runtime failed; its log knows why under {reference}."
    return fault(ErrorCode.internal_error, message, reference=reference)


def _referring(told: Fault, reference: str) -> Fault:
    """Passing trouble of ours can be looked up; a caller's own limit says all there is to say."""
    if told.symbol != UNAVAILABLE:
        return told
    return Fault(told.code, told.message, {**told.data, "reference": reference})


# pydantic's words are for people who know its models; these are for people who wrote JSON.
_REASONS: Final[Mapping[str, str]] = {
    "missing": "is required",
    "extra_forbidden": "is not a member that is known here",
    "model_type": "should be an object",
    "dict_type": "should be an object",
    "list_type": "should be an array",
}


_PYDANTIC_ASIDE: Final = re.compile(r" after validation(, not .*)?$")


def params_refused(error: ValidationError) -> WireError:
    """One sentence about the first member that does not fit. Repeats names, never values."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    member = ".".join(str(part) for part in first["loc"])[:FIELD_CHARS_MAX] or "params"
    reason = _REASONS.get(first["type"]) or _in_plain_words(first["msg"])
    return WireError(ErrorCode.invalid_params, f"{member} {reason}.", field=member, reason=reason)


def _in_plain_words(message: str) -> str:
    message = _PYDANTIC_ASIDE.sub("", message)
    subject, should, rest = message.partition(" should ")
    return f"should {rest}" if should and len(subject.split()) == 1 else message[0].lower() + message[1:]


# Endpoints that speak plain HTTP: by symbol where it is finer than the code.
_STATUS_OF_SYMBOL: Final[Mapping[str, int]] = {UNAVAILABLE: 503, RATE_LIMITED: 429, LOG_PRUNED: 410}
_STATUS_OF_CODE: Final[Mapping[ErrorCode, int]] = {
    ErrorCode.authn_failed: 401,
    ErrorCode.authz_denied: 403,
    ErrorCode.capability_not_supported: 403,
    ErrorCode.ceiling_exceeded: 409,
    ErrorCode.budget_exhausted: 409,
    ErrorCode.tree_boundary_violation: 403,
    ErrorCode.subject_not_found: 404,
    ErrorCode.constitution_policy_violation: 409,
    ErrorCode.tool_not_found: 404,
    ErrorCode.version_mismatch: 400,
    ErrorCode.session_expired: 401,
    ErrorCode.lifecycle_conflict: 409,
    ErrorCode.parse_error: 400,
    ErrorCode.invalid_request: 400,
    ErrorCode.method_not_found: 404,
    ErrorCode.invalid_params: 400,
    ErrorCode.internal_error: 500,
}


def status_of(told: Fault) -> int:
    """The status of a refusal on every endpoint that speaks plain HTTP."""
    return _STATUS_OF_SYMBOL.get(told.symbol) or _STATUS_OF_CODE[told.code]
