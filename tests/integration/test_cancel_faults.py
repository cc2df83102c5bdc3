"""Cancels that nobody is there to carry out, and workers that come back to runs that have left them.

Within five seconds of the call a run is `cancelled`, whatever became of its worker, and what a worker that
was stopped for too long still wants to write is refused.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import anyio
import pytest
from forked import Service
from invariants import violations
from own_servers import OwnServer
from scripted_runs import DONE, Plan, Reader, entries_of, follow, log_of, note, row_of, start_run
from tests.integration.conftest import Start, StartGateway, Stores

from espalier_client.client import AepClient
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]

WAIT_S = 40.0
POLL_S = 0.01
CANCELLED_S = 5.0
READERS = 3
ON = {"ESPALIER_MODELS_SCRIPTED": "on"}
ENDLESS: Plan = [note("first"), {**DONE, "delay_s": 60}]
SHORT: Plan = [note("first"), {**note("late"), "delay_s": 2}, {**note("later"), "delay_s": 2}, DONE]
CANCELLED_LOG = [
    *["run.started", "cycle.started", "tool.called", "tool.called", "tool.returned", "artifact.created"],
    *["tool.returned", "cycle.ended", "cycle.started", "cycle.ended", "run.ended"],
]

log = logging.getLogger(__name__)


@pytest.fixture
async def stores(stores: Stores, own_redis: OwnServer) -> Stores:
    return replace(stores, redis_url=own_redis.url)


@pytest.fixture
async def client(start_gateway: StartGateway, api_key: str) -> AsyncIterator[AepClient]:
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as opened:
        yield opened


@dataclass
class Thinking:
    """A run whose worker waits for the second answer of its model."""

    run_id: str
    worker: Service


@pytest.fixture
def think(client: AepClient, start: Start, pool: Pool) -> Callable[[Plan], Awaitable[Thinking]]:
    async def until_it_thinks(plan: Plan) -> Thinking:
        worker = start("worker", **ON)
        run = await start_run(client, plan)
        while len(await entries_of(pool, run.id, "model_call_started")) < 2:
            await anyio.sleep(POLL_S)
        return Thinking(run.id, worker)

    return until_it_thinks


Think = Callable[[Plan], Awaitable[Thinking]]


async def cancel(client: AepClient, pool: Pool, run_id: str) -> float:
    """Seconds from the call to the state."""
    began_at = anyio.current_time()
    answer = await client.run_cancel(run_id)
    assert answer.state == "cancelled" or answer.cancel_requested_at is not None
    while (await row_of(pool, run_id))["state"] != "cancelled":
        await anyio.sleep(POLL_S)
    return anyio.current_time() - began_at


async def require_cancelled(pool: Pool, reader: Reader) -> None:
    assert [kind for _, kind, _ in reader.log] == CANCELLED_LOG
    assert reader.log == await log_of(pool, reader.run_id)
    assert await violations(pool) == {}


@pytest.mark.parametrize("worker_is", ["alive", "dead", "dead with a survivor", "stopped"])
async def test_a_cancel_ends_the_run_within_five_seconds_whatever_became_of_its_worker(
    worker_is: str, client: AepClient, think: Think, start: Start, pool: Pool
) -> None:
    with anyio.fail_after(WAIT_S):
        thinking = await think(ENDLESS)
        async with anyio.create_task_group() as group:
            (reader,) = follow(group, client, [thinking.run_id])
            await reader.reaches(2)
            if worker_is == "dead with a survivor":
                start("worker", **ON)
            if worker_is.startswith("dead"):
                thinking.worker.kill()
            if worker_is == "stopped":
                with thinking.worker.frozen():
                    took_s = await cancel(client, pool, thinking.run_id)
            else:
                took_s = await cancel(client, pool, thinking.run_id)

    log.info("worker %s: cancelled after %.2f s", worker_is, took_s)
    assert took_s <= CANCELLED_S
    await require_cancelled(pool, reader)


async def test_a_cancel_needs_no_redis(
    client: AepClient, think: Think, own_redis: OwnServer, pool: Pool
) -> None:
    with anyio.fail_after(WAIT_S):
        thinking = await think(ENDLESS)
        async with anyio.create_task_group() as group:
            with own_redis.hanging():
                (reader,) = follow(group, client, [thinking.run_id])
                took_s = await cancel(client, pool, thinking.run_id)
                await reader.ends()

    log.info("redis hangs: cancelled after %.2f s", took_s)
    assert took_s <= CANCELLED_S
    await require_cancelled(pool, reader)


async def gives_up(worker: Service) -> None:
    """Wait until it says that a run is not its own any more, or not surely."""
    while not any(f'"event": "run.{end}"' in worker.output() for end in ("lease_lost", "given_back")):
        await anyio.sleep(POLL_S)


async def test_the_late_success_of_a_stopped_worker_does_not_undo_a_cancel(
    client: AepClient, think: Think, pool: Pool
) -> None:
    with anyio.fail_after(WAIT_S):
        thinking = await think(SHORT)
        reader = Reader(thinking.run_id)
        with thinking.worker.frozen():
            await cancel(client, pool, thinking.run_id)
            ended = await row_of(pool, thinking.run_id)
        await gives_up(thinking.worker)
        await reader.read(client)

    assert await row_of(pool, thinking.run_id) == ended
    await require_cancelled(pool, reader)


async def test_a_stopped_worker_writes_nothing_after_somebody_else_took_its_run(
    client: AepClient, think: Think, start: Start, pool: Pool
) -> None:
    """It goes on while the other waits for the same answer, so that both have something to write."""
    with anyio.fail_after(WAIT_S):
        thinking = await think(SHORT)
        run_id = thinking.run_id
        async with anyio.create_task_group() as group:
            readers = follow(group, client, [run_id] * READERS)
            with thinking.worker.frozen():
                start("worker", **ON)
                while len(await entries_of(pool, run_id, "model_call_started")) < 3:
                    await anyio.sleep(POLL_S)
                taken = await row_of(pool, run_id)
            await gives_up(thinking.worker)
            assert (await row_of(pool, run_id))["next_entry_no"] == taken["next_entry_no"]

    tokens = [entry["lease_token"] for entry in await entries_of(pool, run_id, "model_call_started")]
    first, _, *others = tokens
    assert others == [taken["lease_token"]] * 3 and tokens[1] == first < taken["lease_token"]
    for reader in readers:
        assert reader.log == await log_of(pool, run_id)
    ended = await row_of(pool, run_id)
    assert (ended["state"], ended["cycle_count"]) == ("complete", len(SHORT))
    assert await violations(pool) == {}
