"""How many streams of events are open in this process: per key, per run, and in all.

A stream holds a connection, a task and a buffer for hours, so it is counted for as long as it is there, not
when it is asked for. A WebSocket is one too, of no run, and each subscription on it another one. Nothing here
is awaited: looking and taking are one moment. Above: `events`, `ws` and `subscriptions`, which open streams;
how often they may try is `rate_limits`' business.
"""

from collections import Counter
from contextlib import ExitStack
from typing import Final
from uuid import UUID

from espalier_gateway.errors import UNAVAILABLE, WireError, rate_limited
from espalier_gateway.rate_limits import RefusalLog
from espalier_protocol.errors import ErrorCode
from espalier_store.keys import Caller

RETRY_AFTER_MS: Final = 2_000
"""Nobody knows when another stream will end; this only keeps those who wait from asking all the time."""


class OpenStreams:
    """Counts the streams of one process. Remembers only keys and runs that have one open."""

    def __init__(self, refusals: RefusalLog, *, per_key: int, per_run: int, per_gateway: int) -> None:
        self._refusals = refusals
        self._per_key, self._per_run, self._per_gateway = per_key, per_run, per_gateway
        self._of_key: Counter[UUID] = Counter()
        self._of_run: Counter[tuple[UUID, UUID]] = Counter()
        self._open = 0

    def __len__(self) -> int:
        return self._open

    def require_room(self, caller: Caller, run_id: UUID | None) -> None:
        """Raises WireError if the caller could not open a stream of this run, or of none, now.

        A run is counted together with its owner, so that a run of somebody else looks like one that nobody
        follows, and this may be asked before the run has been looked up.
        """
        if self._of_key[caller.key_id] >= self._per_key:
            message = f"The key has {self._per_key} streams open, and no more are allowed; close one."
            raise self._too_many(caller, "streams_per_key", message)
        if run_id is not None and self._of_run[caller.owner_id, run_id] >= self._per_run:
            message = f"The run has {self._per_run} followers here, and no more are allowed; close one."
            raise self._too_many(caller, "streams_per_run", message)
        if self._open >= self._per_gateway:
            message = f"This gateway has all of its {self._per_gateway} streams open; another may have room."
            after_ms = RETRY_AFTER_MS
            raise WireError(ErrorCode.internal_error, message, symbol=UNAVAILABLE, retry_after_ms=after_ms)

    def open(self, caller: Caller, run_id: UUID | None) -> ExitStack:
        """Counts one stream more, until what this answers is closed; closing it twice is closing it once.

        Raises WireError if there is no room.
        """
        self.require_room(caller, run_id)
        key, run = caller.key_id, None if run_id is None else (caller.owner_id, run_id)
        self._of_key[key] += 1
        if run is not None:
            self._of_run[run] += 1
        self._open += 1
        stream = ExitStack()
        stream.callback(self._closed, key, run)
        return stream

    def _closed(self, key: UUID, run: tuple[UUID, UUID] | None) -> None:
        self._open -= 1
        self._of_key[key] -= 1
        if not self._of_key[key]:
            del self._of_key[key]
        if run is not None:
            self._of_run[run] -= 1
            if not self._of_run[run]:
                del self._of_run[run]

    def _too_many(self, caller: Caller, limit: str, message: str) -> WireError:
        self._refusals.note(caller.key_id, limit)
        return rate_limited(limit, message, RETRY_AFTER_MS)
