"""A run under this worker's lease, and the transactions that move it.

Everything that is written for the run goes through `Held.commit`, which locks the row by our token and lets
the step record what happened, or through `Held.write`, which where it can needs no lock: one statement checks
the token. Both add all that follows without an outside effect and commit once. If the token is no longer ours
they raise LeaseLost, and nothing was written.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final
from uuid import UUID

import anyio

from espalier_acts.calls import known_outcomes
from espalier_acts.log import Written, append_entries, load, restored, write_entries
from espalier_domain.errors import Conflicted, FenceReached, LeaseLost, Unavailable
from espalier_domain.journal import Entry, RunEnded
from espalier_domain.progress import SNAPSHOT_VERSION, Progress
from espalier_domain.run import RunFacts, Step, closing, next_step
from espalier_eventlog.publisher import Publisher
from espalier_run_worker.draft import Begins, Draft
from espalier_store.agents import lock_agent
from espalier_store.fleet import claim_run, release_lease
from espalier_store.pool import Pool, reading, transaction
from espalier_store.runs import LockedRun, lock_live_runs, lock_run, run_facts

COMMIT_TRIES: Final = 3
CLAIMS_MAX: Final = 3
"""Claims that came to nothing after which a run is taken for poison."""

CYCLES_PER_HOLD: Final = 50
"""Cycles after which a run that always continues gives its slot to others."""

POISON: Final = {"reason": f"poison: {CLAIMS_MAX} claims of the run came to nothing"}
GIVE_BACK_WAIT_S: Final = 5.0
GIVE_BACK_TRIES: Final = 8
GIVE_BACK_AGAIN_S: Final = 0.5

Record = Callable[[Draft], Awaitable[None]]


class Held:
    """One run, ours until its fence: a moment on this process's monotonic clock, ahead of the lease's end."""

    def __init__(self, pool: Pool, publisher: Publisher, lease_ttl_s: float, run: LockedRun) -> None:
        self.run_id, self.owner_id, self.lease_token = run.run_id, run.owner_id, run.lease_token
        self.facts: RunFacts
        self.progress: Progress
        self.over, self.still_due = False, False
        self.hand_over = False
        self._promised: list[int | UUID] = []
        self._pool, self._publisher, self._lease_ttl_s = pool, publisher, lease_ttl_s
        self._row, self._row_at = run, anyio.current_time()
        self._fence_at = 0.0
        self._outside: anyio.CancelScope | None = None
        self._lost = False
        self._cycles_here = 0

    def next_step(self) -> Step:
        return next_step(self.facts, self.progress, age_s=self._age_s, lease_token=self.lease_token)

    @property
    def _age_s(self) -> float:
        return self._row.age_s + anyio.current_time() - self._row_at

    def renewed(self, asked_at: float) -> None:
        """The lease was renewed by a request that was sent at `asked_at`."""
        self._fence_at = max(self._fence_at, asked_at + self._lease_ttl_s * 3 / 4)
        if self._outside:
            self._outside.deadline = self._fence_at

    def lose(self) -> None:
        """Somebody else has the run: stop what is under way and write nothing more."""
        self._lost = True
        self.interrupt()

    def interrupt(self) -> None:
        """Stop the outside effect that is under way, if any; the next commit finds out why."""
        if self._outside:
            self._outside.cancel()

    @contextmanager
    def outside(self) -> Iterator[anyio.CancelScope]:
        """An effect outside Postgres: it stops by itself at the fence, on a cancel, and when we lose the run.

        Raises LeaseLost when the lease is no longer surely ours.
        """
        with anyio.CancelScope(deadline=self._fence_at) as scope:
            self._outside = scope
            try:
                yield scope
            finally:
                self._outside = None
        if self._lost:
            raise LeaseLost("the supervisor saw another token")
        if scope.cancelled_caught and anyio.current_time() >= self._fence_at:
            raise FenceReached("the fence was reached")

    async def commit(self, record: Record, *, agent_first: bool = False) -> None:
        """One step in one transaction. Raises LeaseLost, or Unavailable when the outcome is not known.

        A step that changes the run's agent locks the agent first, as everybody does who locks both, and then
        all runs of it, because what it learnt may spread to them.
        """
        async with self._publisher.in_order(self.run_id):
            for tries_left in reversed(range(COMMIT_TRIES)):
                try:
                    await self._commit_once(record, agent_first)
                except Conflicted:
                    if not tries_left:
                        raise
                else:
                    return

    async def write(self, *entries: Entry) -> None:
        """Commit `entries` and what follows from them, at once where that is possible."""

        async def record(draft: Draft) -> None:
            draft.record(*entries)

        if entries:
            await self.commit_at_once(record)
        else:
            await self.commit(record)

    async def commit_at_once(self, record: Record) -> None:
        """`commit` for what needs no lock, because it is true whatever has become of the run.

        It is one statement, which checks token, cancel, wall and ceilings by itself, and begins no cycle.
        Where that is refused the row is locked, which tells why.
        """
        if not await self._write_at_once(record):
            await self.commit(record)

    async def _write_at_once(self, record: Record) -> bool:
        """Whether it was enough. The row is the one that we saw last; what may have changed is checked."""
        async with self._publisher.in_order(self.run_id):
            try:
                async with reading(self._pool) as connection:
                    asked_at = anyio.current_time()
                    row = replace(self._row, age_s=self._age_s)
                    begins = Begins.NOTHING if self.hand_over else Begins.ATTEMPTS
                    draft = Draft(connection, row, self.facts, self.progress, begins=begins)
                    await record(draft)
                    written = await self._conclude(draft, unless_stopped=True)
            except Conflicted:
                return False
            if written is not None:
                self._committed(draft, written, asked_at)
            return written is not None

    async def _commit_once(self, record: Record, agent_first: bool) -> None:
        async with transaction(self._pool) as connection:
            asked_at = anyio.current_time()  # waiting for a connection is no part of the lease
            if agent_first:
                await lock_agent(connection, self.owner_id, self._row.agent_id)
                await lock_live_runs(connection, self.owner_id, self._row.agent_id)
            run = await lock_run(connection, self.owner_id, self.run_id, lease_token=self.lease_token)
            if run is None or run.state != "running":
                raise LeaseLost(f"the row says {run.state if run else 'another token'}")
            if self.progress.cycle is None:
                self.facts = await run_facts(connection, self.owner_id, self.run_id)
            else:
                self.facts = replace(self.facts, ceilings=run.ceilings)
            begins = Begins.NOTHING if self.hand_over else Begins.CYCLES
            draft = Draft(connection, run, self.facts, self.progress, begins=begins)
            if draft.stopping:
                await _take_in(draft, stopping=True)
            await record(draft)
            written = await self._conclude(draft)
        if written is None:
            raise LeaseLost("the row refused the token")
        self._committed(draft, written, asked_at)

    async def _conclude(self, draft: Draft, *, unless_stopped: bool = False) -> Written | None:
        draft.conclude()
        release = self.hand_over or (draft.resting() and self._cycles_here + 1 >= CYCLES_PER_HOLD)
        return await append_entries(
            draft.connection,
            draft.run,
            tuple(draft.entries),
            after=draft.progress,
            release=release,
            lease_ttl_s=self._lease_ttl_s,
            unless_stopped=unless_stopped,
        )

    def _committed(self, draft: Draft, written: Written, asked_at: float) -> None:
        self.progress = written.progress
        self.over, self.still_due = written.released, written.due
        self._cycles_here += draft.resting()
        self._row, self._row_at = draft.run, asked_at
        self.renewed(asked_at)
        self._publisher.publish(written.run_id, written.outbox_id, written.events)
        self._promised += draft.wakes
        self._promised += [*written.wakes, *written.to_ring]
        for child in draft.begun:
            self._publisher.publish(child.run_id, child.outbox_id, child.events)
            self._promised.append(child.run_id)

    def promised_wakes(self) -> list[int | UUID]:
        """What was committed since this was last asked: wakes in the outbox, and runs to ring for."""
        promised, self._promised = self._promised, []
        return promised

    async def give_back(self) -> None:
        """Release the lease if it is still ours, so that another worker can take the run at once.

        A database that stays away for GIVE_BACK_TRIES leaves the lease to run out.
        """
        with anyio.move_on_after(GIVE_BACK_WAIT_S, shield=True):
            for _ in range(GIVE_BACK_TRIES):
                try:
                    async with transaction(self._pool) as connection:
                        await release_lease(connection, self.run_id, self.lease_token)
                except Unavailable:
                    await anyio.sleep(GIVE_BACK_AGAIN_S)
                else:
                    return


async def claim(pool: Pool, publisher: Publisher, lease_ttl_s: float, run_id: UUID) -> Held | None:
    """Take a run that is due and free, and in the same transaction write what follows by itself.

    A run that cannot even be read is claimed all the same, so that it is tried a few times and then ended.
    """
    try:
        async with publisher.in_order(run_id):
            return await _claim(pool, publisher, lease_ttl_s, run_id)
    except (Unavailable, LeaseLost):
        raise
    except Exception:
        await _claim_unread(pool, publisher, lease_ttl_s, run_id)
        raise


async def _claim(pool: Pool, publisher: Publisher, lease_ttl_s: float, run_id: UUID) -> Held | None:
    async with transaction(pool) as connection:
        asked_at = anyio.current_time()
        claimed = await claim_run(connection, run_id, lease_ttl_s, SNAPSHOT_VERSION)
        if claimed is None:
            return None
        run = claimed.run
        held = Held(pool, publisher, lease_ttl_s, run)
        held.facts, held.progress = restored(claimed.loaded())
        if held.progress.entry_no != run.next_entry_no - 1:
            held.facts, progress = await load(connection, run.owner_id, run_id)
            # A snapshot counts the entries that its writer saw: notices of others may lie between them.
            held.progress = replace(progress, entry_no=run.next_entry_no - 1)
        draft = Draft(connection, run, held.facts, held.progress)
        poison = run.expired_claims >= CLAIMS_MAX and not draft.cancelled
        await _take_in(draft, stopping=draft.stopping or poison)
        if poison:
            draft.record(*closing(draft.progress, "error", POISON, open_calls="not run"))
        written = await held._conclude(draft)
    assert written is not None, "the row was locked by its claim"
    held._committed(draft, written, asked_at)
    return held


async def _take_in(draft: Draft, *, stopping: bool) -> None:
    """Record what the rows of calls under way tell: their worker may have died before it could."""
    run = draft.run
    known = await known_outcomes(
        draft.connection, run.owner_id, run.run_id, draft.progress, stopping=stopping
    )
    draft.record(*known)


async def _claim_unread(pool: Pool, publisher: Publisher, lease_ttl_s: float, run_id: UUID) -> None:
    """Count a claim that came to nothing; the last one ends the run from its row alone."""
    async with transaction(pool) as connection:
        claimed = await claim_run(connection, run_id, lease_ttl_s, SNAPSHOT_VERSION)
        if claimed is None or claimed.run.expired_claims < CLAIMS_MAX:
            return
        end = RunEnded("error", POISON)
        written = await write_entries(
            connection, claimed.run, Progress(), (end,), release=True, lease_ttl_s=lease_ttl_s
        )
    publisher.publish(written.run_id, written.outbox_id, written.events)
