"""What becomes of a provider's trouble: one place from the SDK's errors to faults that a run can act on.

A fault's reason is a word and a detail. The detail is bounded and names neither the key nor the address, and
of a provider's own text it keeps one short message, because "the model does not exist" helps whoever reads
it. Above: the adapters. Nothing here waits or asks again; that is the run's.
"""

import re
from collections.abc import Iterator
from socket import gaierror
from typing import Final

import httpcore2
from openai import APIStatusError
from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelNotFoundError,
    ModelOverloadedError,
    ModelQuotaExceededError,
    ModelTimeoutError,
)

from espalier_egress import EgressError, EgressRefused, EgressTooLarge, EgressTooSlow, EgressUnreachable
from espalier_run_worker.models.model import ModelFault

DETAIL_CHARS_MAX: Final = 200
SECRET_PART_CHARS: Final = 8
"""A text that repeats this many characters of a secret in a row is not shown at all."""

# What the SDK learnt from more than the status. The first that fits counts.
KINDS: Final[tuple[tuple[type[ModelAPIError], str, bool], ...]] = (
    (ModelQuotaExceededError, "quota_exhausted", False),
    (ModelContextWindowExceededError, "prompt_too_long", False),
    (ModelOverloadedError, "overloaded", True),
    (ModelNotFoundError, "not_found", False),
    (ModelAuthenticationError, "unauthorized", False),
    (ModelTimeoutError, "timeout", True),
    (ModelConnectionError, "unreachable", True),
)
# What the way out says of an address that somebody else chose; its sentences name none.
REFUSED_ADDRESS: Final = ("address_refused", False)
EGRESS: Final[dict[type[EgressError], tuple[str, bool]]] = {
    EgressRefused: REFUSED_ADDRESS,
    EgressUnreachable: ("unreachable", True),
    EgressTooSlow: ("timeout", True),
    EgressTooLarge: ("answer_too_large", True),
}
STATUSES: Final[dict[int, tuple[str, bool]]] = {
    401: ("unauthorized", False),
    402: ("quota_exhausted", False),
    403: ("unauthorized", False),
    404: ("not_found", False),
    408: ("timeout", True),
    409: ("conflict", True),
    425: ("too_early", True),
    429: ("rate_limited", True),
    503: ("unavailable", True),
    529: ("overloaded", True),
}
OTHER_FROM_500: Final = ("provider_error", True)
OTHER_BELOW: Final = ("refused", False)
REDIRECTED: Final = ("redirected", False)
UNREADABLE: Final = ("unreadable_answer", True)

NO_CONNECTION: Final = (httpcore2.ConnectError, httpcore2.ConnectTimeout, gaierror)
"""What the way out met before it could send anything; the last is a name that nobody knows."""
CAUSES_MAX: Final = 8

_CODE: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class ProviderFaults:
    """The faults of one endpoint, whose `secrets` no reason repeats."""

    def __init__(self, secrets: tuple[str, ...]) -> None:
        self._secrets = secrets

    def of(self, error: ModelAPIError | EgressError, tokens_max: int) -> ModelFault:
        """The fault that an SDK's error means; one after which nobody knows the cost costs `tokens_max`."""
        word, retryable = _meaning(error)
        refused = isinstance(error, ModelHTTPError) or _redirected(error) or _never_sent(error)
        return ModelFault(
            self._reason(word, error),
            retryable=retryable,
            tokens=0 if refused else tokens_max,
            retry_after_s=error.retry_after if isinstance(error, ModelAPIError) else None,
        )

    def _reason(self, word: str, error: ModelAPIError | EgressError) -> str:
        detail = "".join(self._details(error))[:DETAIL_CHARS_MAX].rstrip()
        return f"{word}: {detail}" if detail else word

    def _details(self, error: ModelAPIError | EgressError) -> Iterator[str]:
        if isinstance(error, ModelHTTPError):
            yield str(error.status_code)
            code = _code(error)
            if _CODE.fullmatch(code) and self._tells_nothing(code):
                yield f" {code}"
            # About a key that was refused, providers like to say which one it was.
            if not isinstance(error, ModelAuthenticationError) and (text := self._told(error.body)):
                yield f", {text}"
        elif isinstance(met := _on_the_way_out(error), EgressRefused):
            yield str(met)
        elif isinstance(error, ModelConnectionError) and error.phase:
            yield f"at {error.phase}"

    def _told(self, body: object) -> str:
        """The message in an error's body, on one line, if it is harmless."""
        message = body.get("message") if isinstance(body, dict) else None
        if not isinstance(message, str) or not self._tells_nothing(message):
            return ""
        return " ".join("".join(each if each.isprintable() else " " for each in message).split())

    def _tells_nothing(self, text: str) -> bool:
        return not any(part in text for secret in self._secrets for part in _parts(secret))


def _meaning(error: ModelAPIError | EgressError) -> tuple[str, bool]:
    if met := _on_the_way_out(error):
        return EGRESS[type(met)]
    for kind, word, retryable in KINDS:
        if isinstance(error, kind):
            return word, retryable
    if isinstance(error, ModelHTTPError):
        return STATUSES.get(error.status_code, OTHER_FROM_500 if error.status_code >= 500 else OTHER_BELOW)
    # What else there is are bodies that the SDK could not read.
    return REDIRECTED if _redirected(error) else UNREADABLE


def _code(error: ModelHTTPError) -> str:
    """The provider's own name of the trouble. Some put the status there, which says nothing new."""
    code = error.provider_error_code or ""
    return code if code and not code.isdigit() else error.provider_error_type or ""


def _redirected(error: ModelAPIError | EgressError) -> bool:
    """The SDK has no class of its own for a status below 400 that is no success."""
    return not isinstance(error, ModelHTTPError) and isinstance(error.__cause__, APIStatusError)


def _never_sent(error: ModelAPIError | EgressError) -> bool:
    if met := _on_the_way_out(error):
        # The pool below passes on what a connection raised without its cause.
        return isinstance(met, EgressRefused) or isinstance(met.__cause__ or met.__context__, NO_CONNECTION)
    return isinstance(error, ModelConnectionError) and error.phase in ("pool", "connect")


def _on_the_way_out(error: BaseException) -> EgressError | None:
    """The SDKs chain what their client raised."""
    met: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if met is None or isinstance(met, EgressError):
            return met
        met = met.__cause__
    return None


def _parts(secret: str) -> Iterator[str]:
    for start in range(max(len(secret) - SECRET_PART_CHARS, 0) + 1):
        yield secret[start : start + SECRET_PART_CHARS]
