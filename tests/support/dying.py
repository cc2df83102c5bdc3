"""A service that kills itself at a chosen moment: before or after its n-th commit, publish, ring or wake.

Of a gateway the commits of creates count. A worker also dies around a model's answer (`ask`) and around
planned calls (`carry`: before they are handed to the broker, after their outcome is known and before it is
committed); a broker around `sent` (the call's row says so, and not a byte has left) and around `settle` (its
answer is known).

`arm("commit.before:3")` puts a SIGKILL of the own process at that place. Only this test code knows of it; the
product has no branch for dying.
"""

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from espalier_eventlog.publisher import Publisher
from espalier_gateway import couriers, idempotency
from espalier_jobs import Doorbell
from espalier_mcp_broker import calls
from espalier_run_worker import cycle, held
from espalier_run_worker.brokered_calls import BrokeredCalls
from espalier_store.pool import Connection, Pool, reading, transaction

_seen: Counter[str] = Counter()


def arm(moment: str) -> None:
    """Die at `<place>.<before|after>:<n>`; a worker so armed also hands its run over after every cycle."""
    place, count = moment.split(":")

    def reached(where: str) -> None:
        _seen[where] += 1
        if where == place and _seen[where] == int(count):
            os.kill(os.getpid(), signal.SIGKILL)

    held.CYCLES_PER_HOLD = 1  # type: ignore[misc]
    held.transaction = _around_commits(transaction, reached)  # type: ignore[attr-defined]
    idempotency.transaction = _around_commits(transaction, reached)  # type: ignore[attr-defined]
    held.reading = _around_commits(reading, reached, statement=True)  # type: ignore[attr-defined]
    Publisher.send = _around_calls("publish", Publisher.send, reached)  # type: ignore[method-assign]
    Doorbell.ring = _around_calls("ring", Doorbell.ring, reached)  # type: ignore[method-assign]
    couriers.wake_for_message = _around_calls("wake", couriers.wake_for_message, reached)  # type: ignore[attr-defined]
    cycle.ask = _around_calls("ask", cycle.ask, reached)  # type: ignore[attr-defined]
    BrokeredCalls.carry_out = _around_calls("carry", BrokeredCalls.carry_out, reached)  # type: ignore[method-assign]
    calls.send_call = _around_calls("sent", calls.send_call, reached)  # type: ignore[attr-defined]
    calls.settle_call = _around_calls("settle", calls.settle_call, reached)  # type: ignore[attr-defined]


def _around_commits(real: Any, reached: Callable[[str], None], *, statement: bool = False) -> Any:
    """A `statement` commits by itself, so that the last moment before it is before the block."""

    @asynccontextmanager
    async def dying_transaction(pool: Pool) -> AsyncIterator[Connection]:
        async with real(pool) as connection:
            if statement:
                reached("commit.before")
            yield connection
            if not statement:
                reached("commit.before")
        reached("commit.after")

    return dying_transaction


def _around_calls(
    name: str, act: Callable[..., Awaitable[Any]], reached: Callable[[str], None]
) -> Callable[..., Any]:
    async def dying_act(*args: Any, **kwargs: Any) -> Any:
        reached(f"{name}.before")
        answer = await act(*args, **kwargs)
        reached(f"{name}.after")
        return answer

    return dying_act
