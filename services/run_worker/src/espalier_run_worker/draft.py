"""What one step will write, before it is committed: entries, and the progress that they make.

A draft belongs to the transaction that moves its run. It adds by itself whatever follows without an
effect outside: a cycle's start and its reservation, its end, a limit, a cancel. Above: `held`, which commits
it, and the steps that record into it.
"""

from enum import IntEnum

from espalier_acts.log import Written
from espalier_acts.runs import cancelled
from espalier_domain.history import prompt_tokens
from espalier_domain.journal import (
    CycleEnded,
    CycleStarted,
    Entry,
    HeadroomAwaited,
    ModelCallStarted,
    Parked,
)
from espalier_domain.progress import Progress, apply
from espalier_domain.run import (
    AwaitHeadroom,
    CallBroker,
    CallModel,
    CallSelf,
    Reserve,
    Rest,
    RunFacts,
    StartCycle,
    Step,
    Write,
    next_step,
    tokens_left,
)
from espalier_run_worker.model_calls import ANSWER_TOKENS_MAX, shown
from espalier_store.pool import Connection
from espalier_store.runs import LockedRun


class Begins(IntEnum):
    """What a draft may begin by itself; the rest is left to whoever takes the next step."""

    NOTHING = 0
    ATTEMPTS = 1
    CYCLES = 2


class Draft:
    """`record` what happened; `conclude` adds what follows from it.

    `wakes` are rows of the outbox that promise a wake, to be carried out after the commit; `begun` are runs
    that the step spawned, to be published and rung for then.

    A new cycle is begun under the row's lock alone, because it reads what the run was given anew.
    """

    def __init__(
        self,
        connection: Connection,
        run: LockedRun,
        facts: RunFacts,
        progress: Progress,
        *,
        begins: Begins = Begins.CYCLES,
    ) -> None:
        self.connection = connection
        self.run = run
        self.facts = facts
        self.progress = progress
        self.begins = begins
        self.entries: list[Entry] = []
        self.wakes: list[int] = []
        self.begun: list[Written] = []

    @property
    def cancelled(self) -> bool:
        return self.run.cancel_requested_at is not None

    @property
    def stopping(self) -> bool:
        """Whether the run is to end whatever it does next."""
        return self.cancelled or self.run.age_s >= self.facts.ceilings.max_wall_seconds

    def record(self, *entries: Entry) -> None:
        for entry in entries:
            self.progress = apply(self.progress, entry)
            self.entries.append(entry)

    def next_step(self) -> Step:
        run = self.run
        return next_step(self.facts, self.progress, age_s=run.age_s, lease_token=run.lease_token)

    def conclude(self) -> None:
        """Add every entry that follows by itself: the end of a cycle, a limit, a cancel, a new cycle."""
        if self.cancelled and self.progress.final_state is None:
            self.record(*cancelled(self.progress))
        while not self.resting():
            match self.next_step():
                case StartCycle() | AwaitHeadroom() if self.begins < Begins.CYCLES:
                    return
                case Reserve() if self.begins < Begins.ATTEMPTS:
                    return
                case StartCycle(number):
                    self.record(self._cycle(number))
                case AwaitHeadroom():
                    self.record(HeadroomAwaited(self.run.wake_seq))
                case Reserve(attempt):
                    self.record(self._reservation(attempt))
                case Write(entries):
                    self.record(*entries)
                case CallModel() | CallSelf() | CallBroker() | Rest():
                    return

    def resting(self) -> bool:
        """Whether the last entry ended the cycle, the run, or its stay here."""
        ended = self.progress.final_state is not None
        return ended or (
            bool(self.entries) and isinstance(self.entries[-1], CycleEnded | Parked | HeadroomAwaited)
        )

    def _cycle(self, number: int) -> CycleStarted:
        run = self.run
        woken = run.wake_seq > run.wake_seen
        return CycleStarted(number, run.age_s, run.wake_seq, self.facts.budgets, woken)

    def _reservation(self, attempt: int) -> ModelCallStarted:
        cycle = self.progress.cycle
        assert cycle is not None
        wanted = prompt_tokens(shown(self.facts, self.progress)) + ANSWER_TOKENS_MAX
        reserved = min(wanted, tokens_left(cycle))
        return ModelCallStarted(cycle.number, attempt, reserved, self.run.lease_token)
