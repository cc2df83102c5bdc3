"""Prompts that change: by the agent as far as its policy lets it, by a person's word, and who is told."""

from typing import Any

import anyio
import pytest
from fake_openai import answer, fake_openai
from invariants import violations
from tests.integration.conftest import Start
from tests.integration.test_wire_agent_changes import meanwhile
from tests.integration.wire import ANSWER_WAIT_S, POLL_S, Gateway, Wire, symbol
from tests.integration.wire_prompts import (
    DONE,
    GO_ON,
    NAP,
    WIRE_PLANS,
    Plan,
    answers_to,
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

from espalier_acts.prompts import resolve_change
from espalier_domain.prompts import PENDING_MAX, PROMPT_CHARS_MAX, REASON_CHARS_MAX, patched, unified_diff
from espalier_protocol.access import SCOPES
from espalier_protocol.errors import ErrorCode
from espalier_protocol.shapes import PAGE_DEFAULT
from espalier_store.pool import Connection

pytestmark = pytest.mark.anyio

A, B, C = "Say ok.\nBe kind.", "Say ok.\nBe brief.", "Say nothing.\nBe brief."
UNKNOWN = "0" * 26

# ------------------------------------------------------------------ auto


async def test_under_auto_a_change_is_applied_told_and_kept_in_the_history(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**written(A), subject_ids=["sub_agents"])
    diff = unified_diff(B, C)
    plan: Plan = [
        {"calls": [modify(B, "shorter"), modify(diff, "shorter still", "diff"), GO_ON]},
        DONE,
    ]
    run_id = await lived(wire, agent_id, plan)

    first, second = await history_of(wire, agent_id)
    assert await prompt_of(wire, agent_id) == C
    assert [(e["agent_id"], e["diff"], e["reason"], e["approved_by"]) for e in (first, second)] == [
        (agent_id, unified_diff(A, B), "shorter", None),
        (agent_id, diff, "shorter still", None),
    ]
    assert await answers_to(gateway, run_id) == [
        (True, {"applied": True, "history_entry_id": entry["id"]}) for entry in (first, second)
    ]
    assert await told(gateway, run_id, "prompt.", "espalier.") == [
        ("prompt.modified", {"diff": entry["diff"], "reason": entry["reason"], "approved_by": None})
        for entry in (first, second)
    ]
    returned = ["tool.returned", "prompt.modified"]
    assert (await event_types(gateway.pool, run_id))[2:9] == [*["tool.called"] * 3, *returned * 2]
    assert await violations(gateway.pool) == {}


async def test_a_change_is_about_the_subjects_of_its_agent_and_of_the_run_that_made_it(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    start("worker", **WIRE_PLANS)
    for policy, table in (("auto", "prompt_history"), ("approval_required", "prompt_changes")):
        agent_id = await wire.agent(**written(A, policy), subject_ids=["sub_b", "sub_a"])
        plan: Plan = [{"calls": [modify(B)]}, DONE]
        run_id = await wire.run(
            agent_id, subject_ids=["sub_c"], inputs={"espalier.script": {"answers": plan}}
        )
        await once(wire, run_id, "complete")
        subjects = await gateway.pool.fetchval(f"select subject_ids from {table}")
        assert subjects == ["sub_a", "sub_b", "sub_c"]


@pytest.mark.slow
async def test_the_very_next_cycle_is_shown_the_new_prompt_and_the_one_under_way_the_old_one(
    wire: Wire, start: Start
) -> None:
    """A worker that loads a real model's adapter, which takes seconds."""
    change = {"mode": "replace", "content": "NEW", "reason": "better"}
    replies = [
        answer("I change.", ("modify_own_prompt", change)),
        answer(None, ("continue_now", {})),
        answer("Done."),
    ]
    async with fake_openai(replies) as fake:
        settings = {"OPENAI_BASE_URL": fake.base_url, "OPENAI_API_KEY": fake.key}
        start("worker", ESPALIER_MODEL=fake.model, **settings)
        run_id = await wire.run(await wire.agent(**written("OLD")))
        with anyio.fail_after(60):
            while (await wire.call("run.get", run_id=run_id))["ended_at"] is None:
                await anyio.sleep(POLL_S)

    assert fake.refusals == []
    systems = [request["messages"][0]["content"] for request in fake.requests]
    assert systems == ["Be brief.\n\nOLD", "Be brief.\n\nOLD", "Be brief.\n\nNEW"]


# ------------------------------------------------------------------ what is refused


NOTHING_CHANGES = "invalid_params: content changes nothing: the prompt is this already."
UNFIT = "invalid_params: content cannot be applied:"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no diff": (
        modify("Be bold.", mode="diff"),
        f"{UNFIT} it is no unified diff: 'Be bold.'",
    ),
    "a diff to another text": (
        modify(unified_diff("Say no.\nBe kind.", B), mode="diff"),
        f"{UNFIT} hunk 1 is refused: at line 1 it has 'Say no.\\n', the prompt has 'Say ok.\\n'.",
    ),
    "a diff without a hunk": (
        modify("", mode="diff"),
        f"{UNFIT} there is no hunk",
    ),
    "the same": (modify(A), NOTHING_CHANGES),
    "too long": (modify("x" * (PROMPT_CHARS_MAX + 1)), "invalid_params: modify_own_prompt takes"),
    "no reason": (modify(B, ""), "invalid_params: modify_own_prompt takes"),
    "a long reason": (modify(B, "x" * (REASON_CHARS_MAX + 1)), "invalid_params: modify_own_prompt takes"),
    "a number": (modify(5), "invalid_params: modify_own_prompt takes"),
    "another mode": (modify(B, mode="append"), "invalid_params: modify_own_prompt takes"),
    "another agent": (modify(B, agent_id="agt_" + UNKNOWN), "invalid_params: modify_own_prompt takes"),
    "the policy": (modify(B, mutable_prompt_policy="auto"), "invalid_params: modify_own_prompt takes"),
}


async def test_a_change_that_does_not_fit_is_told_so_in_a_sentence_and_changes_nothing(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**written(A))
    before = await wire.call("agent.get", agent_id=agent_id)
    run_id = await lived(wire, agent_id, [{"calls": [call for call, _ in REFUSED.values()]}, DONE])

    answers = dict(zip(REFUSED, await answers_to(gateway, run_id), strict=True))
    wrong = {
        name: text for name, (ok, text) in answers.items() if ok or not text.startswith(REFUSED[name][1])
    }
    assert wrong == {}
    assert await told(gateway, run_id, "prompt.", "espalier.", "error") == []
    assert await wire.call("agent.get", agent_id=agent_id) == before
    assert (await history_of(wire, agent_id), await pending_of(wire, agent_id)) == ([], [])


async def test_a_prompt_does_not_grow_beyond_its_limit_by_diffs(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**written("x" * PROMPT_CHARS_MAX + "\n"))
    run_id = await lived(
        wire, agent_id, [{"calls": [modify("@@ -1,0 +2 @@\n+one more\n", mode="diff")]}, DONE]
    )
    ((ok, text),) = await answers_to(gateway, run_id)
    assert (ok, text) == (
        False,
        f"invalid_params: content makes a prompt of more than {PROMPT_CHARS_MAX} characters.",
    )


async def test_a_locked_prompt_stays_and_the_attempt_is_told_by_its_code(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**written(A, "locked"))
    before = await wire.call("agent.get", agent_id=agent_id)
    run_id = await lived(wire, agent_id, [{"calls": [modify(B)]}, DONE])

    assert await answers_to(gateway, run_id) == [
        (False, "constitution_policy_violation: The constitution locks the prompt.")
    ]
    assert await told(gateway, run_id, "prompt.", "espalier.", "error") == [
        (
            "error",
            {
                "code": ErrorCode.constitution_policy_violation,
                "symbol": "constitution_policy_violation",
                "message": "The constitution locks the prompt.",
                "cycle_number": 1,
            },
        )
    ]
    assert await wire.call("agent.get", agent_id=agent_id) == before
    assert (await history_of(wire, agent_id), await pending_of(wire, agent_id)) == ([], [])


# ------------------------------------------------------------------ approval_required


async def asleep_with_changes(
    wire: Wire, start: Start, *prompts: str
) -> tuple[str, str, list[dict[str, Any]]]:
    """An agent whose live run proposed these prompts, the run, and the changes that wait."""
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**written(A, "approval_required"))
    calls = [modify(prompt, f"reason {number}") for number, prompt in enumerate(prompts, start=1)]
    run_id = await lived(wire, agent_id, [{"calls": [*calls, NAP]}, DONE], state="sleeping")
    return agent_id, run_id, await pending_of(wire, agent_id)


def resolving(agent_id: str, change: dict[str, Any], approve: bool, **more: Any) -> dict[str, Any]:
    return {"agent_id": agent_id, "pending_change_id": change["id"], "approve": approve, **more}


async def test_under_approval_a_change_waits_and_is_told_and_changes_nothing(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    agent_id, run_id, (first, second) = await asleep_with_changes(wire, start, B, C)

    assert await answers_to(gateway, run_id) == [
        (True, {"queued": True, "pending_change_id": change["id"]}) for change in (first, second)
    ]
    expected = {"agent_id": agent_id, "run_id": run_id, "stale": False}
    for change, number, prompt in ((first, 1, B), (second, 2, C)):
        given = {"diff": unified_diff(A, prompt), "reason": f"reason {number}"}
        assert {name: change[name] for name in (*expected, *given)} == {**expected, **given}
    assert await told(gateway, run_id, "prompt.", "espalier.") == [
        event
        for change in (first, second)
        for event in (
            (
                "prompt.change_queued",
                {"pending_change_id": change["id"], "diff": change["diff"], "reason": change["reason"]},
            ),
            (
                "espalier.approval.requested",
                {"approval_id": change["approval_id"], "kind": "prompt_change"},
            ),
        )
    ]
    assert (await prompt_of(wire, agent_id), await history_of(wire, agent_id)) == (A, [])
    assert await violations(gateway.pool) == {}


async def test_an_approved_change_is_applied_and_told_to_the_run_that_lives(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    agent_id, run_id, (change,) = await asleep_with_changes(wire, start, B)
    by = await key_of(gateway, wire)

    result = await wire.call(
        "agent.approve_prompt_change", **resolving(agent_id, change, True, comment="yes")
    )

    (entry,) = await history_of(wire, agent_id)
    assert result == {"applied": True, "history_entry_id": entry["id"]}
    given = {"agent_id": agent_id, "diff": change["diff"], "reason": "reason 1", "approved_by": by}
    assert {name: entry[name] for name in given} == given
    assert (await prompt_of(wire, agent_id), await pending_of(wire, agent_id)) == (B, [])
    assert (await told(gateway, run_id, "prompt.", "espalier."))[2:] == [
        ("prompt.modified", {"diff": change["diff"], "reason": "reason 1", "approved_by": by}),
        (
            "espalier.approval.resolved",
            {"approval_id": change["approval_id"], "kind": "prompt_change", "resolution": "approve"},
        ),
    ]
    approval = await wire.call("approval.get", approval_id=change["approval_id"])
    answer = {"state": "resolved", "resolution": "approve", "comment": "yes", "resolved_by": by}
    assert {name: approval[name] for name in answer} == answer
    await wire.call("run.continue", run_id=run_id)
    assert (await once(wire, run_id, "complete", "error"))["state"] == "complete", "the run goes on"
    assert await violations(gateway.pool) == {}


async def test_a_rejected_change_is_told_with_the_comment_and_leaves_prompt_and_history(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    agent_id, run_id, (change,) = await asleep_with_changes(wire, start, B)
    by = await key_of(gateway, wire)
    before = await wire.call("agent.get", agent_id=agent_id)

    result = await wire.call(
        "agent.approve_prompt_change", **resolving(agent_id, change, False, comment="no")
    )

    assert result == {"applied": False}
    assert (await told(gateway, run_id, "prompt.", "espalier."))[2:] == [
        (
            "prompt.change_rejected",
            {
                "pending_change_id": change["id"],
                "reason": "reason 1",
                "rejected_by": by,
                "comment": "no",
            },
        ),
        (
            "espalier.approval.resolved",
            {"approval_id": change["approval_id"], "kind": "prompt_change", "resolution": "deny"},
        ),
    ]
    assert await wire.call("agent.get", agent_id=agent_id) == before
    assert (await history_of(wire, agent_id), await pending_of(wire, agent_id)) == ([], [])


@pytest.mark.parametrize("overtaken_by", ["another change", "the embedder"])
async def test_a_change_of_a_prompt_that_was_changed_since_can_only_be_rejected(
    wire: Wire, start: Start, overtaken_by: str
) -> None:
    agent_id, _, (older, newer) = await asleep_with_changes(wire, start, B, C)
    if overtaken_by == "the embedder":
        await wire.call("agent.update", agent_id=agent_id, constitution={"mutable_prompt": C})
    else:
        await wire.call("agent.approve_prompt_change", **resolving(agent_id, newer, True))
    before = await history_of(wire, agent_id)

    error = await wire.refused("agent.approve_prompt_change", **resolving(agent_id, older, True))

    assert error["code"] == ErrorCode.lifecycle_conflict
    assert (await prompt_of(wire, agent_id), await history_of(wire, agent_id)) == (C, before)
    assert {change["id"]: change["stale"] for change in await pending_of(wire, agent_id)}[older["id"]] is True
    rejected = await wire.call("agent.approve_prompt_change", **resolving(agent_id, older, False))
    assert rejected == {"applied": False}


@pytest.mark.parametrize("approve", [True, False], ids=["applied", "rejected"])
async def test_a_change_is_resolved_once(wire: Wire, start: Start, approve: bool) -> None:
    agent_id, _, (change,) = await asleep_with_changes(wire, start, B)
    await wire.call("agent.approve_prompt_change", **resolving(agent_id, change, approve))
    before = await wire.call("agent.get", agent_id=agent_id, include=["prompt_history"])
    for again in (True, False):
        answer = await wire.answer("agent.approve_prompt_change", resolving(agent_id, change, again))
        assert symbol(answer) == "lifecycle_conflict"
    assert await wire.call("agent.get", agent_id=agent_id, include=["prompt_history"]) == before


async def test_of_two_who_resolve_a_change_at_once_one_is_told_that_it_was(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    agent_id, run_id, (change,) = await asleep_with_changes(wire, start, B)
    await wire.call("run.cancel", run_id=run_id)  # so that nobody waits for a run
    owner_id = await gateway.pool.fetchval("select owner_id from agents")

    async def resolve(connection: Connection) -> object:
        ids = uuid("agt", agent_id), uuid("pch", change["id"])
        return await resolve_change(connection, owner_id, *ids, approve=True, comment=None, by="key_other")

    answer = await meanwhile(
        gateway.pool,
        resolve,
        lambda: wire.answer("agent.approve_prompt_change", resolving(agent_id, change, True)),
    )

    assert symbol(answer) == "lifecycle_conflict"
    assert [entry["approved_by"] for entry in await history_of(wire, agent_id)] == ["key_other"]


async def test_an_agent_whose_run_has_ended_keeps_the_fact_in_its_history_alone(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    agent_id, run_id, (change,) = await asleep_with_changes(wire, start, B)
    await wire.call("run.cancel", run_id=run_id)
    events = await event_types(gateway.pool, run_id)

    await wire.call("agent.approve_prompt_change", **resolving(agent_id, change, True))

    assert [entry["reason"] for entry in await history_of(wire, agent_id)] == ["reason 1"]
    assert await event_types(gateway.pool, run_id) == events and events[-1] == "run.ended"


async def test_a_change_is_told_to_the_run_that_made_it_while_it_lives_and_else_to_the_newest(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    agent_id, maker, (first, second) = await asleep_with_changes(wire, start, B, C)
    older, newest = [await lived(wire, agent_id, [{"calls": [NAP]}], "sleeping") for _ in range(2)]

    await wire.call("agent.approve_prompt_change", **resolving(agent_id, first, False))
    await wire.call("run.cancel", run_id=maker)
    await wire.call("agent.approve_prompt_change", **resolving(agent_id, second, False))

    heard = {run: await told(gateway, run, "prompt.change_rejected") for run in (maker, older, newest)}
    assert {run: [p["pending_change_id"] for _, p in events] for run, events in heard.items()} == {
        maker: [first["id"]],
        older: [],
        newest: [second["id"]],
    }


async def test_so_many_changes_wait_and_no_more(wire: Wire, gateway: Gateway, start: Start) -> None:
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**written(A, "approval_required"))
    proposals = [modify(f"prompt {number}") for number in range(PENDING_MAX + 1)]
    run_id = await lived(wire, agent_id, [{"calls": proposals}, DONE])

    *kept, (ok, text) = await answers_to(gateway, run_id)
    assert [queued for queued, _ in kept] == [True] * PENDING_MAX
    assert (ok, text.startswith("lifecycle_conflict: 8 changes of the prompt wait")) == (False, True)
    pending = await pending_of(wire, agent_id)
    assert [change["id"] for change in pending] == [answer["pending_change_id"] for _, answer in kept]

    await wire.call("agent.approve_prompt_change", **resolving(agent_id, pending[0], False))
    again = await lived(wire, agent_id, [{"calls": proposals[-1:]}, DONE])
    assert [queued for queued, _ in await answers_to(gateway, again)] == [True]


async def test_a_change_that_nobody_made_is_not_found_whoever_asks(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    agent_id, _, (change,) = await asleep_with_changes(wire, start, B)
    others, stranger = await wire.agent(), await gateway.caller("two")
    stranger_agent = await stranger.agent()
    for asker, agent, change_id in (
        (wire, agent_id, "pch_" + UNKNOWN),
        (wire, agent_id, "x"),
        (wire, others, change["id"]),
        (stranger, stranger_agent, change["id"]),
    ):
        params = {"agent_id": agent, "pending_change_id": change_id, "approve": True}
        error = await asker.refused("agent.approve_prompt_change", **params)
        assert (error["code"], error["data"]) == (
            ErrorCode.tool_not_found,
            {"symbol": "tool_not_found", "resource": "prompt_change", "id": change_id},
        )
    error = await stranger.refused("agent.approve_prompt_change", **resolving(agent_id, change, True))
    assert (error["code"], error["data"]["resource"]) == (ErrorCode.tool_not_found, "agent")
    assert len(await pending_of(wire, agent_id)) == 1


async def test_resolving_needs_its_capability_and_its_scope(gateway: Gateway) -> None:
    params = {"agent_id": "agt_" + UNKNOWN, "pending_change_id": "pch_" + UNKNOWN, "approve": True}
    without = await gateway.caller("one", SCOPES, **{"self.learning_memory": True})
    reads = await gateway.caller("one", ("agent.read", "run.read"))
    told = [symbol(await each.answer("agent.approve_prompt_change", params)) for each in (without, reads)]
    assert told == ["capability_not_supported", "authz_denied"]


# ------------------------------------------------------------------ the history in pages


async def test_the_history_is_read_page_by_page_oldest_first(wire: Wire) -> None:
    agent_id = await wire.agent(**written("prompt 0"))
    count = PAGE_DEFAULT + 3
    for number in range(1, count + 1):
        await wire.call(
            "agent.update", agent_id=agent_id, constitution={"mutable_prompt": f"prompt {number}"}
        )

    first = await wire.call("agent.get", agent_id=agent_id, include=["prompt_history"])
    cursor = first["prompt_history_cursor"]
    second = await wire.call(
        "agent.get", agent_id=agent_id, include=["prompt_history"], prompt_history_cursor=cursor
    )

    entries = [*first["prompt_history"], *second["prompt_history"]]
    assert (len(first["prompt_history"]), len(entries)) == (PAGE_DEFAULT, count)
    assert cursor == entries[PAGE_DEFAULT - 1]["id"] and "prompt_history_cursor" not in second
    prompt = "prompt 0"
    for entry in entries:
        prompt = patched(prompt, entry["diff"])
    assert prompt == f"prompt {count}", "the diffs, one after the other, lead from the first to the last"


async def test_a_page_of_long_diffs_ends_early_and_none_is_missing(wire: Wire) -> None:
    agent_id = await wire.agent(**written("a"))
    for number in range(6):
        prompt = f"{number}" * 200_000
        await wire.call("agent.update", agent_id=agent_id, constitution={"mutable_prompt": prompt})

    reasons, pages = 0, 0
    cursor: dict[str, str] = {}
    for _ in range(6):
        page = await wire.call("agent.get", agent_id=agent_id, include=["prompt_history"], **cursor)
        reasons, pages = reasons + len(page["prompt_history"]), pages + 1
        if "prompt_history_cursor" not in page:
            break
        cursor = {"prompt_history_cursor": page["prompt_history_cursor"]}
    assert (reasons, pages > 1) == (6, True)


async def test_a_cursor_that_no_page_of_this_history_answered_is_refused(wire: Wire) -> None:
    agent_id, other = await wire.agent(**written(A)), await wire.agent(**written(A))
    await wire.call("agent.update", agent_id=other, constitution={"mutable_prompt": B})
    (entry,) = await history_of(wire, other)
    for cursor in (entry["id"], "phe_" + UNKNOWN, "x"):
        error = await wire.refused(
            "agent.get", agent_id=agent_id, include=["prompt_history"], prompt_history_cursor=cursor
        )
        assert (error["code"], error["data"]["field"]) == (ErrorCode.invalid_params, "prompt_history_cursor")


# ------------------------------------------------------------------ locks


WAITING = (
    "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
)


async def test_a_step_that_changes_the_prompt_waits_for_the_agent_without_holding_its_run(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    """The order in which everybody locks: an agent before its runs."""
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**written(A))
    slow: Plan = [{"calls": [modify(B)], "delay_s": 0.5}, DONE]
    run_id = await wire.run(agent_id, inputs={"espalier.script": {"answers": slow}})
    async with gateway.pool.acquire() as connection, connection.transaction():
        await connection.execute("select from agents where id = $1 for no key update", uuid("agt", agent_id))
        with anyio.fail_after(ANSWER_WAIT_S):
            while not await gateway.pool.fetchval(WAITING):
                await anyio.sleep(POLL_S)
        await connection.execute("set local lock_timeout = '500ms'")  # a renewal may have it for a moment
        await connection.execute("select from runs where id = $1 for update", uuid("run", run_id))
    assert (await once(wire, run_id, "complete", "error"))["state"] == "complete"
    assert await prompt_of(wire, agent_id) == B
