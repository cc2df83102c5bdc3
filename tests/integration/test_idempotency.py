"""`Idempotency-Key`: a create that names a key happens once, whoever asks again, where and when."""

from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID

import anyio
import asyncpg
import httpx2
import pytest
from forked import Service
from scripted_runs import make_agent
from tests.integration.conftest import StartGateway, Stores
from tests.integration.wire import (
    AGENT,
    ANSWER_WAIT_S,
    POLL_S,
    Gateway,
    Wire,
    request,
    running_gateway,
    symbol,
)
from tests.integration.wire_runs import event_types

from espalier_client import AepClient, TransportError
from espalier_gateway.settings import GatewaySettings
from espalier_protocol.ids import from_wire
from espalier_protocol.run import RunCreate
from espalier_store.idempotency import KEPT_S
from espalier_store.pool import Pool

pytestmark = pytest.mark.anyio

TWINS = 50
OTHER_AGENT = {**AGENT, "name": "somebody"}


@pytest.fixture
async def other_gateway(gateway: Gateway, gateway_settings: GatewaySettings) -> AsyncIterator[Gateway]:
    async with running_gateway(gateway_settings, gateway.pool) as running:
        yield running


async def keyed(wire: Wire, method: str, params: Any, key: str = "k") -> httpx2.Response:
    return await wire.post(request(method, params), wire.headers(Idempotency_Key=key))


async def kept(gateway: Gateway) -> int:
    return int(await gateway.pool.fetchval("select count(*) from idempotency"))


async def creates(wire: Wire) -> dict[str, dict[str, Any]]:
    """A create of each kind that heeds a key."""
    agent_id = await wire.agent()
    return {
        "agent.create": AGENT,
        "run.create": {"agent_id": agent_id, "goal": "once", "inputs": {"a": {"x": 1, "y": [2.5]}}},
        "message.send": {"to_agent_id": agent_id, "body": {"text": "hello"}},
    }


async def test_the_first_answer_is_the_only_one_byte_for_byte(wire: Wire, gateway: Gateway) -> None:
    for method, params in (await creates(wire)).items():
        first = await keyed(wire, method, params)
        assert symbol(first.json()) == "result"
        before = await gateway.rows()
        again = [await keyed(wire, method, params) for _ in range(3)]
        assert [(each.status_code, each.content) for each in again] == [(200, first.content)] * 3
        assert await gateway.rows() == before


async def test_the_answer_is_the_first_one_though_the_run_has_gone_on(wire: Wire, gateway: Gateway) -> None:
    params = (await creates(wire))["run.create"]
    first = await keyed(wire, "run.create", params)
    run_id = first.json()["result"]["id"]
    await wire.call("run.cancel", run_id=run_id)
    assert (await keyed(wire, "run.create", params)).content == first.content
    assert await event_types(gateway.pool, run_id) == ["run.started", "run.ended"]


async def test_the_order_of_members_does_not_make_other_params(wire: Wire) -> None:
    params = (await creates(wire))["run.create"]
    turned = {**dict(reversed(params.items())), "inputs": {"a": {"y": [2.5], "x": 1}}}
    first = await keyed(wire, "run.create", params)
    assert (await keyed(wire, "run.create", turned)).content == first.content


async def test_other_params_under_a_used_key_are_refused(wire: Wire, gateway: Gateway) -> None:
    first = await keyed(wire, "agent.create", AGENT)
    before = await gateway.rows()
    other = (await keyed(wire, "agent.create", OTHER_AGENT)).json()
    assert (symbol(other), other["error"]["data"]) == (
        "invalid_params",
        {"symbol": "invalid_params", "field": "Idempotency-Key", "reason": "was used for other params"},
    )
    assert await gateway.rows() == before
    assert (await keyed(wire, "agent.create", AGENT)).content == first.content


NO_KEYS = {
    "empty": "",
    "long": "k" * 256,
    "a blank": "a b",
    "beyond ASCII": "schl\u00fcssel",
    "a tab": "a\tb",
}


@pytest.mark.parametrize("key", NO_KEYS.values(), ids=NO_KEYS)
async def test_what_is_no_key_is_refused(wire: Wire, gateway: Gateway, key: str) -> None:
    before = await gateway.rows()
    headers = [*wire.headers(Content_Type="application/json").items(), ("Idempotency-Key", key)]
    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    answer = (await wire.http.post("/aep/v1/rpc", json=request("agent.create", AGENT), headers=sent)).json()
    assert (symbol(answer), answer["error"]["data"]["field"]) == ("invalid_params", "Idempotency-Key")
    assert await gateway.rows() == before


async def test_two_keys_are_no_key_and_255_characters_are_one(wire: Wire, gateway: Gateway) -> None:
    two = [*wire.headers().items(), ("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    answer = await wire.http.post("/aep/v1/rpc", json=request("agent.create", AGENT), headers=two)
    assert symbol(answer.json()) == "invalid_params"
    assert symbol((await keyed(wire, "agent.create", AGENT, "~" * 255)).json()) == "result"
    assert await kept(gateway) == 1


async def test_a_key_is_its_owners_and_its_methods(wire: Wire, gateway: Gateway) -> None:
    other = await gateway.caller("two")
    made = {
        (await keyed(caller, "agent.create", AGENT)).json()["result"]["id"]
        for caller in (wire, other)
        for _ in range(2)
    }
    assert len(made) == 2
    for method, params in (await creates(wire)).items():
        assert symbol((await keyed(wire, method, params)).json()) == "result", method
    assert await kept(gateway) == 4


async def test_any_key_of_the_owner_gets_the_first_answer(wire: Wire, gateway: Gateway) -> None:
    first = await keyed(wire, "agent.create", AGENT)
    colleague = await gateway.caller("one")
    assert (await keyed(colleague, "agent.create", AGENT)).content == first.content


async def test_a_call_that_may_be_repeated_anyway_does_not_heed_a_key(wire: Wire, gateway: Gateway) -> None:
    agent_id = await wire.agent()
    for method in ("agent.get", "agent.archive"):
        answer = await keyed(wire, method, {"agent_id": agent_id})
        assert answer.json()["result"]["id"] == agent_id
    assert await kept(gateway) == 0


async def test_a_create_without_a_key_leaves_no_row(wire: Wire, gateway: Gateway) -> None:
    await wire.run()
    assert await kept(gateway) == 0


async def test_a_notification_with_a_key_happens_once_too(wire: Wire, gateway: Gateway) -> None:
    silent = {"jsonrpc": "2.0", "method": "agent.create", "params": AGENT}
    before = (await gateway.rows())["agents"]
    for _ in range(2):
        response = await wire.post(silent, wire.headers(Idempotency_Key="k"))
        assert (response.status_code, response.content) == (204, b"")
    assert (await gateway.rows())["agents"] == before + 1


async def test_a_create_that_failed_leaves_nothing_and_may_be_asked_for_again(
    wire: Wire, gateway: Gateway
) -> None:
    agent_id = await wire.agent(max_live_runs=1)
    first = await wire.run(agent_id)
    params = {"agent_id": agent_id, "goal": "when there is room"}
    assert symbol((await keyed(wire, "run.create", params)).json()) == "lifecycle_conflict"
    assert await kept(gateway) == 0
    await wire.call("run.cancel", run_id=first)
    made = await keyed(wire, "run.create", params)
    assert symbol(made.json()) == "result"
    assert (await keyed(wire, "run.create", params)).content == made.content


async def test_of_twins_at_two_gateways_one_creates_and_all_answer_the_same(
    wire: Wire, gateway: Gateway, other_gateway: Gateway
) -> None:
    params = (await creates(wire))["run.create"]
    there = Wire(other_gateway.http, wire.key, wire.session_id)
    answers: list[bytes] = []

    async def ask(caller: Wire) -> None:
        answers.append((await keyed(caller, "run.create", params)).content)

    with anyio.fail_after(ANSWER_WAIT_S):
        async with anyio.create_task_group() as group:
            for number in range(TWINS):
                group.start_soon(ask, (wire, there)[number % 2])

    assert len(answers) == TWINS and len(set(answers)) == 1
    rows = await gateway.rows()
    assert (rows["runs"], rows["events"], await kept(gateway)) == (1, 1, 1)


BEGUN = """
insert into idempotency (owner_id, method, key, params_hash)
select owner_id, 'agent.create', 'k', 'x' from keys limit 1
"""
WAITING = (
    "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
)


async def test_a_twin_waits_for_the_one_under_way_and_creates_if_that_comes_to_nothing(
    wire: Wire, gateway: Gateway, stores: Stores
) -> None:
    answers: list[str] = []

    async def ask() -> None:
        answers.append(symbol((await keyed(wire, "agent.create", AGENT)).json()))

    under_way = await asyncpg.connect(stores.postgres_url)
    try:
        async with anyio.create_task_group() as group:
            block = under_way.transaction()
            await block.start()
            await under_way.execute(BEGUN)
            group.start_soon(ask)
            with anyio.fail_after(ANSWER_WAIT_S):
                while not await gateway.pool.fetchval(WAITING):
                    await anyio.sleep(POLL_S)
            assert answers == []
            await block.rollback()
    finally:
        await under_way.close()
    assert answers == ["result"]
    assert (await gateway.rows())["agents"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["commit.before", "commit.after"])
async def test_a_create_whose_gateway_dies_around_its_commit_is_there_once_for_whoever_asks_again(
    moment: str, start_gateway: StartGateway, pool: Pool, api_key: str
) -> None:
    well = await start_gateway()
    async with AepClient(well.base_url, api_key) as client:
        agent = await make_agent(client)
    dying = await start_gateway(dies_at=f"{moment}:1")
    order = RunCreate(agent_id=agent.id, goal="once")

    async with AepClient(dying.base_url, api_key) as client:
        with anyio.fail_after(ANSWER_WAIT_S), pytest.raises(TransportError):
            await client.run_create(order, key="mine")
    assert dying.service.has_died()
    committed = {row["id"] for row in await pool.fetch("select id from runs")}
    assert len(committed) == (moment == "commit.after")

    async with AepClient(well.base_url, api_key) as client:
        runs = [await client.run_create(order, key="mine") for _ in range(2)]
    assert committed <= {from_wire("run", run.id) for run in runs}
    assert (runs[0], await pool.fetchval("select count(*) from runs")) == (runs[1], 1)
    assert await event_types(pool, runs[0].id) == ["run.started"]


async def test_a_client_with_two_gateways_goes_on_at_the_other_one_by_itself(
    start_gateway: StartGateway, pool: Pool, api_key: str
) -> None:
    dying, well = await start_gateway(dies_at="commit.after:1"), await start_gateway()
    async with AepClient([dying.base_url, well.base_url], api_key) as client:
        with anyio.fail_after(ANSWER_WAIT_S):
            agent = await make_agent(client)
    assert dying.service.has_died()
    assert [row["id"] for row in await pool.fetch("select id from agents")] == [from_wire("agt", agent.id)]


OLD = """
insert into idempotency (owner_id, method, key, params_hash, answer, created_at)
select $1, 'run.create', 'old-' || n, 'x', '{}', now() - make_interval(secs => $2)
from generate_series(1, $3) n
"""


@pytest.mark.slow
async def test_answers_are_forgotten_after_a_day_and_not_before(
    start: Callable[..., Service], pool: Pool, owner_id: UUID
) -> None:
    """More of them than a sweeper takes in one turn."""
    await pool.execute(OLD, owner_id, KEPT_S + 1.0, 1_500)
    await pool.execute(OLD.replace("old-", "young-"), owner_id, KEPT_S - 3600.0, 3)
    start("worker")
    with anyio.fail_after(ANSWER_WAIT_S):
        while await pool.fetchval("select count(*) from idempotency") > 3:
            await anyio.sleep(POLL_S)
    left = [row["key"] for row in await pool.fetch("select key from idempotency order by key")]
    assert left == ["young-1", "young-2", "young-3"]
