"""A run's events as server-sent events: replay from a cursor, then live, then the end.

Frames end with LF LF and carry the envelope on one line, because that is all that published clients parse;
ids, comments and `retry` are for the others. Above stands the route, which has checked the caller, the run
and the cursor; below, `following.py`.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Final
from uuid import UUID

from espalier_gateway import following
from espalier_gateway.following import Pace, Reading, StillAllowed
from espalier_gateway.streaming import PiecewiseResponse
from espalier_gateway.tails import Tails
from espalier_protocol.events import EventLine
from espalier_protocol.ids import event_id
from espalier_store.events import OpenedLog
from espalier_store.pool import Pool

RETRY_MS: Final = 1_000
OPENING: Final = b"retry: %d\n: espalier\n\n" % RETRY_MS
HEARTBEAT: Final = b": heartbeat\n\n"
CHUNK_BYTES_MAX: Final = 64 * 1024
"""Frames are sent together up to this size; a single larger one is sent alone."""


def frame(line: EventLine) -> bytes:
    return f"id: {event_id(line.seq)}\nevent: {line.type}\ndata: {line.data}\n\n".encode()


def farewell(why: str) -> bytes:
    """Tells a person with curl why the stream ends, and a client that it may come back."""
    return b"retry: %d\n: %s\n\n" % (RETRY_MS, why.encode())


class Place(following.Place):
    """A reader's place, from which frames are sent."""

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
    place = Place(since, own_events=own_events)
    reading = Reading(tails, pool, owner_id, run_id, log, place=place, pace=pace)
    before = OPENING
    async with aclosing(reading.batches(still_allowed)) as batches:
        async for lines in batches:
            for chunk in place.chunks(lines, before=before):
                yield chunk
                reading.clock.said()
            before = b""
            if reading.clock.silent:
                yield HEARTBEAT
                reading.clock.said()
    if reading.why is not None:
        yield farewell(reading.why)


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
