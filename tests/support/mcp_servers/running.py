"""How tests start `ledger.py`, the server that keeps a ledger, and read what it wrote."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from espalier_mcp_broker.servers import HttpServer, StdioServer

PROGRAM = Path(__file__).with_name("ledger.py")
PORT_LINE_BYTES_MAX = 16
STARTS_S = 40.0
POLL_S = 0.01
SOON_S = 15.0


def stdio_ledger(name: str, ledger: Path, *words: str, **more: Any) -> StdioServer:
    more.setdefault("connect_timeout_s", STARTS_S)
    return StdioServer(name=name, command=sys.executable, args=(str(PROGRAM), str(ledger), *words), **more)


@dataclass(frozen=True)
class HttpLedger:
    """A ledger that serves HTTP until the test's block ends or the process dies."""

    port: int
    process: Process

    def as_server(self, name: str, **more: Any) -> HttpServer:
        return HttpServer(name=name, url=f"http://127.0.0.1:{self.port}/mcp", **more)


def http_ledger(ledger: Path, *words: str, port: int = 0) -> AbstractAsyncContextManager[HttpLedger]:
    return _serving(PROGRAM, str(ledger), "--http", "--port", str(port), *words)


def http_echo(notes: Path, *words: str, port: int = 0) -> AbstractAsyncContextManager[HttpLedger]:
    """A server that repeats what it was sent; its `notes` are requests."""
    return _serving(PROGRAM.with_name("echo.py"), str(notes), "--port", str(port), *words)


@asynccontextmanager
async def _serving(program: Path, *words: str) -> AsyncIterator[HttpLedger]:
    command = [sys.executable, str(program), *words]
    async with await anyio.open_process(command, stdin=DEVNULL, stdout=PIPE, stderr=None) as process:
        try:
            assert process.stdout is not None
            with anyio.fail_after(STARTS_S):
                line = await BufferedByteReceiveStream(process.stdout).receive_until(
                    b"\n", PORT_LINE_BYTES_MAX
                )
            yield HttpLedger(int(line), process)
        finally:
            if process.returncode is None:
                process.kill()


def notes(ledger: Path, **wanted: object) -> list[dict[str, Any]]:
    """The lines of a ledger that have these values."""
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    written = [json.loads(line) for line in lines]
    return [note for note in written if all(note.get(key) == value for key, value in wanted.items())]


async def comes_true(question: Callable[[], bool], within_s: float = SOON_S) -> None:
    with anyio.fail_after(within_s):
        while not question():
            await anyio.sleep(POLL_S)
