"""Agents that spawn, as an embedder sees it: agents with a parent, events, and a result that comes back."""

from typing import Any, Final

import pytest
from tests.contract.embedder import SLEEPS_FOR_AN_HOUR, Embedder
from tests.contract.requirements import requirement
from tests.integration.wire import AGENT

from espalier_protocol.errors import ErrorCode

pytestmark = pytest.mark.anyio

CEILINGS: Final[dict[str, int]] = AGENT["ceilings"]
NOTHING: Final[dict[str, Any]] = {"text": ""}
READS: Final[dict[str, Any]] = {"calls": [{"tool": "inbox_read"}]}
TELLS: Final[dict[str, Any]] = {
    "calls": [{"tool": "complete", "args": {"result": "${/cycle/results/0/messages/0/body}"}}]
}
FOUND: Final[dict[str, Any]] = {"calls": [{"tool": "complete", "args": {"result": {"found": 42}}}]}


def spawn(*answers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    args = {
        "name": "helper",
        "constitution": {"immutable_directives": "Be kind.", "mutable_prompt": "Help."},
        "toolset_subset": [],
        "initial_goal": "help",
        "ceilings": {**CEILINGS, "max_cycles": 2, "max_subagents": 0, "max_wall_seconds": 60},
        "budgets": AGENT["budgets"],
        "metadata": {"espalier.script": {"answers": list(answers)}},
        **changes,
    }
    return {"calls": [{"tool": "spawn_subagent", "args": args}]}


async def payloads(embedder: Embedder, run: dict[str, Any], type_: str) -> list[dict[str, Any]]:
    return [event.payload for event in await embedder.events(run["id"]) if event.type == type_]


@requirement("AEP-SPAWN-01")
async def test_a_spawned_agent_belongs_to_its_tree(embedder: Embedder) -> None:
    run = await embedder.run([spawn(FOUND), NOTHING])

    (told,) = await payloads(embedder, run, "subagent.spawned")

    child = await embedder.client.agent.get(told["child_agent_id"])
    assert (child["parent_agent_id"], child["root_agent_id"]) == (run["agent_id"], run["agent_id"])
    assert child["constitution"]["immutable_directives"] == "Be brief.\n\nBe kind."
    assert (await embedder.client.run.get(told["child_run_id"]))["agent_id"] == child["id"]
    mine = {"root_agent_id": run["agent_id"]}
    assert [each["id"] for each in (await embedder.client.agent.list(**mine))["items"]] == [
        child["id"],
        run["agent_id"],
    ]


@requirement("AEP-SPAWN-02")
async def test_spawning_above_the_headroom_is_refused(embedder: Embedder) -> None:
    above = spawn(ceilings={**CEILINGS, "max_subagents": 0})
    run = await embedder.run([above, {"text": "went on"}])

    (trouble,) = await payloads(embedder, run, "error")

    assert (trouble["code"], trouble["symbol"]) == (ErrorCode.ceiling_exceeded, "ceiling_exceeded")
    assert [each["id"] for each in (await embedder.client.agent.list())["items"]] == [run["agent_id"]]
    assert (await embedder.client.run.get(run["id"]))["state"] == "complete"


@requirement("AEP-SPAWN-03")
async def test_a_helper_gets_no_tool_that_its_spawner_lacks(embedder: Embedder) -> None:
    run = await embedder.run([spawn(toolset_subset=["helix.shell"]), {"text": "went on"}])

    troubles = [(each["code"], each["symbol"]) for each in await payloads(embedder, run, "error")]

    # The agent's own toolset names a tool that this broker has not: that is told too.
    assert troubles[-1] == (ErrorCode.tool_not_found, "tool_not_found")
    returned = await payloads(embedder, run, "tool.returned")
    assert [each["result_summary"]["preview"].partition(":")[0] for each in returned] == ["tool_not_found"]


@requirement("AEP-SPAWN-04")
async def test_the_end_of_a_helper_wakes_its_spawner_with_the_result(embedder: Embedder) -> None:
    run = await embedder.run([spawn(FOUND), NOTHING, READS, TELLS])

    await embedder.events(run["id"])

    ended = await embedder.client.run.get(run["id"])
    told = ended["result"]
    assert (ended["cycle_count"], told["state"], told["result"]) == (2, "complete", {"found": 42})
    assert (await embedder.client.agent.get(told["child_agent_id"]))["lifecycle_state"] == "complete"


@requirement("AEP-SPAWN-05")
async def test_a_cancelled_run_takes_its_helpers_with_it(embedder: Embedder) -> None:
    run = await embedder.run([spawn(*SLEEPS_FOR_AN_HOUR), NOTHING])
    await embedder.until(run["id"], "sleeping")
    await embedder.client.run.cancel(run["id"])

    (told,) = await payloads(embedder, run, "subagent.spawned")

    await embedder.until(told["child_run_id"], "cancelled")
