"""How much one caller may do: calls per second and key, and streams per key, run and gateway.

Where a limit has to be met the rate is next to nothing, so that no bucket refills while a test runs.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest
from structlog.testing import capture_logs
from tests.integration.wire import (
    AGENT,
    ANSWER_WAIT_S,
    POLL_S,
    UNKNOWN_TAIL,
    Gateway,
    Wire,
    request,
    running_gateway,
    symbol,
)

from espalier_client import AepClient
from espalier_gateway.auth import CallContext
from espalier_gateway.following import SCOPES
from espalier_gateway.settings import GatewaySettings
from espalier_protocol.agent import AgentCreate
from espalier_protocol.errors import ErrorCode
from espalier_store.pool import Pool

pytestmark = pytest.mark.anyio

NEVER = 1e-3
"""Calls per second at which the next one comes long after the test."""

UNLIMITED = {"rpc_rate": 1e6, "rpc_burst": 1_000_000}

Limited = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def limited(gateway_settings: GatewaySettings, pool: Pool) -> Limited:
    """A gateway with other limits than usual."""

    def open_it(**limits: float) -> AbstractAsyncContextManager[Gateway]:
        return running_gateway(gateway_settings.model_copy(update=limits), pool)

    return open_it


def refusal(answer: Any) -> dict[str, Any]:
    """The answer to one call that was refused for its rate, without the time and the sentence."""
    error = answer["error"]
    assert error["data"].pop("retry_after_ms") > 0 and "per second" in error.pop("message")
    return dict(answer)


def limited_answer(request_id: Any) -> dict[str, Any]:
    data = {"symbol": "rate_limited", "limit": "rpc_rate"}
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": ErrorCode.internal_error, "data": data}}


def create(request_id: Any) -> dict[str, Any]:
    return request("agent.create", AGENT, request_id)


def notified(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "id"}


# ------------------------------------------------------------------ calls


async def test_calls_beyond_the_burst_are_refused_with_429_and_nothing_is_done(limited: Limited) -> None:
    async with limited(rpc_rate=NEVER, rpc_burst=4) as gateway:
        wire = await gateway.caller()  # its initialize is the first call
        passed = [await wire.post(create(n)) for n in range(3)]
        before = await gateway.rows()
        refused = await wire.post(create("late"))
        silent = await wire.post(notified(create(0)))
        assert [(each.status_code, symbol(each.json())) for each in passed] == [(200, "result")] * 3
        assert refused.json()["error"]["data"]["retry_after_ms"] > 1000 / NEVER - 60_000
        assert abs(int(refused.headers["retry-after"]) - 1 / NEVER) < 60
        assert (refused.status_code, refusal(refused.json())) == (429, limited_answer("late"))
        assert (silent.status_code, silent.content, "content-type" in silent.headers) == (429, b"", False)
        assert int(silent.headers["retry-after"]) > 0
        assert before["agents"] == 3 and await gateway.rows() == before


@pytest.mark.slow
async def test_a_client_that_waits_as_told_gets_everything_done_once(limited: Limited) -> None:
    async with limited(rpc_rate=20.0, rpc_burst=2) as gateway:
        key = (await gateway.stranger("one")).key
        began_at = anyio.current_time()
        async with AepClient(gateway.base_url, key) as client:
            made = [(await client.agent_create(AgentCreate.model_validate(AGENT))).id for _ in range(8)]
        assert len(set(made)) == 8 and (await gateway.rows())["agents"] == 8
        assert anyio.current_time() - began_at >= (1 + 8 - 2) / 20.0


async def test_a_batch_counts_each_of_its_entries_and_runs_whole_or_not_at_all(limited: Limited) -> None:
    async with limited(rpc_rate=NEVER, rpc_burst=8) as gateway:
        wire = await gateway.caller()
        assert symbol((await wire.post(create(0))).json()) == "result"
        before = await gateway.rows()
        seven = [create(1), notified(create(2)), create("3"), 7, {"id": 5}, create(6), create(7)]
        refused = await wire.post(seven)
        assert (refused.status_code, [refusal(each) for each in refused.json()]) == (
            429,
            [limited_answer(n) for n in (1, "3", None, 5, 6, 7)],
        )
        assert int(refused.headers["retry-after"]) > 0
        assert await gateway.rows() == before
        passed = await wire.post(seven[:6])
        told = [symbol(each) for each in passed.json()]
        assert (passed.status_code, told) == (
            200,
            ["result", "result", "invalid_request", "invalid_request", "result"],
        )
        assert (await gateway.rows())["agents"] == before["agents"] + 4
        silent = await wire.post([notified(create(1)), notified(create(2))])
        assert (silent.status_code, silent.content, "content-type" in silent.headers) == (429, b"", False)
        assert int(silent.headers["retry-after"]) > 0


async def test_a_batch_that_is_larger_than_the_burst_passes_when_the_bucket_is_full(limited: Limited) -> None:
    async with limited(rpc_rate=NEVER, rpc_burst=3) as gateway:
        wire = await gateway.caller("one")
        fresh = await gateway.stranger("one")
        fresh.session_id = wire.session_id
        twenty = [request("agent.list", {}, n) for n in range(20)]
        assert (await wire.post(twenty)).status_code == 429, "its initialize took a call"
        passed = await fresh.post(twenty)
        assert (passed.status_code, {symbol(each) for each in passed.json()}) == (200, {"result"})
        assert (await fresh.post(request("agent.list"))).status_code == 429


async def test_a_key_at_its_limit_slows_no_other_key_of_the_same_owner(limited: Limited) -> None:
    async with limited(rpc_rate=NEVER, rpc_burst=2) as gateway:
        greedy = await gateway.caller("one")
        other = await gateway.stranger("one")
        other.session_id = greedy.session_id
        told = [(await greedy.post(request("agent.list"))).status_code for _ in range(20)]
        assert told == [200] + [429] * 19
        assert [(await other.post(request("agent.list"))).status_code for _ in range(3)] == [200, 200, 429]


async def test_the_limit_holds_however_many_calls_come_at_once(limited: Limited) -> None:
    async with limited(rpc_rate=NEVER, rpc_burst=31) as gateway:
        wire = await gateway.caller()
        told: list[int] = []

        async def call() -> None:
            told.append((await wire.post(create(1))).status_code)

        async with anyio.create_task_group() as group:
            for _ in range(60):
                group.start_soon(call)
        assert Counter(told) == {200: 30, 429: 30}
        assert (await gateway.rows())["agents"] == 30


async def test_the_rate_comes_after_the_token_and_before_the_session(limited: Limited) -> None:
    async with limited(rpc_rate=NEVER, rpc_burst=1) as gateway:
        wire = await gateway.caller()
        told = {
            "as usual": await wire.post(request("agent.list")),
            "no session": await wire.post(request("agent.list"), wire.headers(X_AEP_Session_Id=None)),
            "no such method": await wire.post(request("no.such")),
            "initialize": await wire.post(request("initialize", {})),
            "no token": await wire.post(request("agent.list"), wire.headers(Authorization=None)),
            "no version": await wire.post(request("agent.list"), wire.headers(Agent_Protocol_Version=None)),
            "no version, batch": await wire.post(
                [request("agent.list")], wire.headers(Agent_Protocol_Version=None)
            ),
            "no token, batch": await wire.post([request("agent.list")], wire.headers(Authorization=None)),
            "not JSON": await wire.post(b"{"),
            "no request": await wire.post({}),
        }
        assert {name: each.status_code for name, each in told.items()} == {
            "as usual": 429,
            "no session": 429,
            "no such method": 429,
            "initialize": 429,
            "no token": 401,
            "no version": 200,
            "no version, batch": 200,
            "no token, batch": 401,
            "not JSON": 400,
            "no request": 400,
        }


async def test_who_has_no_valid_key_takes_no_call_and_no_memory(limited: Limited) -> None:
    async with limited(rpc_rate=NEVER, rpc_burst=3) as gateway:
        wire, revoked = await gateway.caller("one"), await gateway.stranger("two")
        await gateway.pool.execute(
            "update keys set revoked_at = now() where owner_id = (select id from owners where name = 'two')"
        )
        buckets = len(gateway.state.gatekeeper.rate)
        strange = [f"Bearer esp_{n:043d}" for n in range(20)]
        for authorization in (None, "Bearer", f"Bearer {revoked.key}", f"Bearer {wire.key}x", *strange):
            for body in (request("agent.list"), [request("agent.list")] * 20):
                assert (await wire.post(body, wire.headers(Authorization=authorization))).status_code == 401
        assert len(gateway.state.gatekeeper.rate) == buckets == 1
        assert [(await wire.post(request("agent.list"))).status_code for _ in range(3)] == [200, 200, 429]


async def test_streams_and_downloads_are_calls_too(limited: Limited) -> None:
    async with limited(rpc_rate=NEVER, rpc_burst=6) as gateway:
        wire = await gateway.caller()
        events = f"/aep/v1/runs/run_{UNKNOWN_TAIL}/events"
        paths = [events, f"/aep/v1/artifacts/art_{UNKNOWN_TAIL}/bytes"]
        for path in (*paths, *paths, events):
            assert (await wire.get(path)).status_code == 404
        for path in paths:
            refused = await wire.get(path)
            body = refused.json()
            assert body.pop("retry_after_ms") > 0 and "per second" in body.pop("message")
            assert (refused.status_code, body) == (
                429,
                {"error": "rate_limited", "code": ErrorCode.internal_error, "limit": "rpc_rate"},
            )
            assert int(refused.headers["retry-after"]) > 0
            assert refused.headers["cache-control"] == "no-store"
        assert (await wire.post(request("agent.list"))).status_code == 429


async def test_looking_at_the_rights_behind_an_open_stream_is_no_call(limited: Limited) -> None:
    async with limited(rpc_rate=NEVER, rpc_burst=2) as gateway:
        wire = await gateway.caller()
        context = CallContext(f"Bearer {wire.key}", wire.version, wire.session_id)
        for _ in range(10):
            await gateway.state.gatekeeper.admit_again(context, SCOPES, "streaming.sse")
        assert [(await wire.post(request("agent.list"))).status_code for _ in range(2)] == [200, 429]


async def test_a_flood_does_not_flood_the_log_and_the_log_names_no_key(limited: Limited) -> None:
    async with limited(rpc_rate=NEVER, rpc_burst=1) as gateway:
        wire = await gateway.caller()
        began_at = anyio.current_time()
        with capture_logs() as lines:
            for _ in range(40):
                await wire.post(request("agent.list"))
                await wire.post([request("agent.list")] * 20)
        seconds = int(anyio.current_time() - began_at) + 1
        assert 1 <= len(lines) <= seconds
        key_id = await gateway.pool.fetchval("select id from keys")
        assert lines[0] == {
            "event": "limit.reached",
            "log_level": "warning",
            "key_id": str(key_id),
            "limit": "rpc_rate",
        }
        assert wire.key not in repr(lines)


async def test_a_batch_does_not_begin_while_nobody_can_tell_who_asks(wire: Wire, gateway: Gateway) -> None:
    await gateway.state.pool.close()
    answers = (await wire.post([request("agent.list", {}, n) for n in range(3)])).json()
    faults = [answer["error"] for answer in answers]
    assert [answer["id"] for answer in answers] == [0, 1, 2]
    assert {fault["data"]["symbol"] for fault in faults} == {"unavailable"}
    assert len({fault["data"]["reference"] for fault in faults}) == 1, "it was tried once, not three times"


# ------------------------------------------------------------------ streams


def events_of(run_id: str) -> str:
    return f"/aep/v1/runs/{run_id}/events"


@asynccontextmanager
async def following(wire: Wire, run_id: str) -> AsyncIterator[httpx2.Response]:
    """A stream that has said something, open until the block ends; or the refusal."""
    async with (
        wire.http.stream("GET", events_of(run_id), headers=wire.headers()) as response,
        aclosing(response.aiter_raw()) as pieces,
    ):
        with anyio.fail_after(ANSWER_WAIT_S):
            assert await anext(pieces)
        yield response


async def asked(wire: Wire, run_id: str) -> httpx2.Response:
    """The answer to a request for a stream that has to end."""
    with anyio.fail_after(ANSWER_WAIT_S):
        return await wire.get(events_of(run_id))


async def turned_away(wire: Wire, run_id: str) -> tuple[int, str, str | None]:
    response = await asked(wire, run_id)
    body = response.json()
    assert body["retry_after_ms"] > 0 and int(response.headers["retry-after"]) > 0
    assert ("reference" in body) == (response.status_code == 503)
    return response.status_code, body["error"], body.get("limit")


async def no_stream_is_open(gateway: Gateway) -> None:
    with anyio.fail_after(ANSWER_WAIT_S):
        while len(gateway.state.streams):
            await anyio.sleep(POLL_S)


async def test_a_key_has_so_many_streams_and_another_key_has_its_own(limited: Limited) -> None:
    async with limited(streams_per_key=2) as gateway, AsyncExitStack() as opened:
        wire = await gateway.caller("one")
        other = await gateway.caller("one")
        runs = [await wire.run(), await wire.run()]
        for run_id in runs:
            await opened.enter_async_context(following(wire, run_id))
        assert await turned_away(wire, runs[0]) == (429, "rate_limited", "streams_per_key")
        await opened.enter_async_context(following(other, runs[0]))
        assert len(gateway.state.streams) == 3
        await opened.aclose()
        await no_stream_is_open(gateway)
        async with following(wire, runs[0]) as response:
            assert response.status_code == 200


async def test_a_run_has_so_many_followers_and_nobody_else_learns_it(limited: Limited) -> None:
    async with limited(streams_per_run=2) as gateway, AsyncExitStack() as opened:
        wire, other, foreign = [await gateway.caller(name) for name in ("one", "one", "two")]
        run_id, quiet = await wire.run(), await wire.run()
        for caller in (wire, other):
            await opened.enter_async_context(following(caller, run_id))
        assert await turned_away(wire, run_id) == (429, "rate_limited", "streams_per_run")
        await opened.enter_async_context(following(wire, quiet))
        assert (await asked(foreign, run_id)).status_code == 404


async def test_a_gateway_that_is_full_says_that_another_may_have_room(limited: Limited) -> None:
    async with limited(streams_per_gateway=2) as gateway, AsyncExitStack() as opened:
        one, two, three = [await gateway.caller() for _ in range(3)]
        for caller in (one, two):
            await opened.enter_async_context(following(caller, await caller.run()))
        assert await turned_away(three, await three.run()) == (503, "unavailable", None)
        assert "another may have room" in (await asked(three, await three.run())).json()["message"]


async def test_the_stream_limits_hold_however_many_come_at_once(limited: Limited) -> None:
    async with limited(streams_per_key=7) as gateway:
        wire = await gateway.caller()
        run_id, told, all_told = await wire.run(), Counter[int](), anyio.Event()

        async def open_one() -> None:
            async with following(wire, run_id) as response:
                told[response.status_code] += 1
                if told.total() == 40:
                    all_told.set()
                await all_told.wait()

        async with anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(open_one)
        assert told == {200: 7, 429: 33}
        await no_stream_is_open(gateway)


async def test_whoever_finds_no_room_costs_the_database_nothing(limited: Limited) -> None:
    async with limited(streams_per_key=2, streams_per_run=2, cache_s=60.0) as gateway:
        one, two = [await gateway.caller("one") for _ in range(2)]
        run_id = await one.run()
        await two.call("agent.list")  # now the key and session of both are remembered
        async with following(one, run_id), following(one, run_id):
            await gateway.state.pool.close()
            told = {
                "at its own limit": await asked(one, f"run_{UNKNOWN_TAIL}"),
                "at the run's": await asked(two, run_id),
                "within both": await asked(two, f"run_{UNKNOWN_TAIL}"),
            }
            assert {name: (each.status_code, each.json().get("limit")) for name, each in told.items()} == {
                "at its own limit": (429, "streams_per_key"),
                "at the run's": (429, "streams_per_run"),
                "within both": (503, None),
            }


async def test_what_opens_no_stream_takes_no_room(limited: Limited) -> None:
    async with limited(streams_per_key=1) as gateway:
        wire = await gateway.caller()
        run_id = await wire.run()
        path = events_of(run_id)
        await wire.call("run.cancel", run_id=run_id)
        last = (await gateway.pool.fetchval("select next_seq from runs")) - 1
        told = [
            await wire.get(events_of(f"run_{UNKNOWN_TAIL}")),
            await wire.get(events_of("nonsense")),
            await wire.get(path, since="999"),
            await wire.get(path, wire.headers(Last_Event_ID=str(last))),
            await wire.get(path),
        ]
        assert [each.status_code for each in told] == [404, 404, 400, 204, 200]
        await gateway.pool.execute("update runs set log_pruned_at = now()")
        assert (await wire.get(path)).status_code == 410
        await no_stream_is_open(gateway)


@pytest.mark.slow
async def test_three_hundred_streams_that_are_left_at_any_moment_leave_nothing_behind(
    limited: Limited,
) -> None:
    """Left right after asking, in the middle of the head, and while events are on their way."""
    async with limited(**UNLIMITED, streams_per_key=1000) as gateway:
        wire = await gateway.caller()
        head = "".join(f"{name}: {value}\r\n" for name, value in wire.headers().items())
        asked = f"GET {events_of(await wire.run())} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode()
        most, ways = 0, (0, 1, 40, 400)
        assert len(asked) > 100

        async def ask_and_leave(nth: int) -> None:
            nonlocal most
            async with await anyio.connect_tcp(*gateway.address) as stream:
                await stream.send(asked)
                read = 0
                while read < ways[nth % len(ways)]:
                    read += len(await stream.receive(64))
                most = max(most, len(gateway.state.streams))

        with anyio.fail_after(ANSWER_WAIT_S):
            for _ in range(6):
                async with anyio.create_task_group() as group:
                    for nth in range(50):
                        group.start_soon(ask_and_leave, nth)
        await no_stream_is_open(gateway)
        assert most > 0, "some were open"
        assert gateway.state.tails.followed == 0
        async with following(wire, await wire.run()) as response:
            assert (response.status_code, len(gateway.state.streams)) == (200, 1)


async def test_the_usual_limits_are_those_that_were_promised(gateway_settings: GatewaySettings) -> None:
    limits = ("rpc_rate", "rpc_burst", "streams_per_key", "streams_per_run", "streams_per_gateway")
    assert [getattr(gateway_settings, name) for name in limits] == [50.0, 200, 100, 2000, 4000]
