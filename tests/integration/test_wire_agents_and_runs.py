"""What the methods of agents and runs answer, and what they leave behind."""

import anyio
import pytest
from tests.integration.wire import AGENT, POLL_S, Gateway, Wire, request, symbol
from tests.integration.wire_runs import event_types, lease

from espalier_gateway import cancels
from espalier_protocol.errors import ErrorCode

pytestmark = pytest.mark.anyio

WAIT_S = 15.0


async def test_a_created_agent_comes_back_whole(wire: Wire) -> None:
    sent = {**AGENT, "metadata": {"k": [1, {"deep": None}], "ä": "\u2028"}, "subject_ids": ["sub_abc"]}
    made = await wire.call("agent.create", **sent)
    assert made == await wire.call("agent.get", agent_id=made["id"])
    assert {name: made[name] for name in sent} == sent
    assert {name: value for name, value in made.items() if name not in sent} == {
        "id": made["id"],
        "root_agent_id": made["id"],
        "parent_agent_id": None,
        "lifecycle_state": "active",
        "next_wake_at": None,
        "external_mcp_servers": [],
        "runner": None,
        "max_live_runs": 8,
        "created_at": made["created_at"],
        "updated_at": made["created_at"],
    }
    more = await wire.call(
        "agent.get", agent_id=made["id"], include=["prompt_history", "pending_prompt_changes"]
    )
    assert more == {**made, "prompt_history": [], "pending_prompt_changes": []}


async def test_a_created_run_is_running_has_started_and_is_rung_for(wire: Wire, gateway: Gateway) -> None:
    agent_id = await wire.agent(subject_ids=["sub_a"])
    run = await wire.call("run.create", agent_id=agent_id, goal="g", inputs={"a": 1}, subject_ids=["sub_b"])
    assert run == await wire.call("run.get", run_id=run["id"])
    assert run == {
        "id": run["id"],
        "agent_id": agent_id,
        "goal": "g",
        "state": "running",
        "started_at": run["started_at"],
        "ended_at": None,
        "cycle_count": 0,
        "result": None,
        "subject_ids": ["sub_a", "sub_b"],
        "metadata": {"a": 1},
        "wait_reason": None,
        "next_wake_at": None,
        "cancel_requested_at": None,
    }
    assert await event_types(gateway.pool, run["id"]) == ["run.started"]
    with anyio.fail_after(WAIT_S):  # the publisher has taken it to Redis, so the outbox forgets it
        while await gateway.pool.fetchval("select count(*) from outbox"):
            await anyio.sleep(POLL_S)


async def test_a_run_is_refused_beyond_the_agents_live_runs_and_nothing_is_left(
    wire: Wire, gateway: Gateway
) -> None:
    agent_id = await wire.agent(max_live_runs=1)
    await wire.run(agent_id)
    before = await gateway.rows()
    error = await wire.refused("run.create", agent_id=agent_id, goal="g")
    assert (error["code"], error["data"]["symbol"]) == (ErrorCode.lifecycle_conflict, "lifecycle_conflict")
    assert await gateway.rows() == before


async def test_cancelling_a_run_that_nobody_holds_ends_it_at_once(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    run = await wire.call("run.cancel", run_id=run_id)
    assert (run["state"], run["ok"], run["ended_at"] is not None) == ("cancelled", True, True)
    assert await event_types(gateway.pool, run_id) == ["run.started", "run.ended"]
    assert await wire.call("run.cancel", run_id=run_id) == run, "a second cancel changes nothing"
    assert await event_types(gateway.pool, run_id) == ["run.started", "run.ended"]


async def test_cancelling_a_finished_run_is_a_conflict(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    await gateway.pool.execute("update runs set state = 'complete', ended_at = now()")
    for method in ("run.cancel", "run.continue"):
        assert symbol(await wire.answer(method, {"run_id": run_id})) == "lifecycle_conflict"


@pytest.mark.slow
async def test_cancelling_a_held_run_raises_the_flag_and_answers_the_run_as_it_stands(
    wire: Wire, gateway: Gateway
) -> None:
    run_id = await wire.run()
    token = await lease(gateway.pool, run_id)
    run = await wire.call("run.cancel", run_id=run_id)
    assert (run["state"], run["ok"], run["cancel_requested_at"] is not None) == ("running", True, True)
    assert await gateway.pool.fetchval("select lease_token from runs") == token


async def test_a_cancel_that_the_holder_ignores_is_forced_over_its_head(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancels, "FORCE_AFTER_S", 0.1)
    run_id = await wire.run()
    token = await lease(gateway.pool, run_id)
    run = await wire.call("run.cancel", run_id=run_id)
    assert (run["state"], run["ok"]) == ("cancelled", True), "within the two seconds that the answer waits"
    assert await event_types(gateway.pool, run_id) == ["run.started", "run.ended"]
    assert await gateway.pool.fetchval("select lease_token from runs") > token


async def test_continue_wakes_a_sleeper_and_nobody_else(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    assert symbol(await wire.answer("run.continue", {"run_id": run_id})) == "lifecycle_conflict"
    asleep = "update runs set state = 'sleeping', wait_reason = $1, due_at = now() + interval '1 hour'"
    await gateway.pool.execute(asleep, "timer")
    seen = await wire.call("run.get", run_id=run_id)
    assert (seen["state"], seen["wait_reason"], seen["next_wake_at"] is not None) == (
        "sleeping",
        "timer",
        True,
    )
    woken = await wire.call("run.continue", run_id=run_id)
    assert (woken["state"], woken["wait_reason"], woken["next_wake_at"], woken["ok"]) == (
        "running",
        None,
        None,
        True,
    )
    await gateway.pool.execute(asleep, "approval")
    assert symbol(await wire.answer("run.continue", {"run_id": run_id})) == "lifecycle_conflict"


async def test_lists_are_newest_first_in_both_dialects_and_page_without_gaps(wire: Wire) -> None:
    agents = [await wire.agent() for _ in range(5)]
    runs = [await wire.run(agents[0]) for _ in range(5)]
    for method, params, member, made in (
        ("agent.list", {}, "agents", agents),
        ("run.list", {"agent_id": agents[0]}, "runs", runs),
    ):
        pages, cursor = [], None
        for _ in made:
            page = await wire.call(method, **params, limit=2, **({"cursor": cursor} if cursor else {}))
            assert page["items"] == page[member] and page["cursor"] == page["next_cursor"]
            pages.append([item["id"] for item in page["items"]])
            if (cursor := page["cursor"]) is None:
                break
        newest_first = made[::-1]
        assert pages == [newest_first[:2], newest_first[2:4], newest_first[4:]]
        whole = await wire.call(method, **params, limit=10_000)
        assert ([item["id"] for item in whole["items"]], whole["cursor"]) == (newest_first, None)
        exact = await wire.call(method, **params, limit=5)
        assert exact["cursor"] is None, "a page that is exactly full is the last"
        assert symbol(await wire.answer(method, {**params, "limit": 0})) == "invalid_params"


async def test_agents_are_filtered(wire: Wire, gateway: Gateway) -> None:
    first, second = await wire.agent(subject_ids=["sub_a"]), await wire.agent()
    await wire.run(second)
    await gateway.pool.execute("update runs set state = 'sleeping', wait_reason = 'timer'")
    told = {
        name: [agent["id"] for agent in (await wire.call("agent.list", **params))["items"]]
        for name, params in {
            "root": {"root_agent_id": first},
            "parent": {"parent_agent_id": first},
            "active": {"lifecycle_state": "active"},
            "sleeping": {"lifecycle_state": "sleeping"},
            "subject": {"subject_id": "sub_a"},
            "malformed": {"root_agent_id": "x"},
        }.items()
    }
    assert told == {
        "root": [first],
        "parent": [],
        "active": [first],
        "sleeping": [second],
        "subject": [first],
        "malformed": [],
    }


async def test_a_page_of_large_items_is_shorter_and_says_that_more_follow(wire: Wire) -> None:
    made = [await wire.agent(metadata={"note": "x" * 400_000}) for _ in range(5)]
    seen: list[str] = []
    pages, page = 0, {"cursor": None}
    while pages == 0 or page["cursor"]:
        page = await wire.call("agent.list", cursor=page["cursor"])
        seen += [agent["id"] for agent in page["items"]]
        pages += 1
    assert seen == made[::-1]
    assert pages == 2


async def test_a_batch_stops_answering_when_its_response_is_full(wire: Wire) -> None:
    for _ in range(2):
        await wire.agent(metadata={"note": "x" * 480_000})
    listing = [request("agent.list", request_id=number) for number in range(20)]
    answers = (await wire.post(listing)).json()
    told = [symbol(answer) for answer in answers]
    assert [answer["id"] for answer in answers] == list(range(20))
    assert told == ["result"] * told.count("result") + ["internal_error"] * told.count("internal_error")
    assert answers[-1]["error"]["data"]["symbol"] == "unavailable"
