"""Messages, as the published client sends and lists them, and as they wake the agents they are for."""

from typing import Any

import pytest
from tests.contract.embedder import Embedder, refused
from tests.contract.pages import both_dialects_agree, walked
from tests.contract.requirements import requirement

from espalier_protocol.errors import ErrorCode

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"text": "hällo", "parts": [1, None, {"deep": True}]}
WAITS_FOR_A_MESSAGE: list[dict[str, Any]] = [
    {"calls": [{"tool": "sleep", "args": {"duration_seconds": 3600}}]},
    {"calls": [{"tool": "inbox_read"}]},
    {"calls": [{"tool": "complete", "args": {"result": "${/results/1/messages}"}}]},
]


async def sent_to(embedder: Embedder, agent_id: str, count: int) -> list[dict[str, Any]]:
    return [await embedder.client.message.send(agent_id, n) for n in range(count)]


@requirement("AEP-MESSAGE-01")
async def test_a_sent_message_is_answered_as_a_message(embedder: Embedder) -> None:
    agent = await embedder.agent()
    sent = await embedder.client.message.send(agent["id"], BODY)
    assert sent["id"].startswith("msg_") and sent["sent_at"]
    told = ("from_agent_id", "to_agent_id", "tree_root_id", "body", "delivered_at", "read_at", "sender")
    assert {name: sent[name] for name in told} == {
        "from_agent_id": agent["id"],
        "to_agent_id": agent["id"],
        "tree_root_id": agent["id"],
        "body": BODY,
        "delivered_at": None,
        "read_at": None,
        "sender": {"kind": "embedder"},
    }


@requirement("AEP-MESSAGE-02")
async def test_messages_are_found_page_by_page(embedder: Embedder) -> None:
    agent, other = await embedder.agent(), await embedder.agent()
    made = await sent_to(embedder, agent["id"], 3)
    await sent_to(embedder, other["id"], 1)
    filters: dict[str, Any]
    for filters in ({"agent_id": agent["id"]}, {"tree_root_id": agent["id"]}):
        assert await walked(embedder.client.message.list, "items", "cursor", **filters) == made[::-1]


@requirement("AEP-MESSAGE-03")
async def test_messages_are_listed_in_both_dialects(embedder: Embedder) -> None:
    agent = await embedder.agent()
    made = await sent_to(embedder, agent["id"], 3)
    assert await both_dialects_agree(embedder.client.message.list, "messages", agent_id=agent["id"])
    assert await walked(embedder.client.message.list, "messages", "next_cursor") == made[::-1]


@requirement("AEP-MESSAGE-04")
async def test_an_inbox_is_what_its_agent_has_not_read(embedder: Embedder) -> None:
    agent = await embedder.agent()
    made = await sent_to(embedder, agent["id"], 3)
    for _ in range(2):
        assert await embedder.client.message.inbox(agent["id"]) == {"messages": made}


@requirement("AEP-MESSAGE-05")
async def test_a_message_wakes_a_sleeping_agent(embedder: Embedder) -> None:
    run = await embedder.run(WAITS_FOR_A_MESSAGE)
    await embedder.until(run["id"], "sleeping")
    sent = await embedder.client.message.send(run["agent_id"], BODY)

    events = await embedder.events(run["id"])

    shown = {name: sent[name] for name in ("id", "from_agent_id", "body", "sent_at")}
    assert events[-1].payload["result"] == [shown]
    delivered = [event.payload for event in events if event.type == "message.delivered"]
    assert delivered == [{"from_agent_id": run["agent_id"], "message_id": sent["id"]}]
    assert await embedder.client.message.inbox(run["agent_id"]) == {"messages": []}
    (listed,) = (await embedder.client.message.list(agent_id=run["agent_id"]))["items"]
    assert listed["read_at"] and listed["delivered_at"]


@requirement("AEP-MESSAGE-06")
async def test_a_message_stays_in_its_tree(embedder: Embedder) -> None:
    agent, other = await embedder.agent(), await embedder.agent()
    error = await embedder.wire.refused(
        "message.send", to_agent_id=agent["id"], body=BODY, tree_root_id=other["id"]
    )
    assert error["code"] == ErrorCode.tree_boundary_violation
    nobody = await refused(embedder.client.message.send("agt_" + "0" * 26, BODY))
    assert nobody.symbol == "tool_not_found"
    assert (await embedder.client.message.list())["items"] == []
