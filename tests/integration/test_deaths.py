"""Processes killed at every boundary of their work.

Whatever dies: the run ends `complete`, its events are numbered 1..n, and every reader saw each of them once.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from forked import Service

from espalier_client.client import AepClient
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.run import Run, RunCreate
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WAIT_S = 45.0
POLL_S = 0.02
FOLLOWERS = 20
SHORT_LEASE = {"ESPALIER_LEASE_TTL_S": "1", "ESPALIER_MODELS_SCRIPTED": "on"}
PLAN: list[dict[str, Any]] = [
    {
        "text": "first",
        "calls": [
            {"tool": "artifact_create", "args": {"name": "a.md", "content": "once"}},
            {"tool": "continue_now", "args": {}},
        ],
    },
    {"calls": [{"tool": "sleep", "args": {"duration_seconds": 1}}]},
    {"text": "done"},
]
LOG_OF_THE_PLAN = [
    *["run.started", "cycle.started", "tool.called", "tool.called", "tool.returned", "artifact.created"],
    *["tool.returned", "cycle.ended", "cycle.started", "tool.called", "tool.returned", "cycle.ended"],
    *["cycle.started", "cycle.ended", "run.ended"],
]
COMMITS, PUBLISHES, RINGS = 8, 8, 1
MOMENTS = [
    f"{place}.{side}:{count}"
    for place, counts in (("commit", COMMITS), ("publish", PUBLISHES), ("ring", RINGS))
    for side in ("before", "after")
    for count in range(1, counts + 1)
]

NO_CONSTITUTION = Constitution(immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto")

StartGateway = Callable[..., Awaitable[Any]]


async def start_run(client: AepClient, plan: list[dict[str, Any]]) -> Run:
    made = await client.agent_create(
        AgentCreate(
            name="survivor",
            constitution=Constitution(
                immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"
            ),
            toolset=[],
            ceilings=Ceilings(
                max_cycles=50, max_subagents=0, max_tool_calls_per_cycle=9, max_wall_seconds=300
            ),
            budgets=Budgets(tokens_per_cycle=50_000, tool_calls_per_cycle=9, seconds_per_cycle=60),
        )
    )
    inputs = {"espalier.script": {"answers": plan}}
    return await client.run_create(RunCreate(agent_id=made.id, goal="survive", inputs=inputs))


async def read_all(client: AepClient, run_id: str, seen: list[tuple[int, str]]) -> None:
    async for event in client.follow(run_id):
        seen.append((int(event.event_id), event.type))  # noqa: PERF401 - the test looks on while it grows


async def artifacts_of(pool: Pool) -> int:
    return int(await pool.fetchval("select count(*) from artifacts"))


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_worker_killed_at_any_effect_boundary_loses_and_repeats_nothing(
    moment: str, start: Callable[..., Service], start_gateway: StartGateway, pool: Pool, api_key: str
) -> None:
    gateway = await start_gateway()
    first = start("worker", dies_at=moment, **SHORT_LEASE)
    seen: list[tuple[int, str]] = []

    async with AepClient(gateway.base_url, api_key) as client:
        with anyio.fail_after(WAIT_S):
            run = await start_run(client, PLAN)
            async with anyio.create_task_group() as readers:
                readers.start_soon(read_all, client, run.id, seen)
                while not first.has_died():
                    await anyio.sleep(POLL_S)
                start("worker", **SHORT_LEASE)
            ended = await client.run_get(run.id)

    assert (ended.state, ended.cycle_count) == ("complete", 3)
    assert seen == list(enumerate(LOG_OF_THE_PLAN, start=1))
    assert await artifacts_of(pool) == 1


async def test_a_gateway_killed_under_twenty_followers_costs_none_of_them_an_event(
    start: Callable[..., Service], start_gateway: StartGateway, api_key: str
) -> None:
    start("worker", **SHORT_LEASE)
    gateway = await start_gateway()
    port = int(gateway.base_url.rsplit(":")[-1])
    steps: list[dict[str, Any]] = [{"calls": [{"tool": "continue_now", "args": {}}], "delay_s": 0.05}] * 40
    seen: list[list[tuple[int, str]]] = [[] for _ in range(FOLLOWERS)]

    async with AepClient(gateway.base_url, api_key) as client:
        with anyio.fail_after(WAIT_S):
            run = await start_run(client, [*steps, {"text": "done"}])
            async with anyio.create_task_group() as readers:
                for one in seen:
                    readers.start_soon(read_all, client, run.id, one)
                for _ in range(2):
                    reached = len(seen[0])
                    while len(seen[0]) < reached + 20:
                        await anyio.sleep(POLL_S)
                    gateway.service.kill()
                    gateway = await start_gateway(port)
            ended = await client.run_get(run.id)

    assert (ended.state, ended.cycle_count) == ("complete", 41)
    assert [number for number, _ in seen[0]] == list(range(1, len(seen[0]) + 1))
    assert seen[0][-1][1] == "run.ended"
    assert all(one == seen[0] for one in seen)
