"""Streams are counted from before their first byte until nothing is left of them, however they end."""

from collections.abc import AsyncGenerator
from contextlib import suppress
from uuid import UUID, uuid4

import anyio
import anyio.lowlevel
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Scope

from espalier_gateway.errors import WireError
from espalier_gateway.events import CountedResponse
from espalier_gateway.rate_limits import RefusalLog
from espalier_gateway.sse import OPENING, event_response
from espalier_gateway.stream_limits import RETRY_AFTER_MS, OpenStreams
from espalier_store.keys import Caller

pytestmark = pytest.mark.anyio

SOON_S = 5.0
RUN = uuid4()


def caller(owner_id: UUID | None = None) -> Caller:
    return Caller(owner_id or uuid4(), uuid4(), frozenset())


def streams(per_key: int = 9, per_run: int = 9, per_gateway: int = 9) -> OpenStreams:
    return OpenStreams(RefusalLog(), per_key=per_key, per_run=per_run, per_gateway=per_gateway)


def refusal(counted: OpenStreams, who: Caller, run_id: UUID = RUN) -> dict[str, object]:
    """What asking says; opening says the same and counts nothing."""
    before = len(counted)
    with pytest.raises(WireError) as opened:
        counted.open(who, run_id)
    with pytest.raises(WireError) as asked:
        counted.require_room(who, run_id)
    assert (asked.value.fault, len(counted)) == (opened.value.fault, before)
    return dict(asked.value.fault.data)


async def test_each_limit_is_named_and_leaves_room_for_others() -> None:
    limited = {"symbol": "rate_limited", "retry_after_ms": RETRY_AFTER_MS}
    greedy = caller()

    per_key = streams(per_key=2)
    for _ in range(2):
        per_key.open(greedy, uuid4())
    assert refusal(per_key, greedy) == {**limited, "limit": "streams_per_key"}
    per_key.open(caller(greedy.owner_id), RUN)

    per_run = streams(per_run=2)
    for _ in range(2):
        per_run.open(caller(greedy.owner_id), RUN)
    assert refusal(per_run, greedy) == {**limited, "limit": "streams_per_run"}
    per_run.open(greedy, uuid4())
    per_run.require_room(caller(), RUN)  # nobody learns that a run of somebody else is followed

    in_all = streams(per_gateway=2)
    for _ in range(2):
        in_all.open(caller(), uuid4())
    assert refusal(in_all, greedy) == {"symbol": "unavailable", "retry_after_ms": RETRY_AFTER_MS}


async def test_a_stream_that_closes_makes_room_once() -> None:
    counted, who = streams(per_key=1, per_run=1, per_gateway=1), caller()
    for _ in range(3):
        stream = counted.open(who, RUN)
        refusal(counted, who)
        stream.close()
        stream.close()
        assert len(counted) == 0
    counted.open(caller(), uuid4())
    assert refusal(counted, who)["symbol"] == "unavailable", "the second closing gave nothing away"


# ------------------------------------------------------------------ the response that is counted


async def never() -> Message:
    await anyio.sleep_forever()
    raise AssertionError


async def gone() -> Message:
    return {"type": "http.disconnect"}


async def taken(_: Message) -> None:
    await anyio.lowlevel.checkpoint()


async def broken(_: Message) -> None:
    raise OSError("the connection is gone")


async def endless() -> AsyncGenerator[bytes, None]:
    while True:
        yield OPENING
        await anyio.lowlevel.checkpoint()


async def failing() -> AsyncGenerator[bytes, None]:
    yield OPENING
    raise RuntimeError("a bug")


async def three() -> AsyncGenerator[bytes, None]:
    for _ in range(3):
        yield OPENING


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize(
    ("frames", "receive", "send"),
    [
        pytest.param(three, never, taken, id="the stream ends"),
        pytest.param(endless, gone, taken, id="the reader had left before the first byte"),
        pytest.param(endless, never, broken, id="the first byte cannot be sent"),
        pytest.param(failing, never, taken, id="the stream fails"),
    ],
)
async def test_nothing_stays_counted(frames, receive, send, spec_version) -> None:  # type: ignore[no-untyped-def]
    scope: Scope = {"type": "http", "asgi": {"spec_version": spec_version}}
    if receive is gone and spec_version == "2.4":
        send = broken  # there a server tells of a reader that left by failing to send
    counted = streams()
    response = CountedResponse(event_response(frames()), counted.open(caller(), RUN))
    assert len(counted) == 1
    with anyio.fail_after(SOON_S), suppress(OSError, ClientDisconnect, RuntimeError):
        await response(scope, receive, send)
    assert len(counted) == 0


async def test_nothing_stays_counted_of_a_response_that_is_cancelled_before_its_first_step() -> None:
    counted = streams()
    scope: Scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    response = CountedResponse(event_response(endless()), counted.open(caller(), RUN))
    with anyio.CancelScope() as cancelled:
        cancelled.cancel()
        await response(scope, never, taken)
    assert (len(counted), cancelled.cancelled_caught) == (0, True)


async def test_a_stream_counts_while_it_is_sent() -> None:
    counted, seen = streams(), []

    async def send(_: Message) -> None:
        seen.append(len(counted))

    scope: Scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    await CountedResponse(event_response(three()), counted.open(caller(), RUN))(scope, never, send)
    assert seen == [1] * 5 and len(counted) == 0
