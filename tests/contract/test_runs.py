"""Runs, as the published client starts, follows, continues and cancels them; and the published smoke."""

import pytest
from tests.contract.conftest import Runtime
from tests.contract.embedder import SLEEPS_FOR_AN_HOUR, Embedder, refused
from tests.contract.pages import both_dialects_agree, walked
from tests.contract.requirements import requirement

pytestmark = pytest.mark.anyio

SMOKE_EVENTS_MAX = 51


@requirement("AEP-RUN-01")
async def test_a_created_run_is_running_at_once(embedder: Embedder) -> None:
    agent = await embedder.agent()
    run = await embedder.client.run.create(agent["id"], "Say ok.", inputs={"a": 1}, subject_ids=["sub_abc"])
    assert run["id"].startswith("run_") and run["started_at"]
    told = ("agent_id", "goal", "state", "cycle_count", "result", "ended_at", "subject_ids", "metadata")
    assert {name: run[name] for name in told} == {
        "agent_id": agent["id"],
        "goal": "Say ok.",
        "state": "running",
        "cycle_count": 0,
        "result": None,
        "ended_at": None,
        "subject_ids": ["sub_abc"],
        "metadata": {"a": 1},
    }


@requirement("AEP-RUN-02")
async def test_a_run_ends_without_help(embedder: Embedder) -> None:
    events = await embedder.events((await embedder.run())["id"])
    assert events[-1].payload["final_state"] == "complete"
    assert events[-1].payload["result"]["final_message"] == "ok"


@requirement("AEP-RUN-03")
async def test_an_ended_run_tells_how_it_ended(embedder: Embedder) -> None:
    created = await embedder.run()
    events = await embedder.events(created["id"])
    run = await embedder.client.run.get(created["id"])
    end = {"state": "complete", "cycle_count": 1, "result": events[-1].payload["result"]}
    assert run == {**created, **end, "ended_at": run["ended_at"]}
    assert run["started_at"] <= run["ended_at"]


@requirement("AEP-RUN-04")
async def test_a_run_that_does_not_sleep_is_not_continued(embedder: Embedder) -> None:
    ended = await embedder.ended_run()
    assert (await refused(embedder.client.run.continue_(ended["id"]))).symbol == "lifecycle_conflict"
    assert await embedder.client.run.get(ended["id"]) == ended


@requirement("AEP-RUN-05")
async def test_runs_are_found_page_by_page(embedder: Embedder) -> None:
    agent = await embedder.agent()
    made = [(await embedder.run(agent_id=agent["id"]))["id"] for _ in range(5)]
    found = await walked(embedder.client.run.list, "items", "cursor", agent_id=agent["id"])
    assert [run["id"] for run in found] == made[::-1]


@requirement("AEP-RUN-06")
async def test_runs_are_listed_in_both_dialects(embedder: Embedder) -> None:
    agent = await embedder.agent()
    made = [(await embedder.run(agent_id=agent["id"]))["id"] for _ in range(3)]
    assert await both_dialects_agree(embedder.client.run.list, "runs", agent_id=agent["id"])
    found = await walked(embedder.client.run.list, "runs", "next_cursor", agent_id=agent["id"])
    assert [run["id"] for run in found] == made[::-1]


@requirement("AEP-RUN-07")
async def test_a_cancelled_run_ends_as_such(embedder: Embedder) -> None:
    run = await embedder.run(SLEEPS_FOR_AN_HOUR)
    await embedder.until(run["id"], "sleeping")
    told = await embedder.client.run.cancel(run["id"])
    assert told["state"] == "cancelled"
    assert told == {**await embedder.client.run.get(run["id"]), "ok": True}
    last = (await embedder.events(run["id"]))[-1]
    assert (last.type, last.payload["final_state"]) == ("run.ended", "cancelled")


@requirement("AEP-RUN-08")
async def test_a_sleeping_run_that_is_continued_wakes(embedder: Embedder) -> None:
    run = await embedder.run(SLEEPS_FOR_AN_HOUR)
    await embedder.until(run["id"], "sleeping")
    told = await embedder.client.run.continue_(run["id"])
    assert (told["id"], told["ok"]) == (run["id"], True)
    assert told.keys() == {*run, "ok"}
    events = await embedder.events(run["id"])
    ends = [event.payload["outcome"] for event in events if event.type == "cycle.ended"]
    assert ends == ["slept", "completed"]


@requirement("AEP-SMOKE-01")
async def test_the_smoke_of_the_protocol_passes(runtime: Runtime) -> None:
    """A stranger's first program: it knows one key, asks for what agents can do, and stops at the end."""
    embedder = await runtime.embedder()
    asked = ("self.modify_prompt", "self.spawn_subagent", "self.learning_memory", "messaging.peer")
    await embedder.client.initialize(["aep-2026-04-24"], dict.fromkeys((*asked, "streaming.sse"), True))
    agent = await embedder.agent(name="smoke")
    run = await embedder.client.run.create(agent["id"], "reply with 'ok'")
    events = await embedder.events(run["id"])
    assert events[-1].type == "run.ended" and len(events) <= SMOKE_EVENTS_MAX
