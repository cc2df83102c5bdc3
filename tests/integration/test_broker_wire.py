"""The broker as workers meet it: who may ask, and the fence in front of every call.

A test is the worker here: it holds a run's lease, plans a call in its row and posts orders.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from tests.integration.conftest import INTERNAL_KEY, StartBroker
from tests.integration.tools import Ledger, rows_of, start_with_tools
from tests.integration.wire import Gateway
from tests.integration.wire_runs import lease, uuid

from espalier_acts.runs import cancel_run
from espalier_client.client import AepClient
from espalier_protocol.broker import (
    CALL_PATH,
    LIST_PATH,
    SIGNATURE_HEADER,
    CallOrder,
    CallStanding,
    ToolsOffered,
    ToolsWanted,
)
from espalier_secrets import signature
from espalier_store.pool import Pool, transaction

pytestmark = pytest.mark.anyio

PLAN_CALL = """
insert into tool_calls (run_id, owner_id, call_id, tool, args)
select id, owner_id, $2, 'mcp.ledger.record', $3::json from runs where id = $1
"""


@dataclass
class Worker:
    """A run that is held by `token`, and what its worker may post."""

    http: httpx2.AsyncClient
    pool: Pool
    run_id: str
    owner_id: Any
    token: int

    async def plan(self, call_id: str, delay_s: float = 0.0) -> None:
        args = f'{{"text": "{call_id}", "delay_s": {delay_s}}}'
        await self.pool.execute(PLAN_CALL, uuid("run", self.run_id), call_id, args)

    def order(self, call_id: str, **changes: Any) -> CallOrder:
        fields = {"owner_id": self.owner_id, "run_id": uuid("run", self.run_id), "call_id": call_id}
        return CallOrder(**{**fields, "lease_token": self.token, "seconds_max": 20.0, **changes})

    async def post(self, order: CallOrder) -> CallStanding:
        body = order.model_dump_json().encode()
        headers = {SIGNATURE_HEADER: signature(INTERNAL_KEY, CALL_PATH, body)}
        response = await self.http.post(CALL_PATH, content=body, headers=headers, timeout=30)
        assert response.status_code == 200
        return CallStanding.model_validate_json(response.content)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


@pytest.fixture
async def http(start_broker: StartBroker, ledger: Ledger) -> AsyncIterator[httpx2.AsyncClient]:
    broker = await start_broker({"ledger": ledger.server()})
    async with httpx2.AsyncClient(base_url=broker.base_url, trust_env=False) as opened:
        yield opened


@pytest.fixture
async def worker(
    gateway: Gateway, http: httpx2.AsyncClient, pool: Pool, owner_id: Any, api_key: str
) -> AsyncIterator[Worker]:
    async with AepClient(gateway.base_url, api_key) as client:
        run = await start_with_tools(client, [])
        yield Worker(http, pool, run.id, owner_id, await lease(pool, run.id))


async def test_whoever_has_not_the_key_is_refused_and_nothing_is_sent(
    worker: Worker, http: httpx2.AsyncClient, ledger: Ledger, pool: Pool
) -> None:
    await worker.plan("c1")
    body = worker.order("c1").model_dump_json().encode()
    signed = signature(INTERNAL_KEY, CALL_PATH, body)
    wrong = [
        (body, {}),
        (body, {SIGNATURE_HEADER: signature("another-key-0123456789", CALL_PATH, body)}),
        (body.replace(b"c1", b"c2"), {SIGNATURE_HEADER: signed}),
        (body, {SIGNATURE_HEADER: signature(INTERNAL_KEY, LIST_PATH, body)}),
    ]

    for sent, headers in wrong:
        assert (await http.post(CALL_PATH, content=sent, headers=headers)).status_code == 401

    assert await rows_of(pool, worker.run_id) == [("c1", "planned")]
    assert ledger.lines("called") == []


async def test_an_order_that_makes_no_sense_or_is_too_large_is_refused(http: httpx2.AsyncClient) -> None:
    for body, status in ((b"{}", 400), (b"not json", 400), (b"x" * 70_000, 413)):
        headers = {SIGNATURE_HEADER: signature(INTERNAL_KEY, CALL_PATH, body)}
        assert (await http.post(CALL_PATH, content=body, headers=headers)).status_code == status


@pytest.mark.slow
async def test_an_order_is_carried_out_once_however_often_and_by_how_many_it_is_given(
    worker: Worker, ledger: Ledger
) -> None:
    await worker.plan("c1", delay_s=0.5)
    standings: list[CallStanding] = []

    async def post() -> None:
        standings.append(await worker.post(worker.order("c1")))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(post)
    standings.append(await worker.post(worker.order("c1")))

    assert standings == [CallStanding(state="done", content="recorded c1")] * 9
    assert ledger.lines("called") == ["c1"]


@pytest.mark.slow
async def test_a_worker_that_hangs_up_changes_nothing(worker: Worker, ledger: Ledger) -> None:
    await worker.plan("c1", delay_s=1.0)
    with anyio.move_on_after(0.3):
        await worker.post(worker.order("c1"))

    assert await worker.post(worker.order("c1")) == CallStanding(state="done", content="recorded c1")
    assert ledger.lines("called") == ["c1"]


async def test_a_holder_that_lost_its_lease_can_send_nothing(
    worker: Worker, ledger: Ledger, pool: Pool
) -> None:
    await worker.plan("c1")

    stale = await worker.post(worker.order("c1", lease_token=worker.token - 1))
    await pool.execute("update runs set lease_until = now() - interval '1 second'")
    late = await worker.post(worker.order("c1"))

    assert stale == late == CallStanding(state="refused")
    assert await rows_of(pool, worker.run_id) == [("c1", "planned")]
    assert ledger.lines("called") == []


async def test_after_a_cancel_nothing_is_sent(worker: Worker, ledger: Ledger, pool: Pool) -> None:
    await worker.plan("c1")
    async with transaction(pool) as connection:
        await cancel_run(connection, worker.owner_id, uuid("run", worker.run_id))

    assert await worker.post(worker.order("c1")) == CallStanding(state="refused")
    assert ledger.lines("called") == []


async def test_a_cancel_that_is_being_committed_is_waited_for(
    worker: Worker, ledger: Ledger, pool: Pool
) -> None:
    await worker.plan("c1")
    standings: list[CallStanding] = []

    async def post() -> None:
        standings.append(await worker.post(worker.order("c1")))

    async with anyio.create_task_group() as group, transaction(pool) as connection:
        await cancel_run(connection, worker.owner_id, uuid("run", worker.run_id))
        group.start_soon(post)
        await _somebody_waits_for_a_lock(pool)

    assert standings == [CallStanding(state="refused")]
    assert ledger.lines("called") == []


async def test_a_run_of_another_owner_cannot_be_named(worker: Worker, ledger: Ledger) -> None:
    await worker.plan("c1")
    order = worker.order("c1", owner_id="00000000-0000-0000-0000-000000000000")
    assert await worker.post(order) == CallStanding(state="refused")
    assert ledger.lines("called") == []


async def test_a_call_that_nobody_planned_is_refused(worker: Worker) -> None:
    assert await worker.post(worker.order("no such call")) == CallStanding(state="refused")


async def test_the_tools_of_a_toolset_are_listed_under_the_names_that_agents_use(
    worker: Worker, http: httpx2.AsyncClient
) -> None:
    toolset = ("espalier.time", "mcp.ledger.record", "mcp.nobody.*", "mcp.ledger.no_such_tool")
    body = ToolsWanted(owner_id=worker.owner_id, toolset=toolset).model_dump_json().encode()
    headers = {SIGNATURE_HEADER: signature(INTERNAL_KEY, LIST_PATH, body)}

    response = await http.post(LIST_PATH, content=body, headers=headers, timeout=30)

    offered = ToolsOffered.model_validate_json(response.content)
    assert [tool.name for tool in offered.tools] == ["espalier.time", "mcp.ledger.record"]
    assert len(offered.troubles) == 1 and "mcp.nobody" in offered.troubles[0]


async def _somebody_waits_for_a_lock(pool: Pool) -> None:
    waiting = (
        "select count(*) from pg_stat_activity"
        " where wait_event_type = 'Lock' and datname = current_database()"
    )
    with anyio.fail_after(10):
        while await pool.fetchval(waiting) == 0:
            await anyio.sleep(0.02)
