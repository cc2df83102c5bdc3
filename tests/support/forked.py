"""Services of the product as real processes that start in a fraction of a second.

A fork server imports the product once and forks a process for each start: what runs is the service's own
`main`, with its own event loop and connections, and it can be stopped and killed like any other process.
`python -m` is left to the tests of the launcher.
"""

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

SERVICES = {
    "worker": "espalier_run_worker.main",
    "gateway": "espalier_gateway.__main__",
    "broker": "espalier_mcp_broker.__main__",
}
STOP_WAIT_S = 10

_context = multiprocessing.get_context("forkserver")
PRELOADED = [*SERVICES.values(), "dying"]
_context.set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Import these once too, where a service would load them late. Before the first start of the process."""
    _context.set_forkserver_preload([*PRELOADED, *modules])


@dataclass
class Service:
    """A running process, and the file that holds its log."""

    process: BaseProcess
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.join(STOP_WAIT_S)

    def stop(self) -> int | None:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        self.process.join(STOP_WAIT_S)
        return self.process.exitcode

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It stands still and all its connections stay open, like a process on a machine that swaps."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if not self.has_died():
                os.kill(self.process.pid, signal.SIGCONT)

    def has_died(self) -> bool:
        return not self.process.is_alive()

    def output(self) -> str:
        return self.log.read_text()


def start_service(
    service: str, environment: dict[str, str], log: Path, *, dies_at: str = "", claims: Path | None = None
) -> Service:
    """Start a service. `dies_at` names a moment at which it kills itself, see `dying`.

    A worker notes in `claims` which runs it takes, see `witness`.
    """
    process = _context.Process(target=_serve, args=(service, environment, log, dies_at, claims), daemon=True)
    process.start()
    return Service(process, log)


def _serve(service: str, environment: dict[str, str], log: Path, dies_at: str, claims: Path | None) -> None:
    with log.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    if dies_at:
        importlib.import_module("dying").arm(dies_at)
    if claims:
        importlib.import_module("witness").note_claims(claims)
    importlib.import_module(SERVICES[service]).main()
