"""Tool calls of a scripted agent, through a real worker and a real broker, to real MCP servers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from scripted_runs import Reader, entries_of
from tests.integration.conftest import Start, StartBroker, StartGateway
from tests.integration.tools import Ledger, calls, record, returned, rows_of, start_with_tools

from espalier_client.client import AepClient
from espalier_store.pool import Pool

pytestmark = pytest.mark.anyio

WIRE_PLANS = {"ESPALIER_MODELS_SCRIPTED": "on"}
FINISH = ("complete", {"result": "done"})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


@pytest.fixture
async def client(
    start: Start, start_broker: StartBroker, start_gateway: StartGateway, ledger: Ledger, api_key: str
) -> Any:
    """An embedder of a runtime whose broker reaches the ledger server."""
    broker = await start_broker({"ledger": ledger.server()})
    start("worker", **WIRE_PLANS, **broker.worker_settings)
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as opened:
        yield opened


@asynccontextmanager
async def _following(reader: Reader, client: AepClient) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        group.start_soon(reader.read, client)
        yield
        group.cancel_scope.cancel()


async def _events(client: AepClient, run_id: str) -> list[Any]:
    reader = Reader(run_id)
    await reader.read(client)
    return reader.events


async def test_a_call_reaches_the_server_once_and_its_answer_the_model_and_the_embedder(
    client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    plan = [calls(record("a")), calls(("complete", {"result": "${/results/0}"}))]

    run = await start_with_tools(client, plan)
    events = await _events(client, run.id)

    assert returned(events)[0] == ("mcp.ledger.record", True, "recorded a", False)
    assert events[-1].payload["result"] == "recorded a"
    assert ledger.lines("called") == ledger.lines("done") == ["a"]
    assert await rows_of(pool, run.id) == [("call_1_1", "done")]
    assert (await entries_of(pool, run.id, "calls_planned"))[0]["call_ids"] == ["call_1_1"]


async def test_calls_of_one_answer_run_together_and_keep_their_order(
    client: AepClient, ledger: Ledger
) -> None:
    texts = [f"{n:02}" for n in range(10)]
    plan = [calls(*(record(text, 0.3) for text in texts)), calls(FINISH)]

    run = await start_with_tools(client, plan)
    events = await _events(client, run.id)

    lines = [json.loads(line)["event"] for line in ledger.path.read_text().splitlines()]
    assert lines[:10] == ["called"] * 10, "all of them began before the first one was done"
    assert [preview for _, _, preview, _ in returned(events)[:10]] == [f"recorded {text}" for text in texts]


async def test_self_tools_and_servers_tools_of_one_answer_run_in_its_order(
    client: AepClient, ledger: Ledger
) -> None:
    art = ("artifact_create", {"name": "n.md", "content": "c"})
    plan = [calls(record("first"), art, record("second"), FINISH, record("after the end"))]

    run = await start_with_tools(client, plan)
    events = await _events(client, run.id)

    assert [(name, ok) for name, ok, _, _ in returned(events)] == [
        ("mcp.ledger.record", True),
        ("artifact_create", True),
        ("mcp.ledger.record", True),
        ("complete", True),
        ("mcp.ledger.record", False),
    ]
    assert ledger.lines("called") == ["first", "second"]


async def test_a_tool_outside_the_toolset_is_not_found_and_never_called(
    client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    plan = [
        calls(record("no"), ("mcp.other.x", {}), ("espalier.time", {}), ("helix.time", {})),
        calls(FINISH),
    ]

    run = await start_with_tools(client, plan, "mcp.ledger.meta", "espalier.time")
    events = await _events(client, run.id)

    assert [(ok, preview.partition(":")[0]) for _, ok, preview, _ in returned(events)[:2]] == [
        (False, "tool_not_found")
    ] * 2
    assert [ok for _, ok, _, _ in returned(events)[2:4]] == [True, True]
    assert ledger.lines("called") == []
    assert await rows_of(pool, run.id) == [("call_1_3", "done"), ("call_1_4", "done")]


async def test_calls_beyond_the_budget_are_refused_and_not_sent(
    client: AepClient, ledger: Ledger, pool: Pool
) -> None:
    plan = [calls(*(record(text) for text in "abcde"))]

    run = await start_with_tools(client, plan, tool_calls_per_cycle=3)
    reader = Reader(run.id)
    async with _following(reader, client):
        await reader.reaches(14)

    told = returned(reader.events)
    assert [ok for _, ok, _, _ in told] == [True, True, True, False, False]
    assert all(preview.startswith("budget_exhausted") for _, _, preview, _ in told[3:])
    assert sorted(ledger.lines("called")) == ["a", "b", "c"]
    assert await rows_of(pool, run.id) == [(f"call_1_{n}", "done") for n in (1, 2, 3)]


async def test_the_server_is_told_whom_a_call_is_for(client: AepClient, ledger: Ledger) -> None:
    plan = [calls(("mcp.ledger.meta", {})), calls(("complete", {"result": "${/results/0}"}))]

    run = await start_with_tools(client, plan)
    events = await _events(client, run.id)

    meta = events[-1].payload["result"]
    ours = {name: meta[name] for name in ("session_id", "agent_id", "run_id", "subject_ids")}
    assert ours == {"session_id": run.id, "agent_id": run.agent_id, "run_id": run.id, "subject_ids": []}


async def test_a_failing_tool_and_a_refusing_server_are_failed_results(client: AepClient, pool: Pool) -> None:
    plan = [
        calls(("mcp.ledger.fail", {}), ("mcp.ledger.refuse", {})),
        calls(FINISH),
    ]

    run = await start_with_tools(client, plan)
    events = await _events(client, run.id)

    assert [(ok, doubt) for _, ok, _, doubt in returned(events)[:2]] == [(False, False)] * 2
    assert [state for _, state in await rows_of(pool, run.id)] == ["failed"] * 2
    assert events[-1].payload["final_state"] == "complete"
