"""Changing, cancelling and archiving agents, and what that does to the runs that live."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import anyio
import pytest
from tests.integration.wire import AGENT, POLL_S, Gateway, Wire, symbol
from tests.integration.wire_prompts import history_of, key_of, told
from tests.integration.wire_runs import event_types, lease, put_to_sleep, run_rows, uuid

from espalier_acts.agents import archive_agent, cancel_agent
from espalier_acts.runs import RunOrder, create_run
from espalier_domain.prompts import unified_diff
from espalier_gateway import cancels
from espalier_gateway.methods import agent as agent_methods
from espalier_jobs import QueueNames, open_queue, take_rings
from espalier_protocol.errors import ErrorCode
from espalier_store.pool import Connection, Pool, transaction

pytestmark = pytest.mark.anyio

WAIT_S = 20.0
RUN_POLL_S = 0.05
CEILINGS: dict[str, int] = AGENT["ceilings"]
BUDGETS: dict[str, int] = AGENT["budgets"]
SCRIPTED = {"ESPALIER_MODELS_SCRIPTED": "on"}
WAITING = (
    "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
)


def constitution(**changes: str) -> dict[str, str]:
    return {**AGENT["constitution"], **changes}


async def rung_for(stores: Any, expected: set[UUID]) -> set[str]:
    """The runs whose doorbells have rung so far, once `expected` are among them."""
    names, heard = QueueNames(stores.redis_prefix), set[str]()
    async with open_queue(stores.redis_url) as queue:
        with anyio.fail_after(WAIT_S):
            while not heard >= {str(run_id) for run_id in expected}:
                heard |= set(await take_rings(queue, names, await queue.zrange(names.queue, 0, -1)))
                await anyio.sleep(POLL_S)
    return heard


async def once(wire: Wire, run_id: str, condition: Callable[[Any], bool]) -> Any:
    """The run as soon as it is so."""
    with anyio.fail_after(WAIT_S):
        while not condition(run := await wire.call("run.get", run_id=run_id)):
            await anyio.sleep(RUN_POLL_S)
    return run


async def waits_for_a_lock(pool: Pool) -> None:
    with anyio.fail_after(WAIT_S):
        while not await pool.fetchval(WAITING):
            await anyio.sleep(POLL_S)


async def meanwhile(
    pool: Pool, uncommitted: Callable[[Connection], Awaitable[object]], call: Callable[[], Awaitable[Any]]
) -> Any:
    """The answer of `call`, which had to wait for what another transaction has not committed yet."""
    answers = []

    async def ask() -> None:
        answers.append(await call())

    async with anyio.create_task_group() as group, transaction(pool) as connection:
        await uncommitted(connection)
        group.start_soon(ask)
        await waits_for_a_lock(pool)
        assert not answers
    return answers[0]


# ------------------------------------------------------------------ agent.update


async def test_an_update_changes_what_it_names_and_nothing_else(wire: Wire) -> None:
    made = await wire.call("agent.create", **AGENT, metadata={"old": 1}, subject_ids=["sub_a"])
    expected = made
    for change, after in (
        ({"name": "another"}, {"name": "another"}),
        ({"metadata": {"new": [None, {"deep": 1.5}]}}, {"metadata": {"new": [None, {"deep": 1.5}]}}),
        ({"metadata": {}}, {"metadata": {}}),
        ({"ceilings": {"max_cycles": 9}}, {"ceilings": {**CEILINGS, "max_cycles": 9}}),
        ({"ceilings": CEILINGS}, {"ceilings": CEILINGS}),
        ({"budgets": {"seconds_per_cycle": 1}}, {"budgets": {**BUDGETS, "seconds_per_cycle": 1}}),
        ({"budgets": BUDGETS, "name": "third"}, {"budgets": BUDGETS, "name": "third"}),
        ({"constitution": constitution(immutable_directives="Be bold.")},) * 2,
        (
            {"constitution": {"mutable_prompt_policy": "locked"}},
            {"constitution": constitution(immutable_directives="Be bold.", mutable_prompt_policy="locked")},
        ),
        (
            {"constitution": {"mutable_prompt": ""}},
            {
                "constitution": constitution(
                    immutable_directives="Be bold.", mutable_prompt_policy="locked", mutable_prompt=""
                )
            },
        ),
        ({"constitution": AGENT["constitution"]},) * 2,
    ):
        updated = await wire.call("agent.update", agent_id=made["id"], **change)
        assert updated["updated_at"] >= expected["updated_at"]
        expected = {**expected, **after, "updated_at": updated["updated_at"]}
        assert updated == expected
        assert await wire.call("agent.get", agent_id=made["id"]) == expected
    assert expected["updated_at"] > made["updated_at"] == made["created_at"]


async def test_an_update_that_names_nothing_changes_nothing(wire: Wire, gateway: Gateway) -> None:
    made = await wire.call("agent.create", **AGENT)
    await gateway.pool.execute("update agents set updated_at = updated_at - interval '1 hour'")
    before = await wire.call("agent.get", agent_id=made["id"])
    nothings: tuple[dict[str, Any], ...] = ({}, {"ceilings": {}}, {"budgets": {}}, {"constitution": {}})
    for nothing in nothings:
        assert await wire.call("agent.update", agent_id=made["id"], **nothing) == before


CONSTITUTION = "constitution.mutable_prompt"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a ceiling below the least": ({"ceilings": {"max_cycles": 0}}, "ceilings.max_cycles"),
    "a ceiling unknown": ({"ceilings": {"max_cyclez": 1}}, "ceilings.max_cyclez"),
    "a ceiling as a text": ({"ceilings": {"max_subagents": "1"}}, "ceilings.max_subagents"),
    "a ceiling of null": ({"ceilings": {"max_wall_seconds": None}}, "ceilings.max_wall_seconds"),
    "a budget below the least": ({"budgets": {"tokens_per_cycle": 0}}, "budgets.tokens_per_cycle"),
    "a budget unknown": ({"budgets": {"max_cycles": 1}}, "budgets.max_cycles"),
    "a budget beyond a column": ({"budgets": {"seconds_per_cycle": 2**31}}, "budgets.seconds_per_cycle"),
    "ceilings of null": ({"ceilings": None}, "ceilings"),
    "budgets of null": ({"budgets": None}, "budgets"),
    "a name of null": ({"name": None}, "name"),
    "an empty name": ({"name": ""}, "name"),
    "metadata of null": ({"metadata": None}, "metadata"),
    "metadata that are a list": ({"metadata": []}, "metadata"),
    "a policy unknown": ({"constitution": {"mutable_prompt_policy": "free"}}, f"{CONSTITUTION}_policy"),
    "a prompt of null": ({"constitution": {"mutable_prompt": None}}, CONSTITUTION),
    "a prompt beyond the limit": ({"constitution": {"mutable_prompt": "x" * 262_145}}, CONSTITUTION),
    "a part unknown": ({"constitution": {"prompt": "x"}}, "constitution.prompt"),
    "a constitution of null": ({"constitution": None}, "constitution"),
    "a toolset": ({"toolset": []}, "toolset"),
    "live runs": ({"max_live_runs": 9}, "max_live_runs"),
    "a runner with an unknown member": ({"runner": {"modell": "m"}}, "runner.modell"),
}


async def test_members_that_do_not_fit_are_named_and_nothing_is_changed(wire: Wire) -> None:
    before = await wire.call("agent.create", **AGENT)
    told = {}
    for name, (change, _) in WRONG.items():
        params = {"name": "not kept", "agent_id": before["id"], **change}
        answer = await wire.answer("agent.update", params)
        told[name] = (symbol(answer), answer["error"]["data"]["field"])
    assert told == {name: ("invalid_params", member) for name, (_, member) in WRONG.items()}
    assert await wire.call("agent.get", agent_id=before["id"]) == before


async def test_what_the_session_may_not_change_is_refused_and_nothing_is_changed(
    wire: Wire, gateway: Gateway
) -> None:
    before = await wire.call("agent.create", **AGENT)
    modest = await gateway.stranger("one")
    await modest.begin(**{"streaming.sse": True})
    told = {}
    for member, value in (
        ("runner", None),
        ("runner", {"model": "m"}),
        ("external_mcp_servers", []),
        ("external_mcp_servers", [{"url": "https://example.invalid/mcp"}]),
    ):
        error = await modest.refused(
            "agent.update", agent_id=before["id"], name="not kept", **{member: value}
        )
        assert error["code"] == ErrorCode.capability_not_supported
        told[member, str(value)] = {name: text for name, text in error["data"].items() if name != "symbol"}
    assert list(told.values()) == [
        *[{"capability": "runner.byo_llm"}] * 2,
        *[{"capability": "tools.mcp_external"}] * 2,
    ]
    assert await wire.call("agent.get", agent_id=before["id"]) == before


async def test_the_ceilings_of_an_idle_agent_grow_and_its_ended_runs_keep_theirs(
    wire: Wire, gateway: Gateway
) -> None:
    agent_id = await wire.agent()
    await wire.call("run.cancel", run_id=await wire.run(agent_id))
    before = await run_rows(gateway.pool)
    for factor in (2, 1):
        wanted = {name: value * factor for name, value in CEILINGS.items()}
        assert (await wire.call("agent.update", agent_id=agent_id, ceilings=wanted))["ceilings"] == wanted
        assert await run_rows(gateway.pool) == before


@pytest.mark.parametrize("asleep", [False, True], ids=["running", "sleeping"])
async def test_no_ceiling_grows_under_a_live_run_and_then_nothing_else_changes(
    wire: Wire, gateway: Gateway, asleep: bool
) -> None:
    before = await wire.call("agent.create", **AGENT)
    run_id = await wire.run(before["id"])
    if asleep:
        await put_to_sleep(gateway.pool, run_id)
        before = await wire.call("agent.get", agent_id=before["id"])
    rows = await run_rows(gateway.pool)
    smaller = {name: value - 1 for name, value in CEILINGS.items()}
    for member, value in CEILINGS.items():
        ceilings = {**smaller, member: value + 1}
        error = await wire.refused(
            "agent.update", agent_id=before["id"], name="x", metadata={"x": 1}, ceilings=ceilings
        )
        assert error["code"] == ErrorCode.lifecycle_conflict
        assert error["data"]["reason"] == f"ceilings.{member} cannot grow while the agent has a live run."
    assert await wire.call("agent.get", agent_id=before["id"]) == before
    assert await run_rows(gateway.pool) == rows


async def test_ceilings_that_shrink_shrink_in_every_live_run_whoever_holds_it(
    wire: Wire, gateway: Gateway, stores: Any
) -> None:
    agent_id = await wire.agent()
    held, waiting, asleep, soon, ended = [await wire.run(agent_id) for _ in range(5)]
    other_agents = await wire.run()
    await lease(gateway.pool, held)
    for run_id in (asleep, soon, other_agents):
        await put_to_sleep(gateway.pool, run_id)
    await gateway.pool.execute(  # it has lived for a minute
        "update runs set created_at = created_at - m, wall_at = wall_at - m"
        " from (values (interval '1 minute')) shift (m) where id = $1",
        uuid("run", soon),
    )
    await gateway.pool.execute("update runs set max_cycles = 2 where id = $1", uuid("run", asleep))
    await wire.call("run.cancel", run_id=ended)
    await rung_for(stores, {uuid("run", each) for each in (held, waiting, asleep, soon, ended, other_agents)})
    before = await run_rows(gateway.pool)

    shrunk = {"max_cycles": 3, "max_subagents": 0, "max_tool_calls_per_cycle": 4, "max_wall_seconds": 50}
    agent = await wire.call("agent.update", agent_id=agent_id, ceilings=shrunk)

    def expected(row: dict[str, Any]) -> dict[str, Any]:
        wall_at = row["created_at"] + timedelta(seconds=50)
        lower = {"wall_at": wall_at, "due_at": min(row["due_at"], wall_at), "max_subagents": 0}
        return {**row, **lower, "max_cycles": min(row["max_cycles"], 3), "max_wall_seconds": 50}

    live = {uuid("run", each) for each in (held, waiting, asleep, soon)}
    after = await run_rows(gateway.pool)
    assert after == {id_: expected(row) if id_ in live else row for id_, row in before.items()}
    assert after[uuid("run", asleep)]["max_cycles"] == 2, "what was lower already stays"
    assert agent["ceilings"] == shrunk
    assert await rung_for(stores, {uuid("run", soon)}) == {str(uuid("run", soon))}, "the only one due by it"


@pytest.mark.slow
async def test_a_sleeper_meets_the_wall_that_an_update_moved_into_its_past(wire: Wire, start: Any) -> None:
    start("worker", **SCRIPTED)
    sleep = [{"calls": [{"tool": "sleep", "args": {"duration_seconds": 200, "reason": "a while"}}]}]
    agent_id = await wire.agent()
    run_id = await wire.run(agent_id, inputs={"espalier.script": {"answers": sleep}})
    await once(wire, run_id, lambda run: run["state"] == "sleeping")

    await wire.call("agent.update", agent_id=agent_id, ceilings={"max_wall_seconds": 1})

    run = await once(wire, run_id, lambda run: run["ended_at"] is not None)
    assert (run["state"], run["result"]) == ("error", {"reason": "ceiling_exceeded:max_wall_seconds"})


async def test_an_update_and_a_new_run_take_turns(wire: Wire, gateway: Gateway) -> None:
    agent_id, owner_id = await wire.agent(), await gateway.pool.fetchval("select owner_id from agents")
    order = RunOrder(uuid("agt", agent_id), "goal", {}, [])
    wider = {"agent_id": agent_id, "ceilings": {"max_cycles": 99}}

    answer = await meanwhile(
        gateway.pool,
        lambda connection: create_run(connection, owner_id, order),
        lambda: wire.answer("agent.update", wider),
    )

    assert symbol(answer) == "lifecycle_conflict"


async def test_the_directives_stay_once_the_agent_has_had_a_run_and_the_rest_may_change(wire: Wire) -> None:
    agent_id = await wire.agent()
    await wire.call("agent.update", agent_id=agent_id, constitution={"immutable_directives": "Be bold."})
    await wire.call("run.cancel", run_id=await wire.run(agent_id))
    before = await wire.call("agent.get", agent_id=agent_id)

    other = constitution(immutable_directives="Be brief.", mutable_prompt="Say no.")
    error = await wire.refused("agent.update", agent_id=agent_id, name="not kept", constitution=other)

    assert error["code"] == ErrorCode.lifecycle_conflict
    assert error["data"]["reason"].startswith("constitution.immutable_directives cannot change")
    assert await wire.call("agent.get", agent_id=agent_id, include=["prompt_history"]) == {
        **before,
        "prompt_history": [],
    }
    same = {**other, "immutable_directives": "Be bold.", "mutable_prompt_policy": "approval_required"}
    changed = await wire.call("agent.update", agent_id=agent_id, constitution=same)
    assert changed["constitution"] == same, "the same directives may be sent along"


async def test_a_prompt_that_the_embedder_changes_gets_its_place_in_the_history_whatever_the_policy(
    wire: Wire, gateway: Gateway
) -> None:
    by = await key_of(gateway, wire)
    for policy in ("auto", "approval_required", "locked"):
        agent_id = await wire.agent(constitution=constitution(mutable_prompt_policy=policy))
        for prompt in ("Say no.", "Say no.", "Say\nnothing.\n"):
            await wire.call("agent.update", agent_id=agent_id, constitution={"mutable_prompt": prompt})
        history = await history_of(wire, agent_id)
        diffs = [unified_diff("Say ok.", "Say no."), unified_diff("Say no.", "Say\nnothing.\n")]
        assert [entry["diff"] for entry in history] == diffs, "what changes nothing is no change"
        assert {(entry["approved_by"], entry["agent_id"]) for entry in history} == {(by, agent_id)}


@pytest.mark.parametrize("held", [True, False], ids=["held", "free"])
async def test_a_new_prompt_is_told_to_the_newest_live_run_and_a_holder_keeps_its_lease(
    wire: Wire, gateway: Gateway, held: bool
) -> None:
    agent_id = await wire.agent()
    older, newest, ended = [await wire.run(agent_id) for _ in range(3)]
    await wire.call("run.cancel", run_id=ended)
    if held:
        await lease(gateway.pool, newest)
    before = await run_rows(gateway.pool)

    await wire.call("agent.update", agent_id=agent_id, constitution={"mutable_prompt": "Say no."})

    (entry,) = await history_of(wire, agent_id)
    payload = {name: entry[name] for name in ("diff", "reason", "approved_by")}
    told_of = {run: await told(gateway, run, "prompt.") for run in (older, newest, ended)}
    assert told_of == {older: [], newest: [("prompt.modified", payload)], ended: []}
    row = before[uuid("run", newest)]
    after = {
        **row,
        "next_seq": row["next_seq"] + 1,
        "next_entry_no": row["next_entry_no"] + 1,
        "lease_token": row["lease_token"] + (not held),
    }
    assert await run_rows(gateway.pool) == {**before, uuid("run", newest): after}


async def test_a_change_of_the_prompt_and_a_new_run_take_turns(wire: Wire, gateway: Gateway) -> None:
    """So directives do not change under a run that is being created."""
    agent_id, owner_id = await wire.agent(), await gateway.pool.fetchval("select owner_id from agents")
    order = RunOrder(uuid("agt", agent_id), "goal", {}, [])
    change = {"agent_id": agent_id, "constitution": {"immutable_directives": "Be bold."}}

    answer = await meanwhile(
        gateway.pool,
        lambda connection: create_run(connection, owner_id, order),
        lambda: wire.answer("agent.update", change),
    )

    assert symbol(answer) == "lifecycle_conflict"


# ------------------------------------------------------------------ what state an agent is in


ROOT_OF = "update agents set root_id = $1, parent_id = $1 where id = $2"


async def test_an_agent_shows_what_became_of_its_newest_run_and_a_spawned_one_that_it_is_complete(
    wire: Wire, gateway: Gateway
) -> None:
    parent, child = await wire.agent(), await wire.agent()
    await gateway.pool.execute(ROOT_OF, uuid("agt", parent), uuid("agt", child))
    shown = {}
    for end in ("complete", "error", "cancelled"):
        for agent_id in (parent, child):
            run_id = uuid("run", await wire.run(agent_id))
            live = (await wire.call("agent.get", agent_id=agent_id))["lifecycle_state"]
            ended = "update runs set state = $2, ended_at = clock_timestamp() where id = $1"
            await gateway.pool.execute(ended, run_id, end)
            after = (await wire.call("agent.get", agent_id=agent_id))["lifecycle_state"]
            shown[end, agent_id == child] = (live, after)
    assert shown == {
        ("complete", False): ("active", "active"),
        ("complete", True): ("active", "complete"),
        ("error", False): ("active", "error"),
        ("error", True): ("active", "error"),
        ("cancelled", False): ("active", "active"),
        ("cancelled", True): ("active", "active"),
    }


async def test_a_complete_child_is_found_by_its_state_and_may_be_cancelled_and_archived(
    wire: Wire, gateway: Gateway
) -> None:
    parent, child = await wire.agent(), await wire.agent()
    await gateway.pool.execute(ROOT_OF, uuid("agt", parent), uuid("agt", child))
    await wire.run(child)
    await gateway.pool.execute("update runs set state = 'complete', ended_at = clock_timestamp()")

    found = (await wire.call("agent.list", lifecycle_state="complete"))["items"]

    assert [agent["id"] for agent in found] == [child]
    states = [
        (await wire.call(method, agent_id=child))["lifecycle_state"]
        for method in ("agent.cancel", "agent.archive")
    ]
    assert states == ["cancelled", "archived"]


# ------------------------------------------------------------------ agent.cancel, agent.archive


CLOSED = {"agent.cancel": "cancelled", "agent.archive": "archived"}
both = pytest.mark.parametrize(("method", "closed"), CLOSED.items())


@both
async def test_closing_an_agent_ends_its_runs_and_it_takes_no_new_one(
    wire: Wire, gateway: Gateway, method: str, closed: str
) -> None:
    made = await wire.call("agent.create", **AGENT)
    running, asleep, ended = [await wire.run(made["id"]) for _ in range(3)]
    await put_to_sleep(gateway.pool, asleep)
    await gateway.pool.execute(
        "update runs set state = 'complete', ended_at = now() where id = $1", uuid("run", ended)
    )
    other_agents = await wire.run()

    answer = await wire.call(method, agent_id=made["id"])

    agent = {**made, "lifecycle_state": closed, "updated_at": answer["updated_at"]}
    assert answer == {**agent, "ok": True}
    assert answer["updated_at"] >= made["updated_at"]
    assert await wire.call("agent.get", agent_id=made["id"]) == agent
    assert (await wire.call("agent.list", lifecycle_state=closed))["items"] == [agent]
    assert agent in (await wire.call("agent.list"))["items"]
    states = {}
    for run_id in (running, asleep, ended, other_agents):
        run = await wire.call("run.get", run_id=run_id)
        states[run_id] = (run["state"], run["cancel_requested_at"] is not None, run["result"])
    cancelled = ("cancelled", True, {"reason": "cancelled"})
    assert states == {
        running: cancelled,
        asleep: cancelled,
        ended: ("complete", False, None),
        other_agents: ("running", False, None),
    }
    for run_id in (running, asleep):
        assert await event_types(gateway.pool, run_id) == ["run.started", "run.ended"]
    rows = await gateway.rows()
    refused = await wire.refused("run.create", agent_id=made["id"], goal="another")
    assert refused["code"] == ErrorCode.lifecycle_conflict
    assert await gateway.rows() == rows


@both
async def test_closing_an_agent_again_changes_nothing(
    wire: Wire, gateway: Gateway, method: str, closed: str
) -> None:
    agent_id = await wire.agent()
    await wire.run(agent_id)
    first = await wire.call(method, agent_id=agent_id)
    rows, events = await run_rows(gateway.pool), await gateway.rows()
    assert await wire.call(method, agent_id=agent_id) == first
    assert (await run_rows(gateway.pool), await gateway.rows()) == (rows, events)


async def test_a_cancelled_agent_can_be_archived_but_not_the_other_way_round(wire: Wire) -> None:
    agent_id = await wire.agent()
    await wire.call("agent.cancel", agent_id=agent_id)
    assert (await wire.call("agent.archive", agent_id=agent_id))["lifecycle_state"] == "archived"
    before = await wire.call("agent.get", agent_id=agent_id)
    assert symbol(await wire.answer("agent.cancel", {"agent_id": agent_id})) == "lifecycle_conflict"
    assert await wire.call("agent.get", agent_id=agent_id) == before


@pytest.mark.parametrize("state", ["sleeping", "error"])
async def test_agents_in_every_other_state_can_be_archived_and_renamed(
    wire: Wire, gateway: Gateway, state: str
) -> None:
    agent_id = await wire.agent()
    run_id = await wire.run(agent_id)
    if state == "sleeping":
        await put_to_sleep(gateway.pool, run_id)
    else:
        await gateway.pool.execute("update runs set state = 'error', ended_at = now()")
    assert (await wire.call("agent.get", agent_id=agent_id))["lifecycle_state"] == state
    archived = await wire.call("agent.archive", agent_id=agent_id)
    assert (archived["lifecycle_state"], archived["next_wake_at"]) == ("archived", None)
    renamed = await wire.call("agent.update", agent_id=agent_id, name="put away", ceilings={"max_cycles": 99})
    assert renamed == {
        **{name: value for name, value in archived.items() if name != "ok"},
        "name": "put away",
        "ceilings": {**CEILINGS, "max_cycles": 99},
        "updated_at": renamed["updated_at"],
    }


@both
async def test_a_run_that_somebody_holds_is_flagged_and_later_ended_over_the_holders_head(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, method: str, closed: str
) -> None:
    monkeypatch.setattr(cancels, "FORCE_AFTER_S", 0.2)
    agent_id = await wire.agent()
    held, free = await wire.run(agent_id), await wire.run(agent_id)
    token = await lease(gateway.pool, held)

    agent = await wire.call(method, agent_id=agent_id)

    assert (agent["lifecycle_state"], agent["ok"]) == (closed, True)
    rows = await run_rows(gateway.pool)
    states = {rows[uuid("run", run_id)]["state"] for run_id in (held, free)}
    assert states == {"cancelled"}, "within the two seconds that the answer waits"
    assert rows[uuid("run", held)]["lease_token"] > token
    assert await event_types(gateway.pool, held) == ["run.started", "run.ended"]


async def test_runs_beyond_those_that_are_ended_at_once_end_too_without_a_worker(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancels, "FORCE_AFTER_S", 0.2)
    monkeypatch.setattr(agent_methods, "ENDED_AT_ONCE_MAX", 1)
    agent_id = await wire.agent()
    runs = [await wire.run(agent_id) for _ in range(3)]

    began = anyio.current_time()
    await wire.call("agent.cancel", agent_id=agent_id)

    assert anyio.current_time() - began >= cancels.FORCE_AFTER_S
    states = [(await wire.call("run.get", run_id=run_id))["state"] for run_id in runs]
    assert states == ["cancelled"] * 3


@pytest.mark.slow
async def test_a_run_that_is_held_for_longer_than_the_answer_waits_stays_as_it_stands(
    wire: Wire, gateway: Gateway
) -> None:
    agent_id = await wire.agent()
    held = await wire.run(agent_id)
    token = await lease(gateway.pool, held)
    before = (await run_rows(gateway.pool))[uuid("run", held)]

    began = anyio.current_time()
    agent = await wire.call("agent.cancel", agent_id=agent_id)

    assert anyio.current_time() - began >= 2
    assert agent["lifecycle_state"] == "cancelled"
    after = (await run_rows(gateway.pool))[uuid("run", held)]
    assert after == {**before, "cancel_requested_at": after["cancel_requested_at"]}
    assert (after["lease_token"], after["cancel_requested_at"] is not None) == (token, True)


async def test_workers_end_the_runs_that_they_hold_while_the_answer_waits(wire: Wire, start: Any) -> None:
    start("worker", **SCRIPTED)
    agent_id = await wire.agent()
    slow = {"espalier.script": {"answers": [{"text": "too late", "delay_s": 30}]}}
    runs = [await wire.run(agent_id, inputs=slow) for _ in range(3)]
    for run_id in runs:
        await once(wire, run_id, lambda run: run["cycle_count"] == 1)

    await wire.call("agent.cancel", agent_id=agent_id)

    told = [await wire.call("run.get", run_id=run_id) for run_id in runs]
    assert [run["state"] for run in told] == ["cancelled"] * 3


async def test_workers_end_the_runs_of_an_agent_whose_gateway_died_after_the_commit(
    wire: Wire, gateway: Gateway, start: Any
) -> None:
    """The act alone, as a gateway leaves it that dies before it has ended a single run."""
    agent_id = await wire.agent()
    running, asleep, held = [await wire.run(agent_id) for _ in range(3)]
    await put_to_sleep(gateway.pool, asleep)
    await lease(gateway.pool, held)
    before = await run_rows(gateway.pool)
    async with transaction(gateway.pool) as connection:
        owner_id = await connection.fetchval("select owner_id from agents")
        asked = await cancel_agent(connection, owner_id, uuid("agt", agent_id))

    rows = await run_rows(gateway.pool)
    assert set(asked) == set(rows)
    now = await gateway.pool.fetchval("select clock_timestamp()")
    assert {
        row["cancel_requested_at"] is not None and row["state"] in ("running", "sleeping")
        for row in rows.values()
    } == {True}
    assert max(row["due_at"] for row in rows.values()) <= now
    for run_id in (running, held):
        assert rows[uuid("run", run_id)]["due_at"] == before[uuid("run", run_id)]["due_at"]
    await gateway.pool.execute("update runs set lease_until = now() where lease_until is not null")
    start("worker", **SCRIPTED)
    with anyio.fail_after(WAIT_S):
        while await gateway.pool.fetchval("select count(*) from runs where state <> 'cancelled'"):
            await anyio.sleep(POLL_S)


@both
async def test_closing_an_agent_ends_also_the_run_that_is_just_being_made(
    wire: Wire, gateway: Gateway, method: str, closed: str
) -> None:
    agent_id, owner_id = await wire.agent(), await gateway.pool.fetchval("select owner_id from agents")
    order = RunOrder(uuid("agt", agent_id), "goal", {}, [])

    answer = await meanwhile(
        gateway.pool,
        lambda connection: create_run(connection, owner_id, order),
        lambda: wire.answer(method, {"agent_id": agent_id}),
    )

    assert symbol(answer) == "result"
    assert await gateway.pool.fetchval("select array_agg(state) from runs") == ["cancelled"]


@pytest.mark.parametrize("close", [cancel_agent, archive_agent])
async def test_a_new_run_is_refused_by_an_agent_that_is_just_being_closed(
    wire: Wire, gateway: Gateway, close: Callable[[Connection, UUID, UUID], Awaitable[list[UUID]]]
) -> None:
    agent_id, owner_id = await wire.agent(), await gateway.pool.fetchval("select owner_id from agents")

    answer = await meanwhile(
        gateway.pool,
        lambda connection: close(connection, owner_id, uuid("agt", agent_id)),
        lambda: wire.answer("run.create", {"agent_id": agent_id, "goal": "too late"}),
    )

    assert symbol(answer) == "lifecycle_conflict"
    assert await gateway.pool.fetchval("select count(*) from runs") == 0


@pytest.mark.slow
async def test_no_run_lives_after_a_cancel_that_raced_with_twenty_creates(
    wire: Wire, gateway: Gateway
) -> None:
    told: dict[str, list[str]] = {"run.create": [], "agent.cancel": []}

    async def send(method: str, params: dict[str, Any]) -> None:
        told[method].append(symbol(await wire.answer(method, params)))

    for _ in range(3):
        agent_id = await wire.agent(max_live_runs=1000)
        async with anyio.create_task_group() as group:
            for place in range(21):
                if place == 10:
                    group.start_soon(send, "agent.cancel", {"agent_id": agent_id})
                else:
                    group.start_soon(send, "run.create", {"agent_id": agent_id, "goal": "nothing"})
    made = told["run.create"].count("result")
    assert told["agent.cancel"] == ["result"] * 3
    assert told["run.create"].count("lifecycle_conflict") == 60 - made
    states = await gateway.pool.fetch("select state, next_seq from runs")
    assert [tuple(row) for row in states] == [("cancelled", 3)] * made
