"""Where a command meets the person: one call over the wire, its output, and one sentence when it fails.

Standard output carries results and nothing else, so that they can be piped; words to the person go to
standard error.
"""

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import anyio
import typer
import yaml
from pydantic import BaseModel, ValidationError
from rich.console import Console

from espalier_client.client import AepClient
from espalier_client.commands.listing import Thing, each
from espalier_client.commands.target import Given
from espalier_client.errors import ClientError
from espalier_client.lists import Page
from espalier_client.timeline import printable
from espalier_protocol.strict_json import JsonError, JsonValue, loads

FAILED = 2
DOCUMENT_BYTES_MAX = 8 * 1024 * 1024
STDIN = "-"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]

Value = TypeVar("Value")
Model = TypeVar("Model", bound=BaseModel)


class Unusable(ClientError):
    """What the person gave cannot be used."""


def perform(context: typer.Context, act: Callable[[AepClient], Awaitable[Value]]) -> Value:
    """Run one act against the chosen runtime. Exits with 2 and a sentence if it cannot be done."""

    async def connected() -> Value:
        target = given.target()
        async with AepClient(target.base_urls, target.api_key) as client:
            return await act(client)

    given: Given = context.obj
    try:
        return anyio.run(connected)
    except ClientError as error:
        fail(error)


def fail(error: ClientError) -> NoReturn:
    say(f"espalier: {error}")
    raise typer.Exit(FAILED)


def say(sentence: str) -> None:
    """A sentence to the person, beside the output."""
    typer.echo(printable(sentence), err=True)


def put(value: BaseModel, as_json: bool, plain: str) -> None:
    """The result: the whole object for a machine, the one thing that matters for a person."""
    if as_json:
        line(value)
    else:
        typer.echo(printable(plain))


def line(value: BaseModel) -> None:
    """One object on one line, for a machine."""
    typer.echo(value.model_dump_json())


def show_pages(
    context: typer.Context,
    ask: Callable[[AepClient, dict[str, Any]], Awaitable[Page[Thing]]],
    number: int,
    show: Callable[[Thing], None],
) -> None:
    """Show up to `number` things of a list, and tell the person if there are more.

    `ask` takes the members that choose a page. Things are shown as their page arrives, so that a reader who
    leaves (`... | head`) is noticed before the next page is asked for.
    """

    async def listed(client: AepClient) -> bool:
        return await each(lambda cursor, limit: ask(client, chosen(cursor=cursor, limit=limit)), number, show)

    if perform(context, listed):
        say(f"There are more than these {number}; --limit or --all shows more.")


def chosen(**members: Any) -> dict[str, Any]:
    """The members that were given: one that is absent leaves the choice to the runtime."""
    return {name: value for name, value in members.items() if value is not None}


def output() -> Console:
    """Standard output for people: coloured where it is a terminal and `NO_COLOR` is not set."""
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


def document(given: str) -> dict[str, Any]:
    """An object given as JSON, as the name of a JSON or YAML file, or as `-` for standard input."""
    text = given if given.lstrip().startswith("{") else _read(given)
    try:
        # Only nearly all JSON is YAML (1e3 is a text there), so what looks like JSON is read as JSON.
        value = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as err:
        raise Unusable(f"{_name(given)} is neither JSON nor YAML: {_first_line(err)}.") from err
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise Unusable(f"{_name(given)} holds no object (names with values).")
    return value


def json_value(given: str) -> JsonValue:
    """A value given as JSON, or as a text that does not look like JSON, or as `-` for standard input.

    What begins like an object, a list or a quoted text is meant as one, so that a slip in it is told.
    """
    text = _read(given) if given == STDIN else given
    try:
        return loads(text.encode(errors="surrogateescape"))
    except JsonError as err:
        if text.lstrip().startswith(("{", "[", '"')):
            raise Unusable(f"The value is no JSON: {err.reason}") from err
        return text


def checked(model: type[Model], members: dict[str, Any]) -> Model:
    """The members as parameters; the first thing that does not fit becomes the sentence."""
    try:
        return model.model_validate(members)
    except ValidationError as err:
        first = err.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise Unusable(f"{place} does not fit: {first['msg']}.") from err


def _read(name: str) -> str:
    try:
        if name == STDIN:
            return sys.stdin.read(DOCUMENT_BYTES_MAX)
        with Path(name).open(encoding="utf-8") as file:
            return file.read(DOCUMENT_BYTES_MAX)
    except (OSError, UnicodeDecodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "it is not UTF-8 text"
        raise Unusable(f"{name} cannot be read: {reason}.") from err


def _name(given: str) -> str:
    return "What was given" if given.lstrip().startswith("{") else given


def _first_line(err: Exception) -> str:
    return str(getattr(err, "problem", None) or err).splitlines()[0]
