"""`espalier providers ...`: the models that an owner brings.

A key is asked for without showing it, or comes from the environment or from standard input, because everybody
on the machine can read a command line.
"""

import sys
from typing import Annotated

import typer
from pydantic import SecretStr

from espalier_client.commands.listing import ID_COLUMNS, TIME_COLUMNS, Listing, instant, moment, tell
from espalier_client.commands.terminal import (
    AsJson,
    Unusable,
    checked,
    chosen,
    fail,
    line,
    output,
    perform,
    put,
)
from espalier_client.errors import ClientError
from espalier_protocol.provider import KEY_CHARS_MAX, Provider, ProviderCreate

KEY_VARIABLE = "ESPALIER_PROVIDER_KEY"
KIND_COLUMNS = len("openai_compat")
TEST_COLUMNS = len("upstream_error")
COLUMNS = [
    ("provider", ID_COLUMNS),
    ("created, UTC", TIME_COLUMNS),
    ("kind", KIND_COLUMNS),
    ("last test", TEST_COLUMNS),
]
NOT_OK = 1

ProviderId = Annotated[str, typer.Argument(metavar="PROVIDER", help="The provider's id.")]

ProviderKey = Annotated[
    str | None,
    typer.Option(
        "--provider-key",
        envvar=KEY_VARIABLE,
        hidden=True,  # the variable is meant; others see a command line
    ),
]


def group() -> typer.Typer:
    app = typer.Typer(help="Model providers: agents may think with a model of yours.", no_args_is_help=True)
    for command in (add, show, remove):
        app.command()(command)
    app.command("test")(try_)
    app.command("list")(list_)
    return app


def list_(context: typer.Context, *, as_json: AsJson = False) -> None:
    """List the providers, newest first."""
    listing = Listing(output(), COLUMNS, "name")
    for provider in perform(context, lambda client: client.provider_list()).providers:
        if as_json:
            line(provider)
        else:
            created, status = moment(provider.created_at), provider.last_test_status or ""
            listing.row(provider.id, created, provider.kind, status, provider.name)


def add(
    context: typer.Context,
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What you call it.")],
    base_url: Annotated[
        str | None,
        typer.Option(help="Where it is, as in https://api.example.com/v1."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model that agents get unless they name one.")] = None,
    kind: Annotated[str, typer.Option(help="openai_compat, anthropic or gemini.")] = "openai_compat",
    key: ProviderKey = None,
    as_json: AsJson = False,
) -> None:
    """Bring a provider and print its id.

    Its key is asked for, or read from ESPALIER_PROVIDER_KEY or from standard input.
    """
    try:
        members = {"name": name, "kind": kind, "api_key": SecretStr(key or _asked_for())}
        params = checked(ProviderCreate, {**members, **chosen(base_url=base_url, default_model=model)})
    except ClientError as error:
        fail(error)
    provider = perform(context, lambda client: client.provider_create(params))
    put(provider, as_json, provider.id)


def show(context: typer.Context, *, provider: ProviderId, as_json: AsJson = False) -> None:
    """Show a provider, without its key."""
    found = perform(context, lambda client: client.provider_get(provider))
    if as_json:
        line(found)
    else:
        tell(output(), _facts(found))


def try_(context: typer.Context, *, provider: ProviderId, as_json: AsJson = False) -> None:
    """Let the runtime ask the provider one small thing. Exits with 1 if nothing good came of it."""
    result = perform(context, lambda client: client.provider_test(provider))
    put(result, as_json, "ok" if result.ok else f"{result.kind}: {result.message}")
    if not result.ok:
        raise typer.Exit(NOT_OK)


def remove(context: typer.Context, *, provider: ProviderId) -> None:
    """Delete a provider and its key. One that agents are bound to stays."""
    perform(context, lambda client: client.provider_delete(provider))


def _facts(provider: Provider) -> list[tuple[str, str]]:
    return [
        ("provider", provider.id),
        ("name", provider.name),
        ("kind", provider.kind),
        ("base URL", provider.base_url or ""),
        ("model", provider.default_model or ""),
        ("key", provider.api_key_hint),
        ("last test", " ".join(filter(None, (provider.last_test_status, instant(provider.last_tested_at))))),
        ("created", instant(provider.created_at)),
        ("updated", instant(provider.updated_at)),
    ]


def _asked_for() -> str:
    """Raises Unusable without one."""
    if sys.stdin.isatty():
        return str(typer.prompt("Key of the provider", hide_input=True, err=True)).strip()
    key = sys.stdin.readline(KEY_CHARS_MAX + 2).strip()
    if not key:
        raise Unusable(f"No key was given: set {KEY_VARIABLE}, or write the key to standard input.")
    return key
