"""What a transport tells the session about one call: whether it left, and why its answer will not come.

Both transports get a call's message through the SDK, which knows nothing of this; so the flight travels
beside it in a context variable, and a fault travels back in the `data` of a JSON-RPC error, where a server
can put only JSON and never a `Fault`.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, RequestId

from espalier_mcp_broker.outcomes import Reason

CALLS_MAX: Final = 64
"""Calls under way on one connection; further ones wait."""


@dataclass
class Flight:
    """One call. A transport sets `sent` before the first byte leaves, and sends nothing once `given_up`."""

    may_leave: Callable[[], bool]
    sent: bool = False
    given_up: bool = False

    @property
    def is_void(self) -> bool:
        """Nothing has left, and nothing is to: nobody waits any more, or the broker is behind its fence."""
        return not self.sent and (self.given_up or not self.may_leave())


flight_of_task: Final[ContextVar[Flight | None]] = ContextVar("flight_of_task", default=None)


@dataclass
class Connection:
    """The state of one connection. A transport that finds it unusable calls `lose`; its owner then leaves it.

    The owner calls `end` when it leaves, for whatever reason.
    """

    ended: anyio.Event = field(default_factory=anyio.Event)
    is_lost: bool = False

    def lose(self) -> None:
        self.is_lost |= not self.ended.is_set()
        self.end()

    def end(self) -> None:
        self.ended.set()


@dataclass(frozen=True)
class Fault:
    """Why a request has no answer, as the transport saw it."""

    reason: Reason


def fault_message(request_id: RequestId, reason: Reason) -> SessionMessage:
    """Ends the wait for an answer inside the SDK."""
    error = ErrorData(code=INTERNAL_ERROR, message=reason, data=Fault(reason))
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=error))
