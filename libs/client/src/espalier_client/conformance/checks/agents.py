"""Agents: what they are, how they change, how they end."""

from typing import Any, Final

import anyio

from espalier_client.conformance.behaviour import sleeps, thinks
from espalier_client.conformance.checks.lists import (
    require_both_dialects,
    require_pages,
    require_unknown_cursors,
)
from espalier_client.conformance.expected import nobody, require_shape
from espalier_client.conformance.ground import BUDGETS, CEILINGS, POLL_S, Trial, agent_params
from espalier_client.conformance.verdicts import brief, expect, same
from espalier_client.conformance.wire import require_error, symbol_in

SOON_S: Final = 2.0
GROWN: Final = {name: value + 1 for name, value in CEILINGS.items()}


async def agent_01_created(trial: Trial) -> None:
    sent = agent_params(toolset=["helix.web_search"], metadata={"a": [1, None, {"ü": True}]})
    agent = await trial.me.call("agent.create", **sent)
    require_shape(agent, "Agent", "the agent")
    same({name: agent[name] for name in sent}, sent, "what was sent")
    same(agent["external_mcp_servers"], [], "external_mcp_servers")


async def agent_02_root(trial: Trial) -> None:
    agent = await trial.agent()
    told = (agent["root_agent_id"], agent["parent_agent_id"], agent["lifecycle_state"], agent["next_wake_at"])
    same(told, (agent["id"], None, "active", None), "root, parent, state and wake of a new agent")


async def agent_03_read_back(trial: Trial) -> None:
    agent = await trial.agent()
    same(await trial.me.call("agent.get", agent_id=agent["id"]), agent, "agent.get")
    read = await trial.me.call("agent.get", agent_id=agent["id"], include=["prompt_history"])
    same(read.get("prompt_history"), [], "the prompt history of a new agent")


async def agent_04_unknown(trial: Trial) -> None:
    for agent_id in (nobody("agt"), "nonsense", "", nobody("run")):
        for method, more in (
            ("agent.get", {}),
            ("agent.update", {"name": "x"}),
            ("agent.cancel", {}),
            ("agent.archive", {}),
            ("run.create", {"goal": "x"}),
            ("run.list", {}),
        ):
            await trial.me.refused("tool_not_found", method, agent_id=agent_id, **more)


async def _tagged(trial: Trial, count: int) -> tuple[str, list[str]]:
    """Agents that share a subject of their own, newest first."""
    subject = trial.subject()
    made = [(await trial.agent(subject_ids=[subject]))["id"] for _ in range(count)]
    return subject, made[::-1]


async def agent_05_pages(trial: Trial) -> None:
    subject, made = await _tagged(trial, 5)
    await require_pages(trial.me, "agent.list", made, "agents", subject_id=subject)


async def agent_06_dialects(trial: Trial) -> None:
    subject, _ = await _tagged(trial, 3)
    await require_both_dialects(trial.me, "agent.list", "agents", subject_id=subject)


async def agent_07_filters(trial: Trial) -> None:
    subject, (second, first) = await _tagged(trial, 2)
    await trial.me.call("agent.archive", agent_id=first)
    for filters, wanted in (
        ({"subject_id": subject}, [second, first]),
        ({"root_agent_id": first}, [first]),
        ({"subject_id": subject, "lifecycle_state": "archived"}, [first]),
        ({"subject_id": subject, "lifecycle_state": "active"}, [second]),
        ({"subject_id": subject, "root_agent_id": second, "lifecycle_state": "archived"}, []),
        ({"parent_agent_id": first}, []),
        ({"parent_agent_id": nobody("agt")}, []),
        ({"subject_id": trial.subject()}, []),
    ):
        page = await trial.me.call("agent.list", **filters)
        found = [each["id"] for each in page.get("items", page.get("agents"))]
        same(found, wanted, f"agent.list {brief(filters)}")


async def agent_08_unknown_cursor(trial: Trial) -> None:
    await require_unknown_cursors(trial.me, "agent.list", ["nonsense", nobody("agt"), ""])


async def agent_09_limits(trial: Trial) -> None:
    subject, made = await _tagged(trial, 2)
    page = await trial.me.call("agent.list", subject_id=subject, limit=1000)
    same([each["id"] for each in page.get("items", page.get("agents"))], made, "agent.list with limit 1000")
    for limit in (0, -1):
        await trial.me.refused("invalid_params", "agent.list", limit=limit)


async def agent_10_update(trial: Trial) -> None:
    before = await trial.agent(metadata={"kept": 1}, subject_ids=[trial.subject()])
    renamed = await trial.me.call("agent.update", agent_id=before["id"], name="renamed")
    same(renamed, {**before, "name": "renamed", "updated_at": renamed.get("updated_at")}, "after a rename")
    replaced = await trial.me.call("agent.update", agent_id=before["id"], metadata={"new": [2]})
    same(replaced["metadata"], {"new": [2]}, "metadata")
    same(replaced["name"], "renamed", "the name")
    same(await trial.me.call("agent.get", agent_id=before["id"]), replaced, "agent.get")
    expect(before["updated_at"] <= replaced["updated_at"], "updated_at went back.")


async def agent_11_in_part(trial: Trial) -> None:
    agent = await trial.agent()
    change = {"ceilings": {"max_cycles": 3}, "budgets": {"seconds_per_cycle": 7}}
    changed = await trial.me.call("agent.update", agent_id=agent["id"], **change)
    same(changed["ceilings"], {**CEILINGS, "max_cycles": 3}, "ceilings")
    same(changed["budgets"], {**BUDGETS, "seconds_per_cycle": 7}, "budgets")


async def agent_12_unknown_tools(trial: Trial) -> None:
    toolset = ["helix.web_search", "nobody.knows_this"]
    same((await trial.agent(toolset=toolset))["toolset"], toolset, "the toolset")


async def agent_13_minima(trial: Trial) -> None:
    zero = [name for name in CEILINGS if name != "max_subagents"]
    wrong: list[dict[str, Any]] = [agent_params(**{f"ceilings__{name}": 0}) for name in zero]
    wrong += [agent_params(**{f"budgets__{name}": 0}) for name in BUDGETS]
    wrong.append(agent_params(ceilings__max_subagents=-1))
    for block in ("ceilings", "budgets", "constitution"):
        whole = agent_params()[block]
        wrong += [
            agent_params(**{block: {key: value for key, value in whole.items() if key != name}})
            for name in whole
        ]
    wrong += [{k: v for k, v in agent_params().items() if k != name} for name in agent_params()]
    for params in wrong:
        answer = await trial.me.answer("agent.create", params)
        require_error(answer, "invalid_params", f"agent.create {brief(params)}")
    await trial.agent(ceilings__max_subagents=0)


async def agent_14_policy(trial: Trial) -> None:
    params = agent_params(constitution__mutable_prompt_policy="sometimes")
    require_error(await trial.me.answer("agent.create", params), "invalid_params", "a policy 'sometimes'")


async def agent_15_toolset(trial: Trial) -> None:
    agent = await trial.agent(toolset=["helix.web_search"])
    await trial.me.answer("agent.update", {"agent_id": agent["id"], "toolset": ["helix.shell"]})
    read = await trial.me.call("agent.get", agent_id=agent["id"])
    same(read["toolset"], ["helix.web_search"], "the toolset after an attempt to change it")


async def _cannot_grow(trial: Trial, agent: dict[str, Any]) -> None:
    for name, value in GROWN.items():
        change = {"agent_id": agent["id"], "ceilings": {**CEILINGS, name: value}}
        answer = await trial.me.answer("agent.update", change)
        require_error(answer, "lifecycle_conflict", f"widening {name} under a live run")
    read = await trial.me.call("agent.get", agent_id=agent["id"])
    same(read["ceilings"], CEILINGS, "the ceilings after attempts to widen them")


async def agent_16_no_growth_asleep(trial: Trial) -> None:
    agent = await trial.agent()
    run = await trial.run(sleeps(), agent=agent)
    await trial.until(run["id"], "sleeping")
    await _cannot_grow(trial, agent)
    await trial.me.call("run.cancel", run_id=run["id"])


async def agent_17_no_growth_awake(trial: Trial) -> None:
    agent = await trial.agent()
    run = await trial.run(thinks(), agent=agent)
    await _cannot_grow(trial, agent)
    await trial.me.call("run.cancel", run_id=run["id"])


async def agent_18_shrink(trial: Trial) -> None:
    agent = await trial.agent()
    run = await trial.run(sleeps(), agent=agent)
    await trial.until(run["id"], "sleeping")
    less = {name: value - 1 for name, value in CEILINGS.items()}
    changed = await trial.me.call("agent.update", agent_id=agent["id"], ceilings=less)
    same(changed["ceilings"], less, "the ceilings after they shrank")
    await trial.me.call("run.cancel", run_id=run["id"])


async def agent_19_idle_growth(trial: Trial) -> None:
    agent = await trial.agent()
    await trial.ended(agent=agent)
    changed = await trial.me.call("agent.update", agent_id=agent["id"], ceilings=GROWN)
    same(changed["ceilings"], GROWN, "the ceilings of an idle agent")


async def agent_20_directives(trial: Trial) -> None:
    agent = await trial.agent()
    change = {"agent_id": agent["id"], "constitution": {"immutable_directives": "Be kind."}}
    changed = await trial.me.call("agent.update", **change)
    wanted = {**agent["constitution"], "immutable_directives": "Be kind."}
    same(changed["constitution"], wanted, "the constitution before the first run")
    await trial.ended(agent=agent)
    again = {"agent_id": agent["id"], "constitution": {"immutable_directives": "Be bold."}}
    require_error(await trial.me.answer("agent.update", again), "lifecycle_conflict", "new directives")
    read = await trial.me.call("agent.get", agent_id=agent["id"])
    same(read["constitution"], wanted, "the constitution after the first run")


async def agent_21_policy_changes(trial: Trial) -> None:
    agent = await trial.agent()
    await trial.ended(agent=agent)
    change = {"agent_id": agent["id"], "constitution": {"mutable_prompt_policy": "locked"}}
    changed = await trial.me.call("agent.update", **change)
    same(changed["constitution"], {**agent["constitution"], **change["constitution"]}, "the constitution")


async def agent_22_cancel(trial: Trial) -> None:
    agent = await trial.agent()
    asleep = await trial.run(sleeps(), agent=agent)
    await trial.until(asleep["id"], "sleeping")
    told = await trial.me.call("agent.cancel", agent_id=agent["id"])
    require_shape(told, "Agent", "the answer of agent.cancel")
    same((told["lifecycle_state"], told.get("ok")), ("cancelled", True), "state and ok")
    run = await trial.until(asleep["id"], "cancelled")
    expect(run["ended_at"], "the cancelled run has no ended_at.")


async def agent_23_no_new_run(trial: Trial) -> None:
    for method in ("agent.cancel", "agent.archive"):
        agent = await trial.agent()
        await trial.me.call(method, agent_id=agent["id"])
        await trial.me.refused("lifecycle_conflict", "run.create", agent_id=agent["id"], goal="x")


async def agent_24_archive(trial: Trial) -> None:
    subject, (agent_id,) = await _tagged(trial, 1)
    told = await trial.me.call("agent.archive", agent_id=agent_id)
    require_shape(told, "Agent", "the answer of agent.archive")
    same((told["lifecycle_state"], told.get("ok")), ("archived", True), "state and ok")
    read = await trial.me.call("agent.get", agent_id=agent_id)
    same(read["lifecycle_state"], "archived", "its state")
    page = await trial.me.call("agent.list", subject_id=subject)
    same([each["id"] for each in page.get("items", page.get("agents"))], [agent_id], "agent.list")


async def agent_25_again(trial: Trial) -> None:
    for method in ("agent.cancel", "agent.archive"):
        agent = await trial.agent()
        for _ in range(2):
            await trial.me.call(method, agent_id=agent["id"])
    cancelled = await trial.agent()
    await trial.me.call("agent.cancel", agent_id=cancelled["id"])
    await trial.me.call("agent.archive", agent_id=cancelled["id"])


async def agent_26_sleeping(trial: Trial) -> None:
    agent = await trial.agent()
    run = await trial.run(sleeps(), agent=agent)
    await trial.until(run["id"], "sleeping")
    read = await trial.me.call("agent.get", agent_id=agent["id"])
    require_shape(read, "Agent", "the agent")
    same(read["lifecycle_state"], "sleeping", "the state of an agent whose run sleeps")
    expect(read["next_wake_at"], "a sleeping agent has no next_wake_at.")
    await trial.me.call("run.cancel", run_id=run["id"])
    read = await trial.me.call("agent.get", agent_id=agent["id"])
    same((read["lifecycle_state"], read["next_wake_at"]), ("active", None), "state and wake afterwards")


async def agent_27_active_again(trial: Trial) -> None:
    agent = await trial.agent()
    await trial.ended(agent=agent)
    read = await trial.me.call("agent.get", agent_id=agent["id"])
    same(read["lifecycle_state"], "active", "the state after a complete run")


async def agent_28_error(trial: Trial) -> None:
    agent = await trial.agent()
    fault = {"fault": {"reason": "as the script says", "retryable": False}}
    run, _ = await trial.ended(fault, agent=agent)
    same(run["state"], "error", "the state of a run whose model failed")
    read = await trial.me.call("agent.get", agent_id=agent["id"])
    same(read["lifecycle_state"], "error", "the state after a failed run")
    await trial.ended(agent=agent)
    with anyio.fail_after(SOON_S):
        while (await trial.me.call("agent.get", agent_id=agent["id"]))["lifecycle_state"] != "active":
            await anyio.sleep(POLL_S)


async def agent_29_idempotency(trial: Trial) -> None:
    subject, key = trial.subject(), trial.word()
    headers = trial.me.headers(Idempotency_Key=key)
    answers = [
        await trial.me.answer("agent.create", agent_params(subject_ids=[subject]), headers) for _ in range(2)
    ]
    told = [symbol_in(answer) for answer in answers]
    page = await trial.me.call("agent.list", subject_id=subject)
    made = [each["id"] for each in page.get("items", page.get("agents"))]
    if told[0] != "result":
        same(made, [], "agents made by a refused create")
        return
    same(told, ["result", "result"], "both creates")
    same([answer["result"]["id"] for answer in answers], made * 2, "the agent that both creates answer")
    other = await trial.me.answer("agent.create", agent_params(name="other"), headers)
    require_error(other, "invalid_params", "the same key with other params")
