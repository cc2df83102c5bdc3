"""Faults of other people's runs at their end: an end that nobody is told of, is told twice, or is undone.

Each test is about a whole kind of fault; docs/reliability/replays.md says which reports it stands for.
"""

import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
import pytest
from invariants import violations
from redis.asyncio import Redis
from scripted_runs import DONE, Plan, note, row_of
from tests.integration.conftest import Start, StartGateway, Stores
from tests.integration.wire import Wire, symbol

from espalier_eventlog import RedisSettings, open_streams
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]

WAIT_S = 50.0
POLL_S = 0.02
READ_S = 5.0
"""In which a log that is complete is read to its end, from wherever."""

ON = {"ESPALIER_MODELS_SCRIPTED": "on"}
UNLIMITED = {"ESPALIER_RPC_RATE": "100000", "ESPALIER_RPC_BURST": "100000", "ESPALIER_STREAMS_PER_KEY": "999"}
RACES = 60
DICE = 20260302
SHORT_LIFE: Plan = [note("a", delay_s=0.1), note("b", delay_s=0.1), DONE]
MORE_EVENTS = 22
"""Than such a life has: whoever waits for so many comes after its end."""

FRAME = re.compile(r"id: (\d{16})\nevent: (\S+)\ndata: .*\n\n")


@asynccontextmanager
async def caller(base_url: str, key: str) -> AsyncIterator[Wire]:
    limits = httpx2.Limits(max_connections=500)
    async with httpx2.AsyncClient(base_url=base_url, limits=limits, timeout=WAIT_S, trust_env=False) as http:
        wire = Wire(http, key)
        await wire.begin()
        yield wire


async def begin(wire: Wire, agent_id: str, plan: Plan) -> str:
    return await wire.run(agent_id, inputs={"espalier.script": {"answers": plan}})


# ------------------------------------------------------------------ every way to end, and whoever looks


async def cancel(wire: Wire, _: str, run_id: str) -> Any:
    return await wire.call("run.cancel", run_id=run_id)


async def cancel_agent(wire: Wire, agent_id: str, _: str) -> Any:
    return await wire.call("agent.cancel", agent_id=agent_id)


async def archive_agent(wire: Wire, agent_id: str, _: str) -> Any:
    return await wire.call("agent.archive", agent_id=agent_id)


async def shorten(wire: Wire, agent_id: str, _: str) -> Any:
    ceilings = {"max_cycles": 5, "max_subagents": 2, "max_tool_calls_per_cycle": 4, "max_wall_seconds": 1}
    return await wire.call("agent.update", agent_id=agent_id, ceilings=ceilings)


@dataclass(frozen=True)
class Way:
    """What a run does, how it ends, and who ends it when it has told `after` events and rests."""

    plan: Plan
    state: str
    ended_by: Callable[[Wire, str, str], Awaitable[Any]] | None = None
    after: int = 1


FAULT: dict[str, Any] = {"fault": {"reason": "broken", "retryable": False}}
LONG_SLEEP: dict[str, Any] = {"calls": [{"tool": "sleep", "args": {"duration_seconds": 200}}]}
THINKS: dict[str, Any] = {**DONE, "delay_s": 30}
WAYS = {
    "completes": Way([note("a"), DONE], "complete"),
    "its model fails": Way([note("a"), FAULT], "error"),
    "its plan cannot be carried out": Way([{"text": "${/nowhere}"}], "error"),
    "it uses up its cycles": Way([note("a")] * 9, "error"),
    "cancelled while it sleeps": Way([LONG_SLEEP, DONE], "cancelled", cancel, after=5),
    "cancelled while its model thinks": Way([note("a"), THINKS], "cancelled", cancel, after=9),
    "its agent is cancelled": Way([note("a"), THINKS], "cancelled", cancel_agent, after=9),
    "its agent is archived": Way([note("a"), THINKS], "cancelled", archive_agent, after=9),
    "its time is over": Way([note("a"), THINKS], "error", shorten, after=9),
    "cancelled before anybody took it": Way([DONE], "cancelled", cancel),
}


@dataclass
class Watcher:
    """One connection from somewhere in the log to the end that the gateway gives it."""

    wire: Wire
    run_id: str
    since: int = 0
    text: str = ""
    frames: list[tuple[int, str]] = field(default_factory=list)
    is_over: bool = False

    async def watch(self) -> None:
        path = f"/aep/v1/runs/{self.run_id}/events?since={self.since}"
        async with self.wire.http.stream("GET", path, headers=self.wire.headers()) as response:
            assert response.status_code == 200, await response.aread()
            async for piece in response.aiter_text():
                self.text += piece
                self.frames = [(int(m[1]), m[2]) for m in FRAME.finditer(self.text)]
        self.is_over = True

    @property
    def told(self) -> str:
        """What it was sent of the log, byte for byte."""
        return "".join(m[0] for m in FRAME.finditer(self.text))


async def forget_everything(redis: Redis, stores: Stores) -> None:
    keys = [key async for key in redis.scan_iter(match=f"*{stores.redis_prefix}*")]
    assert keys and await redis.delete(*keys)


async def test_every_way_to_end_is_told_once_to_whoever_watches_and_whoever_comes_back(
    start: Start, start_gateway: StartGateway, pool: Pool, api_key: str, stores: Stores
) -> None:
    gateway = await start_gateway(**UNLIMITED)
    watchers: dict[str, Watcher] = {}
    with anyio.fail_after(WAIT_S):
        async with caller(gateway.base_url, api_key) as wire, anyio.create_task_group() as group:

            async def live(name: str, way: Way) -> None:
                agent_id = await wire.agent(toolset=[])
                run_id = await begin(wire, agent_id, way.plan)
                watcher = watchers[name] = Watcher(wire, run_id)
                group.start_soon(watcher.watch)
                while way.ended_by and len(watcher.frames) < way.after:
                    await anyio.sleep(POLL_S)
                if way.ended_by:
                    await way.ended_by(wire, agent_id, run_id)

            await live("cancelled before anybody took it", WAYS["cancelled before anybody took it"])
            start("worker", **ON)
            for name, way in WAYS.items():
                if name not in watchers:
                    group.start_soon(live, name, way)
    for name, watcher in watchers.items():
        kinds = [kind for _, kind in watcher.frames]
        assert (name, kinds.count("run.ended"), kinds[-1]) == (name, 1, "run.ended")
        assert (name, (await row_of(pool, watcher.run_id))["state"]) == (name, WAYS[name].state)

    async with open_streams(RedisSettings(redis_url=stores.redis_url)) as redis:
        await forget_everything(redis, stores)
    gateway.service.kill()
    again = await start_gateway(**UNLIMITED)
    async with caller(again.base_url, api_key) as wire:
        for name, watcher in watchers.items():
            for since in [0, *(seq for seq, _ in watcher.frames)]:
                back = Watcher(wire, watcher.run_id, since)
                with anyio.fail_after(READ_S):
                    await back.watch()
                assert (name, watcher.told.endswith(back.told)) == (name, True)
                assert (name, len(back.frames)) == (name, len(watcher.frames) - since)
            nowhere = await wire.get(f"/aep/v1/runs/{watcher.run_id}/events", since="900")
            assert (name, nowhere.status_code) == (name, 400), "and no stream that never says a word"
    assert await violations(pool) == {}


# ------------------------------------------------------------------ cancels that cross with everything else


async def test_of_cancels_that_cross_with_a_run_each_is_true(
    start: Start, start_gateway: StartGateway, pool: Pool, api_key: str
) -> None:
    """Two at once for each run, over two gateways, after any event of its life. What is answered holds."""
    dice = random.Random(DICE)
    gateways = [await start_gateway(**UNLIMITED) for _ in range(2)]
    for _ in range(2):
        start("worker", **ON)
    answers: dict[str, list[str]] = {}
    async with caller(gateways[0].base_url, api_key) as one, caller(gateways[1].base_url, api_key) as two:

        async def race(after: int) -> None:
            run_id = await begin(one, await one.agent(toolset=[]), SHORT_LIFE)
            answers[run_id] = []

            async def call(wire: Wire) -> None:
                while (told := symbol(await wire.answer("run.cancel", {"run_id": run_id}))) == "unavailable":
                    await anyio.sleep(POLL_S)
                answers[run_id].append(told)

            while (row := await row_of(pool, run_id))["next_seq"] <= after and not row["ended_at"]:
                await anyio.sleep(POLL_S / 4)
            async with anyio.create_task_group() as both:
                both.start_soon(call, one)
                both.start_soon(call, two)

        with anyio.fail_after(WAIT_S):
            for _ in range(RACES // 6):
                async with anyio.create_task_group() as group:
                    for _ in range(6):
                        group.start_soon(race, dice.randint(1, MORE_EVENTS))
            while await pool.fetchval("select count(*) from runs where ended_at is null"):
                await anyio.sleep(POLL_S)

    states = {run_id: (await row_of(pool, run_id))["state"] for run_id in answers}
    for run_id, told in answers.items():
        expected = {"cancelled": {"result"}, "complete": {"lifecycle_conflict"}}
        assert set(told) == expected[states[run_id]], (run_id, states[run_id], told)
    assert set(states.values()) == {"cancelled", "complete"}, "some were early and some late"
    assert await violations(pool) == {}
