"""Helpers: what a spawner gives them, how it hears of their end, and what comes back to it.

With real workers, a gateway process and scripted agents; the statement that grants is also raced by itself.
"""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from families import (
    GOES_ON,
    HELPER,
    READ,
    READS,
    SLEEPS,
    WAITS,
    all_ended,
    asleep,
    children,
    ended,
    make_spawner,
    returned,
    spawn,
    until,
)
from forked import Service
from invariants import violations
from scripted_runs import DONE, log_of, row_of, start_run
from tests.integration.conftest import Start, StartGateway

from espalier_acts.runs import cancel_run
from espalier_client.client import AepClient
from espalier_domain.trees import EXCERPT_CHARS_MAX
from espalier_protocol.agent import AgentDone, AgentRef
from espalier_protocol.ids import to_wire
from espalier_protocol.message import Inbox, Message, MessageInbox, MessageSend
from espalier_protocol.run import RunCreate, RunDone, RunRef
from espalier_store.pool import Pool, transaction

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ON = {"ESPALIER_MODELS_SCRIPTED": "on"}
FINISHES = {"calls": [{"tool": "complete", "args": {"result": {"found": 42}}}]}


@pytest.fixture
async def client(start_gateway: StartGateway, api_key: str) -> AsyncIterator[AepClient]:
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as opened:
        yield opened


@pytest.fixture
def worker(start: Start) -> Service:
    return start("worker", **ON)


def types(log: list[tuple[int, str, Any]]) -> list[str]:
    return [type_ for _, type_, _ in log]


async def test_a_helper_works_while_its_spawner_waits_and_its_result_wakes_the_spawner_once(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client)
    plan = [{"calls": [spawn([FINISHES])]}, WAITS, READS, DONE]
    run = await start_run(client, plan, agent.id)

    row = await ended(pool, run.id)
    (child,) = await children(pool, run.id)

    assert (row["state"], row["cycle_count"], row["wake_seq"]) == ("complete", 2, 1)
    assert (child["state"], child["result"], child["depth"]) == ("complete", {"found": 42}, 1)
    child_run, child_agent = to_wire("run", child["id"]), to_wire("agt", child["agent_id"])
    told = await log_of(pool, run.id)
    assert types(told) == [
        *["run.started", "cycle.started", "tool.called", "tool.returned", "subagent.spawned", "cycle.ended"],
        *["cycle.started", "tool.called", "tool.returned", "message.delivered", "cycle.ended", "run.ended"],
    ]
    ids = {"child_agent_id": child_agent, "child_run_id": child_run}
    assert told[4][2] == ids
    assert (await returned(pool, run.id, "spawn_subagent")) == [ids]
    assert told[5][2]["outcome"] == "slept"
    (message,) = (await returned(pool, run.id, "inbox_read"))[0]["messages"]
    result = {"type": "subagent_result", **ids, "state": "complete", "result": {"found": 42}}
    assert (message["from_agent_id"], message["body"]) == (child_agent, result)
    log_of_child = await log_of(pool, child_run)
    assert types(log_of_child) == [
        *["run.started", "cycle.started", "tool.called", "tool.returned", "cycle.ended"],
        *["message.sent", "run.ended"],
    ]
    assert log_of_child[0][2] == {"run_id": child_run, "agent_id": child_agent}
    assert log_of_child[-2][2] == {"to_agent_id": agent.id, "message_id": message["id"]}
    assert await violations(pool) == {}


async def test_a_helper_inherits_its_tree_its_directives_its_subjects_and_no_more_than_was_given(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client, subject_ids=["sub_of_agent"])
    given = {"name": "scribe", "metadata": {"espalier.script": {"answers": [SLEEPS]}, "k": [1]}}
    order = RunCreate(
        agent_id=agent.id,
        goal="g",
        inputs={"espalier.script": {"answers": [{"calls": [spawn([], **given)]}, SLEEPS]}},
        subject_ids=["sub_of_run"],
    )
    run = await client.run_create(order)
    await asleep(pool, run.id, cycles=1)
    (child,) = await children(pool, run.id)

    helper = await client.agent_get(to_wire("agt", child["agent_id"]))
    wanted = spawn([], **given)["args"]

    assert helper.model_dump() == {
        **helper.model_dump(),
        "name": "scribe",
        "constitution": {
            "immutable_directives": "Harm nobody.\n\nBe brief.",
            "mutable_prompt": "Help.",
            "mutable_prompt_policy": "auto",
        },
        "toolset": [],
        "ceilings": wanted["ceilings"],
        "budgets": wanted["budgets"],
        "root_agent_id": agent.id,
        "parent_agent_id": agent.id,
        "subject_ids": ["sub_of_agent", "sub_of_run"],
        "metadata": given["metadata"],
        "external_mcp_servers": [],
        "runner": None,
        "max_live_runs": agent.max_live_runs,
    }
    row = await row_of(pool, run.id)
    assert {name: child[name] for name in ("root_id", "parent_id", "depth", "goal", "inputs")} == {
        "root_id": row["id"],
        "parent_id": row["id"],
        "depth": 1,
        "goal": "help",
        "inputs": {},
    }
    assert child["subject_ids"] == ["sub_of_agent", "sub_of_run"]
    assert {name: child[name] for name in HELPER} == HELPER
    assert child["wall_at"] - child["created_at"] == timedelta(seconds=HELPER["max_wall_seconds"])


async def test_several_helpers_work_at_once_and_each_end_wakes_the_spawner_once(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client)
    slow = [{**FINISHES, "delay_s": 1.0}]
    plan = [{"calls": [spawn([FINISHES]), spawn(slow)]}, WAITS, READS, WAITS, READS, DONE]
    run = await start_run(client, plan, agent.id)

    row = await ended(pool, run.id)

    first, second = await children(pool, run.id)
    assert second["created_at"] - first["created_at"] < timedelta(seconds=0.5), "they were begun in one step"
    assert (row["state"], row["cycle_count"], row["wake_seq"]) == ("complete", 3, 2)
    read = [
        [m["from_agent_id"] for m in one["messages"]] for one in await returned(pool, run.id, "inbox_read")
    ]
    assert read == [[to_wire("agt", each["agent_id"])] for each in (first, second)]
    assert await violations(pool) == {}


async def test_a_helper_that_ends_before_its_spawner_waits_is_not_missed(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client)
    run = await start_run(
        client, [{"calls": [spawn([FINISHES])]}, {**WAITS, "delay_s": 1.5}, READS, DONE], agent.id
    )

    row = await ended(pool, run.id)

    assert (row["state"], row["cycle_count"]) == ("complete", 2)
    (child,) = await children(pool, run.id)
    begun = "select created_at from journal where run_id = $1 and body ->> 'kind' = 'cycle_started'"
    first, second = [each["created_at"] for each in await pool.fetch(f"{begun} order by entry_no", row["id"])]
    assert child["ended_at"] < second < first + timedelta(seconds=10)
    assert [len(one["messages"]) for one in await returned(pool, run.id, "inbox_read")] == [1]


async def test_an_empty_answer_waits_for_a_child_while_one_lives_and_else_for_a_message(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client)
    tells = {"tool": "send_message", "args": {"to_agent_id": agent.id, "body": "to myself"}}
    plans = {
        "child": [{"calls": [spawn([SLEEPS])]}, WAITS],
        "message": [{"calls": [tells, READ]}, WAITS],
        "timer": [WAITS],
    }
    runs = {reason: await start_run(client, plan, agent.id) for reason, plan in plans.items()}

    rows = {reason: await asleep(pool, run.id, cycles=1) for reason, run in runs.items()}

    assert {reason: row["wait_reason"] for reason, row in rows.items()} == {
        reason: reason for reason in plans
    }
    assert {reason: row["due_at"] == row["wall_at"] for reason, row in rows.items()} == {
        "child": True,
        "message": True,
        "timer": False,
    }
    outcomes = {reason: (await log_of(pool, run.id))[-1][2]["outcome"] for reason, run in runs.items()}
    assert outcomes == {"child": "slept", "message": "slept", "timer": "forced_sleep"}
    assert (await client.run_get(runs["child"].id)).wait_reason == "child"


async def test_a_spawner_that_waits_for_a_child_is_woken_by_a_message_and_can_be_continued(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client)
    run = await start_run(client, [{"calls": [spawn([SLEEPS])]}, WAITS, READS, WAITS, WAITS], agent.id)
    await asleep(pool, run.id, cycles=1)

    await client.call("message.send", MessageSend(to_agent_id=agent.id, body="hello"), Message)
    row = await asleep(pool, run.id, cycles=2)
    assert [m["body"] for m in (await returned(pool, run.id, "inbox_read"))[0]["messages"]] == ["hello"]
    assert row["wait_reason"] == "child", "the child lives, so that it goes on waiting for it"
    await client.call("run.continue", RunRef(run_id=run.id), RunDone)
    assert (await asleep(pool, run.id, cycles=3))["wait_reason"] == "child"


# ------------------------------------------------------------------ every way in which a helper may end

FAILS = {"fault": {"reason": "quota", "retryable": False}}


async def _cancelled(client: AepClient, pool: Pool, child: Any) -> None:
    await client.call("run.cancel", RunRef(run_id=to_wire("run", child["id"])), RunDone)


async def _forced(client: AepClient, pool: Pool, child: Any) -> None:
    """Somebody holds it who does not answer."""
    await pool.execute("update runs set lease_until = now() + interval '1 hour' where id = $1", child["id"])
    async with transaction(pool) as connection:
        assert await cancel_run(connection, child["owner_id"], child["id"], force=True)


async def _poisoned(client: AepClient, pool: Pool, child: Any) -> None:
    lapsed = "expired_claims = 2, lease_until = now() - interval '1 s', due_at = now()"
    await pool.execute(f"update runs set {lapsed} where id = $1", child["id"])


async def _left_alone(client: AepClient, pool: Pool, child: Any) -> None: ...


CANCELLED = {"reason": "cancelled"}
POISONED = {"reason": "poison: 3 claims of the run came to nothing"}


@pytest.mark.parametrize(
    ("answer", "ceilings", "end", "state", "result"),
    [
        pytest.param(FAILS, {}, _left_alone, "error", {"reason": "model_failed:quota"}, id="its model fails"),
        pytest.param(
            SLEEPS, {"max_wall_seconds": 1}, _left_alone, "error",
            {"reason": "ceiling_exceeded:max_wall_seconds"}, id="its time is over",
        ),
        pytest.param(SLEEPS, {}, _cancelled, "cancelled", CANCELLED, id="it is cancelled"),
        pytest.param(SLEEPS, {}, _forced, "cancelled", CANCELLED, id="its cancel is forced"),
        pytest.param(SLEEPS, {}, _poisoned, "error", POISONED, id="it is poison"),
    ],
)  # fmt: skip
async def test_however_a_helper_ends_its_spawner_is_told_once_and_gets_back_what_is_left(
    client: AepClient,
    worker: Service,
    pool: Pool,
    answer: Any,
    ceilings: Any,
    end: Any,
    state: str,
    result: Any,
) -> None:
    agent = await make_spawner(client)
    plan = [{"calls": [spawn([answer], ceilings=ceilings)]}, WAITS, READS, SLEEPS]
    run = await start_run(client, plan, agent.id)
    await begun(pool, run.id)
    (child,) = await children(pool, run.id)
    if end is not _left_alone:
        await asleep(pool, to_wire("run", child["id"]), cycles=1)

    await end(client, pool, child)
    row = await asleep(pool, run.id, cycles=2)

    messages = [m["body"] for one in await returned(pool, run.id, "inbox_read") for m in one["messages"]]
    assert [(m["type"], m["state"], m["result"]) for m in messages] == [("subagent_result", state, result)]
    assert (row["cycles_granted"], row["subagents_granted"], row["wake_seq"]) == (1, 1, 1)
    assert await violations(pool) == {}


async def begun(pool: Pool, run_id: str) -> None:
    async def found() -> bool:
        return bool(await children(pool, run_id))

    await until(found)


async def test_what_a_helper_did_not_use_comes_back_also_when_its_end_was_read_before_the_wake(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client)
    late = {"calls": [READ, {"tool": "sleep", "args": {"duration_seconds": 3600}}], "delay_s": 1.0}
    run = await start_run(client, [{"calls": [spawn([GOES_ON, FINISHES])]}, late], agent.id)

    row = await asleep(pool, run.id, cycles=1)

    assert [len(one["messages"]) for one in await returned(pool, run.id, "inbox_read")] == [1]
    assert (row["cycles_granted"], row["subagents_granted"]) == (2, 1)
    assert await violations(pool) == {}


async def test_a_result_that_is_too_large_for_a_message_is_shortened_and_read_from_the_run(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client, budgets={"tokens_per_cycle": 200_000})
    large = {"calls": [{"tool": "complete", "args": {"result": "x" * 100_000}}]}
    budgets = {"tokens_per_cycle": 100_000}
    run = await start_run(
        client, [{"calls": [spawn([large], budgets=budgets)]}, WAITS, READS, DONE], agent.id
    )

    await ended(pool, run.id)

    (child,) = await children(pool, run.id)
    (message,) = (await returned(pool, run.id, "inbox_read"))[0]["messages"]
    body = message["body"]
    assert (body["result"], body["result_excerpt"]) == (None, '"' + "x" * (EXCERPT_CHARS_MAX - 1))
    assert (await client.run_get(to_wire("run", child["id"]))).result == "x" * 100_000


async def test_a_helper_whose_spawner_has_ended_reports_to_the_spawners_agent(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client)
    run = await start_run(client, [{"calls": [spawn([SLEEPS])]}, WAITS], agent.id)
    await asleep(pool, run.id, cycles=1)
    await client.call("run.cancel", RunRef(run_id=run.id), RunDone)
    await all_ended(pool)

    inbox = await client.call("message.inbox", MessageInbox(agent_id=agent.id), Inbox)
    assert [m.body["state"] for m in inbox.messages] == ["cancelled"]
    later = await start_run(client, [READS, DONE], agent.id)
    await ended(pool, later.id)
    assert [m["body"] for m in (await returned(pool, later.id, "inbox_read"))[0]["messages"]] == [
        inbox.messages[0].body
    ]
    assert await violations(pool) == {}


# ------------------------------------------------------------------ a spawner's end


@pytest.mark.parametrize("how", ["cancel", "complete", "archive the agent"])
async def test_a_run_that_ends_takes_all_live_runs_below_it_with_it(
    client: AepClient, worker: Service, pool: Pool, how: str
) -> None:
    """One of them is at work, the others sleep."""
    agent = await make_spawner(client, ceilings={"max_cycles": 20})
    grandchild = spawn([SLEEPS], ceilings={"max_cycles": 1, "max_wall_seconds": 200})
    busy = spawn([{"delay_s": 60}])
    parent = spawn([{"calls": [grandchild]}, WAITS], ceilings={"max_cycles": 5, "max_subagents": 1})
    ends = {"text": "done", "delay_s": 2.0} if how == "complete" else WAITS
    run = await start_run(client, [{"calls": [parent, busy]}, ends], agent.id)

    async def all_begun() -> bool:
        return bool(await pool.fetchval("select count(*) = 4 from runs where cycle_count = 1"))

    await until(all_begun)
    match how:
        case "cancel":
            await client.call("run.cancel", RunRef(run_id=run.id), RunDone)
        case "archive the agent":
            await client.call("agent.archive", AgentRef(agent_id=agent.id), AgentDone)
    await all_ended(pool)

    rows = await pool.fetch("select depth, state, result, ended_at from runs order by depth, id")
    state = "complete" if how == "complete" else "cancelled"
    assert [(row["depth"], row["state"]) for row in rows] == [
        *[(0, state), (1, "cancelled"), (1, "cancelled"), (2, "cancelled")]
    ]
    assert max(row["ended_at"] for row in rows) - rows[0]["ended_at"] < timedelta(seconds=5)
    assert await violations(pool) == {}
