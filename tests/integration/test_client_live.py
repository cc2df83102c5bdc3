"""The client's reads against a real gateway: what was made is found, alone and in lists, with its bytes."""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from forked import Service

from espalier_client.client import AepClient
from espalier_protocol.agent import AgentCreate, AgentList, Budgets, Ceilings, Constitution
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
            assert (await client.run_list(RunList(agent_id=made.id))).items == [ended]

            artifact = await client.artifact_get(result["artifact_ids"][0])
            assert (artifact.name, artifact.created_by.run_id) == ("a.md", run.id)
            pieces = [piece async for piece in client.artifact_bytes(artifact.id)]
            assert b"".join(pieces) == CONTENT.encode()
            assert artifact.size_bytes == len(CONTENT.encode())
