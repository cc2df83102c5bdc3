"""Logs of runs that ended long ago: removed by workers, a few rows at a time, and nothing but the logs.

Time is moved by moving when a run ended. What a follower is told of a log that is gone is asked of a gateway.
"""

from typing import Any
from uuid import UUID

import anyio
import pytest
from pydantic import ValidationError
from tests.integration.conftest import Start, Stores
from tests.integration.wire import Wire

from espalier_eventlog import RedisSettings, open_streams, stream_key
from espalier_protocol.ids import from_wire
from espalier_run_worker import retention
from espalier_run_worker.retention import remove_old_logs
from espalier_run_worker.settings import WorkerSettings
from espalier_store.fleet import prune_logs, remove_log
from espalier_store.ids import new_id
from espalier_store.pool import Connection, Pool, transaction

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WAIT_S = 20.0
POLL_S = 0.02
DAY_S = 86_400.0
WEEK_S = 7 * DAY_S
LOG = ("events", "journal", "tool_calls", "snapshots")
EVENTS_MANY, RUNS_MANY = 10_000, 500
BIG_CHARS = 8_000
BIG_MANY = 4_000
"""Together more than the buffers between a gateway and a client that does not read."""


@pytest.fixture
async def run_id(wire: Wire, start: Start, pool: Pool) -> str:
    """A run that made an artifact and sent a message, and has ended; its worker has stopped."""
    worker = start("worker", ESPALIER_MODELS_SCRIPTED="on")
    agent_id = await wire.agent(toolset=[])
    calls = [
        {"tool": "artifact_create", "args": {"name": "kept", "content": "kept"}},
        {"tool": "send_message", "args": {"to_agent_id": agent_id, "body": "kept"}},
        {"tool": "continue_now", "args": {}},
    ]
    plan = {"espalier.script": {"answers": [{"calls": calls}, {"text": "done"}]}}
    run_id = await wire.run(agent_id, inputs=plan)
    with anyio.fail_after(WAIT_S):
        while (await wire.call("run.get", run_id=run_id))["state"] != "complete":
            await anyio.sleep(POLL_S)
    assert worker.stop() == 0
    return run_id


def uuid_of(run_id: str) -> UUID:
    found = from_wire("run", run_id)
    assert found is not None
    return found


async def ended_ago(pool: Pool, run_id: str, seconds: float) -> None:
    moved = "update runs set ended_at = now() - make_interval(secs => $2) where id = $1"
    await pool.execute(moved, uuid_of(run_id), seconds)


async def log_rows(pool: Pool, run_id: str) -> dict[str, int]:
    count = "select count(*) from {} where run_id = $1"
    return {table: await pool.fetchval(count.format(table), uuid_of(run_id)) for table in LOG}


async def status_of_log(wire: Wire, run_id: str) -> tuple[int, Any]:
    response = await wire.get(f"/aep/v1/runs/{run_id}/events")
    is_json = response.headers["content-type"].startswith("application/json")
    return response.status_code, response.json()["error"] if is_json else None


async def other_rows(pool: Pool) -> dict[str, list[Any]]:
    """All that retention leaves alone."""
    kept = {}
    for table in ("artifacts", "messages", "blobs", "agents", "approvals"):
        kept[table] = [dict(row) for row in await pool.fetch(f"select * from {table} order by 1, 2")]
    return kept


async def test_a_workers_first_turn_removes_the_log_of_a_run_and_nothing_else(
    wire: Wire, pool: Pool, start: Start, run_id: str
) -> None:
    before, others = await wire.call("run.get", run_id=run_id), await other_rows(pool)
    await ended_ago(pool, run_id, WEEK_S + 60)
    ended_at = await pool.fetchval("select ended_at from runs where id = $1", uuid_of(run_id))

    start("worker")
    with anyio.fail_after(WAIT_S):
        while await pool.fetchval("select log_removed_at from runs where id = $1", uuid_of(run_id)) is None:
            await anyio.sleep(POLL_S)

    assert await log_rows(pool, run_id) == dict.fromkeys(LOG, 0)
    assert await other_rows(pool) == others
    after = await wire.call("run.get", run_id=run_id)
    assert after | {"ended_at": before["ended_at"]} == before
    assert ended_at is not None and after["result"] == before["result"]
    assert await status_of_log(wire, run_id) == (410, "log_pruned")
    found = await wire.call("artifact.list", run_id=run_id)
    assert [each["name"] for each in found["artifacts"]] == ["kept"]


@pytest.mark.parametrize("kept_s", [DAY_S, WEEK_S], ids=["a day", "a week"])
async def test_a_log_is_served_whole_until_its_time_is_over_whatever_redis_holds(
    wire: Wire, pool: Pool, stores: Stores, run_id: str, kept_s: float
) -> None:
    path = f"/aep/v1/runs/{run_id}/events"
    before, told = await log_rows(pool, run_id), (await wire.get(path)).text
    await ended_ago(pool, run_id, kept_s - 60)
    async with open_streams(RedisSettings(redis_url=stores.redis_url)) as redis:
        await redis.delete(stream_key(stores.redis_prefix, uuid_of(run_id)))
    await remove_old_logs(pool, kept_s)
    assert await log_rows(pool, run_id) == before
    assert (await wire.get(path)).text == told
    assert told.count("\nevent: ") == before["events"] > 10


async def test_a_run_that_lives_keeps_its_log_however_old_it_is(wire: Wire, pool: Pool) -> None:
    run_id = await wire.run()
    await pool.execute("update runs set created_at = now() - interval '1 year'")
    before = await log_rows(pool, run_id)
    await remove_old_logs(pool, DAY_S)
    assert await log_rows(pool, run_id) == before


async def test_nobody_can_ask_for_less_than_a_day() -> None:
    with pytest.raises(ValidationError, match="log_retention_days") as refused:
        WorkerSettings(log_retention_days=0.9)
    assert "greater than or equal to 1" in str(refused.value)


async def test_a_call_in_doubt_keeps_the_log_until_a_person_has_answered(
    wire: Wire, pool: Pool, run_id: str
) -> None:
    await ended_ago(pool, run_id, WEEK_S + 60)
    before, approval_id = await log_rows(pool, run_id), new_id()
    asked = """
        insert into approvals (id, owner_id, agent_id, run_id, kind, call_id)
        select $2, owner_id, agent_id, id, 'in_doubt', 'call_1_1' from runs where id = $1
    """
    await pool.execute(asked, uuid_of(run_id), approval_id)
    await remove_old_logs(pool, WEEK_S)
    assert await log_rows(pool, run_id) == before

    (question,) = (await wire.call("approval.list"))["items"]
    await wire.call("approval.resolve", approval_id=question["id"], resolution="done")
    await remove_old_logs(pool, WEEK_S)
    assert await log_rows(pool, run_id) == dict.fromkeys(LOG, 0)
    assert (await wire.call("approval.get", approval_id=question["id"]))["resolution"] == "done"


async def test_a_legal_hold_on_whom_the_run_knows_of_keeps_the_log(
    wire: Wire, pool: Pool, run_id: str
) -> None:
    subjects = "/api/me/subjects"
    held = await wire.http.post(
        subjects, json={"aepId": "sub_held", "legalHold": True}, headers=wire.headers()
    )
    await pool.execute("update runs set subject_ids = array['sub_other', 'sub_held']")
    await ended_ago(pool, run_id, WEEK_S + 60)
    before = await log_rows(pool, run_id)
    await remove_old_logs(pool, WEEK_S)
    assert (held.status_code, await log_rows(pool, run_id)) == (200, before)

    await wire.http.patch(f"{subjects}/sub_held", json={"legalHold": False}, headers=wire.headers())
    await remove_old_logs(pool, WEEK_S)
    assert await log_rows(pool, run_id) == dict.fromkeys(LOG, 0)


async def test_a_log_that_was_closed_by_a_worker_that_died_is_shown_to_nobody_and_removed_by_the_next(
    wire: Wire, pool: Pool, run_id: str
) -> None:
    await ended_ago(pool, run_id, WEEK_S + 60)
    before = await log_rows(pool, run_id)
    async with transaction(pool) as connection:
        await prune_logs(connection, WEEK_S, 10)
    assert await log_rows(pool, run_id) == before
    assert await status_of_log(wire, run_id) == (410, "log_pruned")

    await remove_old_logs(pool, WEEK_S)
    assert await log_rows(pool, run_id) == dict.fromkeys(LOG, 0)


async def more_events(pool: Pool, run_id: str, count: int, chars: int) -> None:
    """Before its last one, which moves up."""
    moved = "update events set seq = seq + $2 where run_id = $1 and type = 'run.ended'"
    await pool.execute(moved, uuid_of(run_id), count)
    more = """
        insert into events (run_id, seq, owner_id, type, payload, emitted_at)
        select id, next_seq - 2 + n, owner_id, 'error', payload, now()
        from runs, generate_series(1, $2) as n, concat('{"message":"', repeat('x', $3), '"}') as payload
        where id = $1
    """
    await pool.execute(more, uuid_of(run_id), count, chars)
    await pool.execute("update runs set next_seq = next_seq + $2 where id = $1", uuid_of(run_id), count)


async def short_logs(pool: Pool, run_id: str, count: int) -> None:
    """Runs that ended just now with one event each, from which Postgres judges how long a log is."""
    await pool.execute(
        """
        insert into runs
        select (jsonb_populate_record(r, jsonb_build_object('id', gen_random_uuid()))).*
        from runs r, generate_series(1, $2) where r.id = $1
        """,
        uuid_of(run_id),
        count,
    )
    await pool.execute("""
        insert into events (run_id, seq, owner_id, type, payload, emitted_at)
        select id, 1, owner_id, 'error', '{}', now() from runs on conflict do nothing
    """)
    await pool.execute("analyze events")


async def test_a_long_log_among_short_ones_is_removed_in_parts_by_two_workers_at_once(
    pool: Pool, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part costs what it holds, or the statement's time limit ends it."""
    parts = []

    async def counted(connection: Connection, limit: int) -> bool:
        parts.append(limit)
        return await remove_log(connection, limit)

    monkeypatch.setattr(retention, "PAUSE_S", 0.0)
    monkeypatch.setattr(retention, "remove_log", counted)
    await short_logs(pool, run_id, RUNS_MANY)
    await more_events(pool, run_id, EVENTS_MANY, 10)
    await ended_ago(pool, run_id, WEEK_S + 60)
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(remove_old_logs, pool, WEEK_S)
    await remove_old_logs(pool, WEEK_S)  # each may have left to the other what it was at work on
    assert await log_rows(pool, run_id) == dict.fromkeys(LOG, 0)
    assert set(parts) == {retention.ROWS_MAX}
    assert len(parts) > EVENTS_MANY // retention.ROWS_MAX
    assert await pool.fetchval("select count(*) from runs where log_removed_at is not null") == 1


async def test_a_part_is_all_that_one_transaction_removes(
    pool: Pool, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_MAX", 3)
    monkeypatch.setattr(retention, "BATCHES_MAX", 1)
    before = await log_rows(pool, run_id)
    await ended_ago(pool, run_id, WEEK_S + 60)
    await remove_old_logs(pool, WEEK_S)
    after = await log_rows(pool, run_id)
    assert {table: before[table] - after[table] for table in ("events", "journal")} == {
        "events": 3,
        "journal": 3,
    }


async def test_a_follower_whose_log_is_removed_under_it_is_cut_and_finds_it_gone(
    wire: Wire, pool: Pool, run_id: str
) -> None:
    """It does not read while the log goes, so the gateway still has most of it to fetch."""
    await more_events(pool, run_id, BIG_MANY, BIG_CHARS)
    total = (await log_rows(pool, run_id))["events"]
    path = f"/aep/v1/runs/{run_id}/events"
    async with wire.http.stream("GET", path, headers=wire.headers()) as response:
        assert response.status_code == 200
        await ended_ago(pool, run_id, WEEK_S + 60)
        await remove_old_logs(pool, WEEK_S)
        with anyio.fail_after(WAIT_S):
            read = [line async for line in response.aiter_lines()]
    seen = [int(line.removeprefix("id: ")) for line in read if line.startswith("id: ")]
    assert seen == list(range(1, len(seen) + 1)) and 0 < len(seen) < total
    assert ": pruned" in read
    assert await status_of_log(wire, run_id) == (410, "log_pruned")
