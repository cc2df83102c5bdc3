"""Runtimes for the kit to try: ours whole, ours with its capabilities off, and the one that owes us nothing.

Each is started fresh, in a folder that goes with it, and comes with the keys that the kit wants.
"""

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import anyio
import httpx2

from espalier_client.conformance.expected import expected
from espalier_client.conformance.ground import scope_sets
from espalier_local.children import guarded
from espalier_local.folder import throwaway_folder
from espalier_local.keys import create_key
from espalier_local.options import RuntimeOptions
from espalier_local.ports import free_port
from espalier_local.runtime import local_runtime
from espalier_store.pool import PostgresSettings, open_pool, transaction

COMMAND: Final = (
    sys.executable,
    "-c",
    "from espalier_local.command import main; main()",
    "conformance",
)
ROOT: Final = Path(__file__).parents[2]
READY_S: Final = 20.0
POLL_S: Final = 0.05
SECOND: Final = "kit-second"
FAST: Final = {"ESPALIER_RPC_RATE": "2000", "ESPALIER_RPC_BURST": "4000"}
"""The kit waits when it is told to; raised so that it need not."""


@dataclass(frozen=True)
class UnderTest:
    """A runtime that answers. `limited` are keys by the scopes that they hold."""

    base_url: str
    key: str = field(repr=False)
    second_key: str = field(repr=False)
    limited: Mapping[str, frozenset[str]] = field(repr=False)

    def arguments(self) -> list[str]:
        limited = [f"{','.join(sorted(scopes))}={key}" for key, scopes in self.limited.items()]
        return [
            *("--base-url", self.base_url, "--key", self.key, "--second-key", self.second_key),
            *(word for each in limited for word in ("--limited-key", each)),
        ]


@asynccontextmanager
async def espalier(env: Mapping[str, str] | None = None) -> AsyncIterator[UnderTest]:
    """Our own, as `espalier up` starts it, where plans may come over the wire."""
    with throwaway_folder() as folder:
        options = RuntimeOptions(port=0, data_dir=folder / "data", env=env or {})
        async with _started(options) as runtime:
            yield runtime


@asynccontextmanager
async def on_servers(postgres_url: str, redis_url: str, env: Mapping[str, str]) -> AsyncIterator[UnderTest]:
    """Our own, on servers that run already."""
    with throwaway_folder() as folder:
        options = RuntimeOptions(port=0, data_dir=folder / "data", env=env)
        async with _started(replace(options, postgres_url=postgres_url, redis_url=redis_url)) as runtime:
            yield runtime


@asynccontextmanager
async def _started(options: RuntimeOptions) -> AsyncIterator[UnderTest]:
    options = replace(options, scripted_plans=True, restart=False, env={**FAST, **options.env})
    async with (
        local_runtime(options) as local,
        open_pool(PostgresSettings(postgres_url=local.servers.postgres_url)) as pool,
    ):
        async with transaction(pool) as connection:
            second = await create_key(connection, SECOND, expected().scopes)
            sets = scope_sets()
            limited = {await create_key(connection, SECOND, sorted(scopes)): scopes for scopes in sets}
        yield UnderTest(local.base_url, local.api_key, second, limited)


def espalier_without_capabilities() -> AbstractAsyncContextManager[UnderTest]:
    """Ours, as an operator runs it who wants agents that execute tools and nothing more."""
    return espalier({"ESPALIER_CAPABILITIES": "streaming.sse"})


@asynccontextmanager
async def independent() -> AsyncIterator[UnderTest]:
    """The minimal runtime beside this folder, which imports nothing of Espalier."""
    names = [f"key-limited-{number}" for number in range(len(scope_sets()))]
    limited = dict(zip(names, scope_sets(), strict=True))
    keys = {
        "key-first": ["first", expected().scopes],
        "key-second": ["second", expected().scopes],
        **{name: ["second", sorted(scopes)] for name, scopes in limited.items()},
    }
    port = free_port()
    command = guarded([sys.executable, "-m", "tests.minimal_runtime", str(port), json.dumps(keys)])
    base_url = f"http://127.0.0.1:{port}"
    async with await anyio.open_process(command, cwd=ROOT, stdout=None, stderr=None) as process:
        try:
            await _until_it_answers(base_url)
            yield UnderTest(base_url, "key-first", "key-second", limited)
        finally:
            process.kill()


async def _until_it_answers(base_url: str) -> None:
    async with httpx2.AsyncClient(base_url=base_url, trust_env=False) as http:
        with anyio.fail_after(READY_S):
            while True:  # bounded by the time limit
                try:
                    await http.get("/")
                    return
                except httpx2.TransportError:
                    await anyio.sleep(POLL_S)


RUNTIMES: Final[Mapping[str, tuple[Callable[[], AbstractAsyncContextManager[UnderTest]], str]]] = {
    "full": (espalier, "full"),
    "minimal": (espalier_without_capabilities, "minimal"),
    "independent": (independent, "minimal"),
}
"""What `make conformance` tries, each with the profile that it is held to."""


def chosen(names: Iterable[str]) -> list[str]:
    """Raises SystemExit for a name that there is not."""
    if unknown := set(names) - RUNTIMES.keys():
        raise SystemExit(f"There is no runtime {min(unknown)!r} here; there are {', '.join(RUNTIMES)}.")
    return list(names) or list(RUNTIMES)
