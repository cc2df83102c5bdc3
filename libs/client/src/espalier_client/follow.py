"""Following a run: its events, each once and in order, over as many connections as that takes.

A connection may break at any byte; the next one resumes after the last event that was handed out, and at any
gateway, because the log is the runtime's and not a gateway's. The order is checked rather than trusted,
because a reader that misses an event quietly is worse than one that stops.
Frames are parsed by httpx2's event source; here is what it does not do: resume, check, and know when to stop.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, get_args

import anyio
import httpx2
from pydantic import ValidationError

from espalier_client.backoff import Pauses
from espalier_client.errors import Cause, ClientError, TransportError, is_passing
from espalier_client.transport import STREAM_SILENCE_S_MAX
from espalier_protocol.events import LAST_EVENT, Event
from espalier_protocol.ids import parse_event_id
from espalier_protocol.run import EndState

if TYPE_CHECKING:
    from espalier_client.client import AepClient

PATH = "/aep/v1/runs/{}/events"
EVENT_STREAM = "text/event-stream"
EVENT_BYTES_MAX = 16 * 1024 * 1024
PATIENCE_S = 120.0
"""How long a runtime may give no sign of life before a follower gives up."""

STEADY_S = 10.0
"""A stream without events that was fed for this long was alive: a sleeping run has nothing to tell."""

WHOLE_LOG = "espalier.events"
"""A session with this capability is sent every event, so that a missing number is a missing event."""


async def follow(
    client: "AepClient", run_id: str, since: str | None = None, *, patience_s: float = PATIENCE_S
) -> AsyncGenerator[Event, None]:
    """Events after `since` up to `run.ended`. Close it (`contextlib.aclosing`) when leaving early.

    Raises AepError when the runtime refuses (unknown run, no scope, a log that is gone), and TransportError
    after `patience_s` without a sign of life or when the events are not in order.
    """
    place = _Place(run_id, since)
    pauses = Pauses(len(client.base_urls))
    alive_at = anyio.current_time()
    # bound: each turn hands out events, or listens to a living runtime, or uses up `patience_s`
    while True:
        connection = _Connection(client, place)
        try:
            async with aclosing(connection.events()) as events:
                async for event in events:
                    yield event
                    alive_at = anyio.current_time()
                    pauses.reset()
            if place.ended or await connection.had_nothing_left():
                return
            trouble: ClientError = TransportError("The stream of events ended early.")
        except ClientError as error:
            if not is_passing(error):
                raise
            trouble = error
        if (heard_at := connection.alive_until(trouble)) > alive_at:
            alive_at = heard_at
            pauses.reset()
        if anyio.current_time() - alive_at >= patience_s:
            raise _given_up(run_id, patience_s, trouble) from trouble
        await anyio.sleep(pauses.after(trouble))


class _Place:
    """Where in the log the reader is, and whether what comes next may come next."""

    def __init__(self, run_id: str, since: str | None) -> None:
        self.run_id = run_id
        self.since = since
        self.ended = False
        self.was_over = False
        self.contiguous = False
        self._seq = 0 if since is None else parse_event_id(since)

    def take(self, data: str) -> Event:
        try:
            event = Event.model_validate_json(data)
        except ValidationError as err:
            raise TransportError(
                f"The stream of {self.run_id} carries something that is no event.", Cause.senseless
            ) from err
        self._check(event)
        self.since, self._seq = event.event_id, parse_event_id(event.event_id)
        self.ended = event.type == LAST_EVENT
        return event

    def _check(self, event: Event) -> None:
        if event.run_id != self.run_id:
            raise self._disorder(f"an event of {event.run_id}")
        seq = parse_event_id(event.event_id)
        # Other runtimes number in their own way; then only an immediate repetition shows.
        numbered = seq is not None and self._seq is not None
        steps = (seq or 0) - (self._seq or 0)
        if event.event_id == self.since or (numbered and steps <= 0):
            raise self._disorder(f"event {event.event_id} once more")
        if numbered and self.contiguous and steps > 1:
            raise self._disorder(f"event {event.event_id} and left out {steps - 1} before it,")

    def _disorder(self, what: str) -> TransportError:
        after = "at the start" if self.since is None else f"after event {self.since}"
        return TransportError(f"The stream of {self.run_id} brought {what} {after}.", Cause.senseless)


class _Connection:
    """One attempt: a stream from the reader's place to wherever it breaks."""

    def __init__(self, client: "AepClient", place: _Place) -> None:
        self._client = client
        self._place = place
        self._opened_at = anyio.current_time()
        self._response: httpx2.Response | None = None
        self._brought = 0

    async def events(self) -> AsyncGenerator[Event, None]:
        place = self._place
        session = await self._client.initialize()
        place.contiguous = session.capabilities.get(WHOLE_LOG, False)
        query = {} if place.since is None else {"since": place.since}
        async with self._client.get(PATH, place.run_id, accept=EVENT_STREAM, query=query) as response:
            _require_stream(response)
            self._response, self._opened_at = response, anyio.current_time()
            async for frame in httpx2.EventSource(response, max_event_size=EVENT_BYTES_MAX):
                if not frame.data:
                    continue
                event = place.take(frame.data)
                self._brought += 1
                yield event
                if place.ended:
                    return

    async def had_nothing_left(self) -> bool:
        """After a clean end without `run.ended`: whether the reader had been at the end of the log already.

        The run may have ended after the stream did, so one more empty stream is asked for before it is
        believed.
        """
        if self._brought:
            return False
        was_over = self._place.was_over
        self._place.was_over = (await self._client.run_get(self._place.run_id)).state in get_args(EndState)
        return was_over

    def alive_until(self, trouble: ClientError) -> float:
        """When the runtime was last heard on a stream that told no event but was fed (heartbeats)."""
        silent = isinstance(trouble, TransportError) and trouble.cause is Cause.silent
        heard_at = anyio.current_time() - (STREAM_SILENCE_S_MAX if silent else 0.0)
        fed = self._response is not None and self._response.num_bytes_downloaded > 0
        return heard_at if fed and heard_at - self._opened_at >= STEADY_S else float("-inf")


def _require_stream(response: httpx2.Response) -> None:
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != EVENT_STREAM:
        raise TransportError(
            f"The runtime answered {kind or 'nothing'} where events belong.", Cause.senseless
        )


def _given_up(run_id: str, patience_s: float, trouble: ClientError) -> TransportError:
    return TransportError(
        f"The events of {run_id} could not be followed for {patience_s:g} s: {trouble}", Cause.senseless
    )
