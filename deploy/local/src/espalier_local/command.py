"""The `espalier` command: what an operator does, and the embedder's commands beside it.

The only place where errors become words on a terminal. Each command builds its options and hands
over; nothing is decided here. A command imports what it runs when it runs: the database's libraries take
seconds to load, and `espalier run` needs none of them.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import anyio
import typer

from espalier_client.commands import app_groups
from espalier_client.commands.terminal import AsJson
from espalier_client.errors import ClientError
from espalier_local.console import harmless
from espalier_local.errors import LocalError
from espalier_local.folder import locate_folder, running_servers
from espalier_local.options import WORKERS_MAX, RuntimeOptions
from espalier_protocol.access import SCOPES

USAGE_ERROR = 2
INTERRUPTED = 130


class Switch(StrEnum):
    on = "on"
    off = "off"


DataDir = Annotated[
    Path | None,
    typer.Option(
        envvar="ESPALIER_DATA_DIR",
        readable=False,  # the folder's own complaint is one sentence
        help="Where database and keys are kept. [./.espalier]",
    ),
]
PostgresUrl = Annotated[
    str | None, typer.Option(envvar="ESPALIER_POSTGRES_URL", help="Use a Postgres that already runs.")
]
RedisUrl = Annotated[
    str | None, typer.Option(envvar="ESPALIER_REDIS_URL", help="Use a Redis that already runs.")
]

app = typer.Typer(
    help="Run and use Espalier, a runtime for long-lived agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
keys = typer.Typer(help="Keys that embedders call with.", no_args_is_help=True)
app.add_typer(keys, name="keys")
app.add_typer(app_groups(locate_folder))


@app.command()
def up(
    *,
    host: Annotated[str, typer.Option(envvar="ESPALIER_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(envvar="ESPALIER_PORT", min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    ] = 8787,
    workers: Annotated[int, typer.Option(min=1, max=WORKERS_MAX, help="How many workers.")] = 1,
    data_dir: DataDir = None,
    postgres_url: PostgresUrl = None,
    redis_url: RedisUrl = None,
    script: Annotated[
        Path | None,
        typer.Option(
            envvar="ESPALIER_SCRIPT", exists=True, dir_okay=False, help="Plan of the scripted model."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(envvar="ESPALIER_MODEL", help="A real model, at OPENAI_BASE_URL with OPENAI_API_KEY."),
    ] = None,
    mcp_servers: Annotated[
        Path | None,
        typer.Option(
            envvar="ESPALIER_MCP_SERVERS", exists=True, dir_okay=False, help="JSON list of MCP servers."
        ),
    ] = None,
    scripted_plans: Annotated[
        Switch,
        typer.Option(envvar="ESPALIER_MODELS_SCRIPTED", help="Whether agents may bring plans of their own."),
    ] = Switch.off,
) -> None:
    """Start everything on this machine: Postgres, Redis, gateway, tool broker, workers. Ctrl-C stops it."""

    from espalier_local.up import run_up

    options = RuntimeOptions(
        host=host,
        port=port,
        workers=workers,
        data_dir=data_dir,
        postgres_url=postgres_url,
        redis_url=redis_url,
        script=script,
        model=model,
        mcp_servers=mcp_servers,
        scripted_plans=scripted_plans is Switch.on,
    )
    anyio.run(run_up, options)


@app.command()
def migrate(*, data_dir: DataDir = None, postgres_url: PostgresUrl = None) -> None:
    """Bring the database's schema up to date (`up` does it by itself)."""

    from espalier_local.schema import bring_up_to_date

    anyio.run(bring_up_to_date, _database(data_dir, postgres_url))
    typer.echo("The schema is up to date.")


@keys.command("create")
def create(
    *,
    owner: Annotated[str, typer.Option(help="Whose key it is; a new name makes a new owner.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(help=f"Default: all. Repeatable; one of: {', '.join(SCOPES)}."),
    ] = None,
    data_dir: DataDir = None,
    postgres_url: PostgresUrl = None,
) -> None:
    """Make a key and print it, and beside it its id. The key is shown this once and stored only as a hash."""

    from espalier_local.first_key import mint_key
    from espalier_local.keys_shown import show_minted

    unknown = sorted(set(scope or ()) - set(SCOPES))
    if unknown:
        raise LocalError(f"There is no scope {unknown[0]!r}; the scopes are {', '.join(SCOPES)}.")
    show_minted(anyio.run(mint_key, _database(data_dir, postgres_url), owner, scope or SCOPES))


@keys.command("list")
def list_(
    *,
    owner: Annotated[str | None, typer.Option(help="Only this owner's keys.")] = None,
    as_json: AsJson = False,
    data_dir: DataDir = None,
    postgres_url: PostgresUrl = None,
) -> None:
    """List keys by owner, revoked ones too. Neither a key nor its hash is shown."""

    from espalier_local.first_key import known_keys
    from espalier_local.keys_shown import show_keys

    show_keys(anyio.run(known_keys, _database(data_dir, postgres_url), owner), owner, as_json)


@keys.command()
def revoke(
    *,
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="The key's id, as `keys list` shows it.")],
    data_dir: DataDir = None,
    postgres_url: PostgresUrl = None,
) -> None:
    """Revoke a key, for good. Runs that were started with it go on.

    A gateway that has just seen it may believe it for 5 seconds more (ESPALIER_CACHE_S).

    Event streams that are open end when their key is looked at again, every 30 seconds.
    """

    from espalier_local.first_key import revoke_key
    from espalier_local.keys_shown import show_revoked

    revoked = anyio.run(revoke_key, _database(data_dir, postgres_url), key_id)
    show_revoked(key_id, revoked, locate_folder(data_dir))


@app.command()
def demo(
    repo: Annotated[Path, typer.Option(help="The git repository whose history is read.")] = Path(),
    output: Annotated[
        Path | None, typer.Option(help="Where the notes go. [demo/release-notes.md in the data folder]")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="ESPALIER_DATA_DIR",
            readable=False,
            help="Data folder that the notes go to by default. [./.espalier]",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="ESPALIER_MODEL",
            help="A real model for the agent, at OPENAI_BASE_URL with OPENAI_API_KEY. [a script]",
        ),
    ] = None,
) -> None:
    """Start a runtime, let an agent write release notes of a repository, print where they are, stop."""
    from espalier_local.demo import demo as run_demo

    run_demo(repo, output, data_dir, model)


def main() -> None:
    """The console script: one line on stderr and exit code 2 for everything a person can put right."""
    try:
        app()
    except (LocalError, ClientError) as error:
        typer.echo(f"espalier: {harmless(str(error))}", err=True)
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _database(data_dir: Path | None, postgres_url: str | None) -> str:
    return postgres_url or running_servers(locate_folder(data_dir))["postgres_url"]
