"""Faults of other people's callers: those who hang up, ask again, or all ask at once.

Each test is about a whole kind of fault; docs/reliability/replays.md says which reports it stands for.
"""

import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2
import pytest
from anyio.abc import SocketAttribute
from fake_openai import Reply, fake_openai
from invariants import violations
from scripted_runs import DONE, Plan, entries_of, log_of, row_of
from tests.integration.conftest import Start, StartGateway
from tests.integration.wire import RPC, Wire, request, symbol

from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]

WAIT_S = 50.0
POLL_S = 0.02
HANGS_UP_WITHIN_S = 0.05
ABORTED_S = 2.0
CALLERS = 40
ON = {"ESPALIER_MODELS_SCRIPTED": "on"}
UNLIMITED = {"ESPALIER_RPC_RATE": "100000", "ESPALIER_RPC_BURST": "100000"}
DICE = 20260303
LONG_SLEEP: dict[str, Any] = {"calls": [{"tool": "sleep", "args": {"duration_seconds": 200}}]}
READ: dict[str, Any] = {"calls": [{"tool": "inbox_read", "args": {}}, LONG_SLEEP["calls"][0]]}


@asynccontextmanager
async def caller(base_url: str, key: str) -> AsyncIterator[Wire]:
    limits = httpx2.Limits(max_connections=500)
    async with httpx2.AsyncClient(base_url=base_url, limits=limits, timeout=WAIT_S, trust_env=False) as http:
        wire = Wire(http, key)
        await wire.begin()
        yield wire


def planned(plan: Plan) -> dict[str, Any]:
    return {"espalier.script": {"answers": plan}}


# ------------------------------------------------------------------ hanging up


Moment = Callable[[], Awaitable[None]]


async def ask_and_hang_up(base_url: str, wire: Wire, key: str, body: bytes, moment: Moment) -> None:
    """Send a whole create and read no answer; then reset the connection, whatever the gateway is doing."""
    parts = urlsplit(base_url)
    headers = {**wire.headers(Idempotency_Key=key), "Content-Type": "application/json"}
    head = [f"POST {RPC} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers.items())]
    async with await anyio.connect_tcp(str(parts.hostname), int(parts.port or 0)) as stream:
        await stream.send("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        await moment()
        raw: socket.socket = stream.extra(SocketAttribute.raw_socket)  # noqa: S610
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


async def persistently(wire: Wire, body: bytes, key: str) -> Any:
    """The answer; asked again while the gateway says that it may be, as any client of ours does."""
    while True:  # bounded by the test
        answer = (await wire.post(body, wire.headers(Idempotency_Key=key))).json()
        if symbol(answer) not in ("unavailable", "conflicted"):
            return answer


async def test_a_create_whose_caller_hangs_up_at_any_moment_is_whole_or_nothing(
    start: Start, start_gateway: StartGateway, pool: Pool, api_key: str
) -> None:
    """Whoever asks again with the key gets the run that there is, or makes it; every run lives to its end."""
    dice = random.Random(DICE)
    gateways = [await start_gateway(**UNLIMITED) for _ in range(2)]
    start("worker", **ON)
    async with caller(gateways[0].base_url, api_key) as one, caller(gateways[1].base_url, api_key) as two:
        agent_id = await one.agent(toolset=[], max_live_runs=CALLERS)
        asked = request("run.create", {"agent_id": agent_id, "goal": "nothing", "inputs": planned([DONE])})
        body = json.dumps(asked).encode()
        keys = [f"caller-{number}" for number in range(CALLERS)]

        async def soon() -> None:
            await anyio.sleep(dice.uniform(0, HANGS_UP_WITHIN_S))

        async def when_one_is_made() -> None:
            while not await pool.fetchval("select count(*) from runs"):
                await anyio.sleep(POLL_S)

        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as group:
                for number, key in enumerate(keys):
                    moment = (soon, when_one_is_made)[number % 2]
                    group.start_soon(ask_and_hang_up, gateways[0].base_url, one, key, body, moment)
        made = await pool.fetchval("select count(*) from runs")
        answers = [[await persistently(wire, body, key) for wire in (two, one)] for key in keys]
        with anyio.fail_after(WAIT_S):
            while await pool.fetchval("select count(*) from runs where ended_at is null"):
                await anyio.sleep(POLL_S)

    assert 0 < made <= CALLERS, "some were made although nobody heard of it"
    assert all(first == second for first, second in answers)
    assert len({first["result"]["id"] for first, _ in answers}) == CALLERS
    states = await pool.fetch("select state from runs")
    assert [row["state"] for row in states] == ["complete"] * CALLERS, "no run besides those that are known"
    assert await violations(pool) == {}


# ------------------------------------------------------------------ all at once


async def asleep(pool: Pool, run_id: str) -> None:
    with anyio.fail_after(WAIT_S):
        while (await row_of(pool, run_id))["state"] != "sleeping":
            await anyio.sleep(POLL_S)


async def test_fifty_who_continue_a_sleeper_at_once_cause_one_cycle(
    start: Start, start_gateway: StartGateway, pool: Pool, api_key: str
) -> None:
    """Nobody can take it before the last of them has asked: so one of them wakes it, and knows that."""
    gateways = [await start_gateway(**UNLIMITED) for _ in range(2)]
    async with caller(gateways[0].base_url, api_key) as one, caller(gateways[1].base_url, api_key) as two:
        agent_id = await one.agent(toolset=[])
        worker = start("worker", **ON)
        run_id = await one.run(agent_id, inputs=planned([LONG_SLEEP, LONG_SLEEP, LONG_SLEEP]))
        await asleep(pool, run_id)
        worker.stop()
        told: list[str] = []

        async def wake(wire: Wire) -> None:
            told.append(symbol(await wire.answer("run.continue", {"run_id": run_id})))

        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(wake, (one, two)[number % 2])
        start("worker", **ON)
        with anyio.fail_after(WAIT_S):
            while len(await entries_of(pool, run_id, "cycle_ended")) < 2:
                await anyio.sleep(POLL_S)
        await asleep(pool, run_id)
        # Whoever is woken now is so by a new word, and not by what is left of the fifty.
        assert symbol(await one.answer("run.continue", {"run_id": run_id})) == "result"
        with anyio.fail_after(WAIT_S):
            while len(await entries_of(pool, run_id, "cycle_ended")) < 3:
                await anyio.sleep(POLL_S)

    assert sorted(told) == ["lifecycle_conflict"] * 49 + ["result"]
    assert (await row_of(pool, run_id))["cycle_count"] == 3
    assert await violations(pool) == {}


async def test_messages_that_come_all_at_once_while_the_worker_dies_are_each_read_once(
    start: Start, start_gateway: StartGateway, pool: Pool, api_key: str
) -> None:
    """The owner of the run is killed amid them: every one is taken, and the agent is lost for nobody."""
    gateways = [await start_gateway(**UNLIMITED) for _ in range(2)]
    bodies = [f"message {number}" for number in range(40)]
    async with caller(gateways[0].base_url, api_key) as one, caller(gateways[1].base_url, api_key) as two:
        ceilings = {"max_cycles": 100, "max_subagents": 0, "max_tool_calls_per_cycle": 9}
        agent_id = await one.agent(toolset=[], ceilings={**ceilings, "max_wall_seconds": 300})
        worker = start("worker", **ON)
        run_id = await one.run(agent_id, inputs=planned([{**READ, "delay_s": 0.2}] * 60))
        told: list[str] = []

        async def say(wire: Wire, body: str) -> None:
            told.append(symbol(await wire.answer("message.send", {"to_agent_id": agent_id, "body": body})))

        with anyio.fail_after(WAIT_S):
            while not await entries_of(pool, run_id, "model_call_started"):
                await anyio.sleep(POLL_S)
            for half in (bodies[:20], bodies[20:]):
                async with anyio.create_task_group() as group:
                    for number, body in enumerate(half):
                        group.start_soon(say, (one, two)[number % 2], body)
                    if half[0] == bodies[0]:
                        worker.kill()
            start("worker", **ON)
            while await pool.fetchval("select count(*) from messages where read_at is null"):
                await anyio.sleep(POLL_S)

    assert told == ["result"] * len(bodies)
    delivered = [payload for _, kind, payload in await log_of(pool, run_id) if kind == "message.delivered"]
    sent = {str(row["id"]) for row in await pool.fetch("select id from messages")}
    assert (len(delivered), len(sent)) == (len(bodies), len(bodies))
    assert len({payload["message_id"] for payload in delivered}) == len(bodies)
    assert await violations(pool) == {}


# ------------------------------------------------------------------ a cancel reaches the provider


@pytest.mark.parametrize("ending", ["silence", "hang"])
async def test_a_cancel_hangs_up_on_the_provider_within_two_seconds(
    ending: Any, start: Start, start_gateway: StartGateway, pool: Pool, api_key: str
) -> None:
    """Before the first byte of the answer, and in the middle of it: nobody pays for what nobody reads."""
    gateway = await start_gateway(**UNLIMITED)
    async with fake_openai([Reply(b"{", missing=10, ending=ending)]) as fake:
        place = {"ESPALIER_MODEL": fake.model, "OPENAI_BASE_URL": fake.base_url, "OPENAI_API_KEY": fake.key}
        start("worker", **place)
        async with caller(gateway.base_url, api_key) as wire:
            run_id = await wire.run(await wire.agent(toolset=[]))
            with anyio.fail_after(WAIT_S):
                while not fake.requests:
                    await anyio.sleep(POLL_S)
            assert fake.left == 0
            began_at = anyio.current_time()
            assert (await wire.call("run.cancel", run_id=run_id))["id"] == run_id
            with anyio.fail_after(WAIT_S):
                while not fake.left:
                    await anyio.sleep(POLL_S)
            took_s = anyio.current_time() - began_at
            with anyio.fail_after(WAIT_S):
                while (await row_of(pool, run_id))["state"] != "cancelled":
                    await anyio.sleep(POLL_S)
    assert took_s < ABORTED_S
    assert (len(fake.requests), fake.refusals) == (1, [])
    assert await violations(pool) == {}
