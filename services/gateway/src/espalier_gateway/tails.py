"""Following runs: one tail per followed run, whatever the number of its followers.

Here a fast copy that may lose anything (Redis) and the log itself (Postgres) become one sequence without a
hole. A tail takes lines in any state, passes on those that continue its own, and has holes filled from
Postgres. Not here: what a client gets to see (`sse.py`, above). Below: `espalier_eventlog.tail`, the store.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias
from uuid import UUID

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from espalier_domain.errors import Unavailable
from espalier_eventlog.tail import StreamReader
from espalier_protocol.events import LAST_EVENT, EventLine, NumberedEvent
from espalier_protocol.ids import to_wire
from espalier_store.events import OpenedLog, events_after
from espalier_store.fleet import last_seqs
from espalier_store.pool import Pool, reading

CHECK_EVERY_S: Final = 1.0
SILENCE_S: Final = 0.25
"""A tail that heard nothing for this long is compared with Postgres at the next check."""
FILLS_MAX: Final = 4
"""Connections that filling holes may take from the pool at once."""
PENDING_EVENTS_MAX: Final = 1_000
BUFFER_EVENTS_MAX: Final = 1_000
BUFFER_CHARS_MAX: Final = 512 * 1024
NOT_RUNNING_RETRY_MS: Final = 1_000

Cut: TypeAlias = Literal["lagged", "closing", "pruned"]
"""Why a follower gets no more: it does not read, the process ends, or the log behind the tail is gone."""

log = structlog.get_logger(__name__)


class Follower:
    """One reader at a tail, with the bounded buffer between the two.

    It is fed only after `join`; until then its reader pages from Postgres.
    """

    def __init__(self, tail: "Tail") -> None:
        self.cut_for: Cut | None = None
        self.joined = False
        self._tail = tail
        self._lines: list[EventLine] = []
        self._chars = 0
        self._news = anyio.Event()

    def join(self, last: int) -> bool:
        """Be fed from now on, if a reader that has everything up to `last` misses nothing by it.

        Comparing and joining are one moment. What is fed then may begin at or before `last`.
        """
        self.joined = self.joined or (self.cut_for is None and self._tail.last <= last)
        return self.joined

    def is_over(self, last: int) -> bool:
        """Whether a reader that has everything up to `last` has the whole log of a run that ended."""
        return self._tail.ended and self._tail.last <= last

    def feed(self, lines: Sequence[EventLine]) -> None:
        """Buffer lines for the reader. One that took all it had is never cut for the size of a burst."""
        chars = sum(len(line.data) for line in lines)
        events = len(self._lines) + len(lines)
        if self._lines and (events > BUFFER_EVENTS_MAX or self._chars + chars > BUFFER_CHARS_MAX):
            log.warning("tails.lagged", run_id=str(self._tail.run_id))
            self.cut("lagged")
            return
        self._lines += lines
        self._chars += chars
        self._news.set()

    async def take(self, within_s: float) -> list[EventLine]:
        """What was fed since the last call; waits for it, and gives nothing after `within_s` or a cut."""
        if not self._lines and self.cut_for is None:
            with anyio.move_on_after(within_s):
                await self._news.wait()
        lines, self._lines, self._chars = self._lines, [], 0
        self._news = anyio.Event()
        return lines

    def cut(self, why: Cut) -> None:
        """Feed it no more and forget what it has not taken: it resumes after what it got."""
        self.cut_for = self.cut_for or why
        self.leave()
        self._lines, self._chars = [], 0
        self._news.set()

    def leave(self) -> None:
        self._tail.followers.discard(self)


class Tail:
    """One run's log as it grows. Every joined follower was fed everything up to `last`.

    `seen` is the highest seq known to be in the log; while it is above `last`, there is a hole between.
    """

    def __init__(self, owner_id: UUID, run_id: UUID, last: int, *, ended: bool) -> None:
        self.owner_id = owner_id
        self.run_id = run_id
        self.last = self.seen = last
        self.ended = ended
        self.filling = False
        self.heard_at = anyio.current_time()
        self.followers: set[Follower] = set()
        self._pending: list[EventLine] = []

    @property
    def has_hole(self) -> bool:
        return self.last < self.seen

    def offer(self, lines: Sequence[EventLine]) -> None:
        """Lines from Redis. While a hole is being filled they wait, as far as there is room."""
        self.heard_at = anyio.current_time()
        self.seen = max(self.seen, lines[-1].seq)
        if self.filling:
            self._pending += lines[: PENDING_EVENTS_MAX - len(self._pending)]
        else:
            self._advance(lines)

    def fill(self, lines: Sequence[EventLine]) -> bool:
        """Lines from Postgres, and then those that waited for them. False if nothing continues the tail."""
        pending, self._pending = self._pending, []
        return self._advance([*lines, *pending])

    def cut(self, why: Cut) -> None:
        for follower in tuple(self.followers):
            follower.cut(why)

    def _advance(self, lines: Sequence[EventLine]) -> bool:
        fresh: list[EventLine] = []
        for line in lines:
            if line.seq == self.last + 1:
                fresh.append(line)
                self.last = line.seq
        if not fresh:
            return False
        self.seen = max(self.seen, self.last)
        self.ended = fresh[-1].type == LAST_EVENT
        for follower in tuple(self.followers):
            if follower.joined:
                follower.feed(fresh)
        return True


class Tails:
    """All tails of a gateway. `run` must be running while somebody follows.

    When `closing` is set every follower is cut, and whoever comes later is cut at once.
    """

    def __init__(self, pool: Pool, redis_url: str, redis_prefix: str, closing: anyio.Event) -> None:
        self.closing = closing
        self._pool = pool
        self._reader = StreamReader(redis_url, redis_prefix)
        self._tails: dict[UUID, Tail] = {}
        self._fills = anyio.CapacityLimiter(FILLS_MAX)
        self._group: TaskGroup | None = None

    @property
    def followed(self) -> int:
        """Runs that have a tail."""
        return len(self._tails)

    @property
    def reader(self) -> StreamReader:
        """For asking how it is; only tails watch."""
        return self._reader

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Read for ever. When it is cancelled, every follower is cut."""
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                group.start_soon(self._reader.run)
                group.start_soon(self._check)
                task_status.started()
                await self.closing.wait()
                self._cut_all()
        finally:
            self._group = None
            self._cut_all()

    @contextmanager
    def follow(self, owner_id: UUID, run_id: UUID, log: OpenedLog) -> Iterator[Follower]:
        """A follower of the owner's run, whose log was opened just now. Raises Unavailable."""
        if self._group is None:
            raise Unavailable(NOT_RUNNING_RETRY_MS)
        tail = self._tails.get(run_id) or self._open(owner_id, run_id, log)
        follower = Follower(tail)
        tail.followers.add(follower)
        if self.closing.is_set():
            follower.cut("closing")
        try:
            yield follower
        finally:
            follower.leave()
            self._end_if_unfollowed(tail)

    def _open(self, owner_id: UUID, run_id: UUID, log: OpenedLog) -> Tail:
        """A new tail. A run that has ended needs no watch."""
        tail = Tail(owner_id, run_id, log.last_seq, ended=log.ended)
        if not tail.ended:
            self._tails[run_id] = tail
            self._reader.watch(run_id, tail.last, lambda lines: self._offer(tail, lines))
        return tail

    def _cut_all(self) -> None:
        for tail in tuple(self._tails.values()):
            tail.cut("closing")

    def _end_if_unfollowed(self, tail: Tail) -> None:
        if not tail.followers and self._tails.get(tail.run_id) is tail:
            del self._tails[tail.run_id]
            self._reader.unwatch(tail.run_id)

    def _offer(self, tail: Tail, lines: Sequence[EventLine]) -> None:
        tail.offer(lines)
        self._fill_soon(tail)

    def _fill_soon(self, tail: Tail) -> None:
        if tail.has_hole and not tail.filling and self._group is not None:
            tail.filling = True
            self._group.start_soon(self._fill, tail)

    async def _fill(self, tail: Tail) -> None:
        """One read per hole, more only if it is wider than a page. If Postgres is away, a check returns."""
        try:
            while tail.has_hole and tail.followers:
                async with self._fills:
                    lines = await read_page(self._pool, tail.owner_id, tail.run_id, tail.last)
                if not tail.fill(lines):
                    log.warning("tails.log_gone", run_id=str(tail.run_id), last=tail.last)
                    tail.cut("pruned")
        except Unavailable:
            log.warning("tails.postgres_away", run_id=str(tail.run_id))
        finally:
            tail.filling = False

    async def _check(self) -> None:
        """Find what Redis never told: above all a last event, after which no other shows the hole."""
        while True:  # bounded by the task group; one query per CHECK_EVERY_S
            await anyio.sleep(CHECK_EVERY_S)
            for tail in tuple(self._tails.values()):
                self._end_if_unfollowed(tail)  # its followers were cut and still stand in a send
            try:
                await self._compare(self._quiet())
            except Unavailable:
                log.warning("tails.postgres_away")

    def _quiet(self) -> list[Tail]:
        heard_since = anyio.current_time() - SILENCE_S
        return [
            tail
            for tail in self._tails.values()
            if tail.heard_at < heard_since or not self._reader.reaches(tail.run_id)
        ]

    async def _compare(self, quiet: list[Tail]) -> None:
        if not quiet:
            return
        async with reading(self._pool) as connection:
            lasts = await last_seqs(connection, [tail.run_id for tail in quiet])
        for tail in quiet:
            if tail.run_id not in lasts:
                tail.cut("pruned")
                continue
            tail.seen = max(tail.seen, lasts[tail.run_id])
            self._fill_soon(tail)


async def read_page(pool: Pool, owner_id: UUID, run_id: UUID, last: int) -> list[EventLine]:
    """The log after `last`, a page at most. Holds no connection afterwards. Raises Unavailable."""
    async with reading(pool) as connection:
        events = await events_after(connection, owner_id, run_id, last)
    return lines_of(run_id, events)


def lines_of(run_id: UUID, events: Sequence[NumberedEvent]) -> list[EventLine]:
    wire_id = to_wire("run", run_id)
    return [event.line(wire_id) for event in events]
