"""Redis as it fails: hanging, gone and back empty, emptied or trimmed under those who read from it.

Whatever it does: every run ends `complete`, nothing that a worker does is interrupted, callers are answered
as ever, and readers get each event once, soon, and from Postgres while Redis has nothing to say.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest
from forked import Service
from invariants import violations
from own_servers import OwnServer
from redis.asyncio import Redis
from scripted_runs import (
    DONE,
    SLEEP,
    Plan,
    Reader,
    entries_of,
    follow,
    log_of,
    make_agent,
    note,
    row_of,
    spread,
)
from tests.integration.conftest import Deployment, StartGateway, Stores

from espalier_client.client import AepClient
from espalier_eventlog import stream_key
from espalier_jobs import QueueNames
from espalier_protocol.ids import from_wire
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]

WAIT_S = 50.0
POLL_S = 0.02
OUTAGE_S = 20.0
ROUNDS = 2
GONE_S = 3.0
ANSWER_S = 1.0
DELIVERY_S = 2.5
WAKE_S = 2.0
READERS = 3
MISSED = 12
NAPS: Plan = [SLEEP, SLEEP, SLEEP, DONE]
NOTES: Plan = [*[note(f"note-{n}", delay_s=0.2) for n in range(15)], DONE]
STEPS: Plan = [*[note(f"note-{n}", delay_s=0.05) for n in range(30)], DONE]
QUICK: Plan = [*[note(f"note-{n}") for n in range(10)], DONE]

Start = Callable[..., Service]
Damage = Callable[["Redis", str], Awaitable[bool]]

log = logging.getLogger(__name__)


@pytest.fixture
async def stores(stores: Stores, own_redis: OwnServer) -> Stores:
    return replace(stores, redis_url=own_redis.url)


@pytest.fixture
async def redis(own_redis: OwnServer) -> AsyncIterator["Redis"]:
    async with Redis.from_url(own_redis.url) as connection:
        yield connection


def thought(seconds: float) -> Plan:
    """One answer, for which the model is asked once and takes long."""
    return [{**DONE, "delay_s": seconds}]


async def begin_thinking(deployment: Deployment, pool: Pool, seconds: float) -> tuple[str, int]:
    """A run whose model is being asked, and the lease token under which it is."""
    run_id = await deployment.run(thought(seconds))
    while not await entries_of(pool, run_id, "model_call_started"):
        await anyio.sleep(POLL_S)
    return run_id, (await row_of(pool, run_id))["lease_token"]


async def require_asked_once(pool: Pool, run_id: str, lease_token: int) -> None:
    """The model was asked by one holder and once: nobody let go of the run, and nobody took it."""
    asked = await entries_of(pool, run_id, "model_call_started")
    assert [(entry["attempt"], entry["lease_token"]) for entry in asked] == [(1, lease_token)]


async def require_all_told(pool: Pool, readers: list[Reader], plans: list[Plan]) -> None:
    """Every run ended well after all the cycles of its plan, its readers saw each event once, and nothing in
    the database is amiss.
    """
    for reader, plan in zip(readers, plans, strict=True):
        row = await row_of(pool, reader.run_id)
        assert (row["state"], row["cycle_count"]) == ("complete", len(plan)), row["result"]
        assert reader.log == await log_of(pool, reader.run_id, int(reader.since or 0))
    assert await violations(pool) == {}


async def require_timely_wakes(pool: Pool) -> None:
    """No sleeper of one second wakes early, or later than WAKE_S. The moments are those of the rows, which
    are a little earlier than those of the statements that set the sleep.
    """
    query = """
        select extract(epoch from woken.created_at - slept.created_at)::float8 - 1 as late_s
        from journal slept join journal woken on woken.run_id = slept.run_id
            and woken.body ->> 'kind' = 'cycle_started'
            and (woken.body ->> 'cycle')::int = (slept.body ->> 'cycle')::int + 1
        where slept.body -> 'decision' ->> 'kind' = 'sleep'
    """
    late_s = [row["late_s"] for row in await pool.fetch(query)]
    log.info("sleepers woke late by %s", spread(late_s))
    assert min(late_s) > -POLL_S and max(late_s) <= WAKE_S


def require_prompt(readers: list[Reader]) -> None:
    delays_s = [delay_s for reader in readers for delay_s in reader.delays_s]
    log.info("events reached readers after %s", spread(delays_s))
    assert max(delays_s) <= DELIVERY_S


def require_answered(deployment: Deployment) -> None:
    log.info("calls were answered after %s", spread(deployment.took_s))
    assert max(deployment.took_s) <= ANSWER_S


def key_of(stores: Stores, run_id: str) -> str:
    uuid = from_wire("run", run_id)
    assert uuid is not None
    return stream_key(stores.redis_prefix, uuid)


async def test_a_redis_that_hangs_interrupts_no_cycle_and_keeps_nobody_waiting(
    deployment: Deployment, own_redis: OwnServer, pool: Pool
) -> None:
    client = deployment.client
    with anyio.fail_after(WAIT_S):
        thinking, lease_token = await begin_thinking(deployment, pool, OUTAGE_S + 1)
        during: Any = None
        async with anyio.create_task_group() as group:
            readers, plans = follow(group, client, [thinking]), [thought(OUTAGE_S + 1)]
            with own_redis.hanging():
                until = anyio.current_time() + OUTAGE_S
                for _ in range(ROUNDS):
                    runs = [await deployment.run(NOTES), await deployment.run(NAPS)]
                    readers += follow(group, client, runs * READERS)
                    plans += [NOTES, NAPS] * READERS
                    unwanted = await deployment.run(STEPS)
                    await deployment.timed(client.agent_get(deployment.agent_id))
                    assert (await deployment.timed(client.run_cancel(unwanted))).state == "cancelled"
                    for reader in readers[-len(runs) :]:
                        await reader.ends()
                while anyio.current_time() < until:
                    during = await row_of(pool, thinking)
                    await anyio.sleep(POLL_S)

    assert (during["state"], during["lease_token"]) == ("running", lease_token)
    await require_asked_once(pool, thinking, lease_token)
    await require_all_told(pool, readers, plans)
    await require_timely_wakes(pool)
    require_answered(deployment)
    require_prompt(readers)
    for worker in deployment.workers:
        assert "doorbell.redis_away" in worker.output(), "it would wait for ever"


async def test_runs_begin_and_end_although_redis_hung_before_anything_was_started(
    own_redis: OwnServer, start: Start, start_gateway: StartGateway, api_key: str, pool: Pool
) -> None:
    with own_redis.hanging(), anyio.fail_after(WAIT_S):
        worker = start("worker", ESPALIER_MODELS_SCRIPTED="on")
        gateway = await start_gateway()
        async with AepClient(gateway.base_url, api_key) as client, anyio.create_task_group() as group:
            deployment = Deployment([worker], gateway, client, (await make_agent(client)).id)
            runs = [await deployment.run(NOTES), await deployment.run(NAPS)]
            readers = follow(group, client, runs * READERS)

    await require_all_told(pool, readers, [NOTES, NAPS] * READERS)
    await require_timely_wakes(pool)
    require_answered(deployment)
    require_prompt(readers)


async def is_used_again(deployment: Deployment, redis: "Redis", stores: Stores) -> None:
    """Wait until events go through streams and rings are heard: not only missed by nobody, but back."""
    while not await redis.exists(key_of(stores, await deployment.run(thought(0)))):
        await anyio.sleep(POLL_S)
    while await redis.zcard(QueueNames(stores.redis_prefix).queue):
        await anyio.sleep(POLL_S)


async def test_a_redis_that_died_and_came_back_empty_was_not_missed_and_is_used_again(
    deployment: Deployment, own_redis: OwnServer, redis: "Redis", stores: Stores, pool: Pool
) -> None:
    plans = [thought(GONE_S + 2), NOTES, STEPS, NAPS]
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            thinking, lease_token = await begin_thinking(deployment, pool, GONE_S + 2)
            runs = [thinking, *[await deployment.run(plan) for plan in plans[1:]]]
            readers = follow(group, deployment.client, runs * READERS)
            await readers[runs.index(thinking) + 1].reaches(MISSED)
            await own_redis.crash(away_s=GONE_S)
            late_comer = await deployment.run(NOTES)
            readers += follow(group, deployment.client, [late_comer])
            await own_redis.wait_back()
            await is_used_again(deployment, redis, stores)
        while await pool.fetchval("select count(*) from outbox"):
            await anyio.sleep(POLL_S)

    await require_asked_once(pool, thinking, lease_token)
    await require_all_told(pool, readers, [*plans * READERS, NOTES])
    await require_timely_wakes(pool)
    require_answered(deployment)
    require_prompt(readers)


async def flush(redis: "Redis", _: str) -> bool:
    return bool(await redis.flushall())


async def delete(redis: "Redis", key: str) -> bool:
    return bool(await redis.delete(key))


async def trim(redis: "Redis", key: str) -> bool:
    return bool(await redis.xtrim(key, maxlen=1, approximate=False))


@pytest.mark.parametrize("damage", [flush, delete, trim])
async def test_readers_at_any_place_get_what_redis_lost(
    damage: Damage, deployment: Deployment, redis: "Redis", stores: Stores, pool: Pool
) -> None:
    """The gateway stands still while events are published and lost: so they really are a hole in its tail."""
    client = deployment.client
    with anyio.fail_after(WAIT_S):
        run_id = await deployment.run(STEPS)
        async with anyio.create_task_group() as group:
            (first,) = follow(group, client, [run_id])
            await first.reaches(MISSED)
            places = [first.events[MISSED // 2], first.events[-1]]
            others = [Reader(run_id, since=place.event_id) for place in places]
            for reader in others:
                group.start_soon(reader.read, client)
                await reader.reaches(1)
            with deployment.gateway.service.frozen():
                seq = (await row_of(pool, run_id))["next_seq"]
                while (await row_of(pool, run_id))["next_seq"] < seq + MISSED:
                    await anyio.sleep(POLL_S)
                assert await damage(redis, key_of(stores, run_id)), "there was nothing to lose"

    await require_all_told(pool, [first, *others], [STEPS] * 3)
    require_prompt([first])


async def test_the_log_of_a_run_that_ended_is_served_whole_without_redis(
    deployment: Deployment, redis: "Redis", pool: Pool
) -> None:
    with anyio.fail_after(WAIT_S):
        run_id = await deployment.run(QUICK)
        before, half, after = Reader(run_id), Reader(run_id, since="30"), Reader(run_id)
        await before.read(deployment.client)
        await redis.flushall()
        await half.read(deployment.client)
        await after.read(deployment.client)

    await require_all_told(pool, [before, half, after], [QUICK] * 3)
