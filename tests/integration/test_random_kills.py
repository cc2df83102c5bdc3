"""Workers killed and stopped at moments that chance chooses. `ESPALIER_TEST_SEED` chooses others.

At every moment: the run ends `complete`, each reader sees each event once, every artifact is made once, and a
worker's death costs no more than its lease and a look for due runs.
"""

import logging
import os
from collections.abc import AsyncIterator
from random import Random

import anyio
import pytest
from invariants import violations
from scripted_runs import DONE, SLEEP, Plan, Reader, follow, log_of, note, row_of, spread, start_run
from tests.integration.conftest import Start, StartGateway

from espalier_client.client import AepClient
from espalier_protocol.ids import from_wire
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]

SEED = int(os.environ.get("ESPALIER_TEST_SEED", "20260301"))
WAIT_S = 170.0
POLL_S = 0.01
KILLS = 20
GOES_ON_S = 6.0
READERS = 5
ON = {"ESPALIER_MODELS_SCRIPTED": "on"}
SHORT_LEASE = {"ESPALIER_LEASE_TTL_S": "1", **ON}
STOPS = 5
STOPPED_S = 2.0
"""Twice the short lease."""

TURNS = 10
MOMENT_S = 1.0
"""Chance chooses from this long: about what a turn of the plan takes without its sleep."""

NOTES_OF_A_TURN = 3


def plan_of(turns: int) -> Plan:
    """Half of the time of a turn somebody holds the run, and half of it the run sleeps."""
    notes = [[note(f"{turn}-{n}", delay_s=0.4) for n in range(NOTES_OF_A_TURN)] for turn in range(turns)]
    return [*[step for turn in notes for step in (*turn, SLEEP)], DONE]


log = logging.getLogger(__name__)


@pytest.fixture
async def client(start_gateway: StartGateway, api_key: str) -> AsyncIterator[AepClient]:
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as opened:
        yield opened


async def require_untouched(pool: Pool, readers: list[Reader], plan: Plan, turns: int) -> None:
    for reader in readers:
        row = await row_of(pool, reader.run_id)
        assert (row["state"], row["cycle_count"]) == ("complete", len(plan)), row["result"]
        assert reader.log == await log_of(pool, reader.run_id)
    assert await pool.fetchval("select count(*) from artifacts") == turns * NOTES_OF_A_TURN
    assert await violations(pool) == {}


async def goes_on_s(pool: Pool, reader: Reader) -> float:
    """Wait for the next event of the reader's run; seconds from now, or from when the run is due."""
    query = "select next_seq, greatest(clock_timestamp(), due_at) as due from runs where id = $1"
    row = await pool.fetchrow(query, from_wire("run", reader.run_id))
    assert row is not None
    with anyio.fail_after(2 * GOES_ON_S):
        await reader.reaches(row["next_seq"])
    waited = "select extract(epoch from clock_timestamp() - $1)::float8"
    return float(await pool.fetchval(waited, row["due"]))


@pytest.mark.parametrize("seed", [SEED])
async def test_every_worker_killed_at_twenty_random_moments_costs_the_lease_at_most_and_nothing_else(
    seed: int, client: AepClient, start: Start, pool: Pool
) -> None:
    chance, waits_s, held = Random(seed), [], 0
    workers = [start("worker", **ON) for _ in range(2)]
    with anyio.fail_after(WAIT_S):
        plan = plan_of(TURNS)
        run = await start_run(client, plan)
        async with anyio.create_task_group() as group:
            readers = follow(group, client, [run.id] * READERS)
            await readers[0].reaches(2)
            for kill in range(KILLS):
                await anyio.sleep(chance.uniform(0, MOMENT_S))
                row = await row_of(pool, run.id)
                assert row["ended_at"] is None, "the plan is too short"
                held += row["lease_until"] is not None
                for worker in workers:
                    worker.kill()
                workers = [start("worker", **ON) for _ in workers]
                waits_s.append(await goes_on_s(pool, readers[0]))
                log.info("kill %d at event %d: %.2f s", kill, len(readers[0].events), waits_s[-1])

    log.info("next event after a kill: %s", spread(waits_s))
    assert max(waits_s) <= GOES_ON_S
    assert held >= KILLS // 4, "chance should have hit the holder more often than that"
    await require_untouched(pool, readers, plan, TURNS)


@pytest.mark.parametrize("seed", [SEED])
async def test_a_worker_stopped_at_random_moments_for_twice_its_lease_writes_nothing_when_it_goes_on(
    seed: int, client: AepClient, start: Start, pool: Pool
) -> None:
    chance = Random(seed)
    workers = [start("worker", **SHORT_LEASE) for _ in range(2)]
    with anyio.fail_after(WAIT_S):
        plan = plan_of(STOPS + 2)
        run = await start_run(client, plan)
        async with anyio.create_task_group() as group:
            readers = follow(group, client, [run.id] * READERS)
            await readers[0].reaches(2)
            for stop in range(STOPS):
                await anyio.sleep(chance.uniform(0, MOMENT_S))
                assert (await row_of(pool, run.id))["ended_at"] is None, "the plan is too short"
                with workers[stop % 2].frozen():
                    until = anyio.current_time() + STOPPED_S
                    await goes_on_s(pool, readers[0])
                    await anyio.sleep(max(0.0, until - anyio.current_time()))

    await require_untouched(pool, readers, plan, STOPS + 2)
