"""The event stream of a run: what the published client hears, and the bytes that any other client gets."""

import json
import re
from itertools import pairwise

import anyio
import pytest
from tests.contract.embedder import MAKES_A_FILE, UNKNOWN, WAIT_S, Embedder, events_path
from tests.contract.requirements import requirement

pytestmark = pytest.mark.anyio

PUBLISHED_TYPES = frozenset(
    """
    run.started run.ended cycle.started cycle.ended tool.called tool.returned subagent.spawned message.sent
    message.delivered prompt.modified prompt.change_queued prompt.change_rejected memory.written
    artifact.created error
    """.split()
)
MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def frames(stream: bytes) -> list[dict[str, str]]:
    """The fields of each frame that carries an event; one without data (`retry`, comments) carries none."""
    *whole, rest = stream.decode().split("\n\n")
    assert rest == "", "the last frame is whole"
    read = [dict(line.split(": ", 1) for line in frame.split("\n")) for frame in whole]
    return [fields for fields in read if "data" in fields]


@requirement("AEP-STREAM-01")
async def test_only_published_types_are_heard(embedder: Embedder) -> None:
    types = {event.type for event in await embedder.events((await embedder.run(MAKES_A_FILE))["id"])}
    assert types == types & PUBLISHED_TYPES
    assert types >= {"run.started", "cycle.started", "tool.called", "tool.returned", "artifact.created"}


@requirement("AEP-STREAM-02")
async def test_the_first_event_is_the_start_and_the_last_one_the_end(embedder: Embedder) -> None:
    run_id = (await embedder.run(MAKES_A_FILE))["id"]
    types = [frame["event"] for frame in frames(await embedder.stream(run_id))]
    assert (types[0], types[-1]) == ("run.started", "run.ended")
    assert (types.count("run.started"), types.count("run.ended")) == (1, 1)


@requirement("AEP-STREAM-03")
async def test_every_event_has_a_whole_envelope(embedder: Embedder) -> None:
    run_id = (await embedder.run(MAKES_A_FILE))["id"]
    sent = [json.loads(frame["data"]) for frame in frames(await embedder.stream(run_id))]
    heard = await embedder.events(run_id)
    assert [vars(event) for event in heard] == sent, "the published client reads what was sent"
    assert [event.type for event in heard if not (event.event_id and isinstance(event.payload, dict))] == []
    assert {event.run_id for event in heard} == {run_id}
    assert all(MOMENT.fullmatch(event.emitted_at) for event in heard)


@requirement("AEP-STREAM-04")
async def test_event_ids_only_increase(embedder: Embedder) -> None:
    ids = [event.event_id for event in await embedder.events((await embedder.run(MAKES_A_FILE))["id"])]
    assert len(ids) > 10, "more than one digit's worth"
    assert all(one < other and int(one) < int(other) for one, other in pairwise(ids))


@requirement("AEP-STREAM-05")
async def test_cycles_begin_and_end_in_turn(embedder: Embedder) -> None:
    events = await embedder.events((await embedder.run(MAKES_A_FILE))["id"])
    cycles = [(each.type, each.payload["cycle_number"]) for each in events if each.type.startswith("cycle.")]
    assert cycles == [(f"cycle.{edge}", number) for number in (1, 2) for edge in ("started", "ended")]


@requirement("AEP-STREAM-06")
async def test_since_resumes_right_after_any_event(embedder: Embedder) -> None:
    run_id = (await embedder.run(MAKES_A_FILE))["id"]
    events = await embedder.events(run_id)
    for place, event in enumerate(events[:-1], start=1):
        assert await embedder.events(run_id, since=event.event_id) == events[place:]


@requirement("AEP-STREAM-07")
async def test_a_stream_says_that_it_is_one(embedder: Embedder) -> None:
    run, wire = await embedder.run(), embedder.wire
    headers = {**wire.headers(), "Accept": "text/event-stream"}
    async with wire.http.stream("GET", events_path(run["id"]), headers=headers) as stream:
        kind = stream.headers["content-type"].split(";")[0]
        assert (stream.status_code, kind) == (200, "text/event-stream")


@requirement("AEP-STREAM-08")
async def test_frames_end_in_two_line_feeds_and_nothing_else(embedder: Embedder) -> None:
    """Both while a run lives and when it is read afterwards."""
    run_id = (await embedder.run(MAKES_A_FILE))["id"]
    for stream in (await embedder.stream(run_id), await embedder.stream(run_id)):
        assert b"\r" not in stream and stream.endswith(b"\n\n")
        data = [line for line in stream.split(b"\n") if line.startswith(b"data:")]
        assert len(data) == len(frames(stream)), "an event is one line of data"


@requirement("AEP-STREAM-09")
async def test_every_frame_carries_the_id_of_its_event(embedder: Embedder) -> None:
    told = frames(await embedder.stream((await embedder.run(MAKES_A_FILE))["id"]))
    assert [frame["id"] for frame in told] == [json.loads(frame["data"])["event_id"] for frame in told]


@requirement("AEP-STREAM-10")
async def test_last_event_id_resumes_like_since(embedder: Embedder) -> None:
    run_id = (await embedder.run(MAKES_A_FILE))["id"]
    told = frames(await embedder.stream(run_id))
    for place, frame in enumerate(told[:-1], start=1):
        assert frames(await embedder.stream(run_id, Last_Event_ID=frame["id"])) == told[place:]


@requirement("AEP-STREAM-11")
async def test_the_stream_of_an_ended_run_ends(embedder: Embedder) -> None:
    run = await embedder.ended_run()
    with anyio.fail_after(WAIT_S):
        types = [event.type async for event in embedder.client.run.events(run["id"])]
    assert types[-1] == "run.ended"


@requirement("AEP-STREAM-12")
async def test_a_run_that_does_not_exist_has_no_stream(embedder: Embedder) -> None:
    assert (await embedder.get(events_path("run_" + UNKNOWN))).status_code == 404
