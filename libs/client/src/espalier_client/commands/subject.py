"""`espalier subject ...`: what is held about a person: read, taken out, erased, and taken in elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from espalier_client.commands.listing import tell
from espalier_client.commands.terminal import AsJson, Unusable, fail, line, output, perform, put, say
from espalier_protocol.subject import ErasureManifest, ErasureMode, SubjectCounts, SubjectRecords

SubjectId = Annotated[str, typer.Argument(metavar="SUBJECT", help="The subject's id.")]


def group() -> typer.Typer:
    app = typer.Typer(help="Data subjects: what is held about a person.", no_args_is_help=True)
    for command in (read, export, erase):
        app.command()(command)
    app.command("import")(import_)
    return app


def read(context: typer.Context, *, subject: SubjectId, as_json: AsJson = False) -> None:
    """Show how many records there are of a subject, or with --json the newest of them whole."""
    found = perform(context, lambda client: client.subject_read(subject))
    if as_json:
        line(found)
    else:
        tell(output(), _facts(found))


def export(
    context: typer.Context,
    *,
    subject: SubjectId,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to make.")],
) -> None:
    """Write everything of a subject into a folder: JSON lines, and the artifacts as files."""
    counts = perform(context, lambda client: client.subject_export_to(subject, output))
    say(f"{output}: {_counted(SubjectCounts(**counts))}")


def erase(
    context: typer.Context,
    *,
    subject: SubjectId,
    mode: Annotated[
        ErasureMode, typer.Option(help="redact: leave husks without words. hard_delete: leave no record.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Erase a subject for good: its runs are stopped, and nothing is written about it any more."""
    if not yes and not typer.confirm(f"Erase everything of {subject}, for good?", err=True):
        fail(Unusable("Nothing was erased."))
    done = perform(context, lambda client: client.subject_erase(subject, mode))
    put(done, as_json, _summary(done))


def import_(
    context: typer.Context,
    *,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A bundle that `subject export` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Take a subject's bundle in, all of it or nothing. Runs arrive ended; nothing is carried out."""
    done = perform(context, lambda client: client.subject_import(folder))
    put(done, as_json, f"{done.subject_id}: {_counted(done.counts)}")


def _facts(found: SubjectRecords) -> list[tuple[str, str]]:
    return [
        ("subject", found.subject_id),
        ("legal hold", "yes" if found.legal_hold else ""),
        *((kind.replace("_", " "), str(number)) for kind, number in found.counts.model_dump().items()),
    ]


def _counted(counts: SubjectCounts) -> str:
    told = [f"{number} {kind.replace('_', ' ')}" for kind, number in counts.model_dump().items() if number]
    return ", ".join(told) or "nothing"


def _summary(done: ErasureManifest) -> str:
    acts = ("deleted", "redacted", "stripped", "retained")
    told = [f"{len(getattr(done, act))} {act}" for act in acts if getattr(done, act)]
    left_out = [f"{done.entries_left_out} not listed"] if done.entries_left_out else []
    return f"{done.subject_id}: {', '.join(told + left_out) or 'nothing was left to erase'}"
