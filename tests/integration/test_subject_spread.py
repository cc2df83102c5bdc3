"""Subjects spread: a run that reads what is tagged is tagged, and so is what it says and asks afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Start, StartBroker, StartGateway
from tests.integration.tools import Ledger, calls, record

from espalier_client.client import AepClient
from espalier_protocol.agent import AgentCreate, AgentUpdate, Budgets, Ceilings, Constitution
from espalier_protocol.approval import ApprovalResolve
from espalier_protocol.ids import from_wire
from espalier_protocol.memory import MemoryWrite
from espalier_protocol.run import Run, RunCreate
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]

SUBJECT = "sub_spreading"


@pytest.fixture
async def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
async def client(
    start: Start, start_gateway: StartGateway, start_broker: StartBroker, api_key: str, ledger: Ledger
) -> Any:
    """An embedder of a runtime with a tool."""
    broker = await start_broker({"ledger": ledger.server()})
    start("worker", ESPALIER_MODELS_SCRIPTED="on", **broker.worker_settings)
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as opened:
        yield opened


async def agent_of(client: AepClient, **changes: Any) -> str:
    """An agent that is nobody's, with a tool, unless `changes` say so."""
    given: dict[str, Any] = {
        "name": "stranger",
        "constitution": Constitution(
            immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"
        ),
        "toolset": ["mcp.ledger.*"],
        "ceilings": Ceilings(
            max_cycles=50, max_subagents=4, max_tool_calls_per_cycle=20, max_wall_seconds=600
        ),
        "budgets": Budgets(tokens_per_cycle=500_000, tool_calls_per_cycle=20, seconds_per_cycle=120),
        **changes,
    }
    return (await client.agent_create(AgentCreate(**given))).id


async def ended(client: AepClient, agent_id: str, *answers: dict[str, Any]) -> Run:
    """A run of the agent that followed this plan and has completed."""
    inputs = {"espalier.script": {"answers": list(answers)}}
    run = await client.run_create(RunCreate(agent_id=agent_id, goal="read", inputs=inputs))
    done = await client.run_result(run.id)
    assert done.state == "complete", done
    return done


async def tagged_memory(client: AepClient, agent_id: str) -> None:
    await client.memory_write(
        MemoryWrite(tree_root_id=agent_id, namespace="n", key="k", value="theirs", subject_id=SUBJECT)
    )


def metas(ledger: Ledger) -> list[list[str]]:
    """Whom each call of the tool said that it was about."""
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    return [line["meta"]["subject_ids"] for line in lines if line["event"] == "called"]


@pytest.mark.parametrize(
    "reading",
    [
        ("learning_memory_read", {"namespace": "n"}),
        ("learning_memory_search", {"namespace": "n", "query": "theirs"}),
    ],
    ids=["read", "search"],
)
async def test_reading_memory_tags_the_run_and_what_it_asks_and_leaves_afterwards(
    client: AepClient, pool: Pool, ledger: Ledger, reading: tuple[str, dict[str, Any]]
) -> None:
    agent_id = await agent_of(client)
    await tagged_memory(client, agent_id)
    run = await ended(
        client,
        agent_id,
        calls(record("before"), ("continue_now", {})),
        calls(reading, ("continue_now", {})),
        calls(
            record("after"),
            ("artifact_create", {"name": "a", "content": "b"}),
            ("learning_memory_write", {"namespace": "own", "key": "k", "value": 1}),
            ("send_message", {"to_agent_id": agent_id, "body": "hello"}),
            ("complete", {"result": 1}),
        ),
    )
    assert run.subject_ids == [SUBJECT]
    assert metas(ledger) == [[], [SUBJECT]]
    found = await client.subject_read(SUBJECT)
    assert found.counts.model_dump() == {
        "agents": 0,
        "runs": 1,
        "artifacts": 1,
        "memory": 2,
        "messages": 1,
        "prompt_history": 0,
    }


async def test_reading_a_message_of_a_run_that_knows_tags_the_reader(client: AepClient, pool: Pool) -> None:
    agent_id = await agent_of(client)
    await tagged_memory(client, agent_id)
    tells = calls(("send_message", {"to_agent_id": agent_id, "body": "psst"}), ("complete", {"result": 1}))
    await ended(client, agent_id, calls(("learning_memory_read", {"namespace": "n"})), tells)
    reader = await ended(client, agent_id, calls(("inbox_read", {}), ("complete", {"result": 1})))
    assert reader.subject_ids == [SUBJECT]
    deaf = await ended(client, agent_id, calls(("complete", {"result": 1})))
    assert deaf.subject_ids == []


async def test_a_child_inherits_and_its_result_is_about_the_same_subjects(
    client: AepClient, pool: Pool
) -> None:
    agent_id = await agent_of(client, subject_ids=[SUBJECT])
    child = {
        "name": "child",
        "constitution": {"immutable_directives": "", "mutable_prompt": ""},
        "toolset_subset": [],
        "initial_goal": "help",
        "ceilings": {
            "max_cycles": 2,
            "max_subagents": 0,
            "max_tool_calls_per_cycle": 2,
            "max_wall_seconds": 60,
        },
        "budgets": {"tokens_per_cycle": 20_000, "tool_calls_per_cycle": 2, "seconds_per_cycle": 30},
    }
    waits = {"text": ""}
    reads = calls(("inbox_read", {}), ("complete", {"result": 1}))
    await ended(client, agent_id, calls(("spawn_subagent", child)), waits, reads)
    rows = await pool.fetch("select subject_ids from messages")
    assert [row["subject_ids"] for row in rows] == [[SUBJECT]]
    counts = (await client.subject_read(SUBJECT)).counts
    assert (counts.agents, counts.runs, counts.messages) == (2, 2, 1)


async def test_a_prompt_that_a_run_which_knows_wrote_makes_later_runs_know_and_goes_alone(
    client: AepClient, pool: Pool
) -> None:
    """The agent is nobody's: it keeps its name and its directives, and goes on."""
    directives = Constitution(
        immutable_directives="be kind", mutable_prompt="old", mutable_prompt_policy="auto"
    )
    agent_id = await agent_of(client, constitution=directives)
    await tagged_memory(client, agent_id)
    edit = {"mode": "replace", "content": "they like tea", "reason": "learned"}
    await ended(
        client,
        agent_id,
        calls(("learning_memory_read", {"namespace": "n"})),
        calls(("modify_own_prompt", edit), ("complete", {"result": 1})),
    )
    later = await ended(client, agent_id, {"text": "done"})
    assert later.subject_ids == [SUBJECT]
    done = await client.subject_erase(SUBJECT, "hard_delete")
    told = [(each.kind, each.id, each.reason) for each in done.redacted]
    assert told == [("agent", agent_id, "prompt_only")]
    agent = await client.agent_get(agent_id)
    assert (agent.name, agent.lifecycle_state) == ("stranger", "active")
    assert agent.constitution.immutable_directives == "be kind"
    assert agent.constitution.mutable_prompt == "[REDACTED]"
    assert await pool.fetchval("select count(*) from prompt_history") == 0
    assert (await ended(client, agent_id, {"text": "done"})).subject_ids == []


async def test_an_embedders_own_prompt_is_about_nobody(client: AepClient, pool: Pool) -> None:
    agent_id = await agent_of(client)
    await tagged_memory(client, agent_id)
    edit = {"mode": "replace", "content": "they like tea", "reason": "learned"}
    await ended(
        client,
        agent_id,
        calls(("learning_memory_read", {"namespace": "n"})),
        calls(("modify_own_prompt", edit), ("complete", {"result": 1})),
    )
    change = AgentUpdate.model_validate(
        {"agent_id": agent_id, "constitution": {"mutable_prompt": "be brief"}}
    )
    await client.agent_update(change)
    assert (await ended(client, agent_id, {"text": "done"})).subject_ids == []
    await client.subject_erase(SUBJECT, "redact")
    assert (await client.agent_get(agent_id)).constitution.mutable_prompt == "be brief"
    left = await pool.fetch("select diff from prompt_history where agent_id = $1", from_wire("agt", agent_id))
    assert "tea" not in str(left), "what was there before stands in the diff of the embedder's change too"


async def test_whoever_is_told_of_a_rejected_change_knows_whom_its_words_are_about(
    client: AepClient, pool: Pool
) -> None:
    """The run that proposed it has ended; another one of the agent is told instead."""
    policy = Constitution(
        immutable_directives="", mutable_prompt="", mutable_prompt_policy="approval_required"
    )
    agent_id = await agent_of(client, constitution=policy)
    await tagged_memory(client, agent_id)
    asleep = {"answers": [calls(("sleep", {"duration_seconds": 3600}))]}
    other = await client.run_create(
        RunCreate(agent_id=agent_id, goal="sleep", inputs={"espalier.script": asleep})
    )
    proposal = {"mode": "replace", "content": "theirs", "reason": "theirs"}
    await ended(
        client,
        agent_id,
        calls(("learning_memory_read", {"namespace": "n"}), ("continue_now", {})),
        calls(("modify_own_prompt", proposal), ("complete", {"result": 1})),
    )
    (waiting,) = (await client.approval_list()).items
    assert (await client.run_get(other.id)).subject_ids == []
    await client.approval_resolve(ApprovalResolve(approval_id=waiting.id, resolution="deny"))
    assert (await client.run_get(other.id)).subject_ids == [SUBJECT]


async def test_what_a_person_says_of_a_call_in_doubt_is_about_whom_the_run_knows_of(
    client: AepClient, pool: Pool, ledger: Ledger
) -> None:
    """The agent is nobody's: whoever reads the comment knows from then on, and an erasure finds it."""
    agent_id = await agent_of(client)
    inputs = {"espalier.script": {"answers": [calls(record("once", 60.0))]}}
    run = await client.run_create(
        RunCreate(agent_id=agent_id, goal="ask", inputs=inputs, subject_ids=[SUBJECT])
    )
    await ledger.until("called", "once")
    await client.run_cancel(run.id)
    await client.run_result(run.id)
    (waiting,) = (await client.approval_list()).items
    assert waiting.kind == "in_doubt"

    await client.approval_resolve(
        ApprovalResolve(approval_id=waiting.id, resolution="done", comment="they like tea")
    )

    (message,) = await pool.fetch("select subject_ids, body from messages")
    assert (message["subject_ids"], "they like tea" in message["body"]) == ([SUBJECT], True)
    reader = await ended(client, agent_id, calls(("inbox_read", {}), ("complete", {"result": 1})))
    assert reader.subject_ids == [SUBJECT]
    await client.subject_erase(SUBJECT, "hard_delete")
    assert await pool.fetchval("select count(*) from messages") == 0
    assert await pool.fetchval("select count(*) from approvals where comment is not null") == 0
