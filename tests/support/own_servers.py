"""A Postgres or a Redis that one test may crash, stop and let hang.

They are the launcher's own servers, so a crash is answered with a restart on the same port, as on any machine
that runs `espalier up`. A crash here is a crash of processes: what was written stays in the page cache.
"""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import psutil

from espalier_local import children
from espalier_local.console import quiet
from espalier_local.folder import open_folder
from espalier_local.postgres import accepts_connections, run_postgres
from espalier_local.redis import accepts_commands, run_redis

COMES_BACK_S = 20.0
DIES_S = 5.0
POLL_S = 0.02
# Surviving a crash of the processes takes commits that were written, not commits that reached the disk.
POSTGRES_OPTIONS = {"fsync": "off", "full_page_writes": "off", "max_connections": "300"}


@dataclass
class OwnServer:
    """A running server, found by its port."""

    url: str
    crash_signal: signal.Signals
    answers: Callable[[], Awaitable[bool]]

    async def crash(self, *, away_s: float = children.BACKOFF_FIRST_S) -> None:
        """End it at once, without a farewell to anybody; the launcher starts it again after `away_s`."""
        children.BACKOFF_FIRST_S = children.BACKOFF_MAX_S = away_s
        main = self._main()
        main.send_signal(self.crash_signal)
        with anyio.fail_after(DIES_S):
            while main.is_running():
                await anyio.sleep(POLL_S)

    async def wait_back(self) -> None:
        with anyio.fail_after(COMES_BACK_S):
            while not await self.answers():
                await anyio.sleep(POLL_S)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """It takes connections and answers nothing, like a server behind a network that drops packets."""
        main = self._main()
        stopped = [main]
        main.suspend()  # first, so that it starts no more
        stopped += main.children(recursive=True)
        for process in stopped[1:]:
            process.suspend()
        try:
            yield
        finally:
            for process in reversed(stopped):
                process.resume()

    def _main(self) -> psutil.Process:
        """The launcher's child that was told, or says, this port."""
        port = str(urlsplit(self.url).port)
        (main,) = [
            child
            for child in psutil.Process(os.getpid()).children()
            if any(word.rpartition(":")[2] == port or word == f"port={port}" for word in _words(child))
        ]
        return main


def _words(child: psutil.Process) -> list[str]:
    """None of another child that has just died."""
    try:
        return child.cmdline()
    except psutil.Error:
        return []


@asynccontextmanager
async def own_redis_server(data_dir: Path) -> AsyncIterator[OwnServer]:
    with _own_pauses(), open_folder(data_dir) as folder:
        async with run_redis(folder, quiet) as url:
            parts = urlsplit(url)
            yield OwnServer(
                url, signal.SIGKILL, lambda: accepts_commands(parts.port or 0, parts.password or "")
            )


@asynccontextmanager
async def own_postgres_server(data_dir: Path) -> AsyncIterator[OwnServer]:
    with _own_pauses(), open_folder(data_dir) as folder:
        async with run_postgres(folder, quiet, options=POSTGRES_OPTIONS) as url:
            port = urlsplit(url).port or 0
            yield OwnServer(url, signal.SIGQUIT, lambda: accepts_connections(port))


@contextmanager
def _own_pauses() -> Iterator[None]:
    """The launcher's pause before a restart is how long a crashed server stays away; it is put back after."""
    first_s, most_s = children.BACKOFF_FIRST_S, children.BACKOFF_MAX_S
    try:
        yield
    finally:
        children.BACKOFF_FIRST_S, children.BACKOFF_MAX_S = first_s, most_s
