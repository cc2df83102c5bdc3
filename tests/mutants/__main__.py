"""`make mutants`: remove one guard after the other from a copy, and demand that the kit finds it out.

A mutant is killed if it boots, passes the published first program, and fails the requirements that its patch
names. Whatever else happens (it does not start, the requirement passes or is skipped, the patch does not
apply) fails the whole. Arguments: words that the name of a guard has; without any all are taken.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from uuid import uuid4

import anyio
import anyio.to_thread
import asyncpg
from tests.conformance.runtimes import on_servers
from tests.mutants.patches import DoesNotApply, Patch, all_patches, copy_sources, module_path

from espalier_client.conformance.expected import requirements
from espalier_client.conformance.ground import Keys, lay
from espalier_client.conformance.runner import chosen, conduct
from espalier_client.conformance.verdicts import Verdict
from espalier_local.errors import LocalError
from espalier_local.folder import throwaway_folder
from espalier_local.servers import LocalServers, local_servers

SMOKE: Final = "SMOKE-01"
MUTANT_S_MAX: Final = 180.0
JOBS: Final = 2


async def mutate(servers: LocalServers, patch: Patch, tree: Path) -> str:
    """Why the mutant lives; empty if it was killed. `tree` is a copy for this mutant alone."""
    try:
        patch.apply(tree)
    except (DoesNotApply, OSError) as error:
        return f"the patch does not apply: {error}"
    try:
        with anyio.fail_after(MUTANT_S_MAX):
            verdicts = await held(servers, tree, (SMOKE, *patch.fails))
    except LocalError as error:
        return f"the mutant does not start: {error}"
    except TimeoutError:
        return f"not done within {MUTANT_S_MAX:g} s"
    return judged(patch, {verdict.requirement.id: verdict for verdict in verdicts})


def judged(patch: Patch, verdicts: dict[str, Verdict]) -> str:
    """Why a mutant with these verdicts lives."""
    if (smoke := verdicts[SMOKE]).outcome != "passed":
        return f"the mutant fails the first program: {smoke.reason}"
    for wanted in patch.fails:
        if (verdict := verdicts[wanted]).outcome != "failed":
            return f"{wanted} should fail and {verdict.outcome}. {verdict.reason}"
    return ""


async def held(servers: LocalServers, tree: Path, wanted: tuple[str, ...]) -> list[Verdict]:
    """What the kit finds of a runtime that runs these sources."""
    name = f"mutant_{uuid4().hex}"
    async with database(servers, name) as postgres_url:
        env = {"PYTHONPATH": module_path(tree), "ESPALIER_REDIS_PREFIX": name}
        async with on_servers(postgres_url, servers.redis_url, env) as runtime:
            keys = Keys(runtime.key, runtime.second_key, runtime.limited)
            async with lay(runtime.base_url, keys) as ground:
                return await conduct(ground, chosen(requirements(), wanted), profile="full", jobs=JOBS)


@asynccontextmanager
async def database(servers: LocalServers, name: str) -> AsyncIterator[str]:
    """A database of its own on the servers that all mutants share."""
    await _execute(servers.postgres_url, f'create database "{name}"')
    try:
        yield f"{servers.postgres_url.rpartition('/')[0]}/{name}"
    finally:
        with anyio.CancelScope(shield=True):
            await _execute(servers.postgres_url, f'drop database "{name}" with (force)')


async def _execute(postgres_url: str, statement: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(parts: list[str]) -> int:
    """The number of mutants that live."""
    words = " ".join(parts).split()
    patches = [patch for patch in all_patches() if all(word in patch.guard for word in words)]
    alive = 0
    with throwaway_folder() as folder:
        async with local_servers(folder / "servers") as servers:
            for patch in patches:
                with TemporaryDirectory(dir=folder) as tree:
                    await anyio.to_thread.run_sync(copy_sources, Path(tree))
                    why = await mutate(servers, patch, Path(tree))
                alive += bool(why)
                tell(f"{'ALIVE ' if why else 'killed'} {patch.guard} ({' '.join(patch.fails)}) {why}")
    tell(f"{len(patches) - alive} of {len(patches)} mutants were killed.")
    return alive if patches else 1


if __name__ == "__main__":
    sys.exit(min(anyio.run(main, sys.argv[1:]), 1))
