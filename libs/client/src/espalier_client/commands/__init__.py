"""The embedder's commands: the groups `agent`, `run`, `artifact`, `memory` and `message`, and `events`.

They do over the wire what any embedder could do, and print it for a person or, with `--json`, for a machine.
Below them stands the client; above them `espalier_local.command`, which owns the word `espalier`.
"""

import typer

from espalier_client.commands import agent, artifact, events, memory, message, run
from espalier_client.commands.target import LocateFolder, beside_here, target_options


def app_groups(locate_folder: LocateFolder = beside_here) -> typer.Typer:
    """All of them without a name of their own, so that `add_typer` puts them beside the others of a command.

    `locate_folder` finds the data folder whose profile names a runtime and a key.
    """
    together = typer.Typer()
    groups = {"agent": agent, "run": run, "artifact": artifact, "memory": memory, "message": message}
    for name, subject in groups.items():
        group = subject.group()
        group.callback()(target_options(locate_folder))
        together.add_typer(group, name=name)
    together.command("events")(events.command(locate_folder))
    return together
