"""What leaves the gateway, byte by byte, and who lets go of whom at the end of a stream."""

from collections.abc import AsyncGenerator

import anyio
import anyio.lowlevel
import pytest
from starlette.types import Message, Receive, Scope, Send

from espalier_gateway.sse import CHUNK_BYTES_MAX, OPENING, Place, event_response, farewell, frame
from espalier_gateway.streaming import HANG_UP, PiecewiseResponse
from espalier_protocol.events import EventLine

pytestmark = pytest.mark.anyio

SOON_S = 5.0
SCOPE: Scope = {"type": "http", "asgi": {"spec_version": "2.3"}}


def line(seq: int, type_: str = "error", data: str = "{}") -> EventLine:
    return EventLine(seq, type_, data)


def sent(place: Place, *lines: EventLine) -> list[int]:
    return [each.seq for each in place.visible(lines)]


def test_a_frame_is_an_id_of_sixteen_digits_a_type_one_line_of_data_and_a_blank_line() -> None:
    assert frame(EventLine(7, "run.started", '{"a":"\u00e9"}')) == (
        b'id: 0000000000000007\nevent: run.started\ndata: {"a":"\xc3\xa9"}\n\n'
    )


def test_what_is_no_event_cannot_be_taken_for_one() -> None:
    for block in (OPENING, farewell("lagged")):
        assert block.endswith(b"\n\n") and b"\r" not in block
        assert all(each.startswith((b":", b"retry: ")) for each in block.strip().split(b"\n"))


def test_frames_travel_together_up_to_the_size_of_a_chunk() -> None:
    lines = [line(seq, data="x" * 1_000) for seq in range(1, 201)]
    chunks = list(Place(0, own_events=False).chunks(lines))
    assert b"".join(chunks) == b"".join(frame(each) for each in lines)
    assert 1 < len(chunks) < 10
    assert max(len(chunk) for chunk in chunks) <= CHUNK_BYTES_MAX


def test_a_frame_larger_than_a_chunk_travels_alone() -> None:
    lines = [line(1), line(2, data="x" * CHUNK_BYTES_MAX), line(3)]
    assert list(Place(0, own_events=False).chunks(lines)) == [frame(each) for each in lines]


def test_known_events_are_dropped_and_the_rest_is_sent() -> None:
    place = Place(2, own_events=False)
    assert sent(place, line(1), line(2), line(3)) == [3]
    assert sent(place, line(3), line(4)) == [4]
    assert not place.broken and not place.ended


def test_an_event_that_does_not_follow_the_last_breaks_the_reading_off() -> None:
    place = Place(0, own_events=False)
    assert sent(place, line(1), line(3), line(4)) == [1]
    assert place.broken and place.last == 1


def test_our_own_types_are_counted_but_shown_only_to_those_who_asked() -> None:
    lines = [line(1), line(2, "espalier.spend.noted"), line(3, "run.ended")]
    place = Place(0, own_events=False)
    assert sent(place, *lines) == [1, 3]
    assert place.ended and not place.broken
    assert sent(Place(0, own_events=True), *lines) == [1, 2, 3]


def test_an_end_that_the_client_knows_already_still_ends_the_stream() -> None:
    place = Place(3, own_events=False)
    assert sent(place, line(2), line(3, "run.ended")) == []
    assert place.ended


async def never() -> Message:
    await anyio.sleep_forever()
    raise AssertionError


async def answer(response: PiecewiseResponse, send: Send, receive: Receive = never) -> None:
    with anyio.fail_after(SOON_S):
        await response(SCOPE, receive, send)


class Stream:
    """A stream that says forever the same, and whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield OPENING
                await anyio.lowlevel.checkpoint()
        finally:
            self.closed = True


async def test_a_response_says_what_it_is_and_that_nobody_may_hold_it_back() -> None:
    async def two() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"

    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await answer(event_response(two()), send)
    assert messages[0]["status"] == 200
    assert dict(messages[0]["headers"]) == {
        b"content-type": b"text/event-stream",
        b"cache-control": b"no-cache, no-transform",
        b"x-accel-buffering": b"no",
    }
    assert [message["body"] for message in messages[1:]] == [b"one", b"two", b""]


async def test_a_client_that_takes_nothing_is_let_go_and_its_stream_closed() -> None:
    stream, taken = Stream(), []

    async def send(message: Message) -> None:
        taken.append(message)
        if len(taken) > 3:
            await anyio.sleep_forever()

    await answer(PiecewiseResponse(stream(), {}, send_wait_s=0.05), send)
    assert len(taken) == 4 and taken[-1]["more_body"]
    assert stream.closed


@pytest.mark.parametrize("stuck_at", [0, 2])
async def test_a_client_that_takes_not_even_the_first_or_the_last_message_is_hung_up_on(
    stuck_at: int,
) -> None:
    async def one() -> AsyncGenerator[bytes, None]:
        yield b"one"

    sent, hung_up = 0, []

    async def send(_: Message) -> None:
        nonlocal sent
        sent += 1
        if sent > stuck_at:
            await anyio.sleep_forever()

    scope = {**SCOPE, "extensions": {HANG_UP: lambda: hung_up.append(True)}}
    with anyio.fail_after(SOON_S):
        await PiecewiseResponse(one(), {}, send_wait_s=0.05)(scope, never, send)
    assert (sent, hung_up) == (stuck_at + 1, [True])


async def test_a_disconnect_in_the_middle_of_a_send_closes_the_stream_before_the_response_ends() -> None:
    stream, stuck = Stream(), anyio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            stuck.set()
            await anyio.sleep_forever()

    async def receive() -> Message:
        await stuck.wait()
        return {"type": "http.disconnect"}

    await answer(event_response(stream()), send, receive)
    assert stream.closed
