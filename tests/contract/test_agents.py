"""Agents, as the published client makes, reads, changes and retires them."""

import re

import pytest
from tests.contract.embedder import SLEEPS_FOR_AN_HOUR, THINKS_FOR_A_MINUTE, UNKNOWN, Embedder, refused
from tests.contract.pages import both_dialects_agree, walked
from tests.contract.requirements import requirement
from tests.integration.wire import AGENT

pytestmark = pytest.mark.anyio

MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@requirement("AEP-AGENT-01")
async def test_a_created_agent_is_what_was_sent_and_more(embedder: Embedder) -> None:
    sent = {**AGENT, "metadata": {"k": [1, None]}, "subject_ids": ["sub_abc"]}
    agent = await embedder.client.agent.create(**sent)
    assert {name: agent[name] for name in sent} == sent
    assert agent["id"].startswith("agt_") and len(agent["id"]) <= 64
    assert all(MOMENT.fullmatch(agent[name]) for name in ("created_at", "updated_at"))
    given = {
        name: agent[name] for name in ("lifecycle_state", "next_wake_at", "external_mcp_servers", "runner")
    }
    assert given == {
        "lifecycle_state": "active",
        "next_wake_at": None,
        "external_mcp_servers": [],
        "runner": None,
    }


@requirement("AEP-AGENT-02")
async def test_an_agent_that_nobody_spawned_is_its_own_root(embedder: Embedder) -> None:
    agent = await embedder.agent()
    assert (agent["root_agent_id"], agent["parent_agent_id"]) == (agent["id"], None)


@requirement("AEP-AGENT-03")
async def test_an_agent_is_read_back_with_its_history(embedder: Embedder) -> None:
    agent = await embedder.agent()
    assert await embedder.client.agent.get(agent["id"]) == agent
    told = await embedder.client.agent.get(agent["id"], include=["prompt_history"])
    assert told == {**agent, "prompt_history": []}


@requirement("AEP-AGENT-04")
async def test_an_agent_that_does_not_exist_is_not_found(embedder: Embedder) -> None:
    assert (await refused(embedder.client.agent.get("agt_" + UNKNOWN))).symbol == "tool_not_found"


@requirement("AEP-AGENT-05")
async def test_agents_are_found_page_by_page(embedder: Embedder) -> None:
    made = [await embedder.agent(name=f"agent {n}") for n in range(5)]
    assert await walked(embedder.client.agent.list, "items", "cursor") == made[::-1]


@requirement("AEP-AGENT-06")
async def test_agents_are_listed_in_both_dialects(embedder: Embedder) -> None:
    made = [await embedder.agent(name=f"agent {n}") for n in range(3)]
    assert await both_dialects_agree(embedder.client.agent.list, "agents")
    assert await walked(embedder.client.agent.list, "agents", "next_cursor") == made[::-1]


@requirement("AEP-AGENT-07")
async def test_an_update_changes_what_it_names_and_nothing_else(embedder: Embedder) -> None:
    agent = await embedder.agent(metadata={"k": 1})
    told = await embedder.client.agent.update(agent["id"], name="renamed")
    assert told == {**agent, "name": "renamed", "updated_at": told["updated_at"]}
    assert await embedder.client.agent.get(agent["id"]) == told


@requirement("AEP-AGENT-08")
async def test_ceilings_do_not_widen_under_a_live_run(embedder: Embedder) -> None:
    """Neither under one that thinks nor under one that sleeps; both live for longer than this test."""
    for answers, state in ((THINKS_FOR_A_MINUTE, "running"), (SLEEPS_FOR_AN_HOUR, "sleeping")):
        agent = await embedder.agent()
        run = await embedder.run(answers, agent_id=agent["id"])
        await embedder.until(run["id"], state)
        for name, value in agent["ceilings"].items():
            wider = {**agent["ceilings"], name: value + 1}
            error = await refused(embedder.client.agent.update(agent["id"], ceilings=wider))
            assert error.symbol == "lifecycle_conflict"
        assert (await embedder.client.run.get(run["id"]))["state"] == state, "it lived all the while"
        assert (await embedder.client.agent.get(agent["id"]))["ceilings"] == agent["ceilings"]


@requirement("AEP-AGENT-09")
async def test_ceilings_shrink_under_a_live_run(embedder: Embedder) -> None:
    agent = await embedder.agent()
    run = await embedder.run(THINKS_FOR_A_MINUTE, agent_id=agent["id"])
    narrower = {name: value - 1 for name, value in agent["ceilings"].items()}
    told = await embedder.client.agent.update(agent["id"], ceilings=narrower)
    assert (await embedder.client.run.get(run["id"]))["state"] == "running", "it lived all the while"
    assert told["ceilings"] == (await embedder.client.agent.get(agent["id"]))["ceilings"] == narrower


@requirement("AEP-AGENT-10")
async def test_cancelling_an_agent_ends_its_live_runs(embedder: Embedder) -> None:
    agent = await embedder.agent()
    thinks = await embedder.run(THINKS_FOR_A_MINUTE, agent_id=agent["id"])
    sleeps = await embedder.run(SLEEPS_FOR_AN_HOUR, agent_id=agent["id"])
    await embedder.until(sleeps["id"], "sleeping")
    told = await embedder.client.agent.cancel(agent["id"])
    closed = {"lifecycle_state": "cancelled", "updated_at": told["updated_at"], "ok": True}
    assert told == {**agent, **closed}
    ends = [(await embedder.events(run["id"]))[-1].payload["final_state"] for run in (thinks, sleeps)]
    assert ends == ["cancelled", "cancelled"]


@requirement("AEP-AGENT-11")
async def test_a_cancelled_agent_takes_no_new_run(embedder: Embedder) -> None:
    agent = await embedder.agent()
    await embedder.client.agent.cancel(agent["id"])
    assert (await refused(embedder.run(agent_id=agent["id"]))).symbol == "lifecycle_conflict"
    assert (await embedder.client.run.list(agent["id"]))["items"] == []


@requirement("AEP-AGENT-12")
async def test_an_archived_agent_can_still_be_read(embedder: Embedder) -> None:
    agent = await embedder.agent()
    told = await embedder.client.agent.archive(agent["id"])
    kept = {**agent, "lifecycle_state": "archived", "updated_at": told["updated_at"]}
    assert told == {**kept, "ok": True}
    assert await embedder.client.agent.get(agent["id"]) == kept
    assert (await embedder.client.agent.list())["items"] == [kept]
