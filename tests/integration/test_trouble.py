"""What must not spread: a busy pool, a Redis that is away, a run that nobody can read."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import anyio
import pytest

from espalier_acts.agents import create_agent
from espalier_acts.runs import RunOrder, create_run
from espalier_domain.progress import SNAPSHOT_VERSION
from espalier_eventlog import RedisSettings, open_streams, stream_key
from espalier_local.ports import free_port
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.ids import from_wire
from espalier_store.fleet import claim_run
from espalier_store.pool import Pool, transaction

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WAIT_S = 40.0
POLL_S = 0.05
SHORT_LEASE = {"ESPALIER_LEASE_TTL_S": "1", "ESPALIER_MODELS_SCRIPTED": "on"}
ANYBODY = AgentCreate(
    name="anybody",
    constitution=Constitution(immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"),
    toolset=[],
    ceilings=Ceilings(max_cycles=9, max_subagents=0, max_tool_calls_per_cycle=90, max_wall_seconds=300),
    budgets=Budgets(tokens_per_cycle=90_000, tool_calls_per_cycle=90, seconds_per_cycle=60),
    max_live_runs=1000,
)

Start = Callable[..., Any]


async def start_runs(pool: Pool, owner_id: UUID, *plans: list[dict[str, Any]]) -> list[UUID]:
    async with transaction(pool) as connection:
        agent_id = from_wire("agt", (await create_agent(connection, owner_id, ANYBODY)).id)
        assert agent_id is not None
        orders = [RunOrder(agent_id, "goal", {"espalier.script": {"answers": plan}}, []) for plan in plans]
        made = [await create_run(connection, owner_id, order) for order in orders]
    return [written.run_id for _, written in made]


async def results(pool: Pool, run_ids: list[UUID]) -> list[tuple[str, Any]]:
    """State and result of runs, once all have ended."""
    query = "select state, result from runs where id = any ($1) and ended_at is not null order by id"
    with anyio.fail_after(WAIT_S):
        while len(rows := await pool.fetch(query, run_ids)) < len(run_ids):
            await anyio.sleep(POLL_S)
    return [(row["state"], row["result"]) for row in rows]


async def test_waiting_for_a_connection_costs_no_lease(pool: Pool, owner_id: UUID, start: Start) -> None:
    busy = {"ESPALIER_WORKER_SLOTS": "60", "ESPALIER_POSTGRES_CONNECTIONS_MAX": "2"}
    worker = start("worker", **SHORT_LEASE, **busy)
    runs = await start_runs(pool, owner_id, *[[{"text": "ok", "delay_s": 0.2}]] * 100)

    assert {state for state, _ in await results(pool, runs)} == {"complete"}
    assert "poison" not in worker.output()


async def test_artifacts_written_in_opposite_orders_are_both_written(
    pool: Pool, owner_id: UUID, start: Start
) -> None:
    start("worker", **SHORT_LEASE)
    notes = [{"tool": "artifact_create", "args": {"name": "n", "content": f"{n}"}} for n in range(60)]
    runs = await start_runs(pool, owner_id, *[[{"calls": notes}], [{"calls": notes[::-1]}]] * 3)

    assert {state for state, _ in await results(pool, runs)} == {"complete"}
    assert await pool.fetchval("select count(*) from artifacts") == 6 * len(notes)


async def test_an_overdue_cancel_is_forced_although_redis_is_away(
    pool: Pool, owner_id: UUID, start: Start
) -> None:
    (held,) = await start_runs(pool, owner_id, [{"text": "ok"}])
    async with transaction(pool) as connection:
        assert await claim_run(connection, held, 600, SNAPSHOT_VERSION)
    await pool.execute("update runs set cancel_requested_at = now() - interval '1 minute'")
    start("worker", ESPALIER_REDIS_URL=f"redis://127.0.0.1:{free_port()}/0", **SHORT_LEASE)

    assert await results(pool, [held]) == [("cancelled", {"reason": "cancelled"})]


async def test_a_run_that_nobody_can_read_is_ended_and_keeps_no_other_waiting(
    pool: Pool, owner_id: UUID, start: Start
) -> None:
    broken = await start_runs(pool, owner_id, *[[{"text": "ok"}]] * 20)
    await pool.execute("""update journal set body = '{"kind": "from another version"}'""")
    (good,) = await start_runs(pool, owner_id, [{"text": "ok"}])
    worker = start("worker", ESPALIER_WORKER_SLOTS="4", **SHORT_LEASE)

    assert [state for state, _ in await results(pool, [good])] == ["complete"]
    poisoned = ("error", {"reason": "poison: 3 claims of the run came to nothing"})
    assert set(map(str, await results(pool, broken))) == {str(poisoned)}
    assert not worker.has_died()


async def test_a_stream_that_redis_refuses_stands_in_no_other_runs_way(
    pool: Pool, owner_id: UUID, start: Start, stores: Any
) -> None:
    runs = await start_runs(pool, owner_id, *[[{"text": "ok"}]] * 2)
    async with open_streams(RedisSettings(redis_url=stores.redis_url)) as redis:
        await redis.set(stream_key(stores.redis_prefix, runs[0]), "no stream")
        start("worker", **SHORT_LEASE)

        assert {state for state, _ in await results(pool, runs)} == {"complete"}
        with anyio.fail_after(WAIT_S):
            while await pool.fetchval("select count(*) from outbox"):
                await anyio.sleep(POLL_S)
        ((last, _),) = await redis.xrevrange(stream_key(stores.redis_prefix, runs[1]), count=1)
    assert last == b"4-0", "the other run's stream goes to its end"
