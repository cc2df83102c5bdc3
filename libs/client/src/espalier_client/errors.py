"""What can go wrong for an embedder, as one tree:

    ClientError           one sentence for a person
    |- AepError           the runtime understood the request and refused it
    `- TransportError     no usable answer: unreachable, cut off, or not AEP

Which of them are worth another attempt is said here too, so that calls, downloads and streams agree.
"""

from collections.abc import Mapping
from enum import StrEnum
from http import HTTPStatus

from espalier_protocol.errors import ErrorCode
from espalier_protocol.shapes import JsonAny

RETRY_AFTER_S_MAX = 60.0
"""A runtime's wish to be left alone is heeded up to here."""

# The status lines of endpoints that do not answer in JSON-RPC, should the body not name the error.
_CODE_OF_STATUS: dict[int, ErrorCode] = {
    HTTPStatus.BAD_REQUEST: ErrorCode.invalid_request,
    HTTPStatus.UNAUTHORIZED: ErrorCode.authn_failed,
    HTTPStatus.FORBIDDEN: ErrorCode.authz_denied,
    HTTPStatus.NOT_FOUND: ErrorCode.tool_not_found,
}


class ClientError(Exception):
    """Carries one sentence. It holds no key, but it may repeat a runtime's words: clean it for a terminal."""

    @property
    def retry_after_s(self) -> float:
        """How long the runtime wants to be left alone; 0 if it did not say."""
        return 0.0


class AepError(ClientError):
    """The runtime's refusal: `code` and `symbol` of the protocol, its words, and what it added."""

    def __init__(self, code: int, symbol: str, message: str, data: JsonAny = None) -> None:
        super().__init__(f"{message} [{symbol}]")
        self.code = code
        self.symbol = symbol
        self.message = message
        self.data = data

    @property
    def retry_after_s(self) -> float:
        wish = self.data.get("retry_after_ms") if isinstance(self.data, Mapping) else None
        if not isinstance(wish, int | float):
            return 0.0
        return min(max(wish / 1000, 0.0), RETRY_AFTER_S_MAX)


class Cause(StrEnum):
    """Why there is no answer, as far as it matters for another attempt."""

    unsent = "unsent"  # the request never left
    silent = "silent"  # the runtime stopped talking while we listened
    lost = "lost"  # it left; what became of it is not known
    senseless = "senseless"  # what came back is not AEP; asking again gives the same


class TransportError(ClientError):
    def __init__(self, sentence: str, cause: Cause = Cause.lost) -> None:
        super().__init__(sentence)
        self.cause = cause


def is_limit(error: ClientError) -> bool:
    """Whether the caller asked too much. It is for the caller to wait, whichever gateway said so."""
    return isinstance(error, AepError) and error.symbol == "rate_limited"


def is_no_answer(error: ClientError) -> bool:
    """Whether the fault may be the gateway's own, so that another one could do better."""
    if isinstance(error, AepError):
        return error.symbol == "unavailable"
    return isinstance(error, TransportError)


def is_passing(error: ClientError) -> bool:
    """Whether the same request may succeed later, without saying whether it is safe to send it again."""
    if isinstance(error, AepError):
        return error.symbol in ("rate_limited", "unavailable")
    return isinstance(error, TransportError) and error.cause is not Cause.senseless


def is_unheard(error: ClientError) -> bool:
    """Whether it is certain that the request had no effect, so that even a create may be sent again."""
    return is_limit(error) or (isinstance(error, TransportError) and error.cause is Cause.unsent)


def symbol_of(code: int, data: JsonAny) -> str:
    """The symbol that came with the error, else the protocol's name for the code."""
    if isinstance(data, Mapping) and isinstance(data.get("symbol"), str):
        return str(data["symbol"])
    try:
        return ErrorCode(code).name
    except ValueError:
        return "unknown"


def code_of_status(status: int) -> ErrorCode:
    """The nearest code for a refusal that names none."""
    return _CODE_OF_STATUS.get(status, ErrorCode.internal_error)
