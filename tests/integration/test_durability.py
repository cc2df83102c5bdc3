"""What a run is promised when the processes around it are stopped, hang or die, at the edges of a lease.

Random deaths are in `test_random_kills.py`, and storms in `tests/chaos`. Here each promise is asked for once,
where it is closest to being broken.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
from forked import Service
from invariants import violations
from scripted_runs import (
    DONE,
    Plan,
    entries_of,
    follow,
    log_of,
    make_agent,
    note,
    row_of,
    start_run,
)
from tests.integration.conftest import Start, StartBroker, StartGateway
from tests.integration.tools import Ledger, calls, record, start_with_tools

from espalier_acts.messages import read_inbox
from espalier_acts.subjects import spread_to_siblings
from espalier_client.client import AepClient
from espalier_domain.errors import FenceReached
from espalier_eventlog import RedisSettings, open_streams
from espalier_eventlog.publisher import Publisher
from espalier_protocol.ids import from_wire
from espalier_protocol.message import MessageSend
from espalier_run_worker.draft import Draft
from espalier_run_worker.held import Held, claim
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

WAIT_S = 60.0
POLL_S = 0.01
HANDED_OVER_S = 2.0
ON = {"ESPALIER_MODELS_SCRIPTED": "on"}
SHORT_LEASE = {"ESPALIER_LEASE_TTL_S": "1", **ON}

log = logging.getLogger(__name__)


@pytest.fixture
async def client(start_gateway: StartGateway, api_key: str) -> AsyncIterator[AepClient]:
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as opened:
        yield opened


async def until(condition: Callable[[], Awaitable[Any]]) -> None:
    with anyio.fail_after(WAIT_S):
        while not await condition():
            await anyio.sleep(POLL_S)


async def attempts(pool: Pool, run_id: str) -> int:
    return len(await entries_of(pool, run_id, "model_call_started"))


async def handed_over_s(pool: Pool, run_id: str, owner: Service, other: Service) -> float:
    """SIGTERM for the owner; seconds until another holds it: a token for the release, one for the claim."""
    token = (await row_of(pool, run_id))["lease_token"]

    async def taken() -> bool:
        row = await row_of(pool, run_id)
        return row["lease_token"] >= token + 2 and row["lease_until"] is not None

    began_at = anyio.current_time()
    owner.process.terminate()
    await until(taken)
    took_s = anyio.current_time() - began_at
    assert not other.has_died()
    assert owner.stop() == 0
    return took_s


# ------------------------------------------------------------------ told to stop


@pytest.mark.slow
async def test_a_stopped_worker_hands_over_a_run_whose_model_is_thinking_within_two_seconds(
    client: AepClient, start: Start, pool: Pool
) -> None:
    owner = start("worker", **ON)
    run = await start_run(client, [{**DONE, "delay_s": 4}])
    await until(lambda: attempts(pool, run.id))
    other = start("worker", **ON)
    await until(lambda: _is_up(other))

    took_s = await handed_over_s(pool, run.id, owner, other)

    log.info("in a model call: %.2f s", took_s)
    assert took_s < HANDED_OVER_S
    assert await attempts(pool, run.id) == 2, "the other asks again at once"
    await until(lambda: _has_ended(pool, run.id))
    assert (await row_of(pool, run.id))["expired_claims"] == 0, "a hand-over is no death"
    assert await violations(pool) == {}


@pytest.mark.slow
async def test_a_stopped_worker_hands_over_a_run_whose_tool_works_and_the_call_is_made_once(
    client: AepClient, start: Start, start_broker: StartBroker, pool: Pool, tmp_path: Any
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    broker = await start_broker({"ledger": ledger.server()})
    owner = start("worker", **ON, **broker.worker_settings)
    run = await start_with_tools(client, [calls(record("once", 5.0)), DONE])
    await ledger.until("called", "once")
    other = start("worker", **ON, **broker.worker_settings)
    await until(lambda: _is_up(other))

    took_s = await handed_over_s(pool, run.id, owner, other)

    log.info("in a tool call: %.2f s", took_s)
    assert took_s < HANDED_OVER_S
    await until(lambda: _has_ended(pool, run.id))
    (returned,) = await entries_of(pool, run.id, "tool_returned")
    assert (returned["ok"], ledger.lines("called")) == (True, ["once"])


@pytest.mark.slow
async def test_workers_that_are_stopped_in_turn_cost_no_reader_more_than_two_seconds_between_events(
    client: AepClient, start: Start, pool: Pool
) -> None:
    """Steps of a third of a second: most are finished by their worker and handed over with their commit."""
    plan: Plan = [*[note(f"note-{n}", delay_s=0.3) for n in range(16)], DONE]
    worker, waits_s = start("worker", **ON), []
    with anyio.fail_after(WAIT_S):
        run = await start_run(client, plan)
        async with anyio.create_task_group() as group:
            (reader,) = follow(group, client, [run.id])
            await reader.reaches(3)
            for _ in range(4):
                other = start("worker", **ON)
                await until(lambda up=other: _is_up(up))  # type: ignore[misc]
                worker.process.terminate()
                seen = (await row_of(pool, run.id))["next_seq"] - 1
                stopped_at = anyio.current_time()
                await reader.reaches(seen + 1)
                while not worker.has_died():
                    await anyio.sleep(POLL_S)
                left = len(reader.events)
                await reader.reaches(left + 1)
                waits_s.append(anyio.current_time() - stopped_at)
                worker = other
    log.info("first event of the next worker: %s s", [round(each, 2) for each in waits_s])
    assert max(waits_s) < HANDED_OVER_S
    assert reader.log == await log_of(pool, run.id)
    assert (await row_of(pool, run.id))["cycle_count"] == len(plan)
    assert await violations(pool) == {}


@pytest.mark.slow
async def test_a_sleeper_that_becomes_due_while_its_worker_stops_is_woken_by_another(
    client: AepClient, start: Start, pool: Pool
) -> None:
    owner = start("worker", **ON)
    run = await start_run(client, [{"calls": [{"tool": "sleep", "args": {"duration_seconds": 2}}]}, DONE])

    async def asleep() -> bool:
        return bool((await row_of(pool, run.id))["state"] == "sleeping")

    await until(asleep)
    other = start("worker", **ON)
    await until(lambda: _is_up(other))
    owner.process.terminate()
    await until(lambda: _has_ended(pool, run.id))

    first, second = await entries_of(pool, run.id, "cycle_started")
    woke = """
        select extract(epoch from c.created_at - e.created_at)::float8 as slept
        from journal c join journal e on e.run_id = c.run_id and e.body ->> 'kind' = 'cycle_ended'
        where c.run_id = $1 and c.body ->> 'kind' = 'cycle_started' and c.entry_no > e.entry_no
    """
    slept_s = await pool.fetchval(woke, from_wire("run", run.id))
    log.info("slept %.2f s", slept_s)
    assert (first["cycle"], second["cycle"]) == (1, 2)
    assert 2.0 <= slept_s < 2.0 + HANDED_OVER_S


# ------------------------------------------------------------------ the lease


async def test_whoever_cannot_renew_stops_while_the_lease_is_still_its_own(
    client: AepClient, pool: Pool, held: Callable[[str, float], Awaitable[Held]]
) -> None:
    run = await start_run(client, [DONE])
    ours = await held(run.id, 2.0)
    with anyio.fail_after(WAIT_S), pytest.raises(FenceReached), ours.outside():
        await anyio.sleep_forever()
    left = "select extract(epoch from lease_until - clock_timestamp())::float8 from runs"
    assert 0 < await pool.fetchval(left) < 1, "a quarter of it, and what the claim took"


@pytest.mark.slow
async def test_a_call_that_outlasts_the_lease_many_times_is_nobody_elses_meanwhile(
    client: AepClient, start: Start, pool: Pool
) -> None:
    workers = [start("worker", **SHORT_LEASE) for _ in range(2)]
    run = await start_run(client, [{**DONE, "delay_s": 5}])
    await until(lambda: _has_ended(pool, run.id))
    assert await attempts(pool, run.id) == 1
    assert (await row_of(pool, run.id))["lease_token"] == 2, "one claim, and the end"
    assert not any("lease_lost" in worker.output() for worker in workers)


@pytest.mark.slow
async def test_a_run_that_kills_every_worker_is_ended_by_the_claim_after_the_third_death(
    client: AepClient, start: Start, pool: Pool
) -> None:
    run = await start_run(client, [DONE])
    for _ in range(3):
        killed = start("worker", dies_at="commit.after:1", **SHORT_LEASE)
        await until(lambda died=killed: _has_died(died))  # type: ignore[misc]
        assert (await row_of(pool, run.id))["ended_at"] is None
    healthy = await start_run(client, [DONE])
    start("worker", **SHORT_LEASE)
    await until(lambda: _has_ended(pool, run.id))
    await until(lambda: _has_ended(pool, healthy.id))

    ended = await row_of(pool, run.id)
    assert (ended["state"], ended["lease_token"]) == ("error", 5), "four claims, and the end"
    assert (await client.run_get(run.id)).result == {"reason": "poison: 3 claims of the run came to nothing"}
    assert (await row_of(pool, healthy.id))["state"] == "complete"
    assert await violations(pool) == {}


async def _is_up(worker: Service) -> bool:
    return worker.log.exists() and "worker.ready" in worker.output()


async def _has_died(service: Service) -> bool:
    return service.has_died()


async def _has_ended(pool: Pool, run_id: str) -> bool:
    return (await row_of(pool, run_id))["ended_at"] is not None


# ------------------------------------------------------------------ locks in one order


@pytest.fixture
async def held(pool: Pool, stores: Any) -> AsyncIterator[Callable[[str, float], Awaitable[Held]]]:
    """Holds a run in this process, which publishes nothing."""

    async def nobody(_: object) -> None: ...

    async with open_streams(RedisSettings(redis_url=stores.redis_url)) as streams:
        publisher = Publisher(streams, stores.redis_prefix, nobody)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await publisher.run()  # closes its queue

        async def hold(run_id: str, lease_ttl_s: float) -> Held:
            found = from_wire("run", run_id)
            assert found is not None
            taken = await claim(pool, publisher, lease_ttl_s, found)
            assert taken is not None
            return taken

        yield hold


async def test_two_runs_of_an_agent_that_read_its_inbox_do_not_deadlock_when_one_changes_the_prompt(
    client: AepClient, pool: Pool, held: Callable[[str, float], Awaitable[Held]]
) -> None:
    """One knows of a subject, which spreads to the other with the prompt; the other reads meanwhile."""
    agent = await make_agent(client)
    changing, reading = [await start_run(client, [DONE], agent.id) for _ in range(2)]
    await pool.execute(
        "update runs set subject_ids = array['sub_one'] where id = $1", from_wire("run", changing.id)
    )
    await client.message_send(MessageSend(to_agent_id=agent.id, body="hello"))
    changes, reads = await held(changing.id, 60.0), await held(reading.id, 60.0)
    told: list[str] = []
    locked = anyio.Event()

    async def change(draft: Draft) -> None:
        told.append("changes")
        entry, taken = await read_inbox(draft.connection, draft.run)
        await spread_to_siblings(draft.connection, draft.run.owner_id, draft.run.agent_id, draft.run.run_id)
        draft.record(entry)
        told.append(f"changed, {len(taken)} read")

    async def read(draft: Draft) -> None:
        told.append("reads")
        locked.set()
        await until(lambda: somebody_waits(pool))
        entry, taken = await read_inbox(draft.connection, draft.run)
        draft.record(entry)
        told.append(f"{len(taken)} read")

    async with anyio.create_task_group() as group:
        group.start_soon(reads.commit, read)
        await locked.wait()
        await changes.commit(change, agent_first=True)

    assert told == ["reads", "1 read", "changes", "changed, 0 read"], "each step was taken once"
    subjects = await pool.fetch("select subject_ids from runs")
    assert [row["subject_ids"] for row in subjects] == [["sub_one"]] * 2
    assert await pool.fetchval("select count(*) from messages where read_at is not null") == 1


async def somebody_waits(pool: Pool) -> bool:
    waiting = """
        select exists (
            select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')
    """
    return bool(await pool.fetchval(waiting))
