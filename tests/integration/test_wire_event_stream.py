"""The events endpoint: who may follow, and from where. What is sent is tested with the tails."""

import re
from collections.abc import AsyncIterator

import anyio
import httpx2
import pytest
from tests.integration.wire import ANSWER_WAIT_S, Gateway, Wire

pytestmark = pytest.mark.anyio

ENDED = "update runs set state = 'complete', ended_at = now()"
EVENTS = """
insert into events (run_id, owner_id, seq, type, payload, emitted_at)
select id, owner_id, n, case when n = $1 then 'run.ended' else 'cycle.started' end, '{}', now()
from runs, generate_series(2, $1) n
"""


async def ended_run(wire: Wire, gateway: Gateway, events: int) -> str:
    """A run whose log has this many events, told by rows."""
    run_id = await wire.run()
    await gateway.pool.execute(EVENTS, events)
    await gateway.pool.execute("update runs set next_seq = $1", events + 1)
    await gateway.pool.execute(ENDED)
    return f"/aep/v1/runs/{run_id}/events"


def ids(response: httpx2.Response) -> list[int]:
    return [int(each) for each in re.findall(r"(?m)^id: (\d{16})$", response.text)]


async def test_a_log_is_replayed_from_the_place_that_is_asked_for(wire: Wire, gateway: Gateway) -> None:
    path = await ended_run(wire, gateway, 5)
    told = {
        "nothing said": ids(await wire.get(path)),
        "since 0": ids(await wire.get(path, since="0")),
        "since unpadded": ids(await wire.get(path, since="2")),
        "since padded": ids(await wire.get(path, since=f"{2:016d}")),
        "since the end": ids(await wire.get(path, since="5")),
        "the header": ids(await wire.get(path, wire.headers(Last_Event_ID="3"))),
        "the header beats since": ids(await wire.get(path, wire.headers(Last_Event_ID="4"), since="1")),
    }
    assert told == {
        "nothing said": [1, 2, 3, 4, 5],
        "since 0": [1, 2, 3, 4, 5],
        "since unpadded": [3, 4, 5],
        "since padded": [3, 4, 5],
        "since the end": [],
        "the header": [4, 5],
        "the header beats since": [5],
    }


async def test_a_place_that_is_not_in_the_log_is_refused(wire: Wire, gateway: Gateway) -> None:
    path = await ended_run(wire, gateway, 5)
    for place in ("6", "-1", "+1", "1.0", "abc", "", " 1", "9" * 16, "9" * 17, "٣", "0x1"):
        since = await wire.get(path, since=place)
        assert (since.status_code, since.json()["error"], since.json()["field"]) == (
            400,
            "invalid_params",
            "since",
        )
        if place.isascii() and place == place.strip():
            header = await wire.get(path, wire.headers(Last_Event_ID=place), since="1")
            assert header.status_code == 400
    twice = await wire.http.get(f"{path}?since=1&since=2", headers=wire.headers())
    assert twice.status_code == 400


async def test_an_event_source_with_nothing_left_to_read_is_told_to_stop(
    wire: Wire, gateway: Gateway
) -> None:
    path = await ended_run(wire, gateway, 3)
    done = await wire.get(path, wire.headers(Last_Event_ID="3"))
    asked = await wire.get(path, since="3")
    assert (done.status_code, done.content, asked.status_code, ids(asked)) == (204, b"", 200, [])


async def test_a_log_that_was_removed_is_gone(wire: Wire, gateway: Gateway) -> None:
    path = await ended_run(wire, gateway, 3)
    await gateway.pool.execute("update runs set log_pruned_at = now()")
    response = await wire.get(path, since="1")
    assert (response.status_code, response.json()["error"]) == (410, "log_pruned")


async def test_following_needs_both_scopes(wire: Wire, gateway: Gateway) -> None:
    path = await ended_run(wire, gateway, 3)
    told = {}
    for scopes in (("run.read",), ("stream.subscribe",), ("run.read", "stream.subscribe")):
        follower = await gateway.caller("one", scopes)
        response = await follower.get(path)
        told[scopes] = (response.status_code, response.headers["content-type"].partition(";")[0])
    assert told == {
        ("run.read",): (403, "application/json"),
        ("stream.subscribe",): (403, "application/json"),
        ("run.read", "stream.subscribe"): (200, "text/event-stream"),
    }


async def lines_of(response: httpx2.Response) -> AsyncIterator[str]:
    with anyio.fail_after(ANSWER_WAIT_S):
        async for line in response.aiter_lines():
            yield line


async def test_a_follower_hears_a_run_end_and_the_stream_closes_by_itself(wire: Wire) -> None:
    run_id = await wire.run()
    heard = []
    async with wire.http.stream("GET", f"/aep/v1/runs/{run_id}/events", headers=wire.headers()) as response:
        async for line in lines_of(response):
            if line.startswith("event: "):
                heard.append(line.removeprefix("event: "))
            if heard == ["run.started"] and not line:
                await wire.call("run.cancel", run_id=run_id)
    assert heard == ["run.started", "run.ended"]


async def test_a_stopping_gateway_ends_its_streams_before_it_waits_for_them(
    wire: Wire, gateway: Gateway
) -> None:
    run_id = await wire.run()
    async with wire.http.stream("GET", f"/aep/v1/runs/{run_id}/events", headers=wire.headers()) as response:
        async for line in lines_of(response):
            if line == "event: run.started":
                gateway.state.closing.set()
    assert response.is_closed


async def test_a_revoked_key_cannot_open_a_stream_again(wire: Wire, gateway: Gateway) -> None:
    path = await ended_run(wire, gateway, 3)
    await gateway.pool.execute("update keys set revoked_at = now()")
    assert (await wire.get(path)).status_code == 401
