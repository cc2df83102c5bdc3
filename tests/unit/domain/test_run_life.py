"""A run's whole life as lists: random models, deaths and cancels must never get it stuck or end it twice."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_domain.decisions import CONTROL_TOOLS, SEND, SPAWN, Sleep, Unreadable, read_decision
from espalier_domain.history import HISTORY_CHARS_MAX, conversation, fold
from espalier_domain.journal import (
    CallsPlanned,
    CycleEnded,
    CycleStarted,
    Entry,
    ModelAnswered,
    ModelCallStarted,
    ModelFailed,
    Parked,
    RunCreated,
    ToolCall,
    ToolReturned,
    decode,
    encode,
)
from espalier_domain.progress import Progress, apply, decode_snapshot, encode_snapshot
from espalier_domain.run import (
    RETRY_AFTER_S_MAX,
    SPREAD,
    TOOLS_UNAVAILABLE,
    CallBroker,
    CallModel,
    CallSelf,
    Reserve,
    Rest,
    RunFacts,
    StartCycle,
    Write,
    closing,
    next_step,
    standing,
    tokens_left,
)
from espalier_domain.telling import events_of
from espalier_domain.tool_results import CallState, returned
from espalier_protocol.agent import Budgets, Ceilings, Constitution
from espalier_protocol.run import EndState

STEPS_MAX = 2_000
WOKEN_IN_S = 1.0
"""Until a message or a child's end ends a wait."""

RUN = RunFacts(
    run_id="run_x",
    agent_id="agt_x",
    root_agent_id="agt_x",
    toolset=("helix.time", "mcp.git.*"),
    constitution=Constitution(immutable_directives="i", mutable_prompt="m", mutable_prompt_policy="auto"),
    goal="goal",
    inputs={},
    agent_metadata={},
    ceilings=Ceilings(max_cycles=4, max_subagents=0, max_tool_calls_per_cycle=4, max_wall_seconds=10_000),
    budgets=Budgets(tokens_per_cycle=500, tool_calls_per_cycle=3, seconds_per_cycle=300),
)

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("sleep", {"duration_seconds": 5}),
    ("sleep", {"until": "yesterday"}),
    ("continue_now", {}),
    ("complete", {"result": 1}),
    ("artifact_create", {"name": "n", "content": "c"}),
    (SPAWN, {}),
    (SEND, {}),
    ("no_such_tool", {}),
    ("espalier.time", {}),
    ("mcp.git.git_log", {"max_count": 3}),
    ("mcp.other.tool", {}),
]
answers = st.one_of(
    st.tuples(st.just("answer"), st.sampled_from(["", "text"]), st.lists(st.sampled_from(CALLS), max_size=6)),
    st.tuples(st.just("fault"), st.booleans(), st.just(0)),
    st.tuples(st.just("death"), st.just(0), st.just(0)),
    st.tuples(st.just("slow"), st.integers(1, 400), st.just(0)),
    st.tuples(st.just("cancel"), st.just(0), st.just(0)),
)


class Life:
    """What a worker does, without a worker: carry out steps, write entries, die and come back."""

    def __init__(self, chances: list[Any]) -> None:
        self.chances = chances
        self.entries: list[Entry] = []
        self.progress = Progress()
        self.token, self.age_s = 1, 0.0
        self.carried_out: list[str] = []
        self.write(RunCreated("agt_x"))

    def write(self, *entries: Entry) -> None:
        for entry in entries:
            self.progress = apply(self.progress, entry)
            self.entries.append(entry)

    def live(self) -> None:
        for _ in range(STEPS_MAX):
            if self.progress.final_state is not None:
                return
            self.step()
        raise AssertionError(f"stuck at {self.progress}")

    def step(self) -> None:
        match next_step(RUN, self.progress, age_s=self.age_s, lease_token=self.token):
            case StartCycle(number):
                self.write(CycleStarted(number, self.age_s, 0, RUN.budgets))
            case Reserve(attempt):
                cycle = self.progress.cycle
                assert cycle is not None and tokens_left(cycle) > 0
                self.write(ModelCallStarted(cycle.number, attempt, min(100, tokens_left(cycle)), self.token))
            case CallModel() as step:
                self.ask(step)
            case CallSelf(call):
                self.run_tool(call)
            case CallBroker() as step:
                self.broker(step)
            case Write(entries):
                self.write(*entries)
                if isinstance(entries[-1], CycleEnded | Parked):
                    self.age_s += standing(self.progress, entries).wake_in_s or WOKEN_IN_S
                    self.token += 1
            case Rest():
                raise AssertionError("a live run rests")

    def ask(self, step: CallModel) -> None:
        cycle = self.progress.cycle
        assert cycle is not None and step.tokens_max > 0 and step.seconds_max > 0
        kind, first, second = self.chances.pop() if self.chances else ("answer", "done", [])
        match kind:
            case "answer":
                no = self.progress.answers + 1
                calls = tuple(ToolCall(f"c{no}.{i}", name, args) for i, (name, args) in enumerate(second))
                self.write(ModelAnswered(cycle.number, first, calls, step.tokens_max))
            case "fault":
                self.write(ModelFailed(cycle.number, "overloaded", retryable=first, tokens=10))
            case "death":
                self.token += 1
                self.age_s += 4
            case "slow":
                self.age_s += first
            case "cancel":
                self.write(*closing(self.progress, "cancelled", None, open_calls="cancelled"))

    def run_tool(self, call: ToolCall) -> None:
        cycle = self.progress.cycle
        assert cycle is not None
        ok = call.name in ("artifact_create", SPAWN, SEND) or (
            call.name in CONTROL_TOOLS and not isinstance(read_decision(call.name, call.args), Unreadable)
        )
        self.write(ToolReturned(cycle.number, call.call_id, call.name, ok, "result"))

    def broker(self, step: CallBroker) -> None:
        """Like a broker: a call that was carried out before is not carried out again, only told."""
        cycle = self.progress.cycle
        assert cycle is not None and step.seconds_max > 0
        self.carried_out += [call.call_id for call in step.calls if call.call_id not in self.carried_out]
        kind = self.chances.pop()[0] if self.chances else "answer"
        match kind:
            case "death":
                self.token += 1
                self.age_s += 4
            case "cancel":
                self.write(*closing(self.progress, "cancelled", None, open_calls="cancelled"))
            case _:
                told = step.calls[:1] if kind == "fault" else step.calls
                state: CallState = "in_doubt" if kind == "slow" else "done"
                self.write(*(returned(cycle.number, call, state, "result") for call in told))


@settings(max_examples=300, deadline=None)
@given(st.lists(answers, max_size=25))
def test_a_run_always_ends_once_and_closes_what_it_opened(chances: list[Any]) -> None:
    life = Life(chances)

    life.live()

    told = [payload for entry in life.entries for payload in events_of(RUN.run_id, entry)]
    types = [payload.type for payload in told]
    assert types[0] == "run.started" and types[-1] == "run.ended" and types.count("run.ended") == 1
    assert types.count("cycle.started") == types.count("cycle.ended") <= RUN.ceilings.max_cycles
    assert types.count("tool.called") == types.count("tool.returned")
    _assert_only_what_was_allowed_was_carried_out(life)


def _assert_only_what_was_allowed_was_carried_out(life: Life) -> None:
    planned = [entry for entry in life.entries if isinstance(entry, CallsPlanned)]
    named = {
        call.call_id: call.name for e in life.entries if isinstance(e, ModelAnswered) for call in e.calls
    }
    ids = [call_id for entry in planned for call_id in entry.call_ids]
    assert life.carried_out == list(dict.fromkeys(life.carried_out)) and set(life.carried_out) <= set(ids)
    assert len(ids) == len(set(ids))
    assert {named[call_id] for call_id in ids} <= {"espalier.time", "mcp.git.git_log"}
    for number in range(1, RUN.ceilings.max_cycles + 1):
        assert sum(len(e.call_ids) for e in planned if e.cycle == number) <= RUN.budgets.tool_calls_per_cycle


@settings(max_examples=200, deadline=None)
@given(st.lists(answers, max_size=25), st.integers(0, 200))
def test_the_journal_rebuilds_the_run_with_or_without_a_snapshot(chances: list[Any], cut: int) -> None:
    life = Life(chances)
    life.live()
    texts = [encode(entry) for entry in life.entries]

    replayed = Progress()
    for text in texts:
        replayed = apply(replayed, decode(text))
    resumed = Progress()
    for text in texts[:cut]:
        resumed = apply(resumed, decode(text))
    resumed = decode_snapshot(encode_snapshot(resumed))
    for text in texts[cut:]:
        resumed = apply(resumed, decode(text))

    assert replayed == life.progress == resumed
    assert replayed.entry_no == len(texts)


@settings(max_examples=200, deadline=None)
@given(st.lists(answers, max_size=25))
def test_no_cycle_spends_more_tokens_than_it_may_reserve(chances: list[Any]) -> None:
    life = Life(chances)
    life.live()
    spent = [entry.tokens_used for entry in life.entries if isinstance(entry, CycleEnded)]
    assert all(tokens <= RUN.budgets.tokens_per_cycle for tokens in spent)


def _lived(cycles: int, content: str) -> Progress:
    progress = apply(Progress(), RunCreated("agt_x"))
    for number in range(1, cycles + 1):
        call = ToolCall(f"c{number}", "artifact_create", {"name": "n", "content": content})
        for entry in (
            CycleStarted(number, 0.0, 0, RUN.budgets),
            ModelCallStarted(number, 1, 10, 1),
            ModelAnswered(number, content, (call,), 10),
            ToolReturned(number, call.call_id, call.name, True, content),
            CycleEnded(number, None, 10, 1),
        ):
            progress = fold(apply(progress, entry))
    return progress


@pytest.mark.slow
def test_a_long_life_is_shown_at_a_bounded_size_with_its_newest_cycle_whole() -> None:
    short, long = _lived(30, "x" * 5_000), _lived(900, "x" * 5_000)

    sizes = [sum(len(str(line)) for line in conversation(RUN, life, "{}")) for life in (short, long)]

    assert sizes[1] < 2 * sizes[0]
    assert long.past[-1].turns[0].results[0].content == "x" * 5_000
    assert "goal" in str(conversation(RUN, long, "{}")[1])
    assert long.cycles == 900


def _ends(final_state: EndState) -> list[str]:
    progress = apply(Progress(), RunCreated("agt_x"))
    return [entry.kind for entry in closing(progress, final_state, None, open_calls="cancelled")]


def test_a_run_without_an_open_cycle_closes_with_its_end_alone() -> None:
    assert _ends("cancelled") == ["run_ended"]


def test_cycles_of_many_small_calls_are_folded_too() -> None:
    progress = apply(Progress(), RunCreated("agt_x"))
    for number in range(1, 120):
        calls = tuple(ToolCall(f"c{number}.{n}", "artifact_create", {"name": "n" * 90}) for n in range(40))
        entries: list[Entry] = [
            CycleStarted(number, 0.0, 0, RUN.budgets),
            ModelAnswered(number, "", calls, 1),
        ]
        entries += [ToolReturned(number, call.call_id, call.name, True, "r" * 150) for call in calls]
        for entry in (*entries, CycleEnded(number, None, 1, 40)):
            progress = apply(progress, entry)
        progress = fold(progress)

    shown = sum(len(str(line)) for line in conversation(RUN, progress, "{}"))
    assert shown < 3 * HISTORY_CHARS_MAX
    assert len(progress.past[-1].turns[0].results) == 40


def test_a_cycle_whose_time_is_over_sends_no_call_but_waits_for_those_that_may_have_been_sent() -> None:
    progress = apply(Progress(), RunCreated("agt_x"))
    call = ToolCall("c1", "espalier.time", {})
    for entry in (CycleStarted(1, 0.0, 0, RUN.budgets), ModelAnswered(1, "", (call,), 1)):
        progress = apply(progress, entry)
    late = RUN.budgets.seconds_per_cycle + 1.0

    in_time = next_step(RUN, progress, age_s=1.0, lease_token=1)
    too_late = next_step(RUN, progress, age_s=late, lease_token=1)
    planned = apply(progress, CallsPlanned(1, ("c1",)))

    assert in_time == Write((CallsPlanned(1, ("c1",)),))
    assert isinstance(too_late, Write)
    assert [entry.kind for entry in too_late.entries] == ["tool_returned", "limit_reached"]
    assert next_step(RUN, planned, age_s=late, lease_token=1) == CallBroker((call,), 1.0)


def test_a_model_that_could_not_be_asked_for_want_of_tools_is_asked_again_until_the_cycle_is_over() -> None:
    progress = apply(apply(Progress(), RunCreated("agt_x")), CycleStarted(1, 0.0, 0, RUN.budgets))
    pauses = []
    for attempt in range(1, 13):
        progress = apply(progress, ModelCallStarted(1, attempt, 10, 1))
        progress = apply(progress, ModelFailed(1, TOOLS_UNAVAILABLE, retryable=True, tokens=0))
        step = next_step(RUN, progress, age_s=1.0, lease_token=1)
        assert isinstance(step, Write) and isinstance(step.entries[0], Parked)
        pauses.append(step.entries[0].seconds)
        progress = apply(progress, step.entries[0])

    least = [1, 4, 9, 16, 25, 36, 49, *[60] * 5]
    assert all(base <= pause < base * (1 + SPREAD) for base, pause in zip(least, pauses, strict=True))
    assert progress.cycle is not None and progress.cycle.spent == 0


def _pause_after(run_id: str, failures: int, retry_after_s: float | None = None) -> float:
    """How long a run waits, or sleeps, whose model has failed so often."""
    progress = apply(apply(Progress(), RunCreated("agt_x")), CycleStarted(1, 0.0, 0, RUN.budgets))
    for attempt in range(1, failures + 1):
        progress = apply(progress, ModelCallStarted(1, attempt, 10, 1))
        failed = ModelFailed(1, "overloaded", retryable=True, tokens=0, retry_after_s=retry_after_s)
        progress = apply(progress, failed)
    step = next_step(replace(RUN, run_id=run_id), progress, age_s=1.0, lease_token=1)
    assert isinstance(step, Write)
    match step.entries[0]:
        case Parked(seconds=seconds):
            return seconds
        case CycleEnded(decision=Sleep(seconds=float(seconds))):
            return seconds
    raise AssertionError(step)


@pytest.mark.parametrize(("failures", "least"), [(1, 1.0), (2, 2.0), (3, 4.0), (4, 300.0)])
def test_runs_that_failed_together_come_back_apart(failures: int, least: float) -> None:
    pauses = [_pause_after(f"run_{number}", failures) for number in range(50)]
    assert min(pauses) >= least and max(pauses) < least * (1 + SPREAD)
    tenths = {int(10 * (pause / least - 1) / SPREAD) for pause in pauses}
    assert len(tenths) >= 9, "fifty runs spread over nearly all of the time that there is"
    assert pauses == [_pause_after(f"run_{number}", failures) for number in range(50)], (
        "and a replay decides alike"
    )


@pytest.mark.parametrize(("asked_for", "least"), [(7.5, 7.5), (0.1, 1.0), (86_400.0, RETRY_AFTER_S_MAX)])
def test_a_provider_is_left_alone_for_as_long_as_it_asks_within_reason(
    asked_for: float, least: float
) -> None:
    for number in range(20):
        assert least <= _pause_after(f"run_{number}", 1, asked_for) < least * (1 + SPREAD)
