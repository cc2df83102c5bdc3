"""Runs followed over one connection: `run.subscribe`, its events as notifications, and its end.

A subscription is counted, checked and cut as a stream of server-sent events is; the difference is the frame.
It begins to speak when the answer that named it has been sent, and its events go out in order, each waiting
for the reader to take what was sent before. Not here: the connection (`ws`, above). Below: `following`.
"""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from uuid import UUID

import anyio
from anyio.abc import TaskGroup

from espalier_gateway.auth import CallContext, Gatekeeper
from espalier_gateway.errors import rate_limited
from espalier_gateway.following import (
    OWN_EVENTS,
    Place,
    Reading,
    Since,
    opened_log,
    since,
    still_allowed,
)
from espalier_gateway.stream_limits import RETRY_AFTER_MS, OpenStreams
from espalier_gateway.tails import Tails
from espalier_protocol.jsonrpc import notification_body
from espalier_protocol.strict_json import JsonValue, dumps
from espalier_store.keys import Caller
from espalier_store.pool import Pool
from espalier_store.sessions import AepSession

SUBSCRIPTIONS_MAX: Final = 32
"""Of one connection. Each may buffer as much as a follower may (`tails`), twice."""

EVENT: Final = "run.event"
ENDED: Final = "run.subscription_ended"
OVER: Final = "ended"
"""The reason when the run's log came to its end; any other one lets the caller subscribe again."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What subscriptions of a process read from and are counted by."""

    tails: Tails
    pool: Pool
    streams: OpenStreams
    gatekeeper: Gatekeeper


@dataclass(slots=True)
class Subscription:
    """One followed run. `stopped` is set when no more of it may be sent."""

    id: str
    reading: Reading
    context: CallContext
    room: ExitStack
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    stopped: bool = False

    def stop(self) -> None:
        self.stopped = True
        self.scope.cancel()


Say = Callable[[bytes, Subscription], Awaitable[None]]
"""Sends one message, unless the subscription was stopped meanwhile. Waits while the reader takes nothing."""


class Subscriptions:
    """Those of one connection. Closed (`close`) when the connection is over."""

    def __init__(self, sources: Sources, say: Say) -> None:
        self.sources = sources
        self._say = say
        self._open: dict[str, Subscription] = {}
        self._opened = 0

    def __len__(self) -> int:
        return len(self._open)

    def require_room(self, caller: Caller, run_id: UUID) -> None:
        """Raises WireError."""
        if len(self._open) >= SUBSCRIPTIONS_MAX:
            message = (
                f"This connection has {SUBSCRIPTIONS_MAX} subscriptions, and no more are allowed; end one."
            )
            raise rate_limited("subscriptions_max", message, RETRY_AFTER_MS)
        self.sources.streams.require_room(caller, run_id)

    def add(self, caller: Caller, run_id: UUID, reading: Reading, context: CallContext) -> Subscription:
        """Counted from now on. Nothing is awaited, so that a cancellation cannot leave it counted."""
        self.require_room(caller, run_id)
        room = self.sources.streams.open(caller, run_id)
        self._opened += 1
        added = Subscription(f"s{self._opened}", reading, context, room)
        self._open[added.id] = added
        return added

    def end(self, subscription_id: str) -> bool:
        """False if there is none. Nothing of it is sent any more."""
        ended = self._open.get(subscription_id)
        if ended is not None:
            self._forget(ended)
            ended.stop()
        return ended is not None

    def close(self) -> None:
        for each in tuple(self._open.values()):
            self.end(each.id)

    async def speak(self, subscription: Subscription) -> None:
        """Send its events until it is over, and why."""
        with subscription.scope:
            try:
                why = await self._send_events(subscription)
            finally:
                self._forget(subscription)
            params: JsonValue = {"subscription_id": subscription.id, "reason": why.replace(" ", "_")}
            await self._say(notification_body(ENDED, dumps(params)), subscription)

    async def _send_events(self, subscription: Subscription) -> str:
        reading, told_id = subscription.reading, dumps(subscription.id)
        allowed = partial(still_allowed, self.sources.gatekeeper, subscription.context)
        async with aclosing(reading.batches(allowed)) as batches:
            async for lines in batches:
                for line in reading.place.visible(lines):
                    params = b'{"subscription_id":%b,"event":%b}' % (told_id, line.data.encode())
                    await self._say(notification_body(EVENT, params), subscription)
                reading.clock.said()  # the connection has its own signs of life
        return reading.why or OVER

    def _forget(self, subscription: Subscription) -> None:
        self._open.pop(subscription.id, None)
        subscription.room.close()


@dataclass(slots=True)
class Listener:
    """Where the events of what one message subscribes to will go, and which session that message began."""

    subscriptions: Subscriptions
    context: CallContext
    session_id: str | None = None
    begun: list[Subscription] = field(default_factory=list)

    async def subscribe(
        self, caller: Caller, session: AepSession, run_id: UUID, since_text: str | None
    ) -> str:
        """The id of a new subscription. It is silent until `start`.

        Room is looked for before the log is read, and again when the subscription is counted.
        """
        mine, sources = self.subscriptions, self.subscriptions.sources
        mine.require_room(caller, run_id)
        place = Since(0, "since") if since_text is None else since(since_text, "since")
        log = await opened_log(sources.pool, caller.owner_id, run_id, place.seq)
        place.require_within(log)
        reading = Reading(
            sources.tails,
            sources.pool,
            caller.owner_id,
            run_id,
            log,
            place=Place(place.seq, own_events=OWN_EVENTS in session.capabilities),
        )
        added = mine.add(caller, run_id, reading, self.context)
        self.begun.append(added)
        return added.id

    def start(self, group: TaskGroup) -> None:
        """Let speak what was begun: its answer has been sent."""
        for subscription in self.begun:
            if not subscription.stopped:
                group.start_soon(self.subscriptions.speak, subscription)
        self.begun.clear()
