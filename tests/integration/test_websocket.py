"""`GET /aep/v1/ws`: the same calls over one connection. Following runs on it: `test_subscriptions.py`."""

import json
from collections.abc import Callable
from typing import Any

import anyio
import httpx2
import pytest
from forked import Service
from tests.integration.conftest import Stores
from tests.integration.socket_caller import PATH, socket
from tests.integration.test_client_failover import agents_locked
from tests.integration.test_wire_process import free_port, ready
from tests.integration.wire import (
    ANSWER_WAIT_S,
    POLL_S,
    VERSION,
    Gateway,
    Wire,
    raw_exchange,
    request,
    running_gateway,
    symbol,
)
from tests.integration.wire_runs import lease
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode

from espalier_gateway.settings import GatewaySettings
from espalier_gateway.ws import CALLS_MAX
from espalier_local.keys import create_key
from espalier_protocol.access import CAPABILITIES, SCOPES
from espalier_store.pool import Pool, transaction

pytestmark = pytest.mark.anyio

SOON_S = 5.0
LOOK_S = 0.05
BEGIN = {
    "client_info": {"name": "test", "version": "0"},
    "requested_versions": [VERSION],
    "requested_capabilities": dict.fromkeys(CAPABILITIES, True),
}


async def refusal(gateway: Gateway, headers: dict[str, str], *offered: str) -> tuple[int, str]:
    """Status and error of an upgrade that has to fail."""
    with pytest.raises(InvalidStatus) as caught:
        async with socket(gateway.base_url, headers, subprotocols=offered):
            pass
    response = caught.value.response
    assert response.headers["Agent-Protocol-Version"] == VERSION
    assert response.body is not None
    return response.status_code, json.loads(response.body)["error"]


# ------------------------------------------------------------------ the same calls


MESSAGES: dict[str, Any] = {
    "a call": request("agent.list", {}),
    "an unknown method": request("agent.fly", {}),
    "params that do not fit": request("agent.get", {"agent": 1}),
    "an unknown id": request("agent.get", {"agent_id": "agt_" + "0" * 26}),
    "no request": {"jsonrpc": "2.0", "id": 7},
    "no JSON": '{"jsonrpc":',
    "too deep": "[" * 65 + "]" * 65,
    "a batch": [
        request("agent.list", {}, 1),
        {"jsonrpc": "2.0", "method": "agent.list"},
        request("no", {}, 2),
    ],
    "an empty batch": [],
    "a session that begins in a batch": [request("initialize", BEGIN)],
}


async def test_each_message_is_answered_as_the_same_body_is_over_http(wire: Wire, gateway: Gateway) -> None:
    await wire.agent()
    over_http = {
        name: (await wire.post(said.encode() if isinstance(said, str) else said)).json()
        for name, said in MESSAGES.items()
    }
    over_socket = {}
    async with socket(gateway.base_url, wire) as caller:
        for name, said in MESSAGES.items():
            await caller.say(said)
            over_socket[name] = await caller.hear()
    assert over_socket == over_http


async def test_notifications_are_silent(wire: Wire, gateway: Gateway) -> None:
    silent = {"jsonrpc": "2.0", "method": "agent.list", "params": {}}
    async with socket(gateway.base_url, wire) as caller:
        for said in (silent, [silent, silent], {**silent, "method": "agent.fly"}):
            await caller.say(said)
        assert symbol(await caller.answer("agent.list", {})) == "result"
        assert caller.told == []


async def test_a_session_that_begins_on_the_connection_is_used_by_what_follows_at_once(
    wire: Wire, gateway: Gateway
) -> None:
    async with socket(gateway.base_url, wire.headers(X_AEP_Session_Id=None)) as caller:
        assert (await caller.refused("agent.list"))["data"]["reason"] == "missing_session"
        for said in (
            request("initialize", BEGIN, "begin"),
            *(request("agent.list", {}, n) for n in range(12)),
        ):
            await caller.say(said)
        answers = [await caller.hear() for _ in range(13)]
    assert (answers[0]["id"], {symbol(each) for each in answers}) == ("begin", {"result"})
    assert sorted(each["id"] for each in answers[1:]) == list(range(12))
    wire.session_id = answers[0]["result"]["session_id"]
    assert symbol(await wire.answer("agent.list", {})) == "result", "it is a session like any other"


async def test_what_needs_a_connection_is_no_method_over_http(wire: Wire) -> None:
    for method in ("run.subscribe", "run.unsubscribe"):
        error = await wire.refused(method, run_id="run_" + "0" * 26)
        assert error["data"] == {"symbol": "method_not_found", "resource": "method", "id": method}


@pytest.mark.slow
async def test_a_call_that_waits_does_not_hold_up_the_others(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    await lease(gateway.pool, run_id)
    async with socket(gateway.base_url, wire) as caller:
        await caller.say(request("run.cancel", {"run_id": run_id}, "waits"))
        await caller.say(request("agent.list", {}, "quick"))
        assert [(await caller.hear())["id"] for _ in range(2)] == ["quick", "waits"]


async def test_a_connection_has_only_so_many_calls_under_way(
    wire: Wire, gateway: Gateway, stores: Stores
) -> None:
    waiting = "select count(*) from pg_locks where relation = 'agents'::regclass and not granted"
    agent_id = await wire.agent()
    async with socket(gateway.base_url, wire) as caller, socket(gateway.base_url, wire) as other:
        async with agents_locked(stores.postgres_url):
            for number in range(2 * CALLS_MAX):
                await caller.say(request("agent.get", {"agent_id": agent_id}, number))
            with anyio.fail_after(SOON_S):
                while await gateway.pool.fetchval(waiting) < CALLS_MAX:
                    await anyio.sleep(POLL_S)
            assert symbol(await other.answer("run.get", {"run_id": "run_x"})) == "tool_not_found"
            assert await gateway.pool.fetchval(waiting) == CALLS_MAX
        answers = [await caller.hear() for _ in range(2 * CALLS_MAX)]
    assert sorted(each["id"] for each in answers) == list(range(2 * CALLS_MAX))


async def test_two_connections_of_a_caller_know_nothing_of_each_other(wire: Wire, gateway: Gateway) -> None:
    async with socket(gateway.base_url, wire) as one, socket(gateway.base_url, wire) as other:
        made = (await one.call("agent.list"))["items"], (await other.call("agent.list"))["items"]
        await one.connection.close()
        assert (made, symbol(await other.answer("agent.list", {}))) == (([], []), "result")


# ------------------------------------------------------------------ limits


async def test_each_message_is_a_call_and_so_is_each_entry_of_a_batch(
    gateway_settings: GatewaySettings, pool: Pool
) -> None:
    settings = gateway_settings.model_copy(update={"rpc_rate": 0.001, "rpc_burst": 6})
    async with running_gateway(settings, pool) as gateway:
        wire = await gateway.caller()  # 1, and opening the connection is 2
        async with socket(gateway.base_url, wire) as caller:
            assert symbol(await caller.answer("agent.list", {})) == "result"
            await caller.say([request("agent.list", {}, "a"), request("agent.list", {}, "b")])
            assert [symbol(each) for each in await caller.hear()] == ["result", "result"]
            assert symbol(await caller.answer("agent.list", {})) == "result"
            for _ in range(2):
                error = await caller.refused("agent.list")
                assert (error["data"]["symbol"], error["data"]["limit"]) == ("rate_limited", "rpc_rate")
        assert await refusal(gateway, wire.headers()) == (429, "rate_limited")


async def test_a_connection_ends_with_the_reason_for_which_it_cannot_go_on(
    wire: Wire, gateway: Gateway
) -> None:
    largest = gateway.state.settings.body_bytes_max
    told: dict[str, Any] = {}
    bad = {"binary": b"{}", "too large": "x" * (largest + 1), "much too large": "x" * 8 * largest}
    for name, said in bad.items():
        async with socket(gateway.base_url, wire) as caller:
            await caller.say(said)
            told[name] = (await caller.closed())[0]
    async with socket(gateway.base_url, wire) as caller:
        caller.connection.transport.write(Frame(Opcode.TEXT, b"\xff").serialize(mask=True))
        told["no UTF-8"] = (await caller.closed())[0]
    async with socket(gateway.base_url, wire) as caller:
        await caller.say("x" * largest)
        told["as large as may be"] = symbol(await caller.hear())
    assert told == {
        "binary": 1003,
        "too large": 1009,
        "much too large": 1009,
        "no UTF-8": 1007,
        "as large as may be": "parse_error",
    }
    await all_freed(gateway)


async def all_freed(gateway: Gateway) -> None:
    with anyio.fail_after(SOON_S):
        while len(gateway.state.streams):
            await anyio.sleep(POLL_S)


async def test_a_connection_is_one_of_the_keys_streams_while_it_is_open(
    gateway_settings: GatewaySettings, pool: Pool
) -> None:
    settings = gateway_settings.model_copy(update={"streams_per_key": 2})
    async with running_gateway(settings, pool) as gateway:
        wire, run_id = await gateway.caller(), ""
        run_id = await wire.run()
        async with socket(gateway.base_url, wire) as one:
            async with socket(gateway.base_url, wire):
                assert await refusal(gateway, wire.headers()) == (429, "rate_limited")
                assert (await one.refused("run.subscribe", run_id=run_id))["data"][
                    "limit"
                ] == "streams_per_key"
            with anyio.fail_after(SOON_S):
                while len(gateway.state.streams) > 1:
                    await anyio.sleep(POLL_S)
            await one.subscribe(run_id)
            assert await refusal(gateway, wire.headers()) == (429, "rate_limited")
        await all_freed(gateway)


async def test_a_full_gateway_sends_callers_to_another_one(
    gateway_settings: GatewaySettings, pool: Pool
) -> None:
    settings = gateway_settings.model_copy(update={"streams_per_gateway": 1})
    async with running_gateway(settings, pool) as gateway:
        one, other = await gateway.caller(), await gateway.caller()
        async with socket(gateway.base_url, one):
            assert await refusal(gateway, other.headers()) == (503, "unavailable")


@pytest.mark.slow
async def test_a_connection_on_which_nothing_happens_is_closed(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await wire.run()
    monkeypatch.setattr("espalier_gateway.ws.LOOK_EVERY_S", LOOK_S)
    monkeypatch.setattr("espalier_gateway.ws.IDLE_S", 10 * LOOK_S)
    async with socket(gateway.base_url, wire) as follower:
        await follower.subscribe(run_id)
        for _ in range(2):  # the second one is idle when the follower has been silent for longer
            async with socket(gateway.base_url, wire) as idle:
                assert await idle.closed() == (1000, "idle")
        assert symbol(await follower.answer("run.get", {"run_id": run_id})) == "result"


async def test_a_revoked_key_is_noticed_though_its_holder_says_nothing(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier_gateway.ws.LOOK_EVERY_S", LOOK_S)
    monkeypatch.setattr("espalier_gateway.ws.RECHECK_S", LOOK_S)
    async with socket(gateway.base_url, wire) as caller:
        assert symbol(await caller.answer("agent.list", {})) == "result"
        await gateway.pool.execute("update keys set revoked_at = now()")
        assert (await caller.closed())[0] == 3000
        assert caller.told == []


async def test_a_call_with_a_revoked_key_is_answered_and_ends_the_connection(
    wire: Wire, gateway: Gateway
) -> None:
    async with socket(gateway.base_url, wire) as caller:
        await gateway.pool.execute("update keys set revoked_at = now()")
        await caller.say(request("agent.list", {}))
        assert (await caller.closed())[0] == 3000
        assert [symbol(each) for each in caller.told] == ["authn_failed"]


def raw_upgrade(wire: Wire, **changes: str) -> bytes:
    """What opens a connection, for a peer that then does what no library would."""
    headers = {
        "Host": "a",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        **wire.headers(),
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    lines = [f"{name}: {value}" for name, value in headers.items() if value]
    return "\r\n".join([f"GET {PATH} HTTP/1.1", *lines, "", ""]).encode()


async def test_a_peer_that_answers_no_ping_is_gone(
    gateway_settings: GatewaySettings, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier_gateway.server.PING_EVERY_S", LOOK_S)
    monkeypatch.setattr("espalier_gateway.server.PONG_WAIT_S", LOOK_S)
    async with running_gateway(gateway_settings, pool) as gateway:
        wire = await gateway.caller()
        said = await raw_exchange(gateway.address, raw_upgrade(wire))
        assert said.startswith(b"HTTP/1.1 101 ")
        assert said.endswith(b"\x03\xf3keepalive ping timeout"), "1011"
        await all_freed(gateway)


@pytest.mark.slow
async def test_a_peer_that_sends_pings_and_reads_nothing_costs_no_memory(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier_gateway.sockets.UNSENT_BYTES_MAX", 256 * 1024)
    pings = Frame(Opcode.PING, b"p" * 125).serialize(mask=True) * 1_000
    async with await anyio.connect_tcp(*gateway.address) as stream:
        await stream.send(raw_upgrade(wire))
        dropped = False
        with anyio.fail_after(ANSWER_WAIT_S):
            assert (await stream.receive()).startswith(b"HTTP/1.1 101 ")
            while not dropped:
                try:
                    await stream.send(pings)
                except anyio.BrokenResourceError:
                    dropped = True
    await all_freed(gateway)


# ------------------------------------------------------------------ opening


async def test_a_connection_that_may_not_be_opened_is_refused_with_the_status_of_other_endpoints(
    wire: Wire, gateway: Gateway
) -> None:
    told = {
        "no version": await refusal(gateway, wire.headers(Agent_Protocol_Version=None)),
        "another version": await refusal(gateway, wire.headers(Agent_Protocol_Version="aep-1999-01-01")),
        "no token": await refusal(gateway, wire.headers(Authorization=None)),
        "another token": await refusal(gateway, wire.headers(Authorization="Bearer esp_nobody")),
        "two tokens": await refusal(gateway, wire.headers(), f"aep.bearer.{wire.key}"),
        "another session": await refusal(gateway, wire.headers(X_AEP_Session_Id="ses_" + "0" * 26)),
        "a key for one call": await refusal(gateway, wire.headers(Idempotency_Key="k")),
    }
    assert told == {
        "no version": (400, "version_mismatch"),
        "another version": (400, "version_mismatch"),
        "no token": (401, "authn_failed"),
        "another token": (401, "authn_failed"),
        "two tokens": (401, "authn_failed"),
        "another session": (401, "session_expired"),
        "a key for one call": (400, "invalid_params"),
    }
    assert len(gateway.state.streams) == 0


async def test_a_browser_says_version_and_token_as_subprotocols_and_is_answered_the_version(
    wire: Wire, gateway: Gateway
) -> None:
    offered = (VERSION, f"aep.bearer.{wire.key}")
    async with socket(gateway.base_url, {}, subprotocols=offered) as caller:
        assert caller.connection.subprotocol == VERSION
        await caller.call("initialize", **BEGIN)
        assert symbol(await caller.answer("agent.list", {})) == "result"
    assert await refusal(gateway, {}, VERSION) == (401, "authn_failed")
    assert await refusal(gateway, {}, VERSION, "aep.bearer.esp_nobody") == (401, "authn_failed")
    assert await refusal(gateway, {}, f"aep.bearer.{wire.key}") == (400, "version_mismatch")


async def test_whoever_comes_without_an_upgrade_is_told_that_it_needs_one(wire: Wire) -> None:
    response = await wire.get(PATH)
    assert (response.status_code, response.headers["Upgrade"]) == (426, "websocket")


BEHIND = b"GET /healthz HTTP/1.1\r\nHost: inner\r\n\r\n"
NO_UPGRADES: dict[str, Callable[[bytes], bytes]] = {
    "another path": lambda head: head.replace(PATH.encode(), b"/healthz"),
    "a query": lambda head: head.replace(PATH.encode(), PATH.encode() + b"?token=x"),
    "another method": lambda head: head.replace(b"GET", b"POST", 1),
    "an older HTTP": lambda head: head.replace(b"HTTP/1.1", b"HTTP/1.0", 1),
    "another protocol": lambda head: head.replace(b"Upgrade: websocket", b"Upgrade: h2c"),
    "two protocols": lambda head: head.replace(b"\r\nHost", b"\r\nUpgrade: h2c\r\nHost", 1),
    "a length": lambda head: head.replace(b"\r\nHost", b"\r\nContent-Length: 39\r\nHost", 1),
    "a coding": lambda head: head.replace(b"\r\nHost", b"\r\nTransfer-Encoding: chunked\r\nHost", 1),
    "no key": lambda head: head.replace(b"Sec-WebSocket-Key", b"X-Key"),
    "another version": lambda head: head.replace(b"Version: 13", b"Version: 8"),
}


@pytest.mark.parametrize("change", NO_UPGRADES.values(), ids=NO_UPGRADES)
async def test_an_upgrade_that_is_none_is_refused_and_nothing_behind_it_is_read(
    wire: Wire, gateway: Gateway, change: Callable[[bytes], bytes]
) -> None:
    answer = await raw_exchange(gateway.address, change(raw_upgrade(wire)) + BEHIND)
    assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 426"), answer
    assert answer.count(b"HTTP/1.1") == 1 and b'{"ok":true}' not in answer
    assert len(gateway.state.streams) == 0


async def test_a_head_that_only_one_of_two_parsers_takes_leaves_no_connection_open(
    wire: Wire, gateway: Gateway
) -> None:
    answer = await raw_exchange(gateway.address, raw_upgrade(wire, X_Long="x" * 12_000))
    assert b" 101 " not in answer


async def test_a_gateway_logs_nothing_of_what_is_said_on_a_connection(
    start: Callable[..., Service], gateway_settings: GatewaySettings, pool: Pool
) -> None:
    canary, port = "hunter2-canary", free_port()
    async with transaction(pool) as connection:
        key = await create_key(connection, "one", SCOPES)
    service = start("gateway", ESPALIER_PORT=str(port), ESPALIER_LOG_LEVEL="debug")
    base_url = f"http://127.0.0.1:{port}"
    async with httpx2.AsyncClient(base_url=base_url, trust_env=False) as http:
        await ready(http)
    headers = {"Authorization": f"Bearer {key}", "Agent-Protocol-Version": VERSION}
    async with socket(base_url, headers) as caller:
        session_id = (await caller.call("initialize", **BEGIN))["session_id"]
        await caller.answer("agent.fly", {"note": canary})
        await caller.say(f'["{canary}')
        assert symbol(await caller.hear()) == "parse_error"
        await caller.say(canary.encode())
        assert (await caller.closed())[0] == 1003
    async with socket(base_url, {}, subprotocols=(VERSION, f"aep.bearer.{key}")) as caller:
        await caller.call("initialize", **BEGIN)
    log = service.output()
    assert "gateway.starting" in log
    assert [secret for secret in (key, session_id, canary) if secret in log] == []
    assert "Traceback" not in log
