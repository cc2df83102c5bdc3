"""Agents that rewrite their prompts, over the wire: plans that do it, and what is known of it afterwards."""

import json
from typing import Any

import anyio
from scripted_runs import entries_of
from tests.integration.wire import AGENT, ANSWER_WAIT_S, POLL_S, Gateway, Wire
from tests.integration.wire_runs import uuid

from espalier_protocol.ids import to_wire
from espalier_secrets import fingerprint

WIRE_PLANS = {"ESPALIER_MODELS_SCRIPTED": "on"}
GO_ON: dict[str, Any] = {"tool": "continue_now", "args": {}}
NAP: dict[str, Any] = {"tool": "sleep", "args": {"duration_seconds": 3600}}
DONE: dict[str, Any] = {"text": "done"}
ROOMY: dict[str, Any] = {
    "toolset": [],
    "ceilings": {**AGENT["ceilings"], "max_cycles": 20, "max_tool_calls_per_cycle": 50},
    "budgets": {**AGENT["budgets"], "tokens_per_cycle": 500_000, "tool_calls_per_cycle": 50},
}
Plan = list[dict[str, Any]]


def modify(content: Any, reason: Any = "why not", mode: Any = "replace", **more: Any) -> dict[str, Any]:
    return {"tool": "modify_own_prompt", "args": {"mode": mode, "content": content, "reason": reason, **more}}


def written(prompt: str, policy: str = "auto") -> dict[str, Any]:
    """What an agent is made with."""
    constitution = {**AGENT["constitution"], "mutable_prompt": prompt, "mutable_prompt_policy": policy}
    return {**ROOMY, "constitution": constitution}


async def once(wire: Wire, run_id: str, *states: str) -> dict[str, Any]:
    """The run as soon as it is in one of the states."""
    with anyio.fail_after(ANSWER_WAIT_S):
        while (run := await wire.call("run.get", run_id=run_id))["state"] not in states:
            await anyio.sleep(POLL_S)
    return dict(run)


async def lived(wire: Wire, agent_id: str, answers: Plan, state: str = "complete") -> str:
    """The id of a run of the agent that followed the plan until it was in that state."""
    run_id = await wire.run(agent_id, inputs={"espalier.script": {"answers": answers}})
    run = await once(wire, run_id, state, "complete", "error")
    assert run["state"] == state, run
    return run_id


async def answers_to(gateway: Gateway, run_id: str) -> list[tuple[bool, Any]]:
    """What the calls of modify_own_prompt answered: whether it was done, and the JSON or the sentence."""
    returned = [
        (entry["ok"], entry["content"])
        for entry in await entries_of(gateway.pool, run_id, "tool_returned")
        if entry["tool"] == "modify_own_prompt"
    ]
    return [(ok, json.loads(content) if ok else content) for ok, content in returned]


async def told(gateway: Gateway, run_id: str, *prefixes: str) -> list[tuple[str, dict[str, Any]]]:
    """(type, payload) of the run's events whose type begins so, in their order."""
    query = "select type, payload from events where run_id = $1 order by seq"
    rows = await gateway.pool.fetch(query, uuid("run", run_id))
    return [(row["type"], json.loads(row["payload"])) for row in rows if row["type"].startswith(prefixes)]


async def prompt_of(wire: Wire, agent_id: str) -> str:
    agent = await wire.call("agent.get", agent_id=agent_id)
    return str(agent["constitution"]["mutable_prompt"])


async def history_of(wire: Wire, agent_id: str) -> list[dict[str, Any]]:
    agent = await wire.call("agent.get", agent_id=agent_id, include=["prompt_history"])
    return list(agent["prompt_history"])


async def pending_of(wire: Wire, agent_id: str) -> list[dict[str, Any]]:
    agent = await wire.call("agent.get", agent_id=agent_id, include=["pending_prompt_changes"])
    return list(agent["pending_prompt_changes"])


async def key_of(gateway: Gateway, wire: Wire) -> str:
    """The wire id of the caller's key."""
    key_id = await gateway.pool.fetchval("select id from keys where key_hash = $1", fingerprint(wire.key))
    return to_wire("key", key_id)
