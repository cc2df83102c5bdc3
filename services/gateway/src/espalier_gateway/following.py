"""Following a run's log, whatever carries it: who may, from which place, and what comes next, in batches.

A reader replays from a place, is fed by the run's tail once it has caught up, and ends after the last event
or for a reason that it is told. Every event reaches it once and in order. Not here: how an event is framed.
Above: `sse` (server-sent events) and `subscriptions` (WebSocket). Below: `tails`, and `store.events`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import UUID

import anyio

from espalier_domain.errors import InvalidInput, NotFound, Unavailable
from espalier_gateway.auth import CallContext, Gatekeeper
from espalier_gateway.errors import LOG_PRUNED, WireError
from espalier_gateway.tails import Follower, Tails, lines_of, read_page
from espalier_protocol import access
from espalier_protocol.errors import ErrorCode
from espalier_protocol.events import LAST_EVENT, EventLine
from espalier_protocol.ids import parse_event_id, to_wire
from espalier_store.events import OpenedLog, open_log
from espalier_store.pool import Pool, reading

SCOPES: Final[tuple[access.Scope, ...]] = ("stream.subscribe", "run.read")
CAPABILITY: Final[access.Capability] = "streaming.sse"
OWN_EVENTS: Final = "espalier.events"
OWN_TYPES: Final = "espalier."

StillAllowed: TypeAlias = Callable[[], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Since:
    """The seq of the last event that the reader has, 0 before the first, and which field said so."""

    seq: int
    field: str

    def require_within(self, log: OpenedLog) -> None:
        if self.seq > log.last_seq:
            raise no_such_place(self.field)


def since(text: str, field: str) -> Since:
    """Raises InvalidInput for what is no event id."""
    seq = parse_event_id(text)
    if seq is None:
        raise no_such_place(field)
    return Since(seq, field)


def no_such_place(field: str) -> InvalidInput:
    return InvalidInput(field, "should be the id of an event of this run")


async def opened_log(pool: Pool, owner_id: UUID, run_id: UUID, after: int) -> OpenedLog:
    """The log and its first page after a seq. Raises NotFound, or WireError if retention removed it."""
    async with reading(pool) as connection:
        log = await open_log(connection, owner_id, run_id, after)
    wire_id = to_wire("run", run_id)
    if log is None:
        raise NotFound("run", wire_id)
    if log.pruned:
        message = "The log of this run has been removed; its result is still there."
        raise WireError(ErrorCode.tool_not_found, message, symbol=LOG_PRUNED, resource="run", id=wire_id)
    return log


async def still_allowed(gatekeeper: Gatekeeper, context: CallContext) -> bool:
    """Asked now and then while a log is followed: the key may be revoked, the session over."""
    try:
        await gatekeeper.admit_again(context, SCOPES, CAPABILITY)
    except WireError:
        return False
    except Unavailable:
        return True  # nobody can tell right now; it is asked again soon
    return True


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of silence before a sign of life, and between two looks at the caller's rights."""

    heartbeat_s: float = 15.0
    recheck_s: float = 30.0


class Place:
    """How far one reader is in a run's log, and what of it the reader gets to see."""

    def __init__(self, since: int, *, own_events: bool) -> None:
        self.last = since
        self.ended = False
        self.broken = False
        self._own_events = own_events

    def visible(self, lines: Sequence[EventLine]) -> Iterator[EventLine]:
        """Lines to send. Known ones are dropped; one that does not follow the last breaks the reading off."""
        for line in lines:
            if line.seq > self.last:
                if line.seq != self.last + 1:
                    self.broken = True
                    return
                self.last = line.seq
                if self._own_events or not line.type.startswith(OWN_TYPES):
                    yield line
            self.ended = line.type == LAST_EVENT


class Clock:
    """When this reader was last told something, and when its caller's rights were last looked at."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._said_at = self._checked_at = anyio.current_time()

    def said(self) -> None:
        self._said_at = anyio.current_time()

    @property
    def wait_s(self) -> float:
        """Until there is something to do although nothing happens."""
        heartbeat_at = self._said_at + self._pace.heartbeat_s
        return max(0.0, min(heartbeat_at, self._checked_at + self._pace.recheck_s) - anyio.current_time())

    @property
    def silent(self) -> bool:
        return anyio.current_time() - self._said_at >= self._pace.heartbeat_s

    async def allows(self, still_allowed: StillAllowed) -> bool:
        if anyio.current_time() - self._checked_at < self._pace.recheck_s:
            return True
        self._checked_at = anyio.current_time()
        return await still_allowed()


class Reading:
    """One reader's way through one run's log.

    `log` was opened at the place, which is at most its last seq. `why` is the reason for which it ended
    before the log did, None otherwise.
    """

    def __init__(
        self,
        tails: Tails,
        pool: Pool,
        owner_id: UUID,
        run_id: UUID,
        log: OpenedLog,
        *,
        place: Place,
        pace: Pace | None = None,
    ) -> None:
        self.place = place
        self.clock = Clock(pace or Pace())
        self.why: str | None = None
        self._tails, self._pool = tails, pool
        self._owner_id, self._run_id, self._log = owner_id, run_id, log

    async def batches(self, still_allowed: StillAllowed) -> AsyncGenerator[Sequence[EventLine], None]:
        """Lines as they come; none now and then, when nothing happens.

        Whoever iterates takes each batch into `place` (`visible`) before asking for the next one, and must
        close it (`aclosing`): that frees the tail. `still_allowed` may raise Unavailable, which ends the
        reading like every other absence of Postgres.
        """
        try:
            with self._tails.follow(self._owner_id, self._run_id, self._log) as follower:
                lines: Sequence[EventLine] = lines_of(self._run_id, self._log.events)
                del self._log
                yield lines
                while self.why is None and not self.place.ended and not follower.is_over(self.place.last):
                    yield await self._next_lines(follower)
                    self.why = self._broken_off(follower)
                    if self.why is None and not await self.clock.allows(still_allowed):
                        self.why = "no longer allowed"
        except Unavailable:
            self.why = "unavailable"
        if self.place.ended:
            self.why = None

    async def _next_lines(self, follower: Follower) -> Sequence[EventLine]:
        """From the tail once the reader has caught up with it, from Postgres before."""
        if follower.cut_for is not None:
            return ()
        if follower.join(self.place.last):
            return await follower.take(self.clock.wait_s)
        page = await read_page(self._pool, self._owner_id, self._run_id, self.place.last)
        self.place.broken = not page  # the tail is ahead, so there was something here
        return page

    def _broken_off(self, follower: Follower) -> str | None:
        if self._tails.closing.is_set():
            return "closing"
        return "pruned" if self.place.broken else follower.cut_for
