"""Logs of runs that ended long ago: removed by workers, a few rows at a time, and nothing but the logs.

Time is moved by moving when a run ended. What a follower is told of a log that is gone is asked of a gateway.
"""

from typing import Any
from uuid import UUID

import anyio
import pytest
from pydantic import ValidationError
from tests.integration.conftest import Start
from tests.integration.wire import Gateway, Wire

from espalier_protocol.ids import from_wire
from espalier_run_worker import retention
from espalier_run_worker.retention import remove_old_logs
from espalier_run_worker.settings import WorkerSettings
from espalier_store.fleet import prune_logs
from espalier_store.ids import new_id
from espalier_store.pool import Pool, transaction

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WAIT_S = 20.0
POLL_S = 0.02
DAY_S = 86_400.0
WEEK_S = 7 * DAY_S
LOG = ("events", "journal", "tool_calls", "snapshots")
EVENTS_MANY = 3_500


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


async def test_a_log_is_kept_until_its_time_is_over(wire: Wire, pool: Pool, run_id: str) -> None:
    before = await log_rows(pool, run_id)
    await ended_ago(pool, run_id, WEEK_S - 60)
    await remove_old_logs(pool, WEEK_S)
    assert await log_rows(pool, run_id) == before
    assert await status_of_log(wire, run_id) == (200, None)


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


async def test_a_long_log_goes_in_small_parts_also_by_two_workers_at_once(
    pool: Pool, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PAUSE_S", 0.0)
    more = """
        insert into events (run_id, seq, owner_id, type, payload, emitted_at)
        select id, 100 + n, owner_id, 'error', '{}', now() from runs, generate_series(1, $2) as n
        where id = $1
    """
    await pool.execute(more, uuid_of(run_id), EVENTS_MANY)
    await ended_ago(pool, run_id, WEEK_S + 60)
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(remove_old_logs, pool, WEEK_S)
    await remove_old_logs(pool, WEEK_S)  # each may have left to the other what it was at work on
    assert await log_rows(pool, run_id) == dict.fromkeys(LOG, 0)
    parts = -(-EVENTS_MANY // retention.ROWS_MAX)
    assert parts > 3
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
    gateway: Gateway, wire: Wire, pool: Pool, run_id: str
) -> None:
    path = f"/aep/v1/runs/{run_id}/events"
    async with wire.http.stream("GET", path, headers=wire.headers()) as response:
        lines = response.aiter_lines()
        assert response.status_code == 200
        await ended_ago(pool, run_id, WEEK_S + 60)
        await remove_old_logs(pool, WEEK_S)
        with anyio.fail_after(WAIT_S):
            read = [line async for line in lines]
    assert read, "what it was shown before is no error"
    assert await status_of_log(wire, run_id) == (410, "log_pruned")
