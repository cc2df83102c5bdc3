"""Child processes: tied to our life, read line by line, restarted with back-off, stopped within a bound.

Knows nothing of what a child is for. Below it stands `guard.py`, the stub that ties a child to this process;
above it the servers (`postgres.py`, `redis.py`) and the services (`runtime.py`). Children must be started
from the main thread (see the stub).
"""

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

import anyio
from anyio.abc import ByteReceiveStream, Process

from espalier_local import guard
from espalier_local.account import Account
from espalier_local.console import OnLine
from espalier_local.errors import LocalError

LINE_BYTES_MAX = 16 * 1024
LAST_LINES_MAX = 20
PROBE_INTERVAL_S = 0.02
DRAIN_S = 0.3
KILL_WAIT_S = 0.5
BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 5.0
FAILURES_MAX = 8
STABLE_AFTER_S = 10.0


@dataclass(frozen=True, kw_only=True)
class ChildPlan:
    """How to start one child and how to stop it: `stop_signal`, then SIGKILL after `grace_s`.

    `death_signal` is what the child gets when this process dies without stopping it. `stdin` is written once
    at each start: what must not show in the process list. A `quiet` child's lines are shown only while it is
    up; its greeting and its farewell tell nobody anything.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    grace_s: float
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGKILL
    account: Account | None = None
    cwd: Path | None = None
    stdin: bytes = b""
    quiet: bool = False


class Child:
    """One supervised process. `pid` is None between a crash and the restart, and after the end."""

    def __init__(self, plan: ChildPlan, on_line: OnLine, *, restart: bool = True) -> None:
        self.plan = plan
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES_MAX)
        self._on_line = on_line
        self._restart = restart
        self._process: Process | None = None
        self._was_ready = False
        self._ending = ""
        self._stopping = anyio.Event()
        self._ended = anyio.Event()

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def become_ready(self, probe: Callable[[], Awaitable[bool]], *, within_s: float) -> None:
        """Wait until the probe says yes. A child that ends before it was ever ready is not restarted."""
        with anyio.move_on_after(within_s):
            while not await probe():
                await anyio.sleep(PROBE_INTERVAL_S)
            self.mark_ready()
            return
        raise LocalError(f"{self.name} was not ready within {within_s:g} s{self._said()}")

    def mark_ready(self) -> None:
        """From now on a crash is answered with a restart."""
        self._was_ready = True

    async def supervise(self) -> None:
        """Keep the process alive until `stop`. Cancelling does nothing: only `stop` knows the grace.

        Raises LocalError if the child ends before it was ready, or FAILURES_MAX times in close succession.
        """
        failures = 0
        try:
            with anyio.CancelScope(shield=True):
                while not self._stopping.is_set():
                    lived_s = await self._live()
                    if self._stopping.is_set() or (self._was_ready and not self._restart):
                        return
                    failures = 1 if lived_s >= STABLE_AFTER_S else failures + 1
                    if not self._was_ready or failures >= FAILURES_MAX:
                        raise LocalError(f"{self.name} {self._how_it_failed(failures)}{self._said()}")
                    await self._back_off(failures)
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Ask, wait for the grace, kill the whole process group. Bounded by `grace_s` + KILL_WAIT_S."""
        self._stopping.set()
        with anyio.CancelScope(shield=True):
            self._signal(self.plan.stop_signal)
            with anyio.move_on_after(self.plan.grace_s):
                await self._ended.wait()
            if not self._ended.is_set():
                self._kill_group()
                with anyio.move_on_after(KILL_WAIT_S):
                    await self._ended.wait()

    async def _live(self) -> float:
        """One life of the process; how long it lasted."""
        began = time.monotonic()
        async with await _spawn(self.plan) as process:
            self._process = process
            try:
                if self._stopping.is_set():
                    self._signal(self.plan.stop_signal)
                await self._attend(process)
            finally:
                self._process = None
        self._ending = _ending(process.returncode)
        return time.monotonic() - began

    async def _attend(self, process: Process) -> None:
        read_out = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, process, read_out)
            if process.stdin is not None:
                with suppress(OSError, anyio.BrokenResourceError):  # it ended before it read
                    await process.stdin.send(self.plan.stdin)
                    await process.stdin.aclose()
            await process.wait()
            with anyio.move_on_after(DRAIN_S):  # a grandchild may hold the pipe open for longer
                await read_out.wait()
            tasks.cancel_scope.cancel()

    async def _read(self, process: Process, read_out: anyio.Event) -> None:
        assert process.stdout is not None
        async for line in _lines(process.stdout):
            self.last_lines.append(line)
            if not self.plan.quiet or (self._was_ready and not self._stopping.is_set()):
                self._on_line(self.name, line)
        read_out.set()

    async def _back_off(self, failures: int) -> None:
        pause_s = min(BACKOFF_FIRST_S * 2 ** (failures - 1), BACKOFF_MAX_S)
        self._on_line(self.name, f"ended {self._ending}; starting it again in {pause_s:g} s")
        with anyio.move_on_after(pause_s):
            await self._stopping.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _kill_group(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _how_it_failed(self, failures: int) -> str:
        return f"ended {failures} times in a row" if self._was_ready else "ended before it was ready"

    def _said(self) -> str:
        """The line that tells most: the last one that is fatal, else the last one."""
        lines = [line.strip() for line in self.last_lines if line.strip()]
        telling = [line for line in lines if "FATAL" in line] or lines
        return f"; it said: {telling[-1]}" if telling else "."


@asynccontextmanager
async def running(
    plans: Sequence[ChildPlan], on_line: OnLine, *, restart: bool = True
) -> AsyncIterator[list[Child]]:
    """Children that live as long as the block; all of them are asked to stop at the same moment."""
    children = [Child(plan, on_line, restart=restart) for plan in plans]
    with lone_errors():
        async with anyio.create_task_group() as tasks:
            try:
                for child in children:
                    tasks.start_soon(child.supervise)
                yield children
            finally:
                with anyio.CancelScope(shield=True):
                    async with anyio.create_task_group() as stops:
                        for child in children:
                            stops.start_soon(child.stop)


def _ending(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return f"with exit code {returncode}"
    known = {int(number): number.name for number in signal.Signals}
    return f"by {known.get(-returncode, f'signal {-returncode}')}"


@contextmanager
def lone_errors() -> Iterator[None]:
    """Give back a single error as itself; a task group wraps it, and callers expect the sentence."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from error.__cause__


async def _spawn(plan: ChildPlan) -> Process:
    assert threading.current_thread() is threading.main_thread(), (
        "a child dies with the thread that forked it"
    )
    return await anyio.open_process(
        guarded(plan.command, plan.death_signal, plan.account),
        stdin=PIPE if plan.stdin else DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        cwd=plan.cwd,
        env=plan.env,
        start_new_session=True,  # Ctrl-C reaches the launcher only, and a kill can reach the whole group
    )


def guarded(
    command: Sequence[str], death_signal: signal.Signals = signal.SIGKILL, account: Account | None = None
) -> list[str]:
    """The command behind the stub that ties it to this process."""
    uid, gid = (-1, -1) if account is None else (account.uid, account.gid)
    numbers = (os.getpid(), int(death_signal), uid, gid)
    return [sys.executable, "-I", "-S", guard.__file__, *map(str, numbers), *command]


async def _lines(stream: ByteReceiveStream) -> AsyncIterator[str]:
    """Lines without their ends; one that is too long arrives in pieces."""
    pending = b""
    async for chunk in stream:
        *whole, pending = (pending + chunk).split(b"\n")
        if len(pending) > LINE_BYTES_MAX:
            whole, pending = [*whole, pending], b""
        for line in whole:
            for piece in _pieces(line.rstrip(b"\r")):
                yield piece
    if pending:
        yield pending.decode("utf-8", "replace")


def _pieces(line: bytes) -> list[str]:
    starts = range(0, len(line) or 1, LINE_BYTES_MAX)
    return [line[start : start + LINE_BYTES_MAX].decode("utf-8", "replace") for start in starts]
