"""Messages, and how they wake those that they are for."""

from typing import Any, Final

import anyio

from espalier_client.conformance.behaviour import calls, completes, says, sleeps, tool
from espalier_client.conformance.checks.lists import (
    require_both_dialects,
    require_pages,
    require_unknown_cursors,
)
from espalier_client.conformance.expected import nobody, require_shape
from espalier_client.conformance.ground import POLL_S, Trial
from espalier_client.conformance.verdicts import expect, same

BODY: Final[dict[str, Any]] = {"text": "hällo", "parts": [1, None, {"deep": True}]}
READS: Final = calls(tool("inbox_read"))
ANSWERS: Final = calls(tool("complete", result="${/cycle/results/0/messages}"))
SETTLED_S: Final = 1.5


async def _sent(trial: Trial, agent_id: str, count: int) -> list[dict[str, Any]]:
    return [await trial.me.call("message.send", to_agent_id=agent_id, body=number) for number in range(count)]


async def message_01_sent(trial: Trial) -> None:
    agent = await trial.agent()
    sent = await trial.me.call("message.send", to_agent_id=agent["id"], body=BODY)
    require_shape(sent, "Message", "the message")
    told = {name: sent[name] for name in ("to_agent_id", "tree_root_id", "body", "delivered_at", "read_at")}
    wanted = {
        "to_agent_id": agent["id"],
        "tree_root_id": agent["id"],
        "body": BODY,
        "delivered_at": None,
        "read_at": None,
    }
    same(told, wanted, "the message")


async def message_02_pages(trial: Trial) -> None:
    agent = await trial.agent()
    ids = [each["id"] for each in await _sent(trial, agent["id"], 5)][::-1]
    await require_pages(trial.me, "message.list", ids, "messages", agent_id=agent["id"])
    await require_pages(trial.me, "message.list", ids, "messages", tree_root_id=agent["id"])
    unknown = ["nonsense", nobody("msg")]
    await require_unknown_cursors(trial.me, "message.list", unknown, agent_id=agent["id"])


async def message_03_dialects(trial: Trial) -> None:
    agent = await trial.agent()
    await _sent(trial, agent["id"], 3)
    await require_both_dialects(trial.me, "message.list", "messages", agent_id=agent["id"])


async def message_04_inbox(trial: Trial) -> None:
    agent = await trial.agent()
    sent = await _sent(trial, agent["id"], 3)
    for _ in range(2):
        inbox = await trial.me.call("message.inbox", agent_id=agent["id"])
        same(inbox.get("messages"), sent, "the inbox, oldest first")
    await trial.me.refused("tool_not_found", "message.inbox", agent_id=nobody("agt"))


async def message_05_wakes(trial: Trial) -> None:
    run = await trial.run(sleeps(), READS, ANSWERS)
    await trial.until(run["id"], "sleeping")
    sent = await trial.me.call("message.send", to_agent_id=run["agent_id"], body=BODY)
    ended = await trial.until(run["id"], "complete")
    shown = [(each.get("id"), each.get("body")) for each in ended["result"]]
    same(shown, [(sent["id"], BODY)], "what the agent read")
    same(
        (await trial.me.call("message.inbox", agent_id=run["agent_id"]))["messages"],
        [],
        "its inbox afterwards",
    )
    page = await trial.me.call("message.list", agent_id=run["agent_id"])
    (listed,) = page.get("items", page.get("messages"))
    expect(
        listed["read_at"] and listed["delivered_at"],
        "a message that was read has no read_at or delivered_at.",
    )
    if trial.has("streaming.sse"):
        told = [e["payload"] for e in await trial.me.events(run["id"]) if e["type"] == "message.delivered"]
        same([each.get("message_id") for each in told], [sent["id"]], "message.delivered")


async def message_06_one_wake(trial: Trial) -> None:
    run = await trial.run(
        sleeps(), calls(tool("inbox_read"), tool("sleep", duration_seconds=3600)), says("late")
    )
    await trial.until(run["id"], "sleeping")
    batch = [
        {
            "jsonrpc": "2.0",
            "id": number,
            "method": "message.send",
            "params": {"to_agent_id": run["agent_id"], "body": number},
        }
        for number in range(3)
    ]
    await trial.me.post(batch)
    while (await trial.me.call("message.inbox", agent_id=run["agent_id"]))[
        "messages"
    ]:  # bounded by the check
        await anyio.sleep(POLL_S)
    await anyio.sleep(SETTLED_S)
    asleep = await trial.until(run["id"], "sleeping")
    expect(
        asleep["cycle_count"] <= 3,
        f"three messages at once caused {asleep['cycle_count'] - 1} cycles, not one.",
    )
    await trial.me.call("run.cancel", run_id=run["id"])


async def message_07_other_tree(trial: Trial) -> None:
    agent, other = await trial.agent(), await trial.agent()
    for root in (other["id"], nobody("agt")):
        params = {"to_agent_id": agent["id"], "body": BODY, "tree_root_id": root}
        await trial.me.refused("tree_boundary_violation", "message.send", **params)
    same((await trial.me.call("message.inbox", agent_id=agent["id"]))["messages"], [], "the inbox afterwards")
    await trial.me.call("message.send", to_agent_id=agent["id"], body=BODY, tree_root_id=agent["id"])


async def message_08_nobody(trial: Trial) -> None:
    for agent_id in (nobody("agt"), "nonsense"):
        await trial.me.refused("tool_not_found", "message.send", to_agent_id=agent_id, body=BODY)


async def message_09_agent_to_other_tree(trial: Trial) -> None:
    other = await trial.agent()
    run, events = await trial.ended(
        calls(tool("send_message", to_agent_id=other["id"], body=BODY)), completes("went on")
    )
    same((run["state"], run["result"]), ("complete", "went on"), "state and result")
    same((await trial.me.call("message.inbox", agent_id=other["id"]))["messages"], [], "the other's inbox")
    if events:
        (returned,) = [
            each["payload"]["result_summary"]
            for each in events
            if each["type"] == "tool.returned" and each["payload"]["tool_name"].endswith("send_message")
        ]
        told = (returned["ok"], returned["preview"].partition(":")[0])
        same(told, (False, "tree_boundary_violation"), "how the call came back")
        same([each for each in events if each["type"] == "message.sent"], [], "message.sent")


async def message_10_closed(trial: Trial) -> None:
    for method in ("agent.cancel", "agent.archive"):
        agent = await trial.agent()
        await trial.me.call(method, agent_id=agent["id"])
        await trial.me.refused("lifecycle_conflict", "message.send", to_agent_id=agent["id"], body=BODY)


async def message_11_not_lost(trial: Trial) -> None:
    run = await trial.run({**sleeps(), "delay_s": 1.5}, READS, ANSWERS)
    sent = await trial.me.call("message.send", to_agent_id=run["agent_id"], body=BODY)
    ended = await trial.until(run["id"], "complete")
    same([each.get("id") for each in ended["result"]], [sent["id"]], "what the agent read when it woke")
