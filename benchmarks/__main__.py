"""`make bench`: take the scenarios one after the other and print what was found.

Nothing is asserted here and nothing fails for being slow. A scenario that meets an error leaves a line that
says so, and the others are taken all the same.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import anyio
from benchmarks.machine import describe, load_average
from benchmarks.report import Figure, Report, Taken
from benchmarks.runtime import Runtime, allow_open_files, open_runtime
from benchmarks.scenarios import STAGES, Stage

from espalier_gateway.settings import GatewaySettings
from espalier_run_worker.settings import WorkerSettings

SCENARIO_S_MAX: Final = 240
INTERRUPTED: Final = 130
PREFIX: Final = "ESPALIER_"
SETTINGS: Final = {**WorkerSettings.model_fields, **GatewaySettings.model_fields}
NAMES: Final = tuple(name for stage in STAGES for name in stage.scenarios)


async def bench(report: Report, chosen: set[str]) -> None:
    report.facts.update(describe())
    report.facts["load average before"] = load_average()
    for stage in STAGES:
        if chosen & stage.scenarios.keys():
            report.limits.update(_raised(stage))
            await _take(report, stage, [name for name in stage.scenarios if name in chosen])
    report.facts["load average after"] = load_average()


async def _take(report: Report, stage: Stage, names: list[str]) -> None:
    """Some scenarios on one runtime. What keeps it from starting or stopping is a figure of theirs."""
    starting = Taken(", ".join(names))
    try:
        _tell(f"starting a runtime for {', '.join(names)}")
        opening = open_runtime(stage.env, script=stage.script, postgres_options=stage.postgres_options)
        async with opening as runtime:
            report.facts.update(runtime.facts)
            for name in names:
                report.figures += await _figures(runtime, stage, name)
    except Exception as error:
        starting.failed(error)
    report.figures += starting.figures()


async def _figures(runtime: Runtime, stage: Stage, name: str) -> list[Figure]:
    _tell(name)
    taken = Taken(name)
    try:
        with anyio.move_on_after(SCENARIO_S_MAX) as limit:
            await stage.scenarios[name](runtime, taken)
        if limit.cancelled_caught:
            taken.failed(TimeoutError(f"given up after {SCENARIO_S_MAX} s"))
    except Exception as error:
        taken.failed(error)
    return taken.figures()


def _raised(stage: Stage) -> Iterator[tuple[str, tuple[str, str]]]:
    """What the stage has set, beside the default that an installation would have."""
    for name, value in stage.env.items():
        yield name, (str(SETTINGS[name.removeprefix(PREFIX).lower()].default), value)
    users = ", ".join(stage.scenarios)
    if stage.script:
        yield "ESPALIER_SCRIPT", (str(SETTINGS["script"].default), f"a file, for {users}")
    for name, value in stage.postgres_options.items():
        yield f"Postgres' {name}", ("none", f"{value}, for {users}")


def _forget_settings() -> None:
    """What the caller's shell has set for its own runtime must not change ours unseen."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]


def _tell(what: str) -> None:
    sys.stderr.write(f"bench: {what}\n")
    sys.stderr.flush()


def _chosen(text: str) -> set[str]:
    names = {name.strip() for name in text.split(",") if name.strip()} or set(NAMES)
    if unknown := sorted(names - set(NAMES)):
        raise argparse.ArgumentTypeError(f"no scenario {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--only", type=_chosen, default="", help="scenarios, with commas between them")
    parser.add_argument("--out", default="", help="a file for the tables and the values of every round")
    options = parser.parse_args(arguments)
    _forget_settings()
    report = Report()
    if raised := allow_open_files():
        report.limits["open files of a process"] = raised
    try:
        anyio.run(bench, report, options.only)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.stdout.write(report.tables())
    if options.out:
        Path(options.out).write_text(report.page())


if __name__ == "__main__":
    main()
