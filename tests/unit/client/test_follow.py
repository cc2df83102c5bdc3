"""Following a run over connections that end in every way a connection can."""

import json
import logging
from collections.abc import Callable
from contextlib import aclosing

import anyio
import pytest
from tests.unit.client.loopback import (
    RUN,
    Answer,
    Loopback,
    envelope,
    error,
    events,
    frame,
    hang_up,
    open_loopback,
    refusal,
    reply,
    result,
    session,
)

from espalier_client import AepClient, AepError, TransportError, follow

pytestmark = pytest.mark.anyio

PATH = f"GET /aep/v1/runs/{RUN}/events"
BOUND_S = 5.0
LOG = [frame(1, "run.started"), frame(2, "cycle.started"), frame(3, "run.ended", final_state="complete")]


async def followed(client: AepClient, since: str | None = None, patience_s: float = 5.0) -> list[int]:
    async with aclosing(follow.follow(client, RUN, since, patience_s=patience_s)) as stream:
        return [int(event.event_id) async for event in stream]


def run(state: str) -> dict[str, object]:
    return {
        "id": RUN,
        "agent_id": "agt_1",
        "goal": "",
        "state": state,
        "started_at": "2026-01-01T00:00:00.000Z",
        "ended_at": None,
        "cycle_count": 0,
        "result": None,
        "subject_ids": [],
        "metadata": {},
        "wait_reason": None,
        "next_wake_at": None,
        "cancel_requested_at": None,
    }


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_every_event_is_handed_out_and_run_ended_ends_it(
    runtime: Loopback, client: AepClient, line_end: bytes
) -> None:
    """Although the server keeps the connection open, sends heartbeats, and breaks data over lines."""
    spread = b"".join(
        b"data: " + line + b"\n" for line in json.dumps(envelope(2), indent=1).encode().split(b"\n")
    )
    pieces = [b": hello\n\n", LOG[0], b": ping\n\n", spread, b"\n", LOG[2]]
    runtime.on(PATH, events(*(piece.replace(b"\n", line_end) for piece in pieces), hold=True))

    assert await followed(client) == [1, 2, 3]

    (asked,) = runtime.asked(PATH)
    assert asked.query == {}
    assert asked.headers["accept"] == "text/event-stream"
    assert asked.headers["x-aep-session-id"] == "ses_1"


@pytest.mark.parametrize("cut", range(0, len(b"".join(LOG)), 31))
async def test_a_stream_that_is_cut_anywhere_goes_on_after_the_last_whole_event(
    runtime: Loopback, client: AepClient, cut: int
) -> None:
    whole = b"".join(LOG)[:cut].count(b"\n\n")
    runtime.on(PATH, events(b"".join(LOG)[:cut]), events(*LOG[whole:]))
    runtime.on("POST run.get", result(run("running")))

    assert await followed(client) == [1, 2, 3]

    first, second = runtime.asked(PATH)
    assert first.query == {}
    assert second.query == ({"since": f"{whole:016d}"} if whole else {})


@pytest.mark.parametrize(
    "trouble",
    [
        hang_up,
        reply(503, b"<html>"),
        refusal(429, "rate_limited", -32603, retry_after_ms=50),
    ],
)
async def test_passing_trouble_is_outlived(runtime: Loopback, client: AepClient, trouble: Answer) -> None:
    runtime.on(PATH, events(LOG[0]), trouble, trouble, events(*LOG[1:]))

    assert await followed(client) == [1, 2, 3]
    assert len(runtime.asked(PATH)) == 4


@pytest.mark.parametrize(("status", "symbol"), [(429, "rate_limited"), (503, "unavailable")])
async def test_a_stream_for_which_there_is_no_room_is_asked_for_again_when_the_runtime_said(
    runtime: Loopback, client: AepClient, status: int, symbol: str
) -> None:
    wait_ms = 400
    runtime.on(PATH, refusal(status, symbol, -32603, retry_after_ms=wait_ms), events(*LOG))

    asked_at = anyio.current_time()
    assert await followed(client) == [1, 2, 3]
    assert anyio.current_time() - asked_at >= wait_ms / 1000
    assert len(runtime.asked(PATH)) == 2


async def test_a_runtime_that_dies_and_comes_back_is_found_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="httpcore2.connection")
    seen: list[int] = []
    async with open_loopback() as place:
        port = place.port
    async with AepClient(place.url, "k") as client, anyio.create_task_group() as tasks:
        async with open_loopback(port) as first:
            first.on(PATH, events(LOG[0], hold=True))
            tasks.start_soon(_follow_into, client, seen)
            await _until(lambda: seen == [1])
        await _until(lambda: "connect_tcp.failed" in caplog.text)
        async with open_loopback(port) as second:
            second.on(PATH, events(*LOG[1:]))
            await _until(lambda: len(seen) == len(LOG))
    assert seen == [1, 2, 3]


async def _follow_into(client: AepClient, seen: list[int]) -> None:
    async for event in client.follow(RUN):
        seen.append(int(event.event_id))  # noqa: PERF401 - watched while it grows


async def _until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(BOUND_S):
        while not condition():
            await anyio.sleep(0.01)


@pytest.mark.parametrize(
    ("status", "symbol", "code"),
    [
        (400, "invalid_params", -32602),
        (401, "authn_failed", -32000),
        (403, "authz_denied", -32001),
        (404, "tool_not_found", -32008),
        (410, "log_pruned", -32008),
    ],
)
async def test_a_refusal_is_final(
    runtime: Loopback, client: AepClient, status: int, symbol: str, code: int
) -> None:
    runtime.on(PATH, refusal(status, symbol, code))

    with pytest.raises(AepError) as caught:
        await followed(client)

    assert (caught.value.code, caught.value.symbol) == (code, symbol)
    assert len(runtime.asked(PATH)) == 1


async def test_a_forgotten_session_begins_again_and_the_stream_goes_on(
    runtime: Loopback, client: AepClient
) -> None:
    runtime.on("POST initialize", result(session("ses_1")), result(session("ses_2")))
    runtime.on(PATH, events(LOG[0]), refusal(401, "session_expired", -32010), events(*LOG[1:]))

    assert await followed(client) == [1, 2, 3]
    assert [asked.headers["x-aep-session-id"] for asked in runtime.asked(PATH)] == ["ses_1", "ses_1", "ses_2"]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([LOG[0], LOG[0]], "once more"),
        ([frame(1), frame(2), frame(1)], "once more"),
        ([frame(1), frame(2, run_id="run_other")], "run_other"),
        ([b"data: {}\n\n"], "no event"),
    ],
)
async def test_a_stream_that_breaks_its_promise_is_not_believed(
    runtime: Loopback, client: AepClient, pieces: list[bytes], words: str
) -> None:
    runtime.on(PATH, events(*pieces, hold=True))

    with pytest.raises(TransportError, match=words):
        await followed(client)
    assert len(runtime.asked(PATH)) == 1


async def test_a_gap_is_an_error_where_the_whole_log_was_promised(
    runtime: Loopback, client: AepClient
) -> None:
    runtime.on("POST initialize", result(session(espalier_events=True)))
    runtime.on(PATH, events(LOG[0], LOG[2]))

    with pytest.raises(TransportError, match="left out 1"):
        await followed(client)


async def test_a_gap_is_an_event_of_another_kind_where_it_was_not(
    runtime: Loopback, client: AepClient
) -> None:
    runtime.on("POST initialize", result(session(espalier_events=False)))
    runtime.on(PATH, events(LOG[0], LOG[2]))

    assert await followed(client) == [1, 3]


async def test_another_answer_than_a_stream_is_final(runtime: Loopback, client: AepClient) -> None:
    runtime.on(PATH, events(b'{"error":"authz_denied"}', kind="application/json"))

    with pytest.raises(TransportError, match="application/json"):
        await followed(client)
    assert len(runtime.asked(PATH)) == 1


async def test_a_runtime_without_a_sign_of_life_is_given_up(runtime: Loopback, client: AepClient) -> None:
    runtime.on(PATH, events(LOG[0]), hang_up)

    with pytest.raises(TransportError, match=r"could not be followed for 0\.5 s: .*broke"):
        await followed(client, patience_s=0.5)


async def test_heartbeats_alone_are_a_sign_of_life(
    runtime: Loopback, client: AepClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "STEADY_S", 0.0)
    runtime.on(PATH, *[events(b": ping\n\n")] * 10, events(*LOG))
    runtime.on("POST run.get", result(run("sleeping")))

    assert await followed(client, patience_s=0.3) == [1, 2, 3]


async def test_a_reader_at_the_end_of_the_log_is_done(runtime: Loopback, client: AepClient) -> None:
    runtime.on(PATH, events())
    runtime.on("POST run.get", result(run("complete")))

    assert await followed(client, since=f"{3:016d}") == []
    assert [asked.query for asked in runtime.asked(PATH)] == [{"since": f"{3:016d}"}] * 2


async def test_a_run_that_ends_while_nobody_streams_is_still_read_to_its_end(
    runtime: Loopback, client: AepClient
) -> None:
    runtime.on(PATH, events(), events(*LOG))
    runtime.on("POST run.get", result(run("complete")))

    assert await followed(client) == [1, 2, 3]


async def test_a_session_that_cannot_begin_because_the_key_is_wrong_is_final(
    runtime: Loopback, client: AepClient
) -> None:
    runtime.on("POST initialize", error(-32000, "no such key", 401, symbol="authn_failed"))

    with pytest.raises(AepError, match="authn_failed"):
        await followed(client)
