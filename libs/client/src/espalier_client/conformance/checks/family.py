"""Agents that rewrite their prompt, and agents that make others."""

from typing import Any, Final

from espalier_client.conformance.behaviour import (
    AN_HOUR_S,
    NOTHING,
    SCRIPT,
    as_it_stands,
    calls,
    completes,
    says,
    sleeps,
    tool,
)
from espalier_client.conformance.expected import nobody, require_payload, require_shape
from espalier_client.conformance.ground import CEILINGS, Trial
from espalier_client.conformance.verdicts import Failed, expect, same

CHILD_CEILINGS: Final = {
    "max_cycles": 3,
    "max_subagents": 0,
    "max_tool_calls_per_cycle": 4,
    "max_wall_seconds": 60,
}
CHILD_BUDGETS: Final = {"tokens_per_cycle": 1000, "tool_calls_per_cycle": 4, "seconds_per_cycle": 20}


def _returned(events: list[dict[str, Any]], name: str) -> list[tuple[bool, str]]:
    """How calls of this tool came back: ok, and the beginning of what was said."""
    return [
        (
            each["payload"]["result_summary"]["ok"],
            each["payload"]["result_summary"]["preview"].partition(":")[0],
        )
        for each in events
        if each["type"] == "tool.returned" and each["payload"]["tool_name"].endswith(name)
    ]


def _payloads(events: list[dict[str, Any]], event_type: str) -> list[dict[str, Any]]:
    found = [each["payload"] for each in events if each["type"] == event_type]
    for payload in found:
        require_payload(payload, event_type)
    return found


# -------------------------------------------------------------------- the prompt


def _rewrites(content: str, reason: str = "as the script says") -> dict[str, Any]:
    return calls(tool("modify_own_prompt", mode="replace", content=content, reason=reason))


async def _history(trial: Trial, agent_id: str) -> list[dict[str, Any]]:
    read = await trial.me.call("agent.get", agent_id=agent_id, include=["prompt_history"])
    for entry in read["prompt_history"]:
        require_shape(entry, "PromptHistoryEntry", "an entry of the prompt history")
        same(entry["agent_id"], agent_id, "the agent of an entry")
    found = read["prompt_history"]
    assert isinstance(found, list)
    return found


async def _prompt(trial: Trial, agent_id: str) -> str:
    return str((await trial.me.call("agent.get", agent_id=agent_id))["constitution"]["mutable_prompt"])


async def _queued(trial: Trial, *contents: str) -> tuple[dict[str, Any], list[str]]:
    """An agent whose run asked for these changes and sleeps, and the ids of the changes."""
    agent = await trial.agent(constitution__mutable_prompt_policy="approval_required")
    asked = calls(
        *(tool("modify_own_prompt", mode="replace", content=each, reason="wanted") for each in contents)
    )
    run = await trial.run(asked, sleeps(), says("awake"), agent=agent)
    events = await trial.heard(run["id"], "prompt.change_queued", len(contents))
    pending = [each["pending_change_id"] for each in _payloads(events, "prompt.change_queued")]
    return {**agent, "run_id": run["id"]}, pending


async def prompt_01_auto(trial: Trial) -> None:
    agent, content = await trial.agent(), trial.word()
    run, events = await trial.ended(_rewrites(content), completes(), agent=agent)
    same(run["state"], "complete", "the state of the run")
    same(await _prompt(trial, agent["id"]), content, "the prompt")
    (entry,) = await _history(trial, agent["id"])
    same((entry["reason"], entry["approved_by"]), ("as the script says", None), "reason and approver")
    told = _payloads(events, "prompt.modified")
    wanted = {name: entry[name] for name in ("diff", "reason", "approved_by")}
    same([{name: each[name] for name in wanted} for each in told], [wanted], "prompt.modified")


async def prompt_02_locked(trial: Trial) -> None:
    agent = await trial.agent(constitution__mutable_prompt_policy="locked")
    run, events = await trial.ended(_rewrites("taken over"), completes("went on"), agent=agent)
    same((run["state"], run["result"]), ("complete", "went on"), "state and result")
    told = _returned(events, "modify_own_prompt")
    same(told, [(False, "constitution_policy_violation")], "how the call came back")
    same(await _prompt(trial, agent["id"]), agent["constitution"]["mutable_prompt"], "the prompt")
    same(await _history(trial, agent["id"]), [], "the history")


async def prompt_03_waits(trial: Trial) -> None:
    agent, pending = await _queued(trial, "wanted prompt")
    same(len(pending), 1, "changes that were told as queued")
    same(await _prompt(trial, agent["id"]), agent["constitution"]["mutable_prompt"], "the prompt")
    same(await _history(trial, agent["id"]), [], "the history")


async def _resolve(
    trial: Trial, agent: dict[str, Any], change: str, approve: bool, **more: Any
) -> dict[str, Any]:
    params = {"agent_id": agent["id"], "pending_change_id": change, "approve": approve, **more}
    told = await trial.me.call("agent.approve_prompt_change", **params)
    assert isinstance(told, dict)
    return told


async def prompt_04_approved(trial: Trial) -> None:
    agent, (change,) = await _queued(trial, "wanted prompt")
    told = await _resolve(trial, agent, change, approve=True)
    (entry,) = await _history(trial, agent["id"])
    same((told.get("applied"), told.get("history_entry_id")), (True, entry["id"]), "applied and the entry")
    expect(entry["approved_by"], "the entry does not say who approved it.")
    same(await _prompt(trial, agent["id"]), "wanted prompt", "the prompt")


async def prompt_05_rejected(trial: Trial) -> None:
    agent, (change,) = await _queued(trial, "unwanted prompt")
    told = await _resolve(trial, agent, change, approve=False, comment="no")
    same(told.get("applied"), False, "applied")
    same(await _prompt(trial, agent["id"]), agent["constitution"]["mutable_prompt"], "the prompt")
    same(await _history(trial, agent["id"]), [], "the history")


async def prompt_06_resolved(trial: Trial) -> None:
    for approve in (True, False):
        agent, (change,) = await _queued(trial, "wanted prompt")
        await _resolve(trial, agent, change, approve=approve)
        for again in (True, False):
            params = {"agent_id": agent["id"], "pending_change_id": change, "approve": again}
            await trial.me.refused("lifecycle_conflict", "agent.approve_prompt_change", **params)


async def prompt_07_unknown(trial: Trial) -> None:
    agent = await trial.agent()
    for agent_id in (agent["id"], nobody("agt")):
        for change in (nobody("pch"), "nonsense"):
            params = {"agent_id": agent_id, "pending_change_id": change, "approve": True}
            await trial.me.refused("tool_not_found", "agent.approve_prompt_change", **params)


async def prompt_08_stale_base(trial: Trial) -> None:
    agent, (older, newer) = await _queued(trial, "older prompt", "newer prompt")
    await _resolve(trial, agent, newer, approve=True)
    params = {"agent_id": agent["id"], "pending_change_id": older, "approve": True}
    await trial.me.refused("lifecycle_conflict", "agent.approve_prompt_change", **params)
    same(await _prompt(trial, agent["id"]), "newer prompt", "the prompt")


async def prompt_09_embedder(trial: Trial) -> None:
    agent = await trial.agent()
    change = {"mutable_prompt": "An embedder's prompt."}
    changed = await trial.me.call("agent.update", agent_id=agent["id"], constitution=change)
    same(changed["constitution"], {**agent["constitution"], **change}, "the constitution")
    (entry,) = await _history(trial, agent["id"])
    expect(entry["approved_by"], "the entry does not say who approved it.")


async def prompt_10_shown(trial: Trial) -> None:
    agent, (change,) = await _queued(trial, "wanted prompt")
    include = ["pending_prompt_changes"]
    read = await trial.me.call("agent.get", agent_id=agent["id"], include=include)
    found = read.get("pending_prompt_changes")
    if not isinstance(found, list):
        raise Failed("agent.get does not answer pending_prompt_changes.")
    same([each.get("id", each.get("pending_change_id")) for each in found], [change], "changes that wait")
    await _resolve(trial, agent, change, approve=False)
    read = await trial.me.call("agent.get", agent_id=agent["id"], include=include)
    same(read.get("pending_prompt_changes"), [], "changes that wait afterwards")


async def prompt_11_told(trial: Trial) -> None:
    agent, (change,) = await _queued(trial, "unwanted prompt")
    await _resolve(trial, agent, change, approve=False, comment="not now")
    await trial.me.call("run.cancel", run_id=agent["run_id"])
    (told,) = _payloads(await trial.me.events(agent["run_id"]), "prompt.change_rejected")
    same((told["pending_change_id"], told["comment"]), (change, "not now"), "prompt.change_rejected")
    expect(told["rejected_by"], "rejected_by is empty.")
    agent, (change,) = await _queued(trial, "wanted prompt")
    await _resolve(trial, agent, change, approve=True)
    await trial.me.call("run.cancel", run_id=agent["run_id"])
    (told,) = _payloads(await trial.me.events(agent["run_id"]), "prompt.modified")
    expect(told["approved_by"], "prompt.modified does not say who approved it.")


async def prompt_12_diff(trial: Trial) -> None:
    agent = await trial.agent(constitution__mutable_prompt="one\ntwo\nthree\n")
    await trial.ended(_rewrites("one\n2\nthree\n"), completes(), agent=agent)
    (entry,) = await _history(trial, agent["id"])
    lines = entry["diff"].splitlines()
    expect("-two" in lines and "+2" in lines, f"the diff should have -two and +2, it is {entry['diff']!r}.")
    expect(any(line.startswith("@@") for line in lines), "the diff has no line of @@.")


# -------------------------------------------------------------------- subagents


def spawn(*answers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A call that spawns a child which behaves like this; members of a block by `ceilings__max_cycles=1`."""
    args: dict[str, Any] = {
        "name": "child",
        "constitution": {
            "immutable_directives": "",
            "mutable_prompt": "Say ok.",
            "mutable_prompt_policy": "auto",
        },
        "toolset_subset": [],
        "initial_goal": "Reply with 'ok'.",
        "ceilings": dict(CHILD_CEILINGS),
        "budgets": dict(CHILD_BUDGETS),
        "metadata": {
            SCRIPT: {"answers": [as_it_stands(each) for each in answers] or [completes("child done")]}
        },
    }
    for name, value in changes.items():
        block, _, member = name.partition("__")
        if member:
            args[block][member] = value
        else:
            args[name] = value
    return tool("spawn_subagent", **args)


async def _child(trial: Trial, events: list[dict[str, Any]], place: int = 0) -> dict[str, Any]:
    told = _payloads(events, "subagent.spawned")
    if len(told) <= place:
        raise Failed(
            f"expected {place + 1} subagent.spawned, got {len(told)}: {_returned(events, 'spawn_subagent')}."
        )
    child = await trial.me.call("agent.get", agent_id=told[place]["child_agent_id"])
    assert isinstance(child, dict)
    return {**child, "run_id": told[place]["child_run_id"]}


async def spawn_01_told(trial: Trial) -> None:
    agent = await trial.agent()
    _, events = await trial.ended(calls(spawn()), completes(), agent=agent)
    child = await _child(trial, events)
    require_shape(child, "Agent", "the child")
    told = (
        child["parent_agent_id"],
        child["root_agent_id"],
        child["name"],
        child["ceilings"],
        child["budgets"],
    )
    same(told, (agent["id"], agent["id"], "child", CHILD_CEILINGS, CHILD_BUDGETS), "the child")
    run = await trial.me.call("run.get", run_id=child["run_id"])
    same((run["agent_id"], run["goal"]), (child["id"], "Reply with 'ok'."), "the child's run")
    same(_returned(events, "spawn_subagent")[0][0], True, "how the call came back")


async def _refused_spawns(trial: Trial, symbol: str, *made: dict[str, Any], **agent: Any) -> None:
    parent = await trial.agent(**agent)
    run, events = await trial.ended(calls(*made), completes("went on"), agent=parent)
    same((run["state"], run["result"]), ("complete", "went on"), "state and result")
    same(_returned(events, "spawn_subagent"), [(False, symbol)] * len(made), "how the calls came back")
    page = await trial.me.call("agent.list", parent_agent_id=parent["id"])
    same(page.get("items", page.get("agents")), [], "children")


async def spawn_02_toolset(trial: Trial) -> None:
    wider = spawn(toolset_subset=["helix.web_search", "helix.shell"])
    await _refused_spawns(trial, "tool_not_found", wider, toolset=["helix.web_search"])


async def spawn_03_headroom(trial: Trial) -> None:
    above = [spawn(ceilings={**CHILD_CEILINGS, name: value + 1}) for name, value in CEILINGS.items()]
    await _refused_spawns(trial, "ceiling_exceeded", *above)


async def spawn_04_counted(trial: Trial) -> None:
    agent = await trial.agent(ceilings__max_subagents=2)
    _, events = await trial.ended(calls(spawn(), spawn(), spawn()), completes(), agent=agent)
    told = [ok for ok, _ in _returned(events, "spawn_subagent")]
    same(told, [True, True, False], "three spawns under max_subagents 2")
    same(_returned(events, "spawn_subagent")[2][1], "ceiling_exceeded", "how the third came back")
    page = await trial.me.call("agent.list", parent_agent_id=agent["id"])
    same(len(page.get("items", page.get("agents"))), 2, "children")


async def spawn_05_none(trial: Trial) -> None:
    await _refused_spawns(trial, "ceiling_exceeded", spawn(), ceilings__max_subagents=0)


async def spawn_06_directives(trial: Trial) -> None:
    word, own = trial.word(), trial.word()
    agent = await trial.agent(constitution__immutable_directives=word)
    _, events = await trial.ended(
        calls(spawn(constitution__immutable_directives=own)), completes(), agent=agent
    )
    directives = (await _child(trial, events))["constitution"]["immutable_directives"]
    expect(word in directives and own in directives, f"the child's directives are {directives!r}.")


async def spawn_07_subjects(trial: Trial) -> None:
    subject = trial.subject()
    agent = await trial.agent(subject_ids=[subject])
    _, events = await trial.ended(calls(spawn()), completes(), agent=agent)
    child = await _child(trial, events)
    run = await trial.me.call("run.get", run_id=child["run_id"])
    same(
        (child["subject_ids"], run["subject_ids"]),
        ([subject], [subject]),
        "subjects of the child and its run",
    )


async def spawn_08_result(trial: Trial) -> None:
    word = trial.word()
    answers = (
        calls(spawn(completes({"found": word}))),
        NOTHING,
        calls(tool("inbox_read")),
        calls(tool("complete", result="${/cycle/results/0/messages}")),
    )
    run, events = await trial.ended(*answers)
    same((run["state"], run["cycle_count"]), ("complete", 2), "state and cycles of the parent")
    child = await _child(trial, events)
    same([each.get("from_agent_id") for each in run["result"]], [child["id"]], "who the parent heard from")
    expect(word in str(run["result"]), f"the child's result is not in {run['result']}.")


async def spawn_09_compounds(trial: Trial) -> None:
    agent = await trial.agent(ceilings__max_cycles=10)
    greedy = spawn(sleeps(), ceilings__max_cycles=7)
    _, events = await trial.ended(calls(greedy, greedy), completes(), agent=agent)
    told = _returned(events, "spawn_subagent")
    same([ok for ok, _ in told], [True, False], "two children of 7 cycles under max_cycles 10")
    same(told[1][1], "ceiling_exceeded", "how the second came back")


async def spawn_10_child_is_no_tree(trial: Trial) -> None:
    trial.require("self.spawn_subagent")
    _, events = await trial.ended(calls(spawn()), completes())
    where = {"tree_root_id": (await _child(trial, events))["id"], "namespace": "kit"}
    await trial.me.refused("tree_boundary_violation", "memory.read", **where)
    await trial.me.refused("tree_boundary_violation", "memory.write", **where, key="k", value=1)


async def spawn_11_cancel(trial: Trial) -> None:
    run = await trial.run(calls(spawn(sleeps())), sleeps())
    events = await trial.heard(run["id"], "subagent.spawned")
    child = await _child(trial, events)
    await trial.until(child["run_id"], "sleeping")
    await trial.me.call("run.cancel", run_id=run["id"])
    await trial.until(child["run_id"], "cancelled")


async def spawn_12_complete(trial: Trial) -> None:
    run = await trial.run(calls(spawn()), sleeps(), says("done"))
    child = await _child(trial, await trial.heard(run["id"], "subagent.spawned"))
    await trial.until(child["run_id"], "complete")
    read = await trial.me.call("agent.get", agent_id=child["id"])
    same(read["lifecycle_state"], "complete", "the state of a child whose only run is complete")
    await trial.stop(run["id"])


async def spawn_13_talk(trial: Trial) -> None:
    trial.require("self.spawn_subagent")
    body = trial.word()
    reads = (
        sleeps(),
        calls(tool("inbox_read")),
        calls(tool("complete", result="${/cycle/results/0/messages}")),
    )
    run = await trial.run(
        calls(spawn(*reads)),
        calls(tool("send_message", to_agent_id="${/results/0/child_agent_id}", body=body)),
        calls(tool("sleep", duration_seconds=AN_HOUR_S)),
    )
    events = await trial.heard(run["id"], "message.sent")
    child = await _child(trial, events)
    (sent,) = _payloads(events, "message.sent")
    same(sent["to_agent_id"], child["id"], "whom the message was for")
    heard = await trial.me.events(child["run_id"])
    (delivered,) = _payloads(heard, "message.delivered")
    same(delivered, {"from_agent_id": run["agent_id"], "message_id": sent["message_id"]}, "message.delivered")
    expect(body in str(heard[-1]["payload"]["result"]), "the child did not read what was sent.")
    await trial.stop(run["id"])


async def spawn_14_listed(trial: Trial) -> None:
    agent = await trial.agent()
    _, events = await trial.ended(calls(spawn()), completes(), agent=agent)
    child = await _child(trial, events)
    for filters, wanted in (
        ({"parent_agent_id": agent["id"]}, [child["id"]]),
        ({"root_agent_id": agent["id"]}, [child["id"], agent["id"]]),
        ({"root_agent_id": child["id"]}, []),
    ):
        page = await trial.me.call("agent.list", **filters)
        found = [each["id"] for each in page.get("items", page.get("agents"))]
        same(found, wanted, f"agent.list {filters}")
