"""`make conformance`: the command `espalier conformance` against fresh runtimes, one after the other.

Arguments: names of runtimes (full, minimal, independent; all of them without any), then `--` and further
arguments of the command, such as `--only RUN-08` or `--json report.json`.
"""

import os
import sys
from itertools import takewhile

import anyio
from tests.conformance.runtimes import COMMAND, RUNTIMES, chosen


async def held(name: str, more: list[str]) -> int:
    """The exit code of the command."""
    opened, profile = RUNTIMES[name]
    sys.stdout.write(f"\n=== {name}: profile {profile}\n")
    sys.stdout.flush()
    async with opened() as runtime:
        command = [*COMMAND, *runtime.arguments(), "--profile", profile, *more]
        env = {**os.environ, "COLUMNS": os.environ.get("COLUMNS", "110")}
        return (await anyio.run_process(command, check=False, stdout=None, stderr=None, env=env)).returncode


async def main(arguments: list[str]) -> int:
    given = list(takewhile(lambda word: word != "--", arguments))
    names = " ".join(given).replace(",", " ").split()
    more = arguments[len(given) + 1 :]
    codes = [await held(name, more) for name in chosen(names)]
    return max(codes)


if __name__ == "__main__":
    sys.exit(anyio.run(main, sys.argv[1:]))
