"""How a tool call ended, as far as can be known here: a closed union of values.

The difference that matters is whether a byte of the call may have left. `NotSent` may be tried again by
whoever wants to; `Unknown` and `TooLarge` must not be. Nothing in here names an address, a header or a word
of a server that cannot be reached: a reason is a category.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

RESULT_BYTES_MAX: Final = 10 * 1024 * 1024
"""The longest answer that is kept: one line of a stdio server, one body or one event over HTTP."""


class Reason(StrEnum):
    """Why there is no answer, in words for a person or a model."""

    CANNOT_START = "the server's program could not be started"
    CANNOT_CONNECT = "the server could not be reached"
    NOT_ALLOWED = "the server's address may not be gone to from here, or leads on to another one"
    NO_CREDENTIAL = "the credential for the server cannot be read here"
    CROWDED = "too many servers are in use at once"
    CONNECT_TIMEOUT = "the server did not become ready in time"
    REFUSED = "the server refused"
    INCOMPATIBLE = "the server speaks no version of MCP that is known here"
    BUSY = "too many calls to the server are under way"
    CLOSING = "the broker is shutting down"
    FENCED = "the broker could not say that it lives"
    CONNECTION_LOST = "the connection to the server was lost"
    DEADLINE = "the server did not answer in time"
    GARBAGE = "the server's answer could not be understood"
    SERVER_FAILED = "the server failed"
    TOO_LARGE = "the server's answer was larger than what is kept"


@dataclass(frozen=True)
class Answered:
    """The server answered. `result` is the JSON of a CallToolResult; `isError` says if the tool failed."""

    result: dict[str, Any]


@dataclass(frozen=True)
class NotSent:
    """Surely no byte of the call left."""

    reason: str


@dataclass(frozen=True)
class Unknown:
    """The call may have been carried out; its answer will never come."""

    reason: str


@dataclass(frozen=True)
class TooLarge:
    """The call was carried out and answered with more than `bytes_max`; the answer was not kept."""

    bytes_max: int = RESULT_BYTES_MAX


Answer = Answered | NotSent | Unknown | TooLarge


def failed(text: str) -> Answered:
    """An answer that says no more than that the call failed, and why."""
    return Answered({"content": [{"type": "text", "text": text}], "isError": True})
