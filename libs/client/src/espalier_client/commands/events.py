"""`espalier events RUN`: what a run's log holds by now.

`run follow` is for watching: it stays until the run has ended and tells by its exit code how. This one is
for looking things up: it prints what is there with each event's number, from any place, and ends. AEP has no
call that answers a part of a log, only a stream that stays open, so for a run that still lives a silence is
taken for the end of what is there, and the person is told.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Final

import anyio
import typer

from espalier_client.client import AepClient
from espalier_client.commands.run import RunId, Since, leave
from espalier_client.commands.target import BaseUrl, Key, LocateFolder, ProfileFolder, given
from espalier_client.commands.terminal import AsJson, line, output, perform, say
from espalier_client.errors import Cause, TransportError
from espalier_client.timeline import Timeline
from espalier_protocol.events import LAST_EVENT, Event

QUIET_S: Final = 2.0
"""A stored log arrives without pauses; after this long a silence means that the rest has yet to happen."""

OPEN_S: Final = 10.0
"""How long the first event may take. Every log has one, so that no event means that no stream was opened."""


def command(locate_folder: LocateFolder) -> Callable[..., None]:
    """The command; unlike a group's it takes the options that choose a runtime itself."""

    def events(
        context: typer.Context,
        *,
        run: RunId,
        since: Since = None,
        goes_on: Annotated[bool, typer.Option("--follow", help="Go on until the run has ended.")] = False,
        as_json: AsJson = False,
        base_url: BaseUrl = None,
        key: Key = None,
        data_dir: ProfileFolder = None,
    ) -> None:
        """Print the events of a run by their numbers, and end."""
        context.obj = given(locate_folder, base_url, key, data_dir)
        try:
            last = perform(context, lambda client: _print(client, run, since, as_json, goes_on))
        except KeyboardInterrupt:
            leave(run)
        if last is not None:
            say(f"The run goes on; --since {last} shows what comes after this.")

    return events


async def _print(
    client: AepClient, run_id: str, since: str | None, as_json: bool, goes_on: bool
) -> str | None:
    """The last event's id if the run goes on, so that another reading can begin there."""
    run = await client.run_get(run_id)
    show = line if as_json else Timeline(output(), run.started_at, numbered=True).show
    last, over = since, goes_on or run.ended_at is not None
    if not over:
        async with aclosing(client.follow(run_id, since)) as events:
            within_s = OPEN_S if since is None else QUIET_S
            while (event := await _next(events, within_s)) is not None:
                show(event)
                last, within_s = event.event_id, QUIET_S
                if event.type == LAST_EVENT:
                    return None
        # A silence may also be a runtime that went away, which this call says, or a run that has just ended.
        over = (await client.run_get(run_id)).ended_at is not None
    if not over and last is None:
        sentence = f"No stream of this run was opened within {OPEN_S:g} s; too many may be open."
        raise TransportError(sentence, Cause.silent)
    if not over:
        return last
    async with aclosing(client.follow(run_id, last)) as events:
        async for event in events:
            show(event)
    return None


async def _next(events: AsyncGenerator[Event, None], within_s: float) -> Event | None:
    """None after the last one, or when nothing comes for so long."""
    with anyio.move_on_after(within_s):
        return await anext(events, None)
    return None
