"""`espalier artifact ...`: what agents left behind, found, fetched and checked, deleted."""

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from espalier_client.commands.listing import (
    ID_COLUMNS,
    LIMIT_DEFAULT,
    LISTED_MAX,
    TIME_COLUMNS,
    All,
    Limit,
    Listing,
    moment,
)
from espalier_client.commands.terminal import (
    STDIN,
    AsJson,
    Unusable,
    checked,
    chosen,
    line,
    output,
    perform,
    put,
    say,
    show_pages,
)
from espalier_protocol.artifact import Artifact, ArtifactList

SIZE_COLUMNS = len("50000000")

ArtifactId = Annotated[str, typer.Argument(metavar="ARTIFACT", help="The artifact's id.")]


def group() -> typer.Typer:
    app = typer.Typer(help="Artifacts: files that agents leave behind.", no_args_is_help=True)
    app.command("list")(list_)
    for command in (get, delete):
        app.command()(command)
    return app


def list_(
    context: typer.Context,
    *,
    run: Annotated[str | None, typer.Option(help="Only those of this run.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only those of this agent.")] = None,
    subject: Annotated[str | None, typer.Option(help="Only those with this subject's id.")] = None,
    limit: Limit = LIMIT_DEFAULT,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """List artifacts, newest first."""
    wanted = chosen(run_id=run, agent_id=agent, subject_id=subject)
    listing = Listing(
        output(),
        [("artifact", ID_COLUMNS), ("bytes", SIZE_COLUMNS), ("created, UTC", TIME_COLUMNS)],
        "name",
    )

    def show(artifact: Artifact) -> None:
        if as_json:
            line(artifact)
        else:
            size = str(artifact.size_bytes).rjust(SIZE_COLUMNS)
            listing.row(artifact.id, size, moment(artifact.created_at), artifact.name)

    show_pages(
        context,
        lambda client, page: client.artifact_list(checked(ArtifactList, {**wanted, **page})),
        LISTED_MAX if everything else limit,
        show,
    )


def get(
    context: typer.Context,
    *,
    artifact: ArtifactId,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it. [standard output]")
    ] = None,
) -> None:
    """Fetch an artifact's bytes. A file appears whole or not at all."""
    if output is None or str(output) == STDIN:
        perform(context, lambda client: _pour(client.artifact_bytes(artifact), sys.stdout.buffer))
        return
    size = perform(context, lambda client: save(client.artifact_bytes(artifact), output))
    say(f"{output}: {size} bytes")


def delete(context: typer.Context, *, artifact: ArtifactId, as_json: AsJson = False) -> None:
    """Delete an artifact with its bytes."""
    deleted = perform(context, lambda client: client.artifact_delete(artifact))
    put(deleted, as_json, f"{artifact} deleted")


async def save(pieces: AsyncGenerator[bytes, None], path: Path) -> int:
    """Write the pieces beside the path and move them there when all are checked. Returns their size."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with fresh.open("wb") as file:
            size = await _pour(pieces, file)
        fresh.replace(path)
    except OSError as err:
        raise Unusable(f"{path} cannot be written: {err.strerror}.") from err
    finally:
        fresh.unlink(missing_ok=True)
    return size


async def _pour(pieces: AsyncGenerator[bytes, None], file: BinaryIO) -> int:
    size = 0
    async with aclosing(pieces):
        async for piece in pieces:
            size += file.write(piece)
    file.flush()
    return size
