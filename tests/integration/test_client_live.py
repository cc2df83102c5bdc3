"""The client's reads against a real gateway: what was made is found, alone and in lists, with its bytes."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from forked import Service

from espalier_client import AepClient, every
from espalier_protocol.agent import AgentCreate, AgentList, Budgets, Ceilings, Constitution
from espalier_protocol.memory import MemoryDelete, MemoryRead, MemorySearch, MemoryWrite
from espalier_protocol.message import MessageList, MessageSend
from espalier_protocol.run import RunCreate, RunList

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WAIT_S = 45.0
CONTENT = "once, with ünïcode\n"
MADE = "${/results/0/artifact_id}"
PLAN = [
    {"calls": [{"tool": "artifact_create", "args": {"name": "a.md", "content": CONTENT}}]},
    {"calls": [{"tool": "complete", "args": {"final_message": "made", "artifact_ids": [MADE]}}]},
]
AGENT = AgentCreate(
    name="reader",
    constitution=Constitution(immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"),
    toolset=[],
    ceilings=Ceilings(max_cycles=5, max_subagents=0, max_tool_calls_per_cycle=5, max_wall_seconds=300),
    budgets=Budgets(tokens_per_cycle=50_000, tool_calls_per_cycle=5, seconds_per_cycle=60),
)


async def test_everything_that_the_client_reads_is_what_the_runtime_holds(
    start: Callable[..., Service], start_gateway: Callable[..., Awaitable[Any]], api_key: str
) -> None:
    gateway = await start_gateway()
    start("worker", ESPALIER_MODELS_SCRIPTED="on")
    async with AepClient(gateway.base_url, api_key) as client:
        with anyio.fail_after(WAIT_S):
            made = await client.agent_create(AGENT)
            inputs = {"espalier.script": {"answers": PLAN}}
            run = await client.run_create(RunCreate(agent_id=made.id, goal="make a file", inputs=inputs))
            events = [event async for event in client.follow(run.id)]
            result = events[-1].payload["result"]

            agent = await client.agent_get(made.id)
            assert (agent.id, agent.name, agent.constitution) == (made.id, "reader", AGENT.constitution)
            assert [each.id for each in (await client.agent_list(AgentList())).items] == [made.id]

            ended = await client.run_get(run.id)
            assert (ended.state, ended.result) == ("complete", result)
            assert await client.run_result(run.id) == ended
            assert (await client.run_list(RunList(agent_id=made.id))).items == [ended]

            artifact = await client.artifact_get(result["artifact_ids"][0])
            assert (artifact.name, artifact.created_by.run_id) == ("a.md", run.id)
            pieces = [piece async for piece in client.artifact_bytes(artifact.id)]
            assert b"".join(pieces) == CONTENT.encode()
            assert artifact.size_bytes == len(CONTENT.encode())


async def test_the_result_of_a_run_is_waited_for(
    start: Callable[..., Service], start_gateway: Callable[..., Awaitable[Any]], api_key: str
) -> None:
    gateway = await start_gateway()
    start("worker", ESPALIER_MODELS_SCRIPTED="on")
    async with AepClient(gateway.base_url, api_key) as client:
        with anyio.fail_after(WAIT_S):
            made = await client.agent_create(AGENT)
            inputs = {"espalier.script": {"answers": [{"text": "well done", "delay_s": 0.5}]}}
            run = await client.run_create(RunCreate(agent_id=made.id, goal="wait", inputs=inputs))

            ended = await client.run_result(run.id)

            assert (ended.state, ended.result["final_message"]) == ("complete", "well done")


async def test_memory_and_messages_are_what_the_runtime_holds(
    start_gateway: Callable[..., Awaitable[Any]], api_key: str
) -> None:
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as client:
        with anyio.fail_after(WAIT_S):
            root = (await client.agent_create(AGENT)).id
            written = [
                await client.memory_write(
                    MemoryWrite(tree_root_id=root, namespace="n", key=f"k{number}", value={"n": number})
                )
                for number in range(5)
            ]
            again = await client.memory_write(
                MemoryWrite(tree_root_id=root, namespace="n", key="k0", value="words to find", subject_id="s")
            )
            shelf = MemoryRead(tree_root_id=root, namespace="n", limit=2)
            kept = [record async for record in every(client.memory_read, shelf)]
            query = MemorySearch(tree_root_id=root, namespace="n", query="find words", k=3)
            found = (await client.memory_search(query)).items
            gone = await client.memory_delete(MemoryDelete(id=written[1].id))

            assert (again.id, again.created_at) == (written[0].id, written[0].created_at)
            assert kept == [*written[:0:-1], again]
            assert [(match.id, match.value, match.score > 0.5) for match in found] == [
                (again.id, "words to find", True)
            ]
            assert (gone.deleted, len((await client.memory_read(shelf)).items)) == (1, 2)

            sent = [await client.message_send(MessageSend(to_agent_id=root, body=n)) for n in range(3)]
            assert (await client.message_inbox(root)).messages == sent
            listed = every(client.message_list, MessageList(agent_id=root, limit=2))
            assert [message async for message in listed] == sent[::-1]
            assert {message.sender.kind for message in sent} == {"embedder"}
