"""`espalier run ...`: start a run, look at it, watch it, wake it, cancel it.

Watching is reading: leaving a timeline with Ctrl-C leaves the run alone.
"""

from contextlib import aclosing
from typing import Annotated, NoReturn

import typer

from espalier_client.client import AepClient
from espalier_client.commands.listing import (
    ID_COLUMNS,
    LIMIT_DEFAULT,
    LISTED_MAX,
    TIME_COLUMNS,
    All,
    Limit,
    Listing,
    compact,
    instant,
    moment,
    tell,
)
from espalier_client.commands.terminal import (
    AsJson,
    checked,
    document,
    fail,
    line,
    output,
    perform,
    put,
    say,
    show_pages,
)
from espalier_client.errors import ClientError
from espalier_client.timeline import Timeline
from espalier_protocol.events import LAST_EVENT
from espalier_protocol.run import Run, RunCreate, RunList

NOT_COMPLETE = 1
INTERRUPTED = 130
STATE_COLUMNS = len("cancelled")

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
Since = Annotated[str | None, typer.Option(help="Begin after the event with this id.")]


def group() -> typer.Typer:
    app = typer.Typer(help="Runs: goals that agents pursue.", no_args_is_help=True)
    for command in (start, get, follow, cancel):
        app.command()(command)
    app.command("list")(list_)
    app.command("continue")(wake)
    return app


def start(
    context: typer.Context,
    *,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")],
    goal: Annotated[str, typer.Option(help="What the run is for.")],
    inputs: Annotated[
        str | None, typer.Option(help="What it works on: an object as JSON, or a file with one.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--follow", help="Show what happens until the run has ended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run and print its id, or with --follow its timeline."""
    try:
        params = RunCreate(agent_id=agent, goal=goal, inputs=document(inputs) if inputs else {})
    except ClientError as error:
        fail(error)
    run = perform(context, lambda client: client.run_create(params))
    if watch:
        _watch(context, run.id, None, as_json)
    else:
        put(run, as_json, run.id)


def get(context: typer.Context, *, run: RunId, as_json: AsJson = False) -> None:
    """Show a run: its goal, how it stands, its result."""
    found = perform(context, lambda client: client.run_get(run))
    if as_json:
        line(found)
    else:
        tell(output(), _facts(found))


def list_(
    context: typer.Context,
    *,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")],
    limit: Limit = LIMIT_DEFAULT,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """List the runs of an agent, newest first."""
    listing = Listing(
        output(), [("run", ID_COLUMNS), ("state", STATE_COLUMNS), ("started, UTC", TIME_COLUMNS)], "goal"
    )

    def show(run: Run) -> None:
        if as_json:
            line(run)
        else:
            listing.row(run.id, run.state, moment(run.started_at), run.goal)

    show_pages(
        context,
        lambda client, page: client.run_list(checked(RunList, {"agent_id": agent, **page})),
        LISTED_MAX if everything else limit,
        show,
    )


def follow(context: typer.Context, *, run: RunId, since: Since = None, as_json: AsJson = False) -> None:
    """Show what happened and happens in a run until it has ended. Exits with 0 if it is complete."""
    _watch(context, run, since, as_json)


def cancel(context: typer.Context, *, run: RunId, as_json: AsJson = False) -> None:
    """Cancel a run."""
    cancelled = perform(context, lambda client: client.run_cancel(run))
    put(cancelled, as_json, _standing(cancelled))


def wake(context: typer.Context, *, run: RunId, as_json: AsJson = False) -> None:
    """Wake a sleeping run now."""
    woken = perform(context, lambda client: client.run_continue(run))
    put(woken, as_json, _standing(woken))


def _standing(run: Run) -> str:
    under_way = run.cancel_requested_at is not None and run.ended_at is None
    return f"{run.id} {run.state}{', cancel under way' if under_way else ''}"


def _facts(run: Run) -> list[tuple[str, str]]:
    waits = f", waits for {run.wait_reason}" if run.wait_reason else ""
    return [
        ("run", run.id),
        ("agent", run.agent_id),
        ("state", f"{run.state}{waits}"),
        ("wakes", instant(run.next_wake_at)),
        ("cancel asked", instant(run.cancel_requested_at)),
        ("started", instant(run.started_at)),
        ("ended", instant(run.ended_at)),
        ("cycles", str(run.cycle_count)),
        ("subjects", "\n".join(run.subject_ids)),
        ("inputs", compact(run.metadata)),
        ("goal", run.goal),
        ("result", compact(run.result)),
    ]


def _watch(context: typer.Context, run_id: str, since: str | None, as_json: bool) -> None:
    try:
        final_state = perform(context, lambda client: _show(client, run_id, since, as_json))
    except KeyboardInterrupt:
        leave(run_id)
    if final_state not in ("complete", None):
        raise typer.Exit(NOT_COMPLETE)


def leave(run_id: str) -> NoReturn:
    """A person who stops reading has not stopped the run."""
    say(f"The run goes on; see it with `espalier run follow {run_id}`, end it with `run cancel`.")
    raise typer.Exit(INTERRUPTED) from None


async def _show(client: AepClient, run_id: str, since: str | None, as_json: bool) -> str | None:
    """The state in which the run ended; None if there was nothing left to show."""
    started_at = (await client.run_get(run_id)).started_at if since else None
    show, final_state = line if as_json else Timeline(output(), started_at).show, None
    async with aclosing(client.follow(run_id, since)) as events:
        async for event in events:
            show(event)
            if event.type == LAST_EVENT:
                final_state = event.payload.get("final_state")
    return final_state
