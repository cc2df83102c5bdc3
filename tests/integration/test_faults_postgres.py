"""Postgres as it fails: crashed, away, hanging, and taking our connections away.

Whatever it does: no run is lost or lived twice, readers get each event once, the probes tell the truth, and
callers are told within a bound that they may try again.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from uuid import uuid4

import anyio
import httpx2
import pytest
from invariants import violations
from own_servers import OwnServer
from scripted_runs import DONE, SLEEP, Plan, Reader, follow, log_of, note, row_of
from tests.integration.conftest import Deployment, Stores
from tests.integration.wire import Wire

from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]

WAIT_S = 55.0
POLL_S = 0.05
CRASHES = 3
AWAY_S = 8.0
TELLS_S = 2.0
REFUSES_S = 5.0
ALIVE_S = 2.0
READY_AGAIN_S = 10.0
NAPS: Plan = [*[SLEEP] * 3, DONE]
NOTES: Plan = [*[note(f"note-{n}", delay_s=0.1) for n in range(15)], DONE]
THOUGHT: Plan = [{**note("thought", delay_s=6)}, DONE]
PLANS = [NAPS, NOTES, THOUGHT] * 2
WRITERS = 20
"""More than a gateway has connections."""

log = logging.getLogger(__name__)


@pytest.fixture
async def stores(own_postgres: OwnServer, own_redis: OwnServer) -> Stores:
    return Stores(own_postgres.url, own_redis.url, f"{uuid4().hex}:")


async def require_all_well(pool: Pool, readers: list[Reader], plans: list[Plan]) -> None:
    for reader, plan in zip(readers, plans, strict=True):
        row = await row_of(pool, reader.run_id)
        assert (row["state"], row["cycle_count"]) == ("complete", len(plan)), row["result"]
        assert reader.log == await log_of(pool, reader.run_id)
    assert {row["state"] for row in await pool.fetch("select state from runs")} == {"complete"}
    assert await violations(pool) == {}


@asynccontextmanager
async def live_runs(deployment: Deployment, pool: Pool) -> AsyncIterator[list[Reader]]:
    """Runs that live meanwhile, two readers each; afterwards all have ended well."""
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            runs = [await deployment.run(plan) for plan in PLANS]
            readers = follow(group, deployment.client, runs * 2)
            for reader in readers:
                await reader.reaches(2)
            yield readers
        await require_all_well(pool, readers, PLANS * 2)
        for service in [*deployment.workers, deployment.gateway.service]:
            assert "active transaction" not in service.output(), "a connection was handed on inside one"


async def test_a_postgres_that_crashes_under_live_runs_costs_time_only(
    deployment: Deployment, own_postgres: OwnServer, pool: Pool
) -> None:
    async with live_runs(deployment, pool) as readers:
        for _ in range(CRASHES):
            told = len(readers[1].events)
            await own_postgres.crash()
            await own_postgres.wait_back()
            await readers[1].reaches(told + 3)


async def test_connections_that_are_taken_away_cost_no_run_anything(
    deployment: Deployment, pool: Pool
) -> None:
    query = """
        select count(pg_terminate_backend(pid)) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()
    """
    async with live_runs(deployment, pool) as readers:
        for _ in range(2 * CRASHES):
            told = len(readers[1].events)
            while not await pool.fetchval(query):  # until we have some again
                await anyio.sleep(POLL_S)
            await readers[1].reaches(told + 3)


@dataclass
class Probe:
    """What one endpoint answered, and when: (asked, answered, what)."""

    answers: list[tuple[float, float, int]] = field(default_factory=list)

    async def keep_asking(self, http: httpx2.AsyncClient, path: str) -> None:
        while True:  # bounded by the test
            asked_at = anyio.current_time()
            status = (await http.get(path)).status_code
            self.answers.append((asked_at, anyio.current_time(), status))
            await anyio.sleep(POLL_S)

    async def first(self, status: int, since: float) -> float:
        """When it first answered so to a question after `since`; bounded by the test."""
        while True:
            for asked_at, answered_at, told in self.answers:
                if asked_at >= since and told == status:
                    return answered_at
            await anyio.sleep(POLL_S)

    @property
    def slowest_s(self) -> float:
        return max(answered_at - asked_at for asked_at, answered_at, _ in self.answers)


@dataclass(frozen=True)
class Refusal:
    symbol: str
    may_try_again: bool
    took_s: float


async def refused(wire: Wire, agent_id: str) -> Refusal:
    """What the gateway says to a `run.create`; our own client would try it again under its key."""
    began_at = anyio.current_time()
    told = (await wire.refused("run.create", agent_id=agent_id, goal="survive"))["data"]
    return Refusal(told["symbol"], told["retry_after_ms"] > 0, anyio.current_time() - began_at)


@pytest.mark.parametrize("fault", ["away", "hanging"])
async def test_the_probes_tell_that_postgres_is_gone_and_writes_may_be_tried_again(
    fault: str, deployment: Deployment, own_postgres: OwnServer, pool: Pool, api_key: str
) -> None:
    ready, alive, refusals = Probe(), Probe(), list[Refusal]()

    async with (
        httpx2.AsyncClient(base_url=deployment.gateway.base_url, trust_env=False, timeout=WAIT_S) as http,
        live_runs(deployment, pool),
        anyio.create_task_group() as probing,
    ):
        wire = Wire(http, api_key)
        await wire.begin()

        async def write() -> None:
            refusals.append(await refused(wire, deployment.agent_id))

        probing.start_soon(ready.keep_asking, http, "/readyz")
        probing.start_soon(alive.keep_asking, http, "/healthz")
        await ready.first(200, since=0.0)
        outage = own_postgres.hanging() if fault == "hanging" else nullcontext()
        gone_at = anyio.current_time()
        if fault == "away":
            await own_postgres.crash(away_s=AWAY_S)
        with outage:
            async with anyio.create_task_group() as writers:
                for _ in range(WRITERS):
                    writers.start_soon(write)
                told_s = await ready.first(503, since=gone_at) - gone_at
            while anyio.current_time() < gone_at + AWAY_S - REFUSES_S / 2:
                await write()
                await anyio.sleep(POLL_S)  # below the limit of calls per second
        await own_postgres.wait_back()
        back_at = anyio.current_time()
        ready_s = await ready.first(200, since=back_at) - back_at
        await alive.first(200, since=back_at)
        probing.cancel_scope.cancel()

    slowest_s = max(refusal.took_s for refusal in refusals)
    log.info("%s: 503 after %.2f s, ready %.2f s after the return", fault, told_s, ready_s)
    log.info("slowest: healthz %.2f s, readyz %.2f s", alive.slowest_s, ready.slowest_s)
    log.info("%d refusals, the slowest took %.2f s", len(refusals), slowest_s)
    assert told_s <= TELLS_S and ready_s <= READY_AGAIN_S
    assert ready.slowest_s <= TELLS_S and alive.slowest_s <= ALIVE_S
    assert {status for _, _, status in alive.answers} == {200}
    assert {(refusal.symbol, refusal.may_try_again) for refusal in refusals} == {("unavailable", True)}
    assert slowest_s <= REFUSES_S
