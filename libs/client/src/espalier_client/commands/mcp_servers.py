"""The MCP servers of `espalier agent create`, from flags. A bearer is never an argument, which every process
of the machine could read: a flag names the variable of the environment that holds it.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from espalier_client.commands.terminal import Unusable

Servers = Annotated[
    list[str] | None,
    typer.Option(
        "--mcp-server", metavar="[NAME=]URL", help="An MCP server to attach; several times for more."
    ),
]
Bearers = Annotated[
    list[str] | None,
    typer.Option(
        "--mcp-bearer-env",
        metavar="NAME=VARIABLE",
        help="The variable of the environment with the bearer of the server NAME.",
    ),
]


def servers_given(
    servers: Sequence[str] | None, bearers: Sequence[str] | None
) -> list[dict[str, Any]] | None:
    """As `external_mcp_servers`; None if there are none. Raises Unusable."""
    given = [_server(text) for text in servers or ()]
    by_name = {server["name"]: server for server in given if "name" in server}
    for text in bearers or ():
        name, _, variable = text.partition("=")
        if name not in by_name:
            raise Unusable(f"--mcp-bearer-env names {name!r}, but no --mcp-server has that name.")
        bearer = os.environ.get(variable, "")
        if not bearer:
            raise Unusable(f"The variable {variable!r} of --mcp-bearer-env is not set.")
        by_name[name]["auth"] = {"bearer": bearer}
    return given or None


def _server(text: str) -> dict[str, Any]:
    name, equals, url = text.partition("=")
    return {"name": name, "url": url} if equals and "://" not in name else {"url": text}
