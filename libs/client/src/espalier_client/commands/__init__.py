"""The embedder's commands: groups such as `agent`, `run` and `approvals`, and `events`.

They do over the wire what any embedder could do, and print it for a person or, with `--json`, for a machine.
Below them stands the client; above them `espalier_local.command`, which owns the word `espalier`.
"""

import typer

from espalier_client.commands import (
    agent,
    approvals,
    artifact,
    conformance,
    events,
    memory,
    message,
    providers,
    run,
    subject,
)
from espalier_client.commands.target import LocateFolder, beside_here, target_options


def app_groups(locate_folder: LocateFolder = beside_here) -> typer.Typer:
    """All of them without a name of their own, so that `add_typer` puts them beside the others of a command.

    `locate_folder` finds the data folder whose profile names a runtime and a key.
    """
    together = typer.Typer()
    groups = {"agent": agent, "run": run, "artifact": artifact, "memory": memory, "message": message}
    groups["approvals"] = approvals
    groups["subject"] = subject
    groups["providers"] = providers
    for name, commands in groups.items():
        group = commands.group()
        group.callback()(target_options(locate_folder))
        together.add_typer(group, name=name)
    together.command("events")(events.command(locate_folder))
    together.command("conformance")(conformance.command(locate_folder))
    return together
