"""The embedder's commands: `agent`, `run` and `artifact`, each a group that a larger command can take in.

They do over the wire what any embedder could do, and print it for a person or, with `--json`, for a machine.
Below them stands the client; above them `espalier_local.command`, which owns the word `espalier`.
"""

import typer

from espalier_client.commands import agent, artifact, run
from espalier_client.commands.target import LocateFolder, beside_here, target_options


def app_groups(locate_folder: LocateFolder = beside_here) -> dict[str, typer.Typer]:
    """The groups by name. `locate_folder` finds the data folder whose profile names a runtime and a key."""
    groups = {"agent": agent.group(), "run": run.group(), "artifact": artifact.group()}
    for group in groups.values():
        group.callback()(target_options(locate_folder))
    return groups
