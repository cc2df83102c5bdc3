"""A runtime with two gateways: where calls, streams and downloads go when one gives no answer.

A pause between attempts would outlast every test here that does not shorten it: going on is going on at once.
"""

import hashlib
from collections.abc import AsyncIterator

import anyio
import pytest
from tests.unit.client.conftest import KEY
from tests.unit.client.loopback import (
    RUN,
    Answer,
    Loopback,
    error,
    events,
    frame,
    hang_up,
    open_loopback,
    refusal,
    reply,
    result,
    session,
    silence,
    torn,
)
from tests.unit.client.test_follow import run

from espalier_client import AepClient, AepError, Cause, TransportError, backoff, transport
from espalier_client.gateways import BASE_URLS_MAX
from espalier_protocol.run import RunCreate

pytestmark = pytest.mark.anyio

EVENTS = f"GET /aep/v1/runs/{RUN}/events"
BYTES = "GET /aep/v1/artifacts/art_1/bytes"
START = RunCreate(agent_id="agt_1", goal="g")
UNAVAILABLE = error(-32603, "busy", symbol="unavailable", retry_after_ms=1)
LOG = [frame(1, "run.started"), frame(2, "cycle.started"), frame(3, "run.ended", final_state="complete")]
CONTENT = bytes(range(256)) * 1000
BOUND_S = 10.0
PAUSE_S = 60.0
SHORT_S = 0.01
ATTEMPTS = 5


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "PAUSE_FIRST_S", PAUSE_S)


@pytest.fixture
def short_pauses(long_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "PAUSE_FIRST_S", SHORT_S)
    monkeypatch.setattr(backoff, "PAUSE_S_MAX", SHORT_S)


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a runtime that has taken a request and is silent."""
    monkeypatch.setattr(transport, "ANSWER_TIMEOUT_S", 0.2)


@pytest.fixture
async def other(runtime: Loopback) -> AsyncIterator[Loopback]:
    async with open_loopback() as server:
        yield server


@pytest.fixture
async def client(short_patience: None, runtime: Loopback, other: Loopback) -> AsyncIterator[AepClient]:
    async with AepClient([runtime.url, other.url], KEY) as opened:
        with anyio.fail_after(BOUND_S):
            yield opened


async def followed(client: AepClient) -> list[int]:
    return [int(event.event_id) async for event in client.follow(RUN)]


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize(
    "trouble",
    [hang_up, silence, reply(502, b"<html>"), UNAVAILABLE],
    ids=["cut", "silent", "failing", "unavailable"],
)
async def test_a_read_goes_on_at_the_next_gateway_at_once_and_in_the_same_session(
    runtime: Loopback, other: Loopback, client: AepClient, trouble: Answer
) -> None:
    runtime.on("POST run.get", trouble)
    other.on("POST run.get", result(run("running")))

    for _ in range(3):
        assert (await client.run_get(RUN)).id == RUN

    assert [request.name for request in runtime.requests] == ["POST initialize", "POST run.get"]
    assert [request.name for request in other.requests] == ["POST run.get"] * 3
    assert {request.headers["x-aep-session-id"] for request in other.requests} == {"ses_1"}


@pytest.mark.parametrize(
    "trouble",
    [hang_up, silence, reply(502, b"<html>"), UNAVAILABLE],
    ids=["cut", "silent", "failing", "unavailable"],
)
async def test_a_create_that_may_have_been_heard_and_has_no_key_is_sent_nowhere_else_but_the_next_call_is(
    runtime: Loopback, other: Loopback, client: AepClient, trouble: Answer
) -> None:
    runtime.on("POST run.create", trouble)
    other.on("POST run.create", result(run("running")))

    with pytest.raises((AepError, TransportError)):
        await client.run_create(START)
    assert (len(runtime.asked("POST run.create")), other.requests) == (1, [])

    assert (await client.run_create(START)).id == RUN
    assert (len(runtime.asked("POST run.create")), len(other.asked("POST run.create"))) == (1, 1)


@pytest.mark.parametrize(
    "trouble",
    [hang_up, silence, reply(502, b"<html>"), UNAVAILABLE],
    ids=["cut", "silent", "failing", "unavailable"],
)
async def test_a_create_at_a_runtime_that_keeps_keys_goes_on_at_the_next_gateway_under_one_key(
    runtime: Loopback, other: Loopback, client: AepClient, trouble: Answer
) -> None:
    runtime.on("POST initialize", result(session(keeps_keys=True)))
    runtime.on("POST run.create", trouble)
    other.on("POST run.create", result(run("running")))

    assert (await client.run_create(START)).id == RUN
    assert (await client.run_create(START, key="mine")).id == RUN

    (first,), (second, own) = runtime.asked("POST run.create"), other.asked("POST run.create")
    keys = [each.headers["idempotency-key"] for each in (first, second, own)]
    assert keys[0] == keys[1] != keys[2] == "mine"
    assert first.message["params"] == second.message["params"]


async def test_each_create_has_a_key_of_its_own_and_nothing_else_has_one(
    runtime: Loopback, client: AepClient
) -> None:
    runtime.on("POST initialize", result(session(keeps_keys=True)))
    for method in ("run.create", "run.get", "run.cancel"):
        runtime.on(f"POST {method}", result(run("running")))

    for _ in range(3):
        await client.run_create(START)
    await client.run_get(RUN)
    await client.run_cancel(RUN)

    keys = {request.name: request.headers.get("idempotency-key") for request in runtime.requests}
    assert len({each.headers["idempotency-key"] for each in runtime.asked("POST run.create")}) == 3
    assert [name for name, key in keys.items() if key] == ["POST run.create"]


async def test_a_create_at_a_runtime_that_keeps_no_keys_has_none_unless_it_is_given(
    runtime: Loopback, client: AepClient
) -> None:
    runtime.on("POST run.create", result(run("running")))
    await client.run_create(START)
    await client.run_create(START, key="mine")
    keys = [each.headers.get("idempotency-key") for each in runtime.asked("POST run.create")]
    assert keys == [None, "mine"]


async def test_a_create_that_surely_was_not_heard_is_sent_to_the_next_gateway(other: Loopback) -> None:
    async with open_loopback() as gone:
        pass
    other.on("POST run.create", result(run("running")))

    async with AepClient([gone.url, other.url], KEY) as client:
        with anyio.fail_after(BOUND_S):
            assert (await client.run_create(START)).id == RUN

    assert len(other.asked("POST run.create")) == 1


async def test_a_caller_at_its_limit_waits_and_does_not_go_round_it(
    runtime: Loopback, other: Loopback, client: AepClient, short_pauses: None
) -> None:
    wait_ms = 300
    limited = error(-32603, "slow down", 429, symbol="rate_limited", retry_after_ms=wait_ms)
    runtime.on("POST run.create", limited, result(run("running")))

    asked_at = anyio.current_time()
    assert (await client.run_create(START)).id == RUN

    assert anyio.current_time() - asked_at >= wait_ms / 1000
    assert (len(runtime.asked("POST run.create")), other.requests) == (2, [])


async def test_a_refusal_is_an_answer_and_nobody_else_is_asked(
    runtime: Loopback, other: Loopback, client: AepClient
) -> None:
    runtime.on("POST run.get", error(-32008, "no such run"))

    for _ in range(2):
        with pytest.raises(AepError, match="tool_not_found"):
            await client.run_get(RUN)
    assert (len(runtime.asked("POST run.get")), other.requests) == (2, [])


async def test_a_gateway_that_is_back_is_found_again(runtime: Loopback) -> None:
    runtime.on("POST run.get", hang_up, hang_up, result(run("running")))
    async with open_loopback() as place:
        port = place.port

    async with AepClient([place.url, runtime.url], KEY) as client:
        with anyio.fail_after(BOUND_S):
            await client.initialize()
            async with open_loopback(port) as back:
                back.on("POST run.get", result(run("running")))
                await client.run_get(RUN)
                await client.run_get(RUN)
                assert (len(back.requests), len(runtime.asked("POST run.get"))) == (2, 1)


async def test_after_a_round_it_is_paused_for_as_long_as_any_of_them_asked(
    runtime: Loopback, other: Loopback, client: AepClient, short_pauses: None
) -> None:
    wait_ms = 300
    busy = error(-32603, "busy", symbol="unavailable", retry_after_ms=wait_ms)
    runtime.on("POST run.get", busy, result(run("running")))
    other.on("POST run.get", UNAVAILABLE)

    asked_at = anyio.current_time()
    assert (await client.run_get(RUN)).id == RUN

    assert anyio.current_time() - asked_at >= wait_ms / 1000
    assert (len(runtime.asked("POST run.get")), len(other.asked("POST run.get"))) == (2, 1)


async def test_when_none_answers_each_was_asked_so_often_and_one_sentence_names_them(
    runtime: Loopback, other: Loopback, client: AepClient, short_pauses: None
) -> None:
    runtime.on("POST run.get", hang_up)
    other.on("POST run.get", hang_up)

    with pytest.raises(TransportError) as caught:
        await client.run_get(RUN)

    assert str(caught.value) == (
        f"None of the gateways {runtime.url}, {other.url} answers: The connection to {other.url} broke."
    )
    assert caught.value.cause is Cause.lost
    assert (len(runtime.asked("POST run.get")), len(other.asked("POST run.get"))) == (ATTEMPTS, ATTEMPTS)


async def test_a_session_is_begun_at_whichever_gateway_answers(
    runtime: Loopback, other: Loopback, client: AepClient
) -> None:
    runtime.on("POST initialize", hang_up)
    other.on("POST initialize", result(session("ses_2")))
    other.on("POST run.get", result(run("running")))

    assert (await client.run_get(RUN)).id == RUN
    assert [request.name for request in other.requests] == ["POST initialize", "POST run.get"]


async def test_one_that_fails_many_callers_at_once_is_left_once(
    runtime: Loopback, other: Loopback, client: AepClient
) -> None:
    """Were it left once for each of them, half of them would come back to it."""
    runtime.on("POST run.get", silence)
    other.on("POST run.get", result(run("running")))

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(client.run_get, RUN)

    assert (len(runtime.asked("POST run.get")), len(other.asked("POST run.get"))) == (4, 4)


@pytest.mark.parametrize("count", [0, BASE_URLS_MAX + 1])
def test_a_number_of_gateways_that_cannot_be_is_one_sentence(count: int) -> None:
    with pytest.raises(TransportError) as caught:
        AepClient([f"http://127.0.0.1:{port}" for port in range(1, count + 1)], KEY)
    assert str(caught.value) == f"A runtime has 1 to {BASE_URLS_MAX} base URLs, not {count}."


async def test_a_gateway_that_is_named_twice_is_one() -> None:
    async with AepClient(["http://a:1", "http://b:1/", "http://a:1/"], KEY) as client:
        assert client.base_urls == ("http://a:1", "http://b:1")


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("cut", range(0, len(b"".join(LOG)), 67))
async def test_a_stream_that_is_cut_goes_on_at_the_next_gateway_after_the_last_whole_event(
    runtime: Loopback, other: Loopback, client: AepClient, cut: int
) -> None:
    whole = b"".join(LOG)[:cut].count(b"\n\n")
    runtime.on(EVENTS, torn(b"".join(LOG)[:cut], content_type="text/event-stream"))
    other.on(EVENTS, events(*LOG[whole:]))

    assert await followed(client) == [1, 2, 3]

    (asked,) = other.asked(EVENTS)
    assert asked.query == ({"since": f"{whole:016d}"} if whole else {})
    assert len(runtime.asked(EVENTS)) == 1


@pytest.mark.parametrize("trouble", [hang_up, refusal(503, "unavailable", -32603, retry_after_ms=60_000)])
async def test_a_stream_that_is_not_opened_is_opened_by_the_next_gateway(
    runtime: Loopback, other: Loopback, client: AepClient, trouble: Answer
) -> None:
    runtime.on(EVENTS, trouble)
    other.on(EVENTS, events(*LOG))

    assert await followed(client) == [1, 2, 3]
    assert len(runtime.asked(EVENTS)) == 1


async def test_a_stream_that_none_can_open_pauses_after_each_round(
    runtime: Loopback, other: Loopback, client: AepClient, short_pauses: None
) -> None:
    wait_ms = 300
    busy = refusal(503, "unavailable", -32603, retry_after_ms=wait_ms)
    runtime.on(EVENTS, busy, events(*LOG))
    other.on(EVENTS, busy)

    asked_at = anyio.current_time()
    assert await followed(client) == [1, 2, 3]

    assert anyio.current_time() - asked_at >= wait_ms / 1000
    assert (len(runtime.asked(EVENTS)), len(other.asked(EVENTS))) == (2, 1)


# ---------------------------------------------------------------- downloads


def etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()}"'


async def fetched(client: AepClient) -> bytes:
    return b"".join([piece async for piece in client.artifact_bytes("art_1")])


@pytest.mark.parametrize("cut", [0, 1, 100_000, len(CONTENT) - 1])
async def test_a_download_goes_on_at_the_next_gateway_where_it_broke_off(
    runtime: Loopback, other: Loopback, client: AepClient, cut: int
) -> None:
    runtime.on(BYTES, torn(CONTENT[:cut], etag=etag(CONTENT)))
    other.on(BYTES, reply(200, CONTENT, etag=etag(CONTENT)))

    assert await fetched(client) == CONTENT
    assert (len(runtime.asked(BYTES)), len(other.asked(BYTES))) == (1, 1)


@pytest.mark.parametrize("cut", [1, 100_000, len(CONTENT) - 1])
async def test_only_the_rest_of_a_download_is_asked_for(
    runtime: Loopback, other: Loopback, client: AepClient, cut: int
) -> None:
    runtime.on(BYTES, torn(CONTENT[:cut], etag=etag(CONTENT)))
    rest = {"etag": etag(CONTENT), "content_range": f"bytes {cut}-{len(CONTENT) - 1}/{len(CONTENT)}"}
    other.on(BYTES, reply(206, CONTENT[cut:], **rest))

    assert await fetched(client) == CONTENT
    (first,), (second,) = runtime.asked(BYTES), other.asked(BYTES)
    assert {"range", "if-range"}.isdisjoint(first.headers)
    assert (second.headers["range"], second.headers["if-range"]) == (f"bytes={cut}-", etag(CONTENT))


async def test_a_part_that_was_not_asked_for_is_an_error(
    runtime: Loopback, other: Loopback, client: AepClient
) -> None:
    runtime.on(BYTES, torn(CONTENT[:1000], etag=etag(CONTENT)))
    rest = {"etag": etag(CONTENT), "content_range": f"bytes 999-{len(CONTENT) - 1}/{len(CONTENT)}"}
    other.on(BYTES, reply(206, CONTENT[999:], **rest))

    with pytest.raises(TransportError, match="Another part"):
        await fetched(client)


async def test_a_download_is_not_put_together_of_two_contents(
    runtime: Loopback, other: Loopback, client: AepClient
) -> None:
    runtime.on(BYTES, torn(CONTENT[:1000], etag=etag(CONTENT)))
    other.on(BYTES, reply(200, CONTENT[::-1], etag=etag(CONTENT[::-1])))

    with pytest.raises(TransportError, match="has changed"):
        await fetched(client)


async def test_a_download_of_which_nobody_could_tell_that_it_is_the_same_is_not_begun_again(
    runtime: Loopback, other: Loopback, client: AepClient
) -> None:
    runtime.on(BYTES, torn(CONTENT[:1000]))
    other.on(BYTES, reply(200, CONTENT))

    with pytest.raises(TransportError, match="broke"):
        await fetched(client)
    assert other.requests == []


async def test_a_download_that_breaks_everywhere_ends(
    runtime: Loopback, other: Loopback, client: AepClient, short_pauses: None
) -> None:
    for gateway in (runtime, other):
        gateway.on(BYTES, torn(CONTENT[:1000], etag=etag(CONTENT)))

    with pytest.raises(TransportError, match="broke"):
        await fetched(client)
    assert (len(runtime.asked(BYTES)), len(other.asked(BYTES))) == (ATTEMPTS, ATTEMPTS)
