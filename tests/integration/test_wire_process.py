"""The gateway as a process: it starts without Redis, stops on a signal, and logs no secrets."""

import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import httpx2
import pytest
from tests.integration.wire import AGENT, ANSWER_WAIT_S, POLL_S, Wire, request

from espalier_local.keys import create_key
from espalier_protocol.access import SCOPES
from espalier_store.pool import Pool, transaction

pytestmark = pytest.mark.anyio

STOP_WAIT_S = 5.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def ready(http: httpx2.AsyncClient) -> None:
    with anyio.fail_after(ANSWER_WAIT_S):
        while True:
            try:
                if (await http.get("/readyz")).status_code == 200:
                    return
            except httpx2.TransportError:
                await anyio.sleep(POLL_S)


@pytest.fixture
async def port() -> int:
    return free_port()


@pytest.fixture
async def caller(pool: Pool, port: int) -> AsyncIterator[Wire]:
    """Somebody with a key, before there is a gateway."""
    async with transaction(pool) as connection:
        key = await create_key(connection, "one", SCOPES)
    timeout = httpx2.Timeout(ANSWER_WAIT_S)
    async with httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=timeout, trust_env=False
    ) as http:
        yield Wire(http, key)


async def test_a_gateway_stops_on_sigterm_and_its_streams_end_first(
    start: Callable[..., Any], caller: Wire, port: int
) -> None:
    service = start("gateway", ESPALIER_PORT=str(port))
    await ready(caller.http)
    await caller.begin()
    run_id = await caller.run()
    heard = []
    async with caller.http.stream("GET", f"/aep/v1/runs/{run_id}/events", headers=caller.headers()) as stream:
        async for line in stream.aiter_lines():
            heard.append(line)
            if line == "event: run.started":
                with anyio.fail_after(STOP_WAIT_S):
                    assert await anyio.to_thread.run_sync(service.stop) == 0, service.output()
    assert ": closing" in heard, "the stream says why it ends, and ends well"
    assert "Traceback" not in service.output()


async def test_a_gateway_serves_where_redis_is_not(
    start: Callable[..., Any], caller: Wire, port: int, pool: Pool
) -> None:
    service = start(
        "gateway", ESPALIER_PORT=str(port), ESPALIER_REDIS_URL=f"redis://127.0.0.1:{free_port()}/0"
    )
    await ready(caller.http)
    await caller.begin()
    run_id = await caller.run()
    events = []
    async with caller.http.stream("GET", f"/aep/v1/runs/{run_id}/events", headers=caller.headers()) as stream:
        with anyio.fail_after(ANSWER_WAIT_S):
            async for line in stream.aiter_lines():
                if line.startswith("event: "):
                    events.append(line)
                if events == ["event: run.started"] and not line:
                    await caller.call("run.cancel", run_id=run_id)
    assert events == ["event: run.started", "event: run.ended"]
    assert await pool.fetchval("select count(*) from outbox") == 2, "kept for the sweeper"
    assert "Traceback" not in service.output()


@pytest.mark.parametrize("log_format", ["json", "console"])
async def test_a_gateway_logs_neither_keys_nor_sessions_nor_what_was_sent(
    log_format: str, start: Callable[..., Any], caller: Wire, port: int, pool: Pool
) -> None:
    canary = "hunter2-canary"
    settings = {"ESPALIER_LOG_LEVEL": "debug", "ESPALIER_LOG_FORMAT": log_format}
    service = start("gateway", ESPALIER_PORT=str(port), **settings)
    await ready(caller.http)
    await caller.begin()
    await caller.agent(metadata={"note": canary})
    await caller.post(request("agent.create", {**AGENT, "name": [canary]}))
    await caller.post(b'{"%b' % canary.encode())
    await caller.get(f"/aep/v1/runs/{canary}/events")
    await pool.execute("alter table agents rename to agents_gone")
    broken = await caller.refused("agent.create", **AGENT, metadata={"note": canary})
    log = service.output()
    assert broken["data"]["reference"] in log, "the log says what the client may not read"
    secrets = (caller.key, caller.session_id, canary)
    assert [secret for secret in secrets if secret in log] == []
