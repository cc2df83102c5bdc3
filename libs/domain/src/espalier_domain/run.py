"""The life of a run: what it does next.

`next_step` looks at a run and its progress and says the one thing to do; `progress.apply` takes in what was
done. Both are pure, and together they are the agent's whole behaviour: the worker only carries steps out and
writes down the entries.
"""

from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from itertools import islice, takewhile
from typing import Any, Final, Literal
from uuid import UUID

from espalier_domain.decisions import (
    CONTROL_TOOLS,
    FORCED_SLEEP_S,
    Complete,
    CycleDecision,
    Sleep,
    Wait,
    forced_sleep,
)
from espalier_domain.journal import (
    CallsPlanned,
    CycleEnded,
    CycleStarted,
    Entry,
    HeadroomAwaited,
    InboxRead,
    LimitReached,
    LimitSymbol,
    ModelAnswered,
    Parked,
    RunEnded,
    ToolCall,
    ToolReturned,
)
from espalier_domain.progress import OpenCycle, Progress, Turn
from espalier_domain.tools import has_tool, is_brokered
from espalier_protocol.agent import Budgets, Ceilings, Constitution
from espalier_protocol.provider import ProviderKind
from espalier_protocol.run import EndState, RunState, WaitReason

MODEL_ATTEMPTS_MAX: Final = 4
"""Attempts at one answer before the cycle gives up and sleeps."""

TOOLS_UNAVAILABLE: Final = "tools_unavailable"
"""Why a model was not even asked. It is tried again until the cycle's time is over, and is no attempt."""

TOOLS_AGAIN_S_MAX: Final = 60.0
RETRY_FIRST_S: Final = 1.0
RETRY_AFTER_S_MAX: Final = 300.0
"""The most that a provider's wish to be left alone is heeded within a cycle."""

SPREAD: Final = 0.5
"""By up to this part of itself a pause is longer for some runs than for others, so that runs which failed
together do not come back together.
"""

CALL_S_MIN: Final = 1.0
TOOL_CHARS_SHOWN_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class BoundProvider:
    """A provider of the agent's owner. Its key is sealed; only what asks a model opens it."""

    owner_id: UUID
    provider_id: UUID
    kind: ProviderKind
    base_url: str | None
    sealed_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Runner:
    """Who thinks for an agent: a model of a provider, or one where the operator's own model is."""

    model: str | None
    provider: BoundProvider | None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run was given. It is read anew at every claim, so an agent's edits show in the next cycle.

    `budgets` are the least of the agent's and of those above it in the tree. `cycles_granted` are its
    children's to use; `children` says that one of them lives, or that its end is not told yet. `overdrawn`:
    a run above has used and granted more cycles than its ceiling, which may have shrunk, allows now.
    """

    run_id: str
    agent_id: str
    root_agent_id: str
    toolset: tuple[str, ...]
    constitution: Constitution
    goal: str
    inputs: dict[str, Any]
    agent_metadata: dict[str, Any]
    ceilings: Ceilings
    budgets: Budgets
    runner: Runner | None = None
    cycles_granted: int = 0
    children: bool = False
    overdrawn: bool = False


@dataclass(frozen=True, slots=True)
class StartCycle:
    number: int


@dataclass(frozen=True, slots=True)
class AwaitHeadroom:
    """Sleep on: what the run has left is its children's, and comes back, or not, when they end."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve tokens for one attempt at an answer."""

    attempt: int


@dataclass(frozen=True, slots=True)
class CallModel:
    attempt: int
    tokens_max: int
    seconds_max: float


@dataclass(frozen=True, slots=True)
class CallSelf:
    """Run the call of a self-tool, and all that follow it, in one transaction."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallBroker:
    """Let the broker carry out these planned calls, all at once; each answers within `seconds_max`."""

    calls: tuple[ToolCall, ...]
    seconds_max: float


@dataclass(frozen=True, slots=True)
class Write:
    """Nothing outside is needed: these entries follow from what is known. They may rest or end the run."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Rest:
    """The run has ended."""


Step = StartCycle | AwaitHeadroom | Reserve | CallModel | CallSelf | CallBroker | Write | Rest


def next_step(run: RunFacts, progress: Progress, *, age_s: float, lease_token: int) -> Step:
    """The one thing to do next for a run that is held by `lease_token` and `age_s` seconds old."""
    if progress.final_state is not None:
        return Rest()
    if age_s >= run.ceilings.max_wall_seconds:
        return _over_ceiling(progress, "max_wall_seconds")
    if progress.cycle is None:
        return _between_cycles(run, progress)
    return _in_cycle(run, progress.cycle, age_s, lease_token)


def _between_cycles(run: RunFacts, progress: Progress) -> Step:
    left = run.ceilings.max_cycles - progress.cycles - progress.lost()
    if left > run.cycles_granted and not run.overdrawn:
        return StartCycle(progress.cycles + 1)
    if left > 0 and run.children and not run.overdrawn:
        return AwaitHeadroom()
    return _over_ceiling(progress, "max_cycles")


def _in_cycle(run: RunFacts, cycle: OpenCycle, age_s: float, lease_token: int) -> Step:
    seconds_left = cycle.budgets.seconds_per_cycle - (age_s - cycle.started_s)
    if cycle.turns:
        turn = cycle.turns[-1]
        if turn.pending():
            return _next_calls(run, cycle, turn, seconds_left)
        if ending := _ending(run, cycle, turn):
            return Write(ending)
    if cycle.failures and not cycle.failures[-1].retryable:
        result = {"reason": f"model_failed:{cycle.failures[-1].reason}"}
        return Write((_stopped(cycle), RunEnded("error", result)))
    if seconds_left <= 0:
        return Write(_exhausted(cycle, "seconds_per_cycle"))
    if cycle.failures and cycle.reservation is None and not cycle.parked:
        return _after_failure(run, cycle)
    if cycle.reservation is None or cycle.reservation.lease_token != lease_token:
        if tokens_left(cycle) <= 0:
            return Write(_exhausted(cycle, "tokens_per_cycle"))
        return Reserve(len(cycle.failures) + 1)
    seconds_left = min(seconds_left, run.ceilings.max_wall_seconds - age_s)
    return CallModel(cycle.reservation.attempt, cycle.reservation.reserved, seconds_left)


def _next_calls(run: RunFacts, cycle: OpenCycle, turn: Turn, seconds_left: float) -> Step:
    """In the order of the answer; neighbours for the broker are planned and carried out together.

    What is planned is not refused any more, whatever the limits have become: it may have been sent. Its time
    is at least CALL_S_MIN for the same reason.
    """
    if under_way := turn.under_way():
        return CallBroker(under_way, max(seconds_left, CALL_S_MIN))
    first = turn.pending()[0]
    if refused := refusal(run, cycle, first):
        return Write(refused)
    if not is_brokered(first.name):
        return CallSelf(first)
    if seconds_left <= 0:
        return Write(_limit(cycle, first, "budget_exhausted", "seconds_per_cycle"))
    together = takewhile(lambda call: _may_be_sent(run, call), turn.pending())
    calls = islice(together, calls_left(run, cycle))
    return Write((CallsPlanned(cycle.number, tuple(call.call_id for call in calls)),))


def _may_be_sent(run: RunFacts, call: ToolCall) -> bool:
    return is_brokered(call.name) and has_tool(run.toolset, call.name)


def calls_left(run: RunFacts, cycle: OpenCycle) -> int:
    """How many more tool calls the cycle may make."""
    limits = (run.ceilings.max_tool_calls_per_cycle, cycle.budgets.tool_calls_per_cycle)
    return min(limits) - cycle.tool_calls_made


def tokens_left(cycle: OpenCycle) -> int:
    """What the cycle may still reserve. An open reservation of a lost holder counts as spent in full."""
    return cycle.budgets.tokens_per_cycle - cycle.spent


def _ending(run: RunFacts, cycle: OpenCycle, turn: Turn) -> tuple[Entry, ...] | None:
    if decision := turn.decision():
        return decided(cycle, decision)
    if not turn.answer.calls:
        return decided(cycle, _decision_without_calls(run, cycle, turn.answer.text))
    if any(result.refused for result in turn.results):
        return decided(cycle, forced_sleep("The limit of tool calls in a cycle was reached."))
    return None


def _decision_without_calls(run: RunFacts, cycle: OpenCycle, text: str) -> CycleDecision:
    if text.strip():
        return Complete({"final_message": text, "artifact_ids": []})
    if awaited := cycle.awaits or ("child" if run.children else None):
        return Wait(awaited)
    return forced_sleep("The model answered nothing.")


def decided(cycle: OpenCycle, decision: CycleDecision) -> tuple[Entry, ...]:
    """The entries that end a cycle, and with `complete` the run."""
    end = CycleEnded(cycle.number, decision, cycle.spent, cycle.tool_calls_made)
    if isinstance(decision, Complete):
        return (end, RunEnded("complete", decision.result))
    return (end,)


def _after_failure(run: RunFacts, cycle: OpenCycle) -> Step:
    longer = 1 + SPREAD * _chance(f"{run.run_id}/{cycle.number}/{len(cycle.failures)}")
    if cycle.failures[-1].reason == TOOLS_UNAVAILABLE:
        pause_s = min(RETRY_FIRST_S * len(cycle.failures) ** 2, TOOLS_AGAIN_S_MAX)
        return Write((Parked(cycle.number, "retry", pause_s * longer),))
    failed = sum(failure.reason != TOOLS_UNAVAILABLE for failure in cycle.failures)
    if failed >= MODEL_ATTEMPTS_MAX:
        return Write(decided(cycle, forced_sleep("The model did not answer.", FORCED_SLEEP_S * longer)))
    asked_for = min(cycle.failures[-1].retry_after_s or 0.0, RETRY_AFTER_S_MAX)
    delay = max(RETRY_FIRST_S * 2 ** (failed - 1), asked_for)
    return Write((Parked(cycle.number, "retry", delay * longer),))


def _chance(name: str) -> float:
    """Between 0 and 1, far apart for names that are alike, and the same whenever it is asked."""
    return int.from_bytes(sha256(name.encode()).digest()[:4]) / 2**32


def _exhausted(cycle: OpenCycle, budget: str) -> tuple[Entry, ...]:
    told = LimitReached(cycle.number, "budget_exhausted", f"The cycle used up {budget}.")
    return (told, *decided(cycle, forced_sleep(f"budget_exhausted:{budget}")))


def _over_ceiling(progress: Progress, ceiling: str) -> Write:
    number = progress.cycle.number if progress.cycle else None
    told = LimitReached(number, "ceiling_exceeded", f"The run reached its {ceiling}.")
    end = closing(progress, "error", {"reason": f"ceiling_exceeded:{ceiling}"}, open_calls="not run")
    return Write((told, *end))


def closing(
    progress: Progress, final_state: EndState, result: Any, *, open_calls: Literal["cancelled", "not run"]
) -> tuple[Entry, ...]:
    """The entries that end a run from wherever it stands: every pair that is open is closed first."""
    end = RunEnded(final_state, result)
    if progress.cycle is None:
        return (end,)
    pending = progress.cycle.turns[-1].pending() if progress.cycle.turns else ()
    closed = tuple(
        ToolReturned(progress.cycle.number, call.call_id, call.name, ok=False, content=open_calls)
        for call in pending
    )
    return (*closed, _stopped(progress.cycle), end)


def _stopped(cycle: OpenCycle) -> CycleEnded:
    return CycleEnded(cycle.number, None, cycle.spent, cycle.tool_calls_made)


def refusal(run: RunFacts, cycle: OpenCycle, call: ToolCall) -> tuple[Entry, ...] | None:
    """Why a call may not run, or None. Control calls end the cycle and count against no limit."""
    if cycle.turns and cycle.turns[-1].decision():
        return (_refused(cycle, call, "not run: an earlier call of this answer ended the cycle"),)
    if call.name in CONTROL_TOOLS:
        return None
    made, limits = cycle.tool_calls_made, (run.ceilings.max_tool_calls_per_cycle, cycle.budgets)
    if made >= limits[0]:
        return _limit(cycle, call, "ceiling_exceeded", "max_tool_calls_per_cycle")
    if made >= limits[1].tool_calls_per_cycle:
        return _limit(cycle, call, "budget_exhausted", "tool_calls_per_cycle")
    if is_brokered(call.name) and not has_tool(run.toolset, call.name):
        why = f"this agent has no tool called {call.name[:TOOL_CHARS_SHOWN_MAX]!r}"
        content = f"tool_not_found: {why}"
        told = LimitReached(cycle.number, "tool_not_found", f"A call was refused: {why}.")
        return (ToolReturned(cycle.number, call.call_id, call.name, ok=False, content=content), told)
    return None


def _limit(cycle: OpenCycle, call: ToolCall, symbol: LimitSymbol, name: str) -> tuple[Entry, ...]:
    told = LimitReached(cycle.number, symbol, f"{call.name} was refused: the cycle reached its {name}.")
    return (_refused(cycle, call, f"{symbol}: the cycle reached its {name}"), told)


def _refused(cycle: OpenCycle, call: ToolCall, why: str) -> ToolReturned:
    return ToolReturned(cycle.number, call.call_id, call.name, ok=False, content=why, refused=True)


@dataclass(frozen=True, slots=True)
class Standing:
    """How the run's row looks after a step.

    A sleeping run wakes at `wake_at` or in `wake_in_s`, whichever is given; without either it sleeps until
    somebody wakes it. `wakes_on_message` also lets a wake that came during the cycle end the sleep at once.
    `progressed` clears the count of claims that came to nothing. `wake_seen` is None where it stays as it is.
    """

    state: RunState
    cycles: int
    cycles_lost: int = 0
    wait_reason: WaitReason | None = None
    wake_at: datetime | None = None
    wake_in_s: float | None = 0.0
    wakes_on_message: bool = False
    wake_seen: int | None = None
    progressed: bool = False
    ended: bool = False
    result: Any = None


def standing(progress: Progress, entries: tuple[Entry, ...]) -> Standing:
    """The row after `entries`, which `progress` has taken in already. The last of several rests counts."""
    row: dict[str, Any] = {"state": "running"}
    for entry in entries:
        match entry:
            case CycleStarted(wake_seen=seen) | InboxRead(wake_seen=seen):
                row["wake_seen"] = seen
            case ModelAnswered() | ToolReturned():
                row["progressed"] = True
            case Parked(reason=reason, seconds=seconds):
                row |= {"state": "sleeping", "wait_reason": reason, "wake_in_s": seconds}
            case CycleEnded(decision=Sleep(until=until, seconds=seconds_)):
                row |= {"state": "sleeping", "wait_reason": "timer", "wakes_on_message": True}
                row |= {"wake_at": until, "wake_in_s": seconds_ or 0.0, "progressed": True}
            case CycleEnded(decision=Wait(on=on)):
                row |= {"state": "sleeping", "wait_reason": on, "wakes_on_message": True}
                row |= {"wake_in_s": None, "progressed": True}
            case HeadroomAwaited(wake_seen=seen):
                row |= {"state": "sleeping", "wait_reason": "child", "wake_in_s": None, "wake_seen": seen}
            case CycleEnded():
                row["progressed"] = True
            case RunEnded(final_state, result):
                row |= {"state": final_state, "ended": True, "result": result, "wait_reason": None}
            case _:
                pass
    return Standing(cycles=progress.cycles, cycles_lost=progress.lost(), **row)
