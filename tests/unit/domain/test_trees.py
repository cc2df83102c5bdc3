"""What a run may give to a helper, and how a tree's rules show in what a run does next."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier_domain.decisions import SEND, SPAWN, Sleep, Wait
from espalier_domain.history import conversation
from espalier_domain.journal import (
    CycleEnded,
    CycleStarted,
    Entry,
    HeadroomAwaited,
    ModelAnswered,
    RunCreated,
    RunEnded,
    ToolCall,
    ToolReturned,
)
from espalier_domain.progress import Progress, apply, decode_snapshot, encode_snapshot
from espalier_domain.run import AwaitHeadroom, RunFacts, StartCycle, Step, Write, next_step, standing
from espalier_domain.telling import events_of
from espalier_domain.trees import (
    DEPTH_MAX,
    Headroom,
    Refusal,
    Spawner,
    SpawnOrder,
    directives,
    least,
    refusal,
    subagent_result,
)
from espalier_protocol.agent import Budgets, Ceilings, Constitution
from espalier_protocol.message import BODY_BYTES_MAX
from espalier_protocol.shapes import TEXT_CHARS_MAX

BUDGETS = Budgets(tokens_per_cycle=100, tool_calls_per_cycle=9, seconds_per_cycle=60)
SPAWNER = Spawner(
    depth=0,
    headroom=Headroom(cycles=5, subagents=3, wall_seconds=50, tool_calls_per_cycle=7),
    budgets=BUDGETS,
    toolset=("helix.time", "mcp.git.*", "mcp.files.read", "plain"),
    immutable_directives="Harm nobody.",
)
CEILINGS = {"max_cycles": 5, "max_subagents": 2, "max_tool_calls_per_cycle": 7, "max_wall_seconds": 50}
RUN = RunFacts(
    run_id="run_x",
    agent_id="agt_x",
    root_agent_id="agt_x",
    toolset=(),
    constitution=Constitution(immutable_directives="i", mutable_prompt="m", mutable_prompt_policy="auto"),
    goal="goal",
    inputs={},
    agent_metadata={},
    ceilings=Ceilings(max_cycles=4, max_subagents=2, max_tool_calls_per_cycle=9, max_wall_seconds=1_000),
    budgets=BUDGETS,
)


def order(**changes: Any) -> SpawnOrder:
    return SpawnOrder.model_validate(
        {
            "name": "helper",
            "constitution": {"immutable_directives": "Be brief.", "mutable_prompt": "Help."},
            "toolset_subset": changes.get("toolset", []),
            "initial_goal": "help",
            "ceilings": {**CEILINGS, **changes.get("ceilings", {})},
            "budgets": {**BUDGETS.model_dump(), **changes.get("budgets", {})},
        }
    )


def test_all_that_is_left_may_be_given_and_not_one_unit_more() -> None:
    assert refusal(SPAWNER, order()) is None
    for ceiling, value in CEILINGS.items():
        refused = refusal(SPAWNER, order(ceilings={ceiling: value + 1}))
        counted = value + 1 + (ceiling == "max_subagents")
        left = counted - 1
        assert refused == Refusal("ceiling_exceeded", f"{ceiling}: {counted} wanted, {left} left to give")
    for budget, value in BUDGETS.model_dump().items():
        refused = refusal(SPAWNER, order(budgets={budget: value + 1}))
        assert refused == Refusal("ceiling_exceeded", f"{budget}: {value + 1} wanted, {value} left to give")


def test_a_tree_has_a_deepest_level() -> None:
    assert refusal(replace(SPAWNER, depth=DEPTH_MAX - 1), order()) is None
    deepest = refusal(replace(SPAWNER, depth=DEPTH_MAX), order())
    assert deepest is not None and deepest.symbol == "ceiling_exceeded"


@pytest.mark.parametrize(
    ("entry", "is_theirs"),
    [
        ("espalier.time", True),
        ("helix.time", True),
        ("espalier.fetch", False),
        ("espalier.*", False),
        ("mcp.git.*", True),
        ("mcp.git.log", True),
        ("mcp.files.read", True),
        ("mcp.files.*", False),
        ("mcp.files.write", False),
        ("mcp.*", False),
        ("*", False),
        ("plain", True),
        ("other", False),
    ],
)
def test_a_helper_gets_only_tools_that_its_spawner_has(entry: str, is_theirs: bool) -> None:
    refused = refusal(SPAWNER, order(toolset=[entry]))
    missing = Refusal("tool_not_found", f"you have no tool {entry!r} to give")
    assert refused == (None if is_theirs else missing)


def test_directives_of_a_spawner_stand_before_a_helpers_own_and_must_fit_with_them() -> None:
    assert directives("Harm nobody.", order()) == "Harm nobody.\n\nBe brief."
    assert directives("", order()) == "Be brief."
    full = replace(SPAWNER, immutable_directives="x" * (TEXT_CHARS_MAX - len("\n\nBe brief.")))
    assert refusal(full, order()) is None
    refused = refusal(replace(full, immutable_directives=full.immutable_directives + "x"), order())
    assert refused is not None and refused.symbol is None


def test_the_least_of_all_budgets_above_binds() -> None:
    above = [
        Budgets(tokens_per_cycle=50, tool_calls_per_cycle=99, seconds_per_cycle=99),
        Budgets(tokens_per_cycle=70, tool_calls_per_cycle=99, seconds_per_cycle=1),
    ]
    assert least(BUDGETS, above) == Budgets(tokens_per_cycle=50, tool_calls_per_cycle=9, seconds_per_cycle=1)
    assert least(BUDGETS, []) is BUDGETS


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=8))
def test_a_result_is_told_whole(result: Any) -> None:
    told = json.loads(subagent_result("agt_c", "run_c", "complete", result))
    assert told == {
        "type": "subagent_result",
        "child_agent_id": "agt_c",
        "child_run_id": "run_c",
        "state": "complete",
        "result": result,
    }


@pytest.mark.parametrize("character", ["x", "\x01", "ü", "\U0001f600"])
def test_a_large_result_is_shortened_to_what_a_message_may_hold(character: str) -> None:
    body = subagent_result("agt_c", "run_c", "complete", character * 100_000)
    assert len(body.encode()) <= BODY_BYTES_MAX
    told = json.loads(body)
    assert told["result"] is None and told["result_excerpt"].startswith('"')


# ------------------------------------------------------------------ what a run does next


def after_calls(*tools: str, ok: bool = True, answers: int = 1) -> Progress:
    """In the first cycle: these calls were made, and then the model answered nothing."""
    calls = tuple(ToolCall(f"c{place}", tool, {}) for place, tool in enumerate(tools))
    entries: list[Entry] = [
        RunCreated("agt_x"),
        CycleStarted(1, 0.0, 0, BUDGETS),
        ModelAnswered(1, "", calls, 10),
        *(ToolReturned(1, call.call_id, call.name, ok, "r") for call in calls),
        ModelAnswered(1, "", (), 10),
    ]
    progress = Progress()
    for entry in entries:
        progress = apply(progress, entry)
    return progress


def decision(step: Step) -> Any:
    assert isinstance(step, Write)
    (end,) = step.entries
    assert isinstance(end, CycleEnded)
    return end.decision


@pytest.mark.parametrize(
    ("tools", "children", "awaited"),
    [
        ([SPAWN], False, "child"),
        ([SEND, SPAWN], False, "child"),
        ([SEND], False, "message"),
        ([SEND], True, "message"),
        (["inbox_read"], True, "child"),
    ],
)
def test_an_empty_answer_waits_for_what_the_cycle_has_begun(
    tools: list[str], children: bool, awaited: str
) -> None:
    progress = after_calls(*tools)
    step = next_step(replace(RUN, children=children), progress, age_s=1.0, lease_token=1)
    assert decision(step) == Wait(awaited)  # type: ignore[arg-type]
    assert isinstance(step, Write)
    progress = apply(progress, step.entries[0])
    row = standing(progress, step.entries)
    assert (row.state, row.wait_reason, row.wake_at, row.wake_in_s) == ("sleeping", awaited, None, None)
    assert row.wakes_on_message and row.progressed
    (told,) = events_of("run_x", step.entries[0])
    assert told.model_dump()["outcome"] == "slept"
    assert "You are awake again" in str(conversation(RUN, progress, "{}")[-1])


@pytest.mark.parametrize(("tools", "ok"), [(["inbox_read"], True), ([SPAWN], False), ([SEND], False)])
def test_an_empty_answer_with_nothing_to_wait_for_is_a_forced_sleep(tools: list[str], ok: bool) -> None:
    made = decision(next_step(RUN, after_calls(*tools, ok=ok), age_s=1.0, lease_token=1))
    assert isinstance(made, Sleep) and made.forced


def between_cycles(cycles: int, tokens: int = 10) -> Progress:
    progress = apply(Progress(), RunCreated("agt_x"))
    for number in range(1, cycles + 1):
        progress = apply(progress, CycleStarted(number, 0.0, 0, BUDGETS))
        progress = apply(progress, ModelAnswered(number, "", (), tokens))
        progress = apply(progress, CycleEnded(number, None, tokens, 0))
    return progress


def step_of(progress: Progress, **facts: Any) -> str:
    match next_step(replace(RUN, **facts), progress, age_s=1.0, lease_token=1):
        case StartCycle():
            return "cycle"
        case AwaitHeadroom():
            return "waits"
        case Write(entries):
            assert entries[-1] == RunEnded("error", {"reason": "ceiling_exceeded:max_cycles"})
            return "ends"
    raise AssertionError("none of these")


@pytest.mark.parametrize(
    ("cycles", "facts", "step"),
    [
        (3, {}, "cycle"),
        (4, {}, "ends"),
        (2, {"cycles_granted": 1}, "cycle"),
        (2, {"cycles_granted": 2}, "ends"),
        (2, {"cycles_granted": 2, "children": True}, "waits"),
        (4, {"cycles_granted": 0, "children": True}, "ends"),
        (1, {"overdrawn": True}, "ends"),
        (2, {"cycles_granted": 2, "children": True, "overdrawn": True}, "ends"),
    ],
)
def test_a_cycle_begins_only_within_what_is_neither_used_nor_granted(
    cycles: int, facts: dict[str, Any], step: str
) -> None:
    assert step_of(between_cycles(cycles), **facts) == step


@pytest.mark.parametrize(("tokens", "lost"), [(100, 0), (101, 1), (200, 1), (201, 2)])
def test_tokens_beyond_a_budget_cost_the_cycles_that_they_would_have_been(tokens: int, lost: int) -> None:
    progress = between_cycles(1, tokens)
    row = standing(progress, ())
    assert (progress.lost(), row.cycles_lost) == (lost, lost)
    assert decode_snapshot(encode_snapshot(progress)) == progress
    assert step_of(progress, cycles_granted=4 - 1 - lost) == "ends"
    assert step_of(progress, cycles_granted=max(0, 4 - 2 - lost)) == "cycle"


def test_an_overshoot_counts_as_soon_as_it_is_known_and_once() -> None:
    opened = apply(apply(Progress(), CycleStarted(1, 0.0, 0, BUDGETS)), ModelAnswered(1, "", (), 350))
    ended = apply(opened, CycleEnded(1, None, 350, 0))
    assert (opened.lost(), ended.lost()) == (3, 3)
    again = apply(ended, CycleStarted(2, 0.0, 0, BUDGETS))
    assert again.lost() == 3


def test_a_run_that_waits_for_headroom_has_seen_the_wake_that_it_could_not_follow() -> None:
    waited = HeadroomAwaited(7)
    progress = apply(between_cycles(1), waited)
    row = standing(progress, (waited,))
    assert (row.state, row.wait_reason, row.wake_in_s, row.wake_seen) == ("sleeping", "child", None, 7)
    assert not row.wakes_on_message and not row.progressed
    assert events_of("run_x", waited) == []
