"""`espalier artifact ...`: what agents left behind, fetched and checked."""

import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from espalier_client.commands.terminal import STDIN, Unusable, perform, say


def group() -> typer.Typer:
    app = typer.Typer(help="Artifacts: files that agents leave behind.", no_args_is_help=True)
    app.command("get")(get)
    return app


def get(
    context: typer.Context,
    *,
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="The artifact's id.")],
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
