"""`run.subscribe`: a run's events over a WebSocket, each once and in order, to readers of every kind."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import psutil
import pytest
from forked import Service
from scripted_runs import DONE, log_of, note, start_run
from tests.integration.conftest import StartGateway
from tests.integration.socket_caller import ENDED, EVENT, SocketCaller, socket
from tests.integration.test_wire_event_stream import ENDED as ROW_ENDED
from tests.integration.test_wire_event_stream import ended_run
from tests.integration.wire import (
    ANSWER_WAIT_S,
    POLL_S,
    VERSION,
    Gateway,
    Wire,
    request,
    symbol,
)
from tests.integration.wire_runs import lease
from websockets.exceptions import ConnectionClosed

from espalier_client import AepClient
from espalier_gateway.following import SCOPES, Pace
from espalier_protocol.access import CAPABILITIES
from espalier_store.pool import Pool

pytestmark = pytest.mark.anyio

SOON_S = 5.0


async def log_with(wire: Wire, gateway: Gateway, events: int) -> str:
    """An ended run with so many events."""
    return (await ended_run(wire, gateway, events)).split("/")[4]


async def freed_to(gateway: Gateway, streams: int) -> None:
    with anyio.fail_after(SOON_S):
        while len(gateway.state.streams) > streams:
            await anyio.sleep(POLL_S)


async def test_a_log_is_told_from_the_place_that_is_asked_for_and_then_that_it_ended(
    wire: Wire, gateway: Gateway
) -> None:
    run_id = await log_with(wire, gateway, 5)
    told = {}
    async with socket(gateway.base_url, wire) as caller:
        for since in (None, "0", "2", f"{2:016d}", "5"):
            place = {} if since is None else {"since": since}
            told[since] = await caller.until_ended(await caller.subscribe(run_id, **place))
    assert told == {
        None: ([1, 2, 3, 4, 5], "ended"),
        "0": ([1, 2, 3, 4, 5], "ended"),
        "2": ([3, 4, 5], "ended"),
        f"{2:016d}": ([3, 4, 5], "ended"),
        "5": ([], "ended"),
    }
    await freed_to(gateway, 0)


async def test_events_are_the_very_ones_of_the_stream(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    await wire.call("run.cancel", run_id=run_id)
    stream = (await wire.get(f"/aep/v1/runs/{run_id}/events")).text
    data = [
        json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")
    ]
    async with socket(gateway.base_url, wire) as caller:
        subscription_id = await caller.subscribe(run_id)
        told = [await caller.next_told() for _ in range(len(data) + 1)]
    assert told == [
        *(
            {
                "jsonrpc": "2.0",
                "method": EVENT,
                "params": {"subscription_id": subscription_id, "event": event},
            }
            for event in data
        ),
        {
            "jsonrpc": "2.0",
            "method": ENDED,
            "params": {"subscription_id": subscription_id, "reason": "ended"},
        },
    ]


async def test_what_happens_is_told_as_it_happens_to_every_connection(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    async with socket(gateway.base_url, wire) as one, socket(gateway.base_url, wire) as other:
        mine, again, theirs = [await each.subscribe(run_id) for each in (one, one, other)]
        for caller, count in ((one, 2), (other, 1)):
            for _ in range(count):
                assert (await caller.next_told())["params"]["event"]["type"] == "run.started"
        await other.say(request("run.cancel", {"run_id": run_id}, "cancel"))
        ends = [await one.until_ended(mine), await one.until_ended(again), await other.until_ended(theirs)]
    assert (len({mine, again}), ends) == (2, [([2], "ended")] * 3)


async def test_what_cannot_be_followed_is_refused_as_a_stream_would_be(wire: Wire, gateway: Gateway) -> None:
    other = await gateway.caller("two")
    foreign = await other.run()
    run_id = await log_with(wire, gateway, 5)
    async with socket(gateway.base_url, wire) as caller:
        for since in ("6", "-1", "abc", "", " 1", "9" * 17, "\u0663"):
            error = await caller.refused("run.subscribe", run_id=run_id, since=since)
            assert (error["data"]["symbol"], error["data"]["field"]) == ("invalid_params", "since")
        missing = [
            await caller.refused("run.subscribe", run_id=each) for each in (foreign, "run_" + "0" * 26)
        ]
        assert [(each["data"]["symbol"], each["data"]["resource"]) for each in missing] == [
            ("tool_not_found", "run")
        ] * 2
        await gateway.pool.execute("update runs set log_pruned_at = now()")
        assert (await caller.refused("run.subscribe", run_id=run_id))["data"]["symbol"] == "log_pruned"
        assert len(gateway.state.streams) == 1


async def test_following_needs_both_scopes(wire: Wire, gateway: Gateway) -> None:
    run_id = await log_with(wire, gateway, 3)
    told = {}
    for scopes in (SCOPES[:1], SCOPES[1:], SCOPES):
        async with socket(gateway.base_url, await gateway.caller("one", scopes)) as caller:
            answer = await caller.answer("run.subscribe", {"run_id": run_id})
            told[scopes] = answer.get("error", {}).get("data", {}).get("required_scope")
    assert told == {SCOPES[:1]: SCOPES[1], SCOPES[1:]: SCOPES[0], SCOPES: None}


OWN = """
insert into events (run_id, owner_id, seq, type, payload, emitted_at)
select id, owner_id, next_seq, 'espalier.spend.noted', '{}', now() from runs
"""


async def test_own_events_are_told_to_those_who_asked_for_them(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    await gateway.pool.execute(OWN)
    await gateway.pool.execute("update runs set next_seq = next_seq + 1")
    await wire.call("run.cancel", run_id=run_id)
    told = []
    for capabilities in (dict.fromkeys(CAPABILITIES, True), {"streaming.sse": True}):
        reader = await gateway.caller("one", SCOPES, **capabilities)
        async with socket(gateway.base_url, reader) as caller:
            told.append(await caller.until_ended(await caller.subscribe(run_id)))
    assert told == [([1, 2, 3], "ended"), ([1, 3], "ended")]


async def test_nothing_of_a_subscription_is_told_after_it_was_ended(wire: Wire, gateway: Gateway) -> None:
    run_id = await log_with(wire, gateway, 2_000)
    async with socket(gateway.base_url, wire) as caller:
        subscription_id = await caller.subscribe(run_id)
        assert await caller.call("run.unsubscribe", subscription_id=subscription_id) == {"ended": True}
        before = len(caller.told)
        for known in (subscription_id, "s99"):
            assert await caller.call("run.unsubscribe", subscription_id=known) == {"ended": False}
        assert len(caller.told) == before
        assert ENDED not in [each["method"] for each in caller.told]
        await freed_to(gateway, 1)


async def test_subscriptions_of_a_batch_begin_after_its_answer(wire: Wire, gateway: Gateway) -> None:
    run_id = await log_with(wire, gateway, 3)
    async with socket(gateway.base_url, wire) as caller:
        await caller.say([request("run.subscribe", {"run_id": run_id}, number) for number in range(3)])
        answers = await caller.hear()
        ids = [each["result"]["subscription_id"] for each in answers]
        assert [await caller.until_ended(each) for each in ids] == [([1, 2, 3], "ended")] * 3


async def test_a_connection_has_only_so_many_subscriptions(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier_gateway.subscriptions.SUBSCRIPTIONS_MAX", 2)
    run_id = await wire.run()
    async with socket(gateway.base_url, wire) as caller:
        first, _ = [await caller.subscribe(run_id) for _ in range(2)]
        error = await caller.refused("run.subscribe", run_id=run_id)
        assert (error["data"]["symbol"], error["data"]["limit"]) == ("rate_limited", "subscriptions_max")
        await caller.call("run.unsubscribe", subscription_id=first)
        await caller.subscribe(run_id)
    await freed_to(gateway, 0)


async def test_rights_that_are_gone_end_a_subscription_and_leave_the_connection(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier_gateway.following.Pace", partial(Pace, recheck_s=POLL_S))
    run_id = await wire.run()
    async with socket(gateway.base_url, wire) as caller:
        subscription_id = await caller.subscribe(run_id)
        await gateway.pool.execute("delete from sessions")
        assert await caller.until_ended(subscription_id) == ([1], "no_longer_allowed")
        assert (await caller.refused("run.get", run_id=run_id))["data"]["symbol"] == "session_expired"


@pytest.mark.slow
async def test_a_stopping_gateway_says_goodbye_after_what_was_asked_is_answered(
    start_gateway: StartGateway, pool: Pool, api_key: str
) -> None:
    """What was asked is a cancel of a run that somebody works on: its answer takes two seconds."""
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as client:
        run = await start_run(client, [DONE])
        session_id = (await client.initialize()).session_id
    headers = {
        "Authorization": f"Bearer {api_key}",
        "Agent-Protocol-Version": VERSION,
        "X-AEP-Session-Id": session_id,
    }
    async with socket(gateway.base_url, headers) as caller:
        subscription_id = await caller.subscribe(run.id)
        await lease(pool, run.id)
        await caller.say(request("run.cancel", {"run_id": run.id}, "last"))
        with anyio.fail_after(ANSWER_WAIT_S):
            while not await pool.fetchval("select count(*) from runs where cancel_requested_at is not null"):
                await anyio.sleep(POLL_S)
            assert await anyio.to_thread.run_sync(gateway.service.stop) == 0
        code, _ = await caller.closed()
        assert [symbol(each) for each in caller.told if each.get("id") == "last"] == ["result"]
        assert (code, await caller.until_ended(subscription_id)) == (1012, ([1], "closing"))
    assert "Traceback" not in gateway.service.output()


# ------------------------------------------------------------------ readers that do not read


EVENTS = 1_500
EVENT_BYTES = 100_000
LARGE = """
insert into events (run_id, owner_id, seq, type, payload, emitted_at)
select id, owner_id, n, case when n = $1 then 'run.ended' else 'error' end,
    '{"message":"' || repeat('x', $2) || '"}', now()
from runs, generate_series(2, $1) n
"""
MEMORY_BYTES_MAX = 60 * 1024 * 1024


@pytest.mark.slow
async def test_a_reader_that_stops_is_cut_costs_little_and_resumes_where_it_was(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is more than twice what the gateway may grow by while nobody reads it."""
    monkeypatch.setattr("espalier_gateway.ws.SEND_WAIT_S", 1.0)
    monkeypatch.setattr("espalier_gateway.ws.LOOK_EVERY_S", 0.1)
    run_id = await wire.run()
    await gateway.pool.execute(LARGE, EVENTS, EVENT_BYTES)
    await gateway.pool.execute("update runs set next_seq = $1", EVENTS + 1)
    await gateway.pool.execute(ROW_ENDED)
    before = psutil.Process().memory_info().rss
    seqs: list[int] = []
    async with socket(gateway.base_url, wire, queue_max=1) as lazy:
        await lazy.say(request("run.subscribe", {"run_id": run_id}))
        grown = 0
        with anyio.fail_after(ANSWER_WAIT_S):
            while not len(gateway.state.streams):
                await anyio.sleep(POLL_S)
            while len(gateway.state.streams):
                grown = max(grown, psutil.Process().memory_info().rss - before)
                await anyio.sleep(POLL_S)
        with suppress(ConnectionClosed):
            while True:
                said: dict[str, Any] = json.loads(await lazy.connection.recv())
                if said.get("method") == EVENT:
                    seqs.append(int(said["params"]["event"]["event_id"]))
        assert lazy.connection.close_code == 1006, "there is no way to tell it why"
    assert grown < MEMORY_BYTES_MAX < EVENTS * EVENT_BYTES / 2
    assert 0 < len(seqs) < EVENTS
    async with socket(gateway.base_url, wire) as caller:
        rest, why = await caller.until_ended(await caller.subscribe(run_id, since=str(seqs[-1])))
    assert ([*seqs, *rest], why) == (list(range(1, EVENTS + 1)), "ended")


APPEND = """
with r as (update runs set next_seq = next_seq + 10 returning id, owner_id, next_seq - 10 as first)
insert into events (run_id, owner_id, seq, type, payload, emitted_at)
select id, owner_id, first + n, 'error', '{"message":"' || repeat('x', 100000) || '"}', now()
from r, generate_series(0, 9) n
"""


@pytest.mark.slow
async def test_a_reader_that_is_too_slow_for_a_lively_run_is_told_and_resumes(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier_gateway.tails.BUFFER_EVENTS_MAX", 5)
    monkeypatch.setattr("espalier_gateway.tails.SILENCE_S", 0.0)
    monkeypatch.setattr("espalier_gateway.tails.CHECK_EVERY_S", 0.05)
    run_id = await wire.run()
    async with socket(gateway.base_url, wire, queue_max=1) as slow:
        subscription_id = await slow.subscribe(run_id)
        with anyio.fail_after(ANSWER_WAIT_S):
            while gateway.state.tails.followed:  # until its follower was cut
                await gateway.pool.execute(APPEND)
                await anyio.sleep(POLL_S)
        seqs, why = await slow.until_ended(subscription_id)
        assert (seqs, why) == (list(range(1, len(seqs) + 1)), "lagged")
        await slow.call("run.cancel", run_id=run_id)
        rest, why = await slow.until_ended(await slow.subscribe(run_id, since=str(seqs[-1])))
    assert ([*seqs, *rest], why) == (list(range(1, len(await log_of(gateway.pool, run_id)) + 1)), "ended")


# ------------------------------------------------------------------ gateways that die


@pytest.mark.slow
async def test_readers_on_two_gateways_see_all_of_a_run_though_each_dies(
    start: Callable[..., Service], start_gateway: StartGateway, pool: Pool, api_key: str
) -> None:
    start("worker", ESPALIER_MODELS_SCRIPTED="on")
    gateways = [await start_gateway() for _ in range(2)]
    urls = [each.base_url for each in gateways]
    plan = [note(f"{number}.md", delay_s=0.1) for number in range(40)] + [DONE]
    async with AepClient(urls, api_key) as client:
        run = await start_run(client, plan)
        session_id = (await client.initialize()).session_id
        headers = {
            "Authorization": f"Bearer {api_key}",
            "Agent-Protocol-Version": VERSION,
            "X-AEP-Session-Id": session_id,
        }
        seen: list[list[int]] = [[], []]

        async def read(number: int) -> None:
            place = number
            while True:
                with suppress(ConnectionClosed, OSError):
                    async with socket(urls[place % 2], headers) as caller:
                        if await _ends(caller, run.id, seen[number]):
                            return
                place += 1
                await anyio.sleep(POLL_S)

        with anyio.fail_after(2 * ANSWER_WAIT_S):
            async with anyio.create_task_group() as group:
                for number in range(2):
                    group.start_soon(read, number)
                for place in (0, 1):
                    reached = len(seen[0])
                    while min(map(len, seen)) < reached + 10:
                        await anyio.sleep(POLL_S)
                    gateways[place].service.kill()
                    if place == 0:
                        while len(seen[0]) < reached + 20:
                            await anyio.sleep(POLL_S)
                        gateways[0] = await start_gateway(port=int(urls[0].rsplit(":")[-1]))
    log = [seq for seq, _, _ in await log_of(pool, run.id)]
    assert seen == [log, log] and log == list(range(1, len(log) + 1))


async def _ends(caller: SocketCaller, run_id: str, seqs: list[int]) -> bool:
    """Follow on after `seqs` and add to them. Whether the log came to its end."""
    await caller.subscribe(run_id, **({"since": str(seqs[-1])} if seqs else {}))
    while True:
        said = await caller.next_told()
        if said["method"] == ENDED:
            return bool(said["params"]["reason"] == "ended")
        seqs.append(int(said["params"]["event"]["event_id"]))
