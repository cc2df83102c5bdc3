"""What a run has lived, as far as deciding needs it: the value that `apply` builds from the journal.

It is pure memory and decides nothing; `run` above it does. A snapshot is this value, written down, so that
loading costs what the model is shown and not what the run has lived.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal, assert_never

from pydantic import TypeAdapter

from espalier_domain.decisions import CONTROL_TOOLS, SEND, SPAWN, CycleDecision, Unreadable, read_decision
from espalier_domain.journal import (
    ApprovalRequested,
    ApprovalResolved,
    ArtifactCreated,
    CallsPlanned,
    CycleEnded,
    CycleStarted,
    Entry,
    HeadroomAwaited,
    InboxRead,
    LimitReached,
    MemoryWritten,
    MessageSent,
    ModelAnswered,
    ModelCallStarted,
    ModelFailed,
    Parked,
    PromptChangeQueued,
    PromptChangeRejected,
    PromptModified,
    RunCreated,
    RunEnded,
    SubagentSpawned,
    ToolCall,
    ToolReturned,
    ToolsMissing,
)
from espalier_protocol.agent import Budgets
from espalier_protocol.run import EndState


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model and what its calls returned; `planned` are ids of calls for the broker."""

    answer: ModelAnswered
    results: tuple[ToolReturned, ...] = ()
    planned: tuple[str, ...] = ()

    def pending(self) -> tuple[ToolCall, ...]:
        returned = {result.call_id for result in self.results}
        return tuple(call for call in self.answer.calls if call.call_id not in returned)

    def under_way(self) -> tuple[ToolCall, ...]:
        """Planned calls whose outcome is not known here yet; some may have been sent."""
        return tuple(call for call in self.pending() if call.call_id in self.planned)

    def decision(self) -> CycleDecision | None:
        """What the first control call that was accepted decides."""
        accepted = {result.call_id for result in self.results if result.ok and result.tool in CONTROL_TOOLS}
        for call in self.answer.calls:
            if call.call_id in accepted:
                decision = read_decision(call.name, call.args)
                assert not isinstance(decision, Unreadable), "only a readable decision is accepted"
                return decision
        return None


@dataclass(frozen=True, slots=True)
class OpenCycle:
    number: int
    started_s: float
    budgets: Budgets
    turns: tuple[Turn, ...] = ()
    reservation: ModelCallStarted | None = None
    failures: tuple[ModelFailed, ...] = ()
    parked: bool = False
    tokens_used: int = 0
    tool_calls_made: int = 0
    woken: bool = False

    @property
    def spent(self) -> int:
        """Tokens, with a reservation that is still open counted in full."""
        return self.tokens_used + (self.reservation.reserved if self.reservation else 0)

    @property
    def lost(self) -> int:
        """Cycles whose tokens the answers of this one have used up beyond its own."""
        tokens = self.budgets.tokens_per_cycle
        return -(-max(0, self.spent - tokens) // tokens)

    @property
    def awaits(self) -> Literal["child", "message"] | None:
        """What an answer without calls would wait for, by what the cycle has done."""
        done = {result.tool for turn in self.turns for result in turn.results if result.ok}
        return "child" if SPAWN in done else "message" if SEND in done else None


@dataclass(frozen=True, slots=True)
class PastCycle:
    number: int
    turns: tuple[Turn, ...]
    end: CycleEnded


@dataclass(frozen=True, slots=True)
class Progress:
    """All that deciding needs of a run's past. A snapshot is this value, written down."""

    cycles: int = 0
    answers: int = 0
    past: tuple[PastCycle, ...] = ()
    cycle: OpenCycle | None = None
    final_state: EndState | None = None
    entry_no: int = 0
    cycles_lost: int = 0

    def lost(self) -> int:
        """Cycles that the run has forfeited: answers beyond their reservation used up their tokens."""
        return self.cycles_lost + (self.cycle.lost if self.cycle else 0)

    def under_way(self) -> tuple[ToolCall, ...]:
        """The planned calls whose outcome is not known here yet."""
        return self.cycle.turns[-1].under_way() if self.cycle and self.cycle.turns else ()


def apply(progress: Progress, entry: Entry) -> Progress:
    """The progress after an entry. Total over every legal journal; an illegal one is a bug and asserts."""
    assert progress.final_state is None, "nothing follows the end of a run"
    entry_no = progress.entry_no + 1
    match entry:
        case (
            RunCreated()
            | ArtifactCreated()
            | MemoryWritten()
            | MessageSent()
            | SubagentSpawned()
            | PromptModified()
            | PromptChangeQueued()
            | PromptChangeRejected()
            | ApprovalRequested()
            | ApprovalResolved()
            | InboxRead()
            | LimitReached()
            | HeadroomAwaited()
        ):
            return replace(progress, entry_no=entry_no)
        case CycleStarted(number, started_s, _, budgets, woken):
            opened = OpenCycle(number, started_s, budgets, woken=woken)
            return replace(progress, entry_no=entry_no, cycles=number, cycle=opened)
        case RunEnded(final_state):
            return replace(progress, entry_no=entry_no, final_state=final_state)
    cycle = progress.cycle
    assert cycle is not None, f"{entry.kind} outside a cycle"
    match entry:
        case CycleEnded():
            past, lost = (*progress.past, PastCycle(cycle.number, cycle.turns, entry)), progress.lost()
            return replace(progress, entry_no=entry_no, cycle=None, past=past, cycles_lost=lost)
        case ModelAnswered():
            answers = progress.answers + 1
            return replace(progress, entry_no=entry_no, answers=answers, cycle=_answered(cycle, entry))
        case ModelCallStarted():
            cycle = replace(cycle, reservation=entry, tokens_used=cycle.spent)
        case ModelFailed(tokens=tokens):
            spent, failures = cycle.tokens_used + tokens, (*cycle.failures, entry)
            cycle = replace(cycle, failures=failures, parked=False, reservation=None, tokens_used=spent)
        case CallsPlanned(call_ids=call_ids):
            last = cycle.turns[-1]
            last = replace(last, planned=(*last.planned, *call_ids))
            cycle = replace(cycle, turns=(*cycle.turns[:-1], last))
        case ToolsMissing():
            pass
        case ToolReturned():
            cycle = _returned(cycle, entry)
        case Parked():
            cycle = replace(cycle, parked=True)
        case _:
            assert_never(entry)
    return replace(progress, entry_no=entry_no, cycle=cycle)


def _answered(cycle: OpenCycle, answer: ModelAnswered) -> OpenCycle:
    return replace(
        cycle,
        turns=(*cycle.turns, Turn(answer)),
        reservation=None,
        failures=(),
        parked=False,
        tokens_used=cycle.tokens_used + answer.tokens,
    )


def _returned(cycle: OpenCycle, entry: ToolReturned) -> OpenCycle:
    last = cycle.turns[-1]
    counts = not entry.refused and entry.tool not in CONTROL_TOOLS
    return replace(
        cycle,
        turns=(*cycle.turns[:-1], replace(last, results=(*last.results, entry))),
        tool_calls_made=cycle.tool_calls_made + counts,
    )


SNAPSHOT_VERSION: Final = 2
_SNAPSHOT: TypeAdapter[Progress] = TypeAdapter(Progress)


def encode_snapshot(progress: Progress) -> str:
    return _SNAPSHOT.dump_json(progress).decode()


def decode_snapshot(text: str) -> Progress:
    return _SNAPSHOT.validate_json(text)
