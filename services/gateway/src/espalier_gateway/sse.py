"""A run's events as server-sent events: replay from a cursor, then live, then the end.

Frames end with LF LF and carry the envelope on one line, because that is all that published clients parse;
ids, comments and `retry` are for the others. Above stands the route, which has checked the caller, the run
and the cursor; below, `tails.py`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import UUID

import anyio
import structlog

from espalier_domain.errors import Unavailable
from espalier_gateway.streaming import PiecewiseResponse
from espalier_gateway.tails import Follower, Tails, lines_of, read_page
from espalier_protocol.events import LAST_EVENT, EventLine
from espalier_protocol.ids import event_id
from espalier_store.events import OpenedLog
from espalier_store.pool import Pool

RETRY_MS: Final = 1_000
OPENING: Final = b"retry: %d\n: espalier\n\n" % RETRY_MS
HEARTBEAT: Final = b": heartbeat\n\n"
OWN_TYPES: Final = "espalier."
CHUNK_BYTES_MAX: Final = 64 * 1024
"""Frames are sent together up to this size; a single larger one is sent alone."""

log = structlog.get_logger(__name__)

StillAllowed: TypeAlias = Callable[[], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of silence before a comment, and between two looks at the caller's rights."""

    heartbeat_s: float = 15.0
    recheck_s: float = 30.0


def frame(line: EventLine) -> bytes:
    return f"id: {event_id(line.seq)}\nevent: {line.type}\ndata: {line.data}\n\n".encode()


def farewell(why: str) -> bytes:
    """Tells a person with curl why the stream ends, and a client that it may come back."""
    return b"retry: %d\n: %s\n\n" % (RETRY_MS, why.encode())


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

    def chunks(self, lines: Sequence[EventLine], *, before: bytes = b"") -> Iterator[bytes]:
        """The frames of `lines`, with `before` in front of the first one or alone."""
        chunk = bytearray(before)
        for line in self.visible(lines):
            framed = frame(line)
            if chunk and len(chunk) + len(framed) > CHUNK_BYTES_MAX:
                yield bytes(chunk)
                chunk.clear()
            chunk += framed
        if chunk:
            yield bytes(chunk)


class Clock:
    """When this stream last said something, and when its caller's rights were last looked at."""

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


async def event_stream(
    tails: Tails,
    pool: Pool,
    owner_id: UUID,
    run_id: UUID,
    log: OpenedLog,
    *,
    since: int,
    own_events: bool,
    still_allowed: StillAllowed,
    pace: Pace | None = None,
) -> AsyncGenerator[bytes, None]:
    """The bytes of one connection. Whoever iterates must close it (`aclosing`): that frees the tail.

    `log` was opened at `since`, which is at most its last seq. Every event after it is sent once, in order,
    and the stream ends after `run.ended`. If it ends sooner, a comment says why, and the client may resume
    after what it got. `still_allowed` may raise Unavailable, which ends the stream like every other absence
    of Postgres.
    """
    place, clock = Place(since, own_events=own_events), Clock(pace or Pace())
    lines: Sequence[EventLine] = lines_of(run_id, log.events)
    why: str | None = None
    try:
        with tails.follow(owner_id, run_id, log) as follower:
            for chunk in place.chunks(lines, before=OPENING):
                yield chunk
            while why is None and not place.ended and not follower.is_over(place.last):
                lines = await _next_lines(follower, place, pool, owner_id, run_id, clock)
                for chunk in place.chunks(lines):
                    yield chunk
                    clock.said()
                if clock.silent:
                    yield HEARTBEAT
                    clock.said()
                why = _broken_off(follower, place, tails.closing)
                if why is None and not await clock.allows(still_allowed):
                    why = "no longer allowed"
    except Unavailable:
        why = "unavailable"
    if why is not None and not place.ended:
        yield farewell(why)


async def _next_lines(
    follower: Follower, place: Place, pool: Pool, owner_id: UUID, run_id: UUID, clock: Clock
) -> Sequence[EventLine]:
    """From the tail once the reader has caught up with it, from Postgres before."""
    if follower.cut_for is not None:
        return ()
    if follower.join(place.last):
        return await follower.take(clock.wait_s)
    page = await read_page(pool, owner_id, run_id, place.last)
    place.broken = not page  # the tail is ahead, so there was something here
    return page


def _broken_off(follower: Follower, place: Place, closing: anyio.Event) -> str | None:
    if closing.is_set():
        return "closing"
    return "pruned" if place.broken else follower.cut_for


def event_response(frames: AsyncGenerator[bytes, None]) -> PiecewiseResponse:
    """The response that carries an `event_stream`."""
    return PiecewiseResponse(
        frames,
        {
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache, no-transform",
            "X-Accel-Buffering": "no",
        },
    )
