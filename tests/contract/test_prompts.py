"""Prompts, as an agent rewrites its own and the published client looks on, approves and refuses."""

from typing import Any

import pytest
from tests.contract.embedder import UNKNOWN, Embedder, refused
from tests.contract.requirements import requirement
from tests.integration.wire import AGENT

from espalier_protocol.errors import ErrorCode

pytestmark = pytest.mark.anyio

NEW = "Say nothing."
REASON = "Silence is shorter."
DIFF = (
    "--- before\n+++ after\n@@ -1 +1 @@\n-Say ok.\n\\ No newline at end of file\n"
    "+Say nothing.\n\\ No newline at end of file\n"
)
CHANGES_ITS_PROMPT_AND_SAYS_WHAT_IT_WAS_TOLD: list[dict[str, Any]] = [
    {
        "calls": [
            {"tool": "modify_own_prompt", "args": {"mode": "replace", "content": NEW, "reason": REASON}},
        ]
    },
    {"calls": [{"tool": "complete", "args": {"result": "${/results/0}"}}]},
]


async def lived(
    embedder: Embedder, policy: str
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]], Any]:
    """The agent after a run that would rewrite its prompt, what was heard of the run by type, its result."""
    constitution = {**AGENT["constitution"], "mutable_prompt_policy": policy}
    agent = await embedder.agent(constitution=constitution)
    run = await embedder.run(CHANGES_ITS_PROMPT_AND_SAYS_WHAT_IT_WAS_TOLD, agent_id=agent["id"])
    heard: dict[str, list[dict[str, Any]]] = {}
    for event in await embedder.events(run["id"]):
        heard.setdefault(event.type, []).append(event.payload)
    include = ["prompt_history", "pending_prompt_changes"]
    after = await embedder.client.agent.get(agent["id"], include=include)
    return after, heard, heard["run.ended"][0]["result"]


@requirement("AEP-PROMPT-01")
async def test_a_change_that_nobody_made_is_not_found(embedder: Embedder) -> None:
    agent = await embedder.agent()
    error = await refused(embedder.client.agent.approve_prompt_change(agent["id"], "pch_" + UNKNOWN, True))
    assert error.symbol == "tool_not_found"


@requirement("AEP-PROMPT-02")
async def test_under_auto_the_prompt_is_another_and_its_history_says_how(embedder: Embedder) -> None:
    agent, heard, result = await lived(embedder, "auto")
    (entry,) = agent["prompt_history"]
    assert agent["constitution"]["mutable_prompt"] == NEW
    told = {"diff": DIFF, "reason": REASON, "approved_by": None}
    assert entry == {"id": entry["id"], "agent_id": agent["id"], "applied_at": entry["applied_at"], **told}
    assert heard["prompt.modified"] == [told]
    assert result == {"applied": True, "history_entry_id": entry["id"]}


@requirement("AEP-PROMPT-03")
async def test_under_approval_a_change_waits_until_it_is_approved(embedder: Embedder) -> None:
    agent, heard, result = await lived(embedder, "approval_required")
    (queued,) = heard["prompt.change_queued"]
    change_id = queued["pending_change_id"]
    assert queued == {"pending_change_id": change_id, "diff": DIFF, "reason": REASON}
    assert result == {"queued": True, "pending_change_id": change_id}
    assert [change["id"] for change in agent["pending_prompt_changes"]] == [change_id]
    assert (agent["constitution"]["mutable_prompt"], agent["prompt_history"]) == ("Say ok.", [])

    told = await embedder.client.agent.approve_prompt_change(agent["id"], change_id, True, comment="fine")

    after = await embedder.client.agent.get(agent["id"], include=["prompt_history"])
    (entry,) = after["prompt_history"]
    assert told == {"applied": True, "history_entry_id": entry["id"]}
    assert (after["constitution"]["mutable_prompt"], entry["diff"]) == (NEW, DIFF)
    assert entry["approved_by"]
    again = await refused(embedder.client.agent.approve_prompt_change(agent["id"], change_id, True))
    assert again.symbol == "lifecycle_conflict"


@requirement("AEP-PROMPT-04")
async def test_a_rejected_change_is_not_applied(embedder: Embedder) -> None:
    agent, heard, _ = await lived(embedder, "approval_required")
    (queued,) = heard["prompt.change_queued"]
    told = await embedder.client.agent.approve_prompt_change(agent["id"], queued["pending_change_id"], False)
    assert told == {"applied": False}
    after = await embedder.client.agent.get(agent["id"], include=["prompt_history"])
    assert (after["constitution"]["mutable_prompt"], after["prompt_history"]) == ("Say ok.", [])


@requirement("AEP-PROMPT-05")
async def test_a_locked_prompt_stays_and_the_stream_has_the_code(embedder: Embedder) -> None:
    agent, heard, result = await lived(embedder, "locked")
    (error,) = heard["error"]
    code = ErrorCode.constitution_policy_violation
    assert (error["code"], error["symbol"]) == (code, code.name)
    assert str(result).startswith("constitution_policy_violation")
    assert (agent["constitution"]["mutable_prompt"], agent["prompt_history"]) == ("Say ok.", [])


@requirement("AEP-PROMPT-06")
async def test_an_embedder_changes_the_prompt_itself(embedder: Embedder) -> None:
    agent = await embedder.agent()
    changed = await embedder.client.agent.update(agent["id"], constitution={"mutable_prompt": NEW})
    expected = {**agent["constitution"], "mutable_prompt": NEW}
    assert changed["constitution"] == expected
    after = await embedder.client.agent.get(agent["id"], include=["prompt_history"])
    assert [entry["diff"] for entry in after["prompt_history"]] == [DIFF]
    assert after["prompt_history"][0]["approved_by"]


@requirement("AEP-AGENT-13")
async def test_directives_change_before_the_first_run_and_not_after_it(embedder: Embedder) -> None:
    agent = await embedder.agent()
    change = {"immutable_directives": "Be bold."}
    changed = await embedder.client.agent.update(agent["id"], constitution=change)
    assert changed["constitution"] == {**agent["constitution"], **change}
    await embedder.run(agent_id=agent["id"])
    back = {"immutable_directives": "Be brief."}
    error = await refused(embedder.client.agent.update(agent["id"], constitution=back))
    assert error.symbol == "lifecycle_conflict"
    assert (await embedder.client.agent.get(agent["id"]))["constitution"] == changed["constitution"]
