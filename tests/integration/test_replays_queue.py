"""Faults of other people's queues: what a dead worker, a lying queue or a lost Redis leaves of a run.

Each test is about a whole kind of fault; docs/reliability/replays.md says which reports it stands for.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import product
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest
from invariants import violations
from redis.asyncio import Redis
from tests.integration.conftest import Start, Stores

from espalier_acts.agents import create_agent
from espalier_acts.runs import RunOrder, create_run
from espalier_eventlog import STREAM_LIFE_S, RedisSettings, open_streams, stream_key
from espalier_jobs import Doorbell, QueueNames, open_queue
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.ids import from_wire
from espalier_store.fleet import overdue_wakes, unpublished
from espalier_store.pool import Pool, transaction

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]

WAIT_S = 40.0
POLL_S = 0.02
ON = {"ESPALIER_MODELS_SCRIPTED": "on"}
TWO_DAYS_S = 49 * 3600
DONE: dict[str, Any] = {"text": "done"}
NEXT: dict[str, Any] = {"calls": [{"tool": "continue_now", "args": {}}]}
ANYBODY = AgentCreate(
    name="anybody",
    constitution=Constitution(immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"),
    toolset=[],
    ceilings=Ceilings(max_cycles=20, max_subagents=0, max_tool_calls_per_cycle=9, max_wall_seconds=10**6),
    budgets=Budgets(tokens_per_cycle=90_000, tool_calls_per_cycle=9, seconds_per_cycle=60),
    max_live_runs=1000,
)

Plan = list[dict[str, Any]]


def sleep(seconds: int) -> dict[str, Any]:
    return {"calls": [{"tool": "sleep", "args": {"duration_seconds": seconds}}]}


async def begin(pool: Pool, owner_id: UUID, plan: Plan, count: int = 1) -> list[UUID]:
    """Runs that nobody has been told of, as a gateway leaves them that died right after the commit."""
    async with transaction(pool) as connection:
        agent_id = from_wire("agt", (await create_agent(connection, owner_id, ANYBODY)).id)
        assert agent_id is not None
        order = RunOrder(agent_id, "goal", {"espalier.script": {"answers": plan}}, [])
        made = [await create_run(connection, owner_id, order) for _ in range(count)]
    return [written.run_id for _, written in made]


async def until(question: Callable[[], Awaitable[Any]], within_s: float = WAIT_S) -> None:
    with anyio.fail_after(within_s):
        while not await question():
            await anyio.sleep(POLL_S)


async def all_over(pool: Pool) -> bool:
    return not await pool.fetchval("select count(*) from runs where ended_at is null")


async def times_asked(pool: Pool) -> dict[UUID, int]:
    """How often the model was asked for each run."""
    query = "select run_id from journal where body ->> 'kind' = 'model_call_started'"
    return dict(Counter(row["run_id"] for row in await pool.fetch(query)))


# ------------------------------------------------------------------ what a crash leaves in the database


@dataclass(frozen=True)
class Left:
    """How a row was left: `deaths` of holders before the last one, and whether a cancel was asked for."""

    state: str
    wait_reason: str | None
    held_by_the_dead: bool
    deaths: int
    cancelled: bool

    @property
    def ends(self) -> str:
        if self.cancelled:
            return "cancelled"
        return "error" if self.held_by_the_dead and self.deaths == 2 else "complete"


WAYS_TO_WAIT = [("running", None), *(("sleeping", why) for why in ("timer", "message", "child", "retry"))]
LEFT = [
    Left(state, why, held, deaths, cancelled)
    for (state, why), held, deaths, cancelled in product(WAYS_TO_WAIT, (False, True), (0, 2), (False, True))
    if not (cancelled and held and deaths)  # ends either way, and both are true
]
LEAVE = """
update runs set state = $2, wait_reason = $3, expired_claims = $5, due_at = now() - interval '1 hour',
    lease_token = lease_token + 1,
    lease_until = case when $4 then now() - interval '1 hour' end,
    cancel_requested_at = case when $6 then now() - interval '1 hour' end
where id = $1
"""


@pytest.mark.parametrize("lived", [False, True], ids=["never claimed", "after a cycle"])
async def test_a_worker_that_starts_on_rows_of_any_shape_brings_every_run_to_its_end(
    lived: bool, pool: Pool, owner_id: UUID, start: Start
) -> None:
    runs = await begin(pool, owner_id, [sleep(3600), DONE] if lived else [DONE], len(LEFT))
    if lived:
        first = start("worker", **ON)
        await until(lambda: pool.fetchval("select bool_and(state = 'sleeping') from runs"))
        first.kill()
    for run_id, left in zip(runs, LEFT, strict=True):
        row = (left.state, left.wait_reason, left.held_by_the_dead, left.deaths, left.cancelled)
        await pool.execute(LEAVE, run_id, *row)

    start("worker", ESPALIER_WORKER_SLOTS="4", **ON)
    await until(lambda: all_over(pool))

    states = {row["id"]: row["state"] for row in await pool.fetch("select id, state from runs")}
    assert [states[run_id] for run_id in runs] == [left.ends for left in LEFT]
    assert await violations(pool) == {}


# ------------------------------------------------------------------ what a queue may say


async def test_rings_that_are_repeated_stale_or_nonsense_cause_no_second_execution(
    pool: Pool, owner_id: UUID, start: Start, stores: Stores
) -> None:
    """Two workers hear each ring many times, also while the run lives and when it has ended."""
    workers = [start("worker", **ON) for _ in range(2)]
    plan: Plan = [{**NEXT, "delay_s": 0.1}] * 5 + [DONE]
    names = QueueNames(stores.redis_prefix)
    runs = await begin(pool, owner_id, plan, 6)
    ended = await begin(pool, owner_id, [DONE], 3)
    with anyio.fail_after(WAIT_S):
        async with open_queue(stores.redis_url) as queue:
            bell = Doorbell(queue, names)
            while not await all_over(pool):
                for run_id in [*runs, *ended, uuid4()] * 3:
                    await bell.ring(run_id)
                await mislead(queue, names)
                await anyio.sleep(POLL_S)
            await until(lambda: is_empty(queue, names))

    assert await times_asked(pool) == {**dict.fromkeys(runs, len(plan)), **dict.fromkeys(ended, 1)}
    assert {row["state"] for row in await pool.fetch("select state from runs")} == {"complete"}
    assert await violations(pool) == {}
    assert not any(worker.has_died() for worker in workers)


NONSENSE = [
    b"",
    b"not json",
    b"[]",
    b"{}",
    b'{"a": "text"}',
    b'{"a": [1, null, "no uuid", []]}',
    b"\x80\x04N.",
]


async def mislead(queue: Any, names: QueueNames) -> None:
    """Ids without a job, jobs that carry no run, and a job whose key holds something else."""
    for body in NONSENSE:
        job_id = f"{names.prefix}{uuid4().hex}"
        await queue.set(f"arq:job:{job_id}", body, ex=60)
        await queue.zadd(names.queue, {job_id: 0})
        await queue.rpush(names.wake_list, job_id, uuid4().hex)
    await queue.zadd(names.queue, {uuid4().hex: 0})


async def is_empty(queue: Any, names: QueueNames) -> bool:
    return not await queue.zcard(names.queue)


async def test_a_queue_that_is_of_another_type_costs_seconds_and_no_run(
    pool: Pool, owner_id: UUID, start: Start, stores: Stores
) -> None:
    names = QueueNames(stores.redis_prefix)
    async with open_streams(RedisSettings(redis_url=stores.redis_url)) as redis:
        await redis.set(names.queue, "not a queue")
        await redis.set(names.wake_list, "not a list")
        worker = start("worker", **ON)
        runs = await begin(pool, owner_id, [NEXT, DONE], 5)
        await until(lambda: all_over(pool))

    assert await times_asked(pool) == dict.fromkeys(runs, 2)
    assert not worker.has_died()
    assert worker.output().count("doorbell.redis_away") < 20, "it is no hot loop"


async def forget_everything(redis: Redis, stores: Stores) -> int:
    """Delete all that the deployment has in Redis; how many keys that were."""
    keys = [key async for key in redis.scan_iter(match=f"*{stores.redis_prefix}*")]
    return int(await redis.delete(*keys)) if keys else 0


async def test_a_sleep_of_two_days_outlives_the_queue_the_worker_and_all_of_redis(
    pool: Pool, owner_id: UUID, start: Start, stores: Stores
) -> None:
    (run_id,) = await begin(pool, owner_id, [sleep(TWO_DAYS_S), DONE])
    first = start("worker", **ON)
    await until(lambda: pool.fetchval("select state = 'sleeping' from runs"))
    left_s = await pool.fetchval("select extract(epoch from due_at - now())::float8 from runs")
    assert TWO_DAYS_S - 60 < left_s <= TWO_DAYS_S
    assert await pool.fetchval("select lease_until from runs") is None
    first.kill()
    async with open_streams(RedisSettings(redis_url=stores.redis_url)) as redis:
        await until(lambda: forget_everything(redis, stores))

        start("worker", **ON)
        await pool.execute("update runs set due_at = due_at - make_interval(secs => $1)", TWO_DAYS_S)
        await until(lambda: all_over(pool))

    assert await times_asked(pool) == {run_id: 2}
    assert await violations(pool) == {}


# ------------------------------------------------------------------ who repairs, if the repairer stands still


IDLE = "idle_in_transaction_session_timeout"


async def test_a_sweeper_that_stands_still_with_rows_in_its_hands_keeps_nobody_from_repairing(
    pool: Pool, owner_id: UUID, start: Start, stores: Stores
) -> None:
    """The rest is repaired meanwhile, and what it had taken when Postgres has ended its transaction."""
    stuck, *others = await begin(pool, owner_id, [sleep(3600)], 5)
    async with open_streams(RedisSettings(redis_url=stores.redis_url)) as redis:

        async def told(run_ids: list[UUID]) -> bool:
            return all([await redis.exists(stream_key(stores.redis_prefix, each)) for each in run_ids])

        taken = await pool.acquire()
        try:
            await taken.execute("begin")
            await taken.execute(f"set local {IDLE} = 0")
            assert [act.run_id for act in await unpublished(taken, 0, 1)] == [stuck]
            assert await overdue_wakes(taken, 0, 100) == []
            await pool.execute(
                "update runs set due_at = 'infinity'"
            )  # their only way to Redis is the sweeper
            start("worker", **ON)
            await until(lambda: told(others))
            assert not await told([stuck])
            await taken.execute(f"set local {IDLE} to default")
            await until(lambda: told([stuck]))
        finally:
            await pool.release(taken)
    assert not await pool.fetchval("select count(*) from outbox")


async def test_nothing_of_a_run_stays_in_redis_for_ever(
    pool: Pool, owner_id: UUID, start: Start, stores: Stores
) -> None:
    """Neither of those that ended nor of those that live: every stream has an end of its own."""
    ended = await begin(pool, owner_id, [NEXT, DONE], 5)
    asleep = await begin(pool, owner_id, [sleep(3600)], 5)
    start("worker", **ON)
    await until(lambda: pool.fetchval("select count(*) = 5 from runs where ended_at is not null"))
    await until(lambda: pool.fetchval("select count(*) = 5 from runs where state = 'sleeping'"))
    await until(lambda: pool.fetchval("select count(*) = 0 from outbox"))
    async with open_streams(RedisSettings(redis_url=stores.redis_url)) as redis:
        lives_s = {
            run_id: await redis.ttl(stream_key(stores.redis_prefix, run_id)) for run_id in ended + asleep
        }
        assert [run_id for run_id, left_s in lives_s.items() if not 0 < left_s <= STREAM_LIFE_S] == []
