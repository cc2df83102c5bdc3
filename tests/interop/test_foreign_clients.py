"""Clients that know nothing of this runtime: three readers of event streams, and one that speaks JSON-RPC."""

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import jsonrpcclient
import pytest
from httpx_sse import aconnect_sse
from sseclient import SSEClient
from tests.contract.embedder import MAKES_A_FILE, UNKNOWN, WAIT_S, Embedder, events_path

from espalier_protocol.events import EVENT_TYPES

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

HERE = Path(__file__).parent
INSTALLING_S = 120.0
needs_node = pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm on the PATH")
Heard = list[tuple[str, str, Any]]


async def log_of(embedder: Embedder, run_id: str) -> Heard:
    """(id, type, envelope) of a whole run, as the published client hears it."""
    return [(event.event_id, event.type, vars(event)) for event in await embedder.events(run_id)]


async def test_httpx_sse_reads_a_run_while_it_lives_and_resumes_it_anywhere(embedder: Embedder) -> None:
    run_id = (await embedder.run(MAKES_A_FILE))["id"]
    base_url = str(embedder.wire.http.base_url)
    async with httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=WAIT_S) as client:

        async def heard(headers: dict[str, str]) -> Heard:
            async with aconnect_sse(client, "GET", events_path(run_id), headers=headers) as source:
                frames = [each async for each in source.aiter_sse()]
                # It hands out a frame that only sets `retry` too.
                return [(str(each.id), each.event, each.json()) for each in frames if each.data]

        whole = await heard(embedder.wire.headers())
        assert whole == await log_of(embedder, run_id)
        for place, (id_, _, _) in enumerate(whole[:-1], start=1):
            assert await heard(embedder.wire.headers(Last_Event_ID=id_)) == whole[place:]


async def test_sseclient_reads_a_run(embedder: Embedder) -> None:
    run_id = (await embedder.run(MAKES_A_FILE))["id"]
    url = str(embedder.wire.http.base_url.join(events_path(run_id)))

    def read() -> Heard:
        with httpx.stream(
            "GET", url, headers=embedder.wire.headers(), trust_env=False, timeout=WAIT_S
        ) as response:
            events = SSEClient(response.iter_bytes()).events()
            return [(str(each.id), each.event, json.loads(each.data)) for each in events]

    assert await anyio.to_thread.run_sync(read) == await log_of(embedder, run_id)


@needs_node
async def test_eventsource_hears_a_run_once_and_is_told_that_nothing_follows(
    embedder: Embedder, tmp_path: Path
) -> None:
    for name in ("package.json", "follow.mjs"):
        shutil.copy(HERE / name, tmp_path)
    with anyio.fail_after(INSTALLING_S):
        await anyio.run_process(
            ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"], cwd=tmp_path
        )
    run_id = (await embedder.run(MAKES_A_FILE))["id"]
    url = str(embedder.wire.http.base_url.join(events_path(run_id)))
    wire = embedder.wire
    command = ["node", "follow.mjs", url, wire.key, wire.session_id, wire.version, ",".join(EVENT_TYPES)]
    with anyio.fail_after(WAIT_S):
        done = await anyio.run_process(command, cwd=tmp_path)
    *events, end = [json.loads(line) for line in done.stdout.splitlines()]
    heard = [(each["id"], each["type"], each["data"]) for each in events]
    assert heard == await log_of(embedder, run_id)
    assert end == {"closed": 204}


async def test_jsonrpcclient_is_understood_and_understands(embedder: Embedder) -> None:
    async def said(body: Any) -> Any:
        response = await embedder.wire.post(body)
        return jsonrpcclient.parse(response.json()) if response.content else None

    match await said(jsonrpcclient.request("agent.list", params={"limit": 1})):
        case jsonrpcclient.Ok(result, _):
            assert result["items"] == []
        case other:
            raise AssertionError(other)
    for id_ in ("text", 7):
        asked = jsonrpcclient.request("run.get", {"run_id": "run_" + UNKNOWN}, id=id_)
        match await said(asked):
            case jsonrpcclient.Error(code, _, data, id):
                assert (code, data["symbol"], id) == (-32008, "tool_not_found", id_)
            case other:
                raise AssertionError(other)
    assert await said(jsonrpcclient.notification("agent.list")) is None
    answers = list(
        await said(
            [
                jsonrpcclient.request("agent.list", id="a"),
                jsonrpcclient.notification("agent.list"),
                jsonrpcclient.request("no.such_method", id="b"),
                jsonrpcclient.request("agent.get", params={}, id="c"),
            ]
        )
    )
    told = [(each.id, getattr(each, "code", None)) for each in answers]
    assert told == [("a", None), ("b", -32601), ("c", -32602)]
    assert await said(b"{") == jsonrpcclient.Error(-32700, *_rest(await embedder.wire.post(b"{")))


def _rest(response: Any) -> tuple[str, Any, None]:
    error = response.json()["error"]
    return error["message"], error["data"], None
