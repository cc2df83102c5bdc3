"""What happens to a tool call when something dies, hangs, stops or is stopped in the middle of it.

The ledger of the server is the witness: it says how often a call was really carried out.
"""

import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from invariants import violations
from scripted_runs import Reader
from tests.integration.conftest import BrokerProcess, Start, StartBroker, StartGateway
from tests.integration.tools import (
    PROGRAM,
    Ledger,
    calls,
    record,
    returned,
    rows_of,
    start_with_tools,
    until_state,
)

from espalier_client.client import AepClient
from espalier_domain.tool_results import DOUBT
from espalier_local.ports import free_port
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]

WIRE_PLANS = {"ESPALIER_MODELS_SCRIPTED": "on"}
SHOW_RESULT = calls(("complete", {"result": "${/results/0}"}))
POLL_S = 0.05

log = logging.getLogger(__name__)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


@pytest.fixture
async def client(start_gateway: StartGateway, api_key: str, pool: Pool) -> AsyncIterator[AepClient]:
    """However a test ends, what is in doubt has been told and asked about, and nothing else is wrong."""
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as opened:
        yield opened
    assert await violations(pool) == {}


@pytest.fixture
async def served_ledger(ledger: Ledger) -> AsyncIterator[dict[str, Any]]:
    """The ledger server as a program that is reached over HTTP."""
    command = [sys.executable, str(PROGRAM), str(ledger.path), "--http"]
    async with await anyio.open_process(command, stderr=None) as process:
        assert process.stdout is not None
        port = int((await process.stdout.receive()).split()[0])
        yield {"url": f"http://127.0.0.1:{port}/mcp"}
        process.kill()


@asynccontextmanager
async def _read(client: AepClient, run_id: str) -> AsyncIterator[Reader]:
    """A reader who follows from now on; on leaving, the run has ended and all of it was read."""
    reader = Reader(run_id)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(reader.read, client)
            yield reader
    assert [int(event.event_id) for event in reader.events] == list(range(1, len(reader.events) + 1))


# --- the worker --------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_s", [1.0, 7.0], ids=["answered-meanwhile", "joined"])
async def test_a_worker_killed_in_the_middle_of_a_call_loses_no_answer_and_repeats_no_call(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool, delay_s: float
) -> None:
    broker = await start_broker({"ledger": ledger.server()})
    first = start("worker", **WIRE_PLANS, **broker.worker_settings)
    run = await start_with_tools(client, [calls(record("once", delay_s)), SHOW_RESULT])

    async with _read(client, run.id) as reader:
        await ledger.until("called", "once")
        first.kill()
        start("worker", **WIRE_PLANS, **broker.worker_settings)

    assert reader.events[-1].payload["result"] == "recorded once"
    assert returned(reader.events)[0] == ("mcp.ledger.record", True, "recorded once", False)
    assert ledger.lines("called") == ["once"]
    assert await rows_of(pool, run.id) == [("call_1_1", "done")]


async def test_a_stopped_worker_whose_run_was_taken_can_send_nothing(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    """The first answer takes long enough to stop the worker before its call is even planned."""
    broker = await start_broker({"ledger": ledger.server()})
    first = start("worker", **WIRE_PLANS, **broker.worker_settings)
    plan = [{**calls(record("once")), "delay_s": 1.0}, SHOW_RESULT]
    run = await start_with_tools(client, plan)

    async with _read(client, run.id) as reader:
        await reader.reaches(2)
        with first.frozen():
            start("worker", **WIRE_PLANS, **broker.worker_settings)
            await reader.ends()

    assert ledger.lines("called") == ["once"]
    assert reader.events[-1].payload["result"] == "recorded once"


# --- the broker --------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False], ids=["another-broker-at-once", "another-broker-later"])
async def test_a_broker_killed_in_the_middle_of_a_call_leaves_it_in_doubt_and_it_is_not_repeated(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool, early: bool
) -> None:
    servers = {"ledger": ledger.server()}
    broker = await start_broker(servers)
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    run = await start_with_tools(client, [calls(record("once", 30.0)), SHOW_RESULT])

    async with _read(client, run.id) as reader:
        await ledger.until("called", "once")
        broker.service.kill()
        killed_at = time.monotonic()
        if early:
            await start_broker(servers, port=broker.port)
        await until_state(pool, run.id, "in_doubt")
        log.info("in doubt %.1f s after the kill", time.monotonic() - killed_at)
        if not early:
            await start_broker(servers, port=broker.port)

    tool, ok, preview, in_doubt = returned(reader.events)[0]
    assert (tool, ok, in_doubt) == ("mcp.ledger.record", False, True) and preview.startswith(DOUBT)
    assert reader.events[-1].payload["result"] == DOUBT, "the model was told"
    assert ledger.lines("called") == ["once"]
    assert await rows_of(pool, run.id) == [("call_1_1", "in_doubt")]


async def test_a_broker_that_stands_still_is_found_out_long_before_the_deadline(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    servers = {"ledger": ledger.server()}
    broker = await start_broker(servers)
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    run = await start_with_tools(client, [calls(record("once", 2.0)), SHOW_RESULT])

    async with _read(client, run.id) as reader:
        await ledger.until("called", "once")
        with broker.service.frozen():
            began = time.monotonic()
            await until_state(pool, run.id, "in_doubt")
            log.info("in doubt %.1f s after it stood still", time.monotonic() - began)
            assert time.monotonic() - began < 25, "not only after the deadline of 60 s"

    assert returned(reader.events)[0][3], "in doubt"
    assert reader.events[-1].payload["result"].startswith(DOUBT)
    assert ledger.lines("called") == ["once"]


async def test_a_broker_that_is_stopped_lets_calls_finish(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    broker = await start_broker({"ledger": ledger.server()})
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    run = await start_with_tools(client, [calls(record("once", 2.0)), SHOW_RESULT])

    async with _read(client, run.id) as reader:
        await ledger.until("called", "once")
        assert await anyio.to_thread.run_sync(broker.service.stop) == 0

    assert reader.events[-1].payload["result"] == "recorded once"
    assert ledger.lines("done") == ["once"]


async def test_a_broker_that_is_stopped_leaves_what_does_not_finish_in_doubt(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    broker = await start_broker({"ledger": ledger.server()}, ESPALIER_BROKER_DRAIN_S="0.5")
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    run = await start_with_tools(client, [calls(record("once", 40.0)), SHOW_RESULT])

    async with _read(client, run.id) as reader:
        await ledger.until("called", "once")
        assert await anyio.to_thread.run_sync(broker.service.stop) == 0

    assert returned(reader.events)[0][3], "in doubt"
    assert ledger.lines("called") == ["once"] and ledger.lines("done") == []


async def test_a_broker_that_comes_late_makes_the_call_once(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    port = free_port()
    nobody = BrokerProcess(None, f"http://127.0.0.1:{port}")  # type: ignore[arg-type]
    start("worker", **WIRE_PLANS, **nobody.worker_settings)
    plan = [calls(record("once")), SHOW_RESULT]
    run = await start_with_tools(client, plan)

    async with _read(client, run.id) as reader:
        with anyio.fail_after(20):
            while not any(event.type == "error" for event in reader.events):
                await anyio.sleep(POLL_S)
        await start_broker({"ledger": ledger.server()}, port=port)

    assert reader.events[-1].payload["result"] == "recorded once"
    assert ledger.lines("called") == ["once"]


async def test_a_call_that_no_broker_can_be_asked_for_is_not_made_and_the_run_goes_on(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    broker = await start_broker({"ledger": ledger.server()})
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    plan = [calls(record("first")), {**calls(record("never")), "delay_s": 2.0}, SHOW_RESULT]
    run = await start_with_tools(client, plan)

    async with _read(client, run.id) as reader:
        await reader.reaches(4)
        broker.service.kill()
        await until_state(pool, run.id, "skipped")
        await start_broker({"ledger": ledger.server()}, port=broker.port)

    _, ok, preview, in_doubt = returned(reader.events)[1]
    assert (ok, in_doubt) == (False, False) and preview.startswith("unavailable")
    assert ledger.lines("called") == ["first"]
    assert await rows_of(pool, run.id) == [("call_1_1", "done"), ("call_2_1", "skipped")]


# --- cancel ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("http", [False, True], ids=["stdio", "http"])
async def test_a_cancel_in_the_middle_of_a_call_ends_the_run_and_tells_the_server(
    start: Start,
    start_broker: StartBroker,
    client: AepClient,
    ledger: Ledger,
    pool: Pool,
    http: bool,
    served_ledger: dict[str, Any],
) -> None:
    broker = await start_broker({"ledger": served_ledger if http else ledger.server()})
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    run = await start_with_tools(client, [calls(record("stop me", 60.0)), SHOW_RESULT])

    async with _read(client, run.id) as reader:
        await ledger.until("called", "stop me")
        began = time.monotonic()
        await client.run_cancel(run.id)
        await reader.ends()
        log.info("cancelled after %.2f s", time.monotonic() - began)

    assert reader.events[-1].payload["final_state"] == "cancelled"
    ((_, ok, preview, in_doubt),) = returned(reader.events)
    assert (ok, in_doubt) == (False, True) and preview.startswith(DOUBT)
    await ledger.until("cancelled", "stop me")
    await until_state(pool, run.id, "in_doubt")
    assert ledger.lines("done") == []


async def test_a_cancel_without_any_worker_alive_stops_the_call_too(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    broker = await start_broker({"ledger": ledger.server()})
    worker = start("worker", **WIRE_PLANS, **broker.worker_settings)
    run = await start_with_tools(client, [calls(record("stop me", 60.0)), SHOW_RESULT])

    async with _read(client, run.id) as reader:
        await ledger.until("called", "stop me")
        worker.kill()
        await client.run_cancel(run.id)

    assert reader.events[-1].payload["final_state"] == "cancelled"
    ((_, ok, preview, in_doubt),) = returned(reader.events)
    assert (ok, in_doubt) == (False, True) and preview.startswith(DOUBT)
    await ledger.until("cancelled", "stop me")
    assert ledger.lines("called") == ["stop me"]


# --- servers that fail -------------------------------------------------------------------------------


async def test_a_server_that_cannot_be_started_is_told_of_and_its_calls_are_not_made(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    servers = {"dead": {"command": "/nowhere/at/all"}, "ledger": ledger.server()}
    broker = await start_broker(servers)
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    plan = [calls(("mcp.dead.x", {}), record("alive")), calls(("complete", {"result": "${/results}"}))]

    run = await start_with_tools(client, plan, "mcp.dead.*", "mcp.ledger.*")
    async with _read(client, run.id) as reader:
        pass

    errors = [event.payload["message"] for event in reader.events if event.type == "error"]
    assert len(errors) == 1 and "mcp.dead" in errors[0] and "/nowhere" not in errors[0]
    (_, ok, preview, doubt), second = returned(reader.events)[:2]
    assert (ok, doubt) == (False, False) and preview.startswith("unavailable: the call was not made")
    assert second == ("mcp.ledger.record", True, "recorded alive", False)
    assert [state for _, state in await rows_of(pool, run.id)] == ["failed", "done"]


async def test_a_server_that_hangs_at_connect_holds_nobody_else_up(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    hanging = {**ledger.server("--hang-at-connect"), "connect_timeout_s": 3}
    broker = await start_broker({"hanging": hanging, "ledger": ledger.server()})
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    plan = [calls(("mcp.hanging.record", {"text": "x"}), record("alive")), SHOW_RESULT]

    run = await start_with_tools(client, plan, "mcp.hanging.*", "mcp.ledger.*")
    async with _read(client, run.id) as reader:
        pass

    (_, ok, preview, doubt), second = returned(reader.events)[:2]
    assert (ok, doubt) == (False, False) and preview.startswith("unavailable: the call was not made")
    assert second == ("mcp.ledger.record", True, "recorded alive", False)
    assert ledger.lines("called") == ["alive"]


async def test_a_call_that_hangs_is_in_doubt_at_its_deadline_and_the_server_is_told(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    broker = await start_broker({"ledger": ledger.server()}, ESPALIER_CALL_S_MAX="2")
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    plan = [calls(record("too slow", 60.0)), calls(record("alive")), SHOW_RESULT]

    run = await start_with_tools(client, plan)
    async with _read(client, run.id) as reader:
        pass

    first, second = returned(reader.events)[:2]
    assert first[1:] == (False, first[2], True) and first[2].startswith(DOUBT)
    assert second == ("mcp.ledger.record", True, "recorded alive", False)
    await ledger.until("cancelled", "too slow")
    assert sorted(ledger.lines("called")) == ["alive", "too slow"]


async def test_a_server_that_dies_in_a_call_leaves_it_in_doubt_and_is_started_again_for_the_next(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    broker = await start_broker({"ledger": ledger.server()})
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    plan = [calls(("mcp.ledger.die", {"text": "d"})), calls(record("alive")), SHOW_RESULT]

    run = await start_with_tools(client, plan)
    async with _read(client, run.id) as reader:
        pass

    first, second = returned(reader.events)[:2]
    assert first[0] == "mcp.ledger.die" and first[1] is False and first[3] is True
    assert second == ("mcp.ledger.record", True, "recorded alive", False)
    assert ledger.lines("called") == ["d", "alive"]


async def test_an_answer_of_20_megabytes_is_a_failed_result_and_the_run_goes_on(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    broker = await start_broker({"ledger": ledger.server()})
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    plan = [calls(("mcp.ledger.big", {"bytes": 20_000_000})), calls(record("alive")), SHOW_RESULT]

    run = await start_with_tools(client, plan)
    async with _read(client, run.id) as reader:
        pass

    first, second = returned(reader.events)[:2]
    assert first[1] is False and first[3] is False and "were not kept" in first[2]
    assert second == ("mcp.ledger.record", True, "recorded alive", False)
    assert reader.events[-1].payload["final_state"] == "complete"


async def test_an_answer_of_two_megabytes_is_kept_whole_and_shown_in_part(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    broker = await start_broker({"ledger": ledger.server()})
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    run = await start_with_tools(client, [calls(("mcp.ledger.big", {"bytes": 2_000_000})), SHOW_RESULT])

    async with _read(client, run.id) as reader:
        pass

    shown = reader.events[-1].payload["result"]
    assert len(shown) <= 256 * 1024 and shown.endswith("[shortened: the first part of 2000000 bytes]")
    kept = await pool.fetchval("select length(result -> 'content' -> 0 ->> 'text') from tool_calls")
    assert kept == 2_000_000


async def test_an_answer_that_is_no_json_is_a_failed_result_and_harms_nobody(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    broker = await start_broker({"raw": ledger.raw_server(), "ledger": ledger.server()})
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    plan = [calls(record("other", 1.0), ("mcp.raw.nan", {})), calls(("mcp.raw.huge", {})), SHOW_RESULT]

    run = await start_with_tools(client, plan, "mcp.raw.*", "mcp.ledger.*")
    async with _read(client, run.id) as reader:
        pass

    other, nan, huge = returned(reader.events)[:3]
    assert other == ("mcp.ledger.record", True, "recorded other", False)
    assert nan[1] is False and nan[3] is False and "no JSON" in nan[2]
    assert huge == ("mcp.raw.huge", True, "ok", False)
    assert reader.events[-1].payload["result"] == "recorded other"
    assert sorted(ledger.lines("called")) == ["huge", "nan", "other"]


async def test_a_number_of_hundreds_of_digits_survives_the_worker(
    start: Start, start_broker: StartBroker, client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    broker = await start_broker({"raw": ledger.raw_server()})
    first = start("worker", **WIRE_PLANS, **broker.worker_settings)
    run = await start_with_tools(
        client, [calls(("mcp.raw.huge", {"delay_s": 1.0})), SHOW_RESULT], "mcp.raw.*"
    )

    async with _read(client, run.id) as reader:
        await ledger.until("called", "huge")
        first.kill()
        await until_state(pool, run.id, "done")
        start("worker", **WIRE_PLANS, **broker.worker_settings)

    assert returned(reader.events)[0] == ("mcp.raw.huge", True, "ok", False)
    assert ledger.lines("called") == ["huge"]
