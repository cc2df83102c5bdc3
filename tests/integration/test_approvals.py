"""What waits for a person: one queue of questions, each answered once, and what becomes of the answer."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest
from invariants import violations
from tests.integration.conftest import Start, StartBroker, Stores
from tests.integration.test_wire_agent_changes import meanwhile
from tests.integration.tools import Ledger, calls, record
from tests.integration.wire import ANSWER_WAIT_S, POLL_S, Gateway, Wire, symbol
from tests.integration.wire_prompts import (
    DONE,
    NAP,
    ROOMY,
    WIRE_PLANS,
    history_of,
    key_of,
    lived,
    modify,
    once,
    pending_of,
    prompt_of,
    told,
    written,
)
from tests.integration.wire_runs import event_types, uuid

from espalier_acts.approvals import Answer, resolve
from espalier_acts.log import tell_live_run
from espalier_domain.errors import LeaseLost
from espalier_domain.journal import ApprovalResolved, ModelAnswered, ToolCall, ToolReturned
from espalier_domain.tool_results import returned
from espalier_eventlog import RedisSettings, open_streams
from espalier_eventlog.publisher import Publisher
from espalier_protocol.access import SCOPES
from espalier_protocol.errors import ErrorCode
from espalier_run_worker.held import Held, claim
from espalier_store.agents import lock_agent
from espalier_store.pool import Pool, transaction

pytestmark = pytest.mark.anyio

LEASE_TTL_S = 60.0
UNKNOWN = "0" * 26
CALL = ToolCall("call_1_1", "mcp.ledger.record", {"text": "once"})
SLEEP = ToolCall("call_1_2", "sleep", {"duration_seconds": 3600})


@pytest.fixture
async def publisher(stores: Stores) -> AsyncIterator[Publisher]:
    """One that only queues: nothing here looks at Redis."""

    async def nobody(_: object) -> None: ...

    async with open_streams(RedisSettings(redis_url=stores.redis_url)) as streams:
        queueing = Publisher(streams, stores.redis_prefix, nobody)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await queueing.run()  # closes its queue
        yield queueing


Hold = Callable[[str], Awaitable[Held]]


@pytest.fixture
async def hold(pool: Pool, publisher: Publisher) -> Hold:
    """Hold the run as a worker does."""

    async def hold_it(run_id: str) -> Held:
        held = await claim(pool, publisher, LEASE_TTL_S, uuid("run", run_id))
        assert held is not None
        return held

    return hold_it


async def sent(pool: Pool, held: Held, *further: ToolCall) -> None:
    """The run's model called a tool, and the call has been sent."""
    await held.write(ModelAnswered(1, "", (CALL, *further), 10))
    assert held.progress.under_way() == (CALL,), "it was planned"
    await pool.execute("update tool_calls set state = 'sent', deadline_at = now() + interval '1 hour'")


async def doubted(wire: Wire, pool: Pool, hold: Hold) -> tuple[str, str, dict[str, Any]]:
    """An agent, its sleeping run with a call in doubt, and the approval that asks about the call."""
    agent_id = await wire.agent(**{**ROOMY, "toolset": ["mcp.ledger.*"]})
    run_id = await wire.run(agent_id)
    held = await hold(run_id)
    await sent(pool, held, SLEEP)
    await held.write(returned(1, CALL, "in_doubt", ""))
    await held.write(ToolReturned(1, SLEEP.call_id, SLEEP.name, True, "ok"))
    assert (await once(wire, run_id, "sleeping"))["wait_reason"] == "timer"
    (approval,) = (await wire.call("approval.list"))["items"]
    return agent_id, run_id, approval


# ------------------------------------------------------------------ calls in doubt


async def test_a_call_in_doubt_becomes_a_question_in_the_step_that_tells_of_the_doubt(
    wire: Wire, gateway: Gateway, hold: Hold
) -> None:
    agent_id, run_id, approval = await doubted(wire, gateway.pool, hold)

    assert approval == {
        "id": approval["id"],
        "kind": "in_doubt",
        "state": "open",
        "agent_id": agent_id,
        "run_id": run_id,
        "about": {"call_id": "call_1_1", "tool_name": "mcp.ledger.record", "args": {"text": "once"}},
        "resolution": None,
        "comment": None,
        "resolved_by": None,
        "created_at": approval["created_at"],
        "resolved_at": None,
    }
    assert await wire.call("approval.get", approval_id=approval["id"]) == approval
    types = await event_types(gateway.pool, run_id)
    assert types[4:6] == ["tool.returned", "espalier.approval.requested"]
    assert await told(gateway, run_id, "espalier.") == [
        ("espalier.approval.requested", {"approval_id": approval["id"], "kind": "in_doubt"})
    ]
    assert await violations(gateway.pool) == {}


async def test_a_cancelled_run_leaves_a_question_about_the_call_that_was_sent_before_its_end(
    wire: Wire, gateway: Gateway, hold: Hold
) -> None:
    run_id = await wire.run(await wire.agent(**{**ROOMY, "toolset": ["mcp.ledger.*"]}))
    held = await hold(run_id)
    await sent(gateway.pool, held)
    await held.give_back()

    await wire.call("run.cancel", run_id=run_id)

    (approval,) = (await wire.call("approval.list"))["items"]
    assert (approval["kind"], approval["run_id"], approval["about"]["call_id"]) == (
        "in_doubt",
        run_id,
        "call_1_1",
    )
    assert (await event_types(gateway.pool, run_id))[3:] == [
        *["tool.returned", "espalier.approval.requested", "cycle.ended", "run.ended"]
    ]
    assert await violations(gateway.pool) == {}


async def test_a_step_that_is_refused_asks_nobody(wire: Wire, gateway: Gateway, hold: Hold) -> None:
    run_id = await wire.run(await wire.agent(**{**ROOMY, "toolset": ["mcp.ledger.*"]}))
    held = await hold(run_id)
    await sent(gateway.pool, held)
    await gateway.pool.execute("update runs set lease_token = lease_token + 1")
    with pytest.raises(LeaseLost):
        await held.write(returned(1, CALL, "in_doubt", ""))
    assert (await wire.call("approval.list", state="all"))["items"] == []


@pytest.mark.parametrize("resolution", ["done", "not_done", "retry"])
async def test_what_became_of_the_call_is_recorded_told_and_a_message_to_the_agent(
    wire: Wire, gateway: Gateway, hold: Hold, resolution: str
) -> None:
    agent_id, run_id, approval = await doubted(wire, gateway.pool, hold)
    by = await key_of(gateway, wire)

    resolved = await wire.call(
        "approval.resolve", approval_id=approval["id"], resolution=resolution, comment="row 7"
    )

    answer = {"state": "resolved", "resolution": resolution, "comment": "row 7", "resolved_by": by}
    assert resolved == {**approval, **answer, "resolved_at": resolved["resolved_at"]}
    assert resolved["resolved_at"] is not None
    assert await wire.call("approval.get", approval_id=approval["id"]) == resolved
    assert (await told(gateway, run_id, "espalier."))[1:] == [
        (
            "espalier.approval.resolved",
            {"approval_id": approval["id"], "kind": "in_doubt", "resolution": resolution},
        )
    ]
    (message,) = (await wire.call("message.inbox", agent_id=agent_id))["messages"]
    became = {
        "done": "it was carried out",
        "not_done": "it was not carried out",
        "retry": "make it again if you still want what it does; "
        "that is safe, whatever became of the first one",
    }[resolution]
    assert message["sender"] == {"kind": "embedder"}
    assert message["body"] == {
        "text": f"A person looked into your call call_1_1, whose outcome was unknown: {became}.",
        "call_id": "call_1_1",
        "tool_name": "mcp.ledger.record",
        "resolution": resolution,
        "comment": "row 7",
    }
    due = "select due_at <= clock_timestamp() from runs where id = $1"
    with anyio.fail_after(ANSWER_WAIT_S):
        while not await gateway.pool.fetchval(due, uuid("run", run_id)):
            await anyio.sleep(POLL_S)


async def test_the_answer_to_an_ended_runs_question_goes_to_the_agent_and_not_into_its_log(
    wire: Wire, gateway: Gateway, hold: Hold
) -> None:
    agent_id, run_id, approval = await doubted(wire, gateway.pool, hold)
    await wire.call("run.cancel", run_id=run_id)
    events = await event_types(gateway.pool, run_id)

    await wire.call("approval.resolve", approval_id=approval["id"], resolution="done")

    assert await event_types(gateway.pool, run_id) == events
    assert len((await wire.call("message.inbox", agent_id=agent_id))["messages"]) == 1


async def test_a_closed_agent_gets_no_message_and_the_answer_is_kept(
    wire: Wire, gateway: Gateway, hold: Hold
) -> None:
    agent_id, _, approval = await doubted(wire, gateway.pool, hold)
    await wire.call("agent.archive", agent_id=agent_id)

    resolved = await wire.call("approval.resolve", approval_id=approval["id"], resolution="not_done")

    assert (resolved["state"], resolved["resolution"]) == ("resolved", "not_done")
    assert (await wire.call("message.list", agent_id=agent_id))["items"] == []


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_an_agent_learns_from_a_person_what_became_of_a_call_whose_broker_died(
    wire: Wire, start: Start, start_broker: StartBroker, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    servers = {"ledger": ledger.server()}
    broker = await start_broker(servers)
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    plan = [
        {"calls": [*calls(record("once", 30.0))["calls"], NAP]},
        {"calls": [{"tool": "inbox_read", "args": {}}]},
        {"calls": [{"tool": "complete", "args": {"result": "${/results/2/messages/0/body}"}}]},
    ]
    agent_id = await wire.agent(**{**ROOMY, "toolset": ["mcp.ledger.*"]})
    run_id = await wire.run(agent_id, inputs={"espalier.script": {"answers": plan}})
    await ledger.until("called", "once")
    broker.service.kill()
    await start_broker(servers, port=broker.port)
    with anyio.fail_after(60):
        while (await wire.call("run.get", run_id=run_id))["state"] != "sleeping":
            await anyio.sleep(POLL_S)
    (approval,) = (await wire.call("approval.list"))["items"]

    await wire.call("approval.resolve", approval_id=approval["id"], resolution="done", comment="seen")

    run = await once(wire, run_id, "complete", "error")
    assert (run["state"], run["result"]["resolution"], run["result"]["comment"]) == (
        "complete",
        "done",
        "seen",
    )
    assert ledger.lines("called") == ["once"]


# ------------------------------------------------------------------ answers that do not fit


async def asked(wire: Wire, start: Start) -> tuple[str, dict[str, Any]]:
    """An agent that wants another prompt, and the approval that asks for it."""
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**written("Say ok.", "approval_required"))
    await lived(wire, agent_id, [{"calls": [modify("Say no.", "to be brief")]}, DONE])
    (approval,) = (await wire.call("approval.list"))["items"]
    return agent_id, approval


async def test_a_resolution_of_another_kind_is_refused_and_nothing_is_changed(
    wire: Wire, gateway: Gateway, start: Start, hold: Hold
) -> None:
    _, _, doubt = await doubted(wire, gateway.pool, hold)
    agent_id = await wire.agent(**written("Say ok.", "approval_required"))
    start("worker", **WIRE_PLANS)
    await lived(wire, agent_id, [{"calls": [modify("Say no.")]}, DONE])
    before = (await wire.call("approval.list"))["items"]
    (change,) = [each for each in before if each["kind"] == "prompt_change"]
    wrong = {"in_doubt": ("approve", "deny"), "prompt_change": ("done", "not_done", "retry")}
    for approval in (doubt, change):
        for resolution in (*wrong[approval["kind"]], "perhaps", None):
            error = await wire.refused("approval.resolve", approval_id=approval["id"], resolution=resolution)
            assert (error["code"], error["data"]["field"]) == (ErrorCode.invalid_params, "resolution")
    assert (await wire.call("approval.list"))["items"] == before


async def test_a_question_is_answered_once_also_with_the_same_word_and_at_the_same_time(
    wire: Wire, gateway: Gateway, hold: Hold, owner_id: UUID
) -> None:
    agent_id, run_id, approval = await doubted(wire, gateway.pool, hold)
    await wire.call("run.cancel", run_id=run_id)  # so that nobody waits for a run
    params = {"approval_id": approval["id"], "resolution": "done"}
    other = Answer("not_done", None, "key_other")

    answer = await meanwhile(
        gateway.pool,
        lambda connection: resolve(connection, owner_id, uuid("apr", approval["id"]), other),
        lambda: wire.answer("approval.resolve", params),
    )

    again = await wire.answer("approval.resolve", {**params, "resolution": "not_done"})
    assert (symbol(answer), symbol(again)) == ("lifecycle_conflict",) * 2
    assert len((await wire.call("message.inbox", agent_id=agent_id))["messages"]) == 1
    kept = await wire.call("approval.get", approval_id=approval["id"])
    assert (kept["resolution"], kept["resolved_by"]) == ("not_done", "key_other")


@pytest.mark.parametrize("resolution", ["approve", "deny"])
async def test_answering_about_a_prompt_is_the_same_act_as_resolving_its_change(
    wire: Wire, gateway: Gateway, start: Start, resolution: str
) -> None:
    agent_id, approval = await asked(wire, start)
    by = await key_of(gateway, wire)
    (change,) = await pending_of(wire, agent_id)
    assert approval["about"] == {
        "pending_change_id": change["id"],
        "diff": change["diff"],
        "reason": "to be brief",
    }
    assert (approval["kind"], approval["id"]) == ("prompt_change", change["approval_id"])

    resolved = await wire.call("approval.resolve", approval_id=approval["id"], resolution=resolution)

    answer = {"state": "resolved", "resolution": resolution, "resolved_by": by}
    assert resolved == {**approval, **answer, "resolved_at": resolved["resolved_at"]}
    approved = resolution == "approve"
    assert await prompt_of(wire, agent_id) == ("Say no." if approved else "Say ok.")
    assert [entry["approved_by"] for entry in await history_of(wire, agent_id)] == [by] * approved
    params = {"agent_id": agent_id, "pending_change_id": change["id"], "approve": approved}
    for method, again in (
        ("agent.approve_prompt_change", params),
        ("approval.resolve", {"approval_id": approval["id"], "resolution": resolution}),
    ):
        assert symbol(await wire.answer(method, again)) == "lifecycle_conflict"


async def test_a_stale_change_cannot_be_approved_here_either(wire: Wire, start: Start) -> None:
    agent_id, approval = await asked(wire, start)
    await wire.call("agent.update", agent_id=agent_id, constitution={"mutable_prompt": "Say much."})
    params = {"approval_id": approval["id"], "resolution": "approve"}
    assert symbol(await wire.answer("approval.resolve", params)) == "lifecycle_conflict"
    assert (await wire.call("approval.get", approval_id=approval["id"])) == approval
    assert await prompt_of(wire, agent_id) == "Say much."


# ------------------------------------------------------------------ the queue


async def test_the_queue_is_listed_newest_first_and_narrowed_by_agent_and_state(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    start("worker", **WIRE_PLANS)
    made: dict[str, list[str]] = {}
    for _ in range(2):
        agent_id = await wire.agent(**written("Say ok.", "approval_required"))
        await lived(wire, agent_id, [{"calls": [modify(f"{n}") for n in range(3)]}, DONE])
        made[agent_id] = [change["approval_id"] for change in await pending_of(wire, agent_id)]
    one, two = made
    everything = [*made[one], *made[two]][::-1]
    answered = made[one][1]
    await wire.call("approval.resolve", approval_id=answered, resolution="deny")
    still_open = [each for each in everything if each != answered]

    async def ids(**filters: Any) -> list[str]:
        found: list[str] = []
        place: dict[str, str] = {}
        for _ in range(10):
            page = await wire.call("approval.list", limit=2, **filters, **place)
            found += [item["id"] for item in page["items"]]
            if page["cursor"] is None:
                break
            place = {"cursor": page["cursor"]}
        return found

    assert await ids() == await ids(state="open") == still_open
    assert await ids(state="all") == everything
    assert await ids(state="resolved") == [answered]
    assert await ids(agent_id=two) == made[two][::-1]
    assert await ids(agent_id=one, state="all") == made[one][::-1]
    assert await ids(agent_id="agt_" + UNKNOWN) == await ids(agent_id="x") == []


async def test_a_question_of_somebody_else_is_one_that_nobody_asked(
    wire: Wire, gateway: Gateway, hold: Hold
) -> None:
    agent_id, _, approval = await doubted(wire, gateway.pool, hold)
    stranger = await gateway.caller("two")
    assert (await stranger.call("approval.list", state="all"))["items"] == []
    assert (await stranger.call("approval.list", agent_id=agent_id))["items"] == []
    for approval_id in (approval["id"], "apr_" + UNKNOWN, "x"):
        for method, more in (("approval.get", {}), ("approval.resolve", {"resolution": "done"})):
            error = await stranger.refused(method, approval_id=approval_id, **more)
            assert (error["code"], error["data"]) == (
                ErrorCode.tool_not_found,
                {"symbol": "tool_not_found", "resource": "approval", "id": approval_id},
            )
        error = await stranger.refused("approval.list", cursor=approval_id)
        assert (error["code"], error["data"]["field"]) == (ErrorCode.invalid_params, "cursor")
    assert await wire.call("approval.get", approval_id=approval["id"]) == approval


async def test_the_queue_needs_its_capability_and_its_scope(gateway: Gateway) -> None:
    without = await gateway.caller("one", SCOPES, **{"self.modify_prompt": True})
    reads = await gateway.caller("one", ("agent.read", "run.read"))
    params = {"approval_id": "apr_" + UNKNOWN}
    for method, sent in (
        ("approval.list", {}),
        ("approval.get", params),
        ("approval.resolve", {**params, "resolution": "done"}),
    ):
        answers = [symbol(await each.answer(method, sent)) for each in (without, reads)]
        assert answers == ["capability_not_supported", "authz_denied"]


# ------------------------------------------------------------------ notices


async def test_what_a_held_run_is_told_by_others_disturbs_neither_its_holder_nor_the_next_one(
    wire: Wire, gateway: Gateway, hold: Hold, owner_id: UUID, pool: Pool
) -> None:
    agent_id = await wire.agent(**ROOMY)
    run_id = await wire.run(agent_id)
    held = await hold(run_id)
    notice = ApprovalResolved("apr_" + UNKNOWN, "in_doubt", "done")
    go_on = ToolCall("call_1_1", "continue_now", {})
    for number in range(2):
        async with transaction(pool) as connection:
            assert await lock_agent(connection, owner_id, uuid("agt", agent_id))
            told_to = await tell_live_run(connection, owner_id, uuid("agt", agent_id), (notice,), run_id=None)
            assert told_to is not None and told_to.run_id == held.run_id
        if not number:
            await held.write(
                ModelAnswered(1, "", (go_on,), 10), ToolReturned(1, "call_1_1", "continue_now", True, "")
            )
    await held.write()
    await held.give_back()

    again = await hold(run_id)
    assert again.progress.cycles == 2
    next_entry_no = await pool.fetchval("select next_entry_no from runs where id = $1", held.run_id)
    assert again.progress.entry_no == next_entry_no - 1, "and so the next snapshot counts right"
    assert await violations(pool) == {}
