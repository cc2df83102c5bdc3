"""Runs: how they begin, sleep, wake and end."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import anyio

from espalier_client.conformance.behaviour import (
    CONTINUES,
    NOTHING,
    calls,
    completes,
    says,
    sleeps,
    thinks,
    tool,
)
from espalier_client.conformance.checks.lists import (
    require_both_dialects,
    require_pages,
    require_unknown_cursors,
)
from espalier_client.conformance.expected import nobody, require_shape
from espalier_client.conformance.ground import POLL_S, Trial
from espalier_client.conformance.verdicts import expect, same

SOON_S: Final = 8.0
AT_ONCE_S: Final = 1.0
QUIET_S: Final = 2.5


async def run_01_created(trial: Trial) -> None:
    agent = await trial.agent()
    run = await trial.run(agent=agent, goal="Say ok, ünïcode.")
    require_shape(run, "Run", "the run")
    told = {name: run[name] for name in ("agent_id", "goal", "state", "cycle_count", "result", "ended_at")}
    wanted = {
        "agent_id": agent["id"],
        "goal": "Say ok, ünïcode.",
        "state": "running",
        "cycle_count": 0,
        "result": None,
        "ended_at": None,
    }
    same(told, wanted, "a run that was just created")


async def run_02_ends(trial: Trial) -> None:
    run, _ = await trial.ended()
    same(run["state"], "complete", "the state of a run that only says ok")


async def run_03_tells_its_end(trial: Trial) -> None:
    created = await trial.run()
    run = await trial.until(created["id"], "complete")
    require_shape(run, "Run", "the run")
    same(run["started_at"], created["started_at"], "started_at")
    expect(run["ended_at"] >= run["started_at"], "the run ended before it started.")
    expect(run["cycle_count"] >= 1, "the run ended without a cycle.")
    expect(run["result"] is not None, "the run ended without a result.")
    same(await trial.me.call("run.get", run_id=run["id"]), run, "run.get again")


async def run_04_unknown(trial: Trial) -> None:
    for run_id in (nobody("run"), "nonsense", "", nobody("agt")):
        for method in ("run.get", "run.cancel", "run.continue"):
            await trial.me.refused("tool_not_found", method, run_id=run_id)


async def run_05_continue_ended(trial: Trial) -> None:
    run, _ = await trial.ended()
    await trial.me.refused("lifecycle_conflict", "run.continue", run_id=run["id"])
    same(await trial.me.call("run.get", run_id=run["id"]), run, "the run afterwards")


async def _several(trial: Trial, count: int) -> tuple[str, list[str]]:
    agent = await trial.agent()
    made = []
    for _ in range(count):
        run, _ = await trial.ended(agent=agent)
        made.append(run["id"])
    return agent["id"], made[::-1]


async def run_06_pages(trial: Trial) -> None:
    agent_id, made = await _several(trial, 5)
    await require_pages(trial.me, "run.list", made, "runs", agent_id=agent_id)
    await require_unknown_cursors(trial.me, "run.list", ["nonsense", nobody("run")], agent_id=agent_id)


async def run_07_dialects(trial: Trial) -> None:
    agent_id, _ = await _several(trial, 3)
    await require_both_dialects(trial.me, "run.list", "runs", agent_id=agent_id)


async def run_08_cancel_asleep(trial: Trial) -> None:
    run = await trial.run(sleeps())
    await trial.until(run["id"], "sleeping")
    told = await trial.me.call("run.cancel", run_id=run["id"])
    require_shape(told, "Run", "the answer of run.cancel")
    same((told["state"], told.get("ok")), ("cancelled", True), "state and ok")
    expect(told["ended_at"], "a cancelled run has no ended_at.")
    read = await trial.me.call("run.get", run_id=run["id"])
    same({**read, "ok": True}, told, "run.get afterwards")


async def run_09_cancel_awake(trial: Trial) -> None:
    run = await trial.run(thinks())
    await trial.me.call("run.cancel", run_id=run["id"])
    with anyio.move_on_after(SOON_S) as limit:
        await trial.until(run["id"], "cancelled")
    expect(not limit.cancelled_caught, f"the run has not ended {SOON_S:g} s after it was cancelled.")


async def run_10_cancel_again(trial: Trial) -> None:
    run = await trial.run(sleeps())
    await trial.until(run["id"], "sleeping")
    told = [await trial.me.call("run.cancel", run_id=run["id"]) for _ in range(2)]
    same(told[1], told[0], "the second cancel")
    complete, _ = await trial.ended()
    await trial.me.refused("lifecycle_conflict", "run.cancel", run_id=complete["id"])
    same(await trial.me.call("run.get", run_id=complete["id"]), complete, "a complete run after a cancel")


async def run_11_continue(trial: Trial) -> None:
    run = await trial.run(sleeps(), says("awake"))
    await trial.until(run["id"], "sleeping")
    told = await trial.me.call("run.continue", run_id=run["id"])
    require_shape(told, "Run", "the answer of run.continue")
    same((told["id"], told.get("ok")), (run["id"], True), "id and ok")
    ended = await trial.until(run["id"], "complete")
    same(ended["cycle_count"], 2, "its cycles")


async def run_12_continue_awake(trial: Trial) -> None:
    run = await trial.run(thinks())
    await trial.me.refused("lifecycle_conflict", "run.continue", run_id=run["id"])
    await trial.me.call("run.cancel", run_id=run["id"])


async def run_13_inputs(trial: Trial) -> None:
    inputs = {"a": 1, "b": {"ü": [None, True, 1.5]}}
    run = await trial.run(inputs=inputs)
    told = {name: run["metadata"].get(name) for name in inputs}
    same(told, inputs, "the inputs in metadata")


async def run_14_several(trial: Trial) -> None:
    agent = await trial.agent()
    first = await trial.run(sleeps(), agent=agent, goal="first")
    await trial.until(first["id"], "sleeping")
    params = {"agent_id": agent["id"], "goal": "second"}
    answer = await trial.me.answer("run.create", params)
    if "error" in answer:
        await trial.me.refused("lifecycle_conflict", "run.create", **params)
    else:
        goals = [
            (await trial.me.call("run.get", run_id=run["id"]))["goal"] for run in (first, answer["result"])
        ]
        same(goals, ["first", "second"], "the goals of two live runs")
    await trial.me.call("run.cancel", run_id=first["id"])


async def run_15_subjects(trial: Trial) -> None:
    one, other = trial.subject(), trial.subject()
    agent = await trial.agent(subject_ids=[one])
    run = await trial.run(agent=agent, subject_ids=[other])
    same(sorted(run["subject_ids"]), sorted([one, other]), "the subjects of the run")


async def run_16_no_goal(trial: Trial) -> None:
    agent = await trial.agent()
    await trial.me.refused("invalid_params", "run.create", agent_id=agent["id"])


async def run_17_text(trial: Trial) -> None:
    word = trial.word()
    run, _ = await trial.ended(says(word))
    same((run["state"], run["cycle_count"]), ("complete", 1), "state and cycles")
    same((run["result"] or {}).get("final_message"), word, "result.final_message")


async def run_18_empty(trial: Trial) -> None:
    run = await trial.run(NOTHING)
    await trial.until(run["id"], "sleeping")
    await trial.me.call("run.cancel", run_id=run["id"])


async def run_19_complete(trial: Trial) -> None:
    result: Any
    for result in ({"a": [1, None]}, "text", None, 5):
        run, _ = await trial.ended(completes(result))
        same((run["state"], run["result"]), ("complete", result), "state and result")
    run, _ = await trial.ended(calls(tool("complete", final_message="made", artifact_ids=[])))
    same(run["result"], {"final_message": "made", "artifact_ids": []}, "the result of the other spelling")


async def run_20_sleep(trial: Trial) -> None:
    until = (datetime.now(UTC) + timedelta(hours=1)).isoformat().replace("+00:00", "Z")
    for args in ({"duration_seconds": 3600}, {"until": until}, {"duration_seconds": 3600, "reason": "x"}):
        run = await trial.run(calls(tool("sleep", **args)))
        asleep = await trial.until(run["id"], "sleeping")
        same(asleep["cycle_count"], 1, f"the cycles of a run that sleeps by {args}")
        await trial.me.call("run.cancel", run_id=run["id"])


async def run_21_timer(trial: Trial) -> None:
    run = await trial.run(sleeps(1), says("awake"))
    ended = await trial.until(run["id"], "complete")
    same(ended["cycle_count"], 2, "its cycles")
    lived_s = (_moment(ended["ended_at"]) - _moment(run["started_at"])).total_seconds()
    expect(lived_s >= 0.9, f"the run slept for a second and lived for {lived_s:g} s.")


async def run_22_continue_now(trial: Trial) -> None:
    _, events = await trial.ended(CONTINUES, says("done"))
    if not events:
        trial.require("streaming.sse")
    ends = [event for event in events if event["type"] == "cycle.ended"]
    starts = [event for event in events if event["type"] == "cycle.started"]
    same(len(starts), 2, "the number of cycles")
    gap_s = (_moment(starts[1]["emitted_at"]) - _moment(ends[0]["emitted_at"])).total_seconds()
    expect(gap_s <= AT_ONCE_S, f"the next cycle began {gap_s:g} s after continue_now.")


async def run_23_stale_timer(trial: Trial) -> None:
    run = await trial.run(sleeps(2), sleeps())
    await trial.until(run["id"], "sleeping")
    await trial.me.call("run.continue", run_id=run["id"])
    while (await trial.until(run["id"], "sleeping", "running"))[
        "cycle_count"
    ] < 2:  # bounded by the check's time
        await anyio.sleep(POLL_S)
    await anyio.sleep(QUIET_S)
    asleep = await trial.until(run["id"], "sleeping")
    same(asleep["cycle_count"], 2, "the cycles after the old timer")
    await trial.me.call("run.cancel", run_id=run["id"])


async def run_24_first_decision(trial: Trial) -> None:
    late = tool("artifact_create", name="late.txt", mime_type="text/plain", content="x")
    run, _ = await trial.ended(
        calls(tool("complete", result="first"), late, tool("complete", result="second"))
    )
    same(run["result"], "first", "the result")
    page = await trial.me.call("artifact.list", run_id=run["id"])
    same(page.get("items", page.get("artifacts")), [], "artifacts of a call after the decision")


async def run_25_failure(trial: Trial) -> None:
    run, _ = await trial.ended({"fault": {"reason": "as_scripted", "retryable": False}})
    same(run["state"], "error", "its state")
    reason = (run["result"] or {}).get("reason")
    expect(isinstance(reason, str) and reason, f"result.reason is {reason!r}.")


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


# -------------------------------------------------------------------- limits


def _told(events: list[dict[str, Any]], symbol: str) -> list[dict[str, Any]]:
    return [
        each["payload"] for each in events if each["type"] == "error" and each["payload"]["symbol"] == symbol
    ]


def _note(number: int = 1) -> dict[str, Any]:
    return tool("artifact_create", name=f"{number}.txt", mime_type="text/plain", content="x")


def _refusals(events: list[dict[str, Any]]) -> list[str]:
    """The beginnings of results that are not ok."""
    summaries = [each["payload"]["result_summary"] for each in events if each["type"] == "tool.returned"]
    return [each["preview"].partition(":")[0] for each in summaries if not each["ok"]]


async def _out_of_cycle(trial: Trial, run_id: str) -> list[dict[str, Any]]:
    """The events up to the first end of a cycle; the run must live on, asleep or awake."""
    trial.require("streaming.sse")
    events = await trial.heard(run_id, "cycle.ended")
    await trial.me.call("run.cancel", run_id=run_id)
    last = (await trial.me.events(run_id))[-1]
    same(last["payload"]["final_state"], "cancelled", "the end of a run whose budget ran out, when cancelled")
    return events


async def limit_01_max_cycles(trial: Trial) -> None:
    agent = await trial.agent(ceilings__max_cycles=2)
    run, events = await trial.ended(*[CONTINUES] * 5, agent=agent)
    same((run["state"], run["cycle_count"]), ("error", 2), "state and cycles")
    expect("max_cycles" in str(run["result"]), f"the result should name max_cycles, it is {run['result']}.")
    if events:
        same(len(_told(events, "ceiling_exceeded")), 1, "events that tell ceiling_exceeded")


async def limit_02_max_wall_seconds(trial: Trial) -> None:
    agent = await trial.agent(ceilings__max_wall_seconds=2)
    run = await trial.run(sleeps(), agent=agent)
    ended = await trial.until(run["id"], "error")
    expect("max_wall_seconds" in str(ended["result"]), f"the result is {ended['result']}.")


async def limit_03_tool_calls_ceiling(trial: Trial) -> None:
    agent = await trial.agent(ceilings__max_tool_calls_per_cycle=2)
    trial.require("streaming.sse")
    run = await trial.run(calls(*map(_note, range(4))), agent=agent)
    events = await _out_of_cycle(trial, run["id"])
    expect(_told(events, "ceiling_exceeded"), "no event tells ceiling_exceeded.")
    expect("ceiling_exceeded" in _refusals(events), f"the calls came back as {_refusals(events)}.")
    page = await trial.me.call("artifact.list", run_id=run["id"])
    same(len(page.get("items", page.get("artifacts"))), 2, "artifacts of the calls that were allowed")


async def limit_04_tool_calls_budget(trial: Trial) -> None:
    agent = await trial.agent(budgets__tool_calls_per_cycle=2)
    run = await trial.run(calls(*map(_note, range(4))), agent=agent)
    events = await _out_of_cycle(trial, run["id"])
    expect(_told(events, "budget_exhausted"), "no event tells budget_exhausted.")
    page = await trial.me.call("artifact.list", run_id=run["id"])
    same(len(page.get("items", page.get("artifacts"))), 2, "artifacts of the calls that were allowed")


async def limit_05_tokens(trial: Trial) -> None:
    agent = await trial.agent(budgets__tokens_per_cycle=100)
    run = await trial.run(calls(_note(), tokens=100), says("never"), agent=agent)
    events = await _out_of_cycle(trial, run["id"])
    expect(_told(events, "budget_exhausted"), "no event tells budget_exhausted.")
    same(events[-1]["payload"].get("outcome"), "forced_sleep", "the outcome of the cycle")


async def limit_06_seconds(trial: Trial) -> None:
    agent = await trial.agent(budgets__seconds_per_cycle=1)
    run = await trial.run(calls(_note(), delay_s=5), says("never"), agent=agent)
    events = await _out_of_cycle(trial, run["id"])
    same(events[-1]["payload"].get("outcome"), "forced_sleep", "the outcome of the cycle")


async def limit_07_toolset(trial: Trial) -> None:
    agent = await trial.agent(toolset=["helix.web_search"])
    run, events = await trial.ended(
        calls(tool("helix.shell", command="ls")), completes("went on"), agent=agent
    )
    same((run["state"], run["result"]), ("complete", "went on"), "state and result")
    if events:
        same(_refusals(events), ["tool_not_found"], "how the call came back")


async def limit_08_no_escape(trial: Trial) -> None:
    names = ("add_tool", "remove_tool", "adjust_caps", "update_ceilings", "agent.update", "replicate")
    agent = await trial.agent()
    tries = calls(*(tool(name, toolset=["helix.shell"], ceilings={"max_cycles": 999}) for name in names))
    run, events = await trial.ended(tries, completes("went on"), agent=agent)
    same(run["state"], "complete", "its state")
    if events:
        same(_refusals(events), ["tool_not_found"] * len(names), "how the calls came back")
    read = await trial.me.call("agent.get", agent_id=agent["id"])
    same((read["toolset"], read["ceilings"]), (agent["toolset"], agent["ceilings"]), "toolset and ceilings")


async def limit_09_shrunk(trial: Trial) -> None:
    agent = await trial.agent()
    run = await trial.run(sleeps(), *[CONTINUES] * 5, agent=agent)
    await trial.until(run["id"], "sleeping")
    await trial.me.call("agent.update", agent_id=agent["id"], ceilings={"max_cycles": 2})
    await trial.me.call("run.continue", run_id=run["id"])
    ended = await trial.until(run["id"], "error")
    same(ended["cycle_count"], 2, "the cycles of a run whose max_cycles shrank to 2")
