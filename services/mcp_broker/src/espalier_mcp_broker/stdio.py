"""MCP over the standard input and output of a program that is started here.

Not the SDK's own transport, which hands on more of the environment, reads lines of any length, and leaves a
server alive when the broker is killed. Here a server gets a list of arguments and no shell, an allow-list of
the environment plus what the operator says, no open files of ours, and a session of its own below
`keeper.py`. An answer above the bound is dropped while it is read; its call is told. Above stands
`session.py`.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from subprocess import PIPE
from types import TracebackType
from typing import Final, Self

import anyio
import structlog
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client import Transport
from mcp.shared.message import SessionMessage
from mcp_types import RequestId, jsonrpc_message_adapter
from pydantic import ValidationError

from espalier_mcp_broker import keeper
from espalier_mcp_broker.flight import CALLS_MAX, Connection, Flight, fault_message, flight_of_task
from espalier_mcp_broker.outcomes import RESULT_BYTES_MAX, Reason
from espalier_mcp_broker.servers import StdioServer

log = structlog.get_logger(__name__)

INHERITED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")

WRITES_MAX: Final = 8 * CALLS_MAX
"""Messages that wait for a server to read its input. A server that lets so many lie is stuck."""
GARBAGE_LINES_MAX: Final = 1_000
"""Lines on the standard output that are no messages: some banners are normal, a flood is not."""
ENDS_BYTES: Final = 4_096
"""What is kept of both ends of a line that is too long: enough to see which call it answers."""
STDERR_LINES_MAX: Final = 10
STDERR_LINE_BYTES_MAX: Final = 400

STOP_AFTER_CLOSE_S: Final = 1.0
STOP_AFTER_TERM_S: Final = 1.0
STOP_AFTER_KILL_S: Final = 1.0
EXIT_LOOK_S: Final = 0.01

Messages = MemoryObjectSendStream[SessionMessage | Exception]


def stdio_transport(server: StdioServer, connection: Connection) -> Transport:
    """A running server. Leaving takes at most the three STOP_AFTER times and leaves no process.

    Raises OSError on entry if the program cannot be started.
    """
    return _running(server, connection)


@asynccontextmanager
async def _running(
    server: StdioServer, connection: Connection
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[SessionMessage | Exception], "_Outgoing"]]:
    words = _LastWords(server)
    queue, queued = anyio.create_memory_object_stream[_Queued](WRITES_MAX)
    messages, inbox = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    with queue, queued, messages, inbox:
        async with _child(server) as process:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_write, queued, process.stdin, connection)
                tasks.start_soon(_read, process.stdout, messages, connection)
                tasks.start_soon(words.listen, process.stderr)
                try:
                    yield inbox, _Outgoing(queue, connection)
                finally:
                    if connection.is_lost:
                        log.warning("mcp.server.lost", server=server.name, stderr=words.lines())
                    inbox.close()  # so that the reader takes in what a server says to the end
                    with anyio.CancelScope(shield=True):
                        await _stop(process)
                    tasks.cancel_scope.cancel()


# ------------------------------------------------------------------------------- process


@asynccontextmanager
async def _child(server: StdioServer) -> AsyncIterator[Process]:
    env = {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(server.env)
    command = server.command if "/" in server.command else shutil.which(server.command, path=env.get("PATH"))
    if command is None:
        raise FileNotFoundError
    leash, held = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="espalier-mcp-", ignore_cleanup_errors=True) as empty:
            try:
                process = await anyio.open_process(
                    [sys.executable, "-I", "-S", keeper.__file__, str(leash), command, *server.args],
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=PIPE,
                    cwd=server.cwd or empty,
                    env=env,
                    start_new_session=True,
                    pass_fds=(leash,),
                )
            finally:
                os.close(leash)
            try:
                yield process
            finally:
                with anyio.CancelScope(shield=True):
                    await _let_go(process)
    finally:
        os.close(held)


async def _stop(process: Process) -> None:
    """Close the input, wait, ask the whole group to end, wait, kill it."""
    assert process.stdin is not None
    with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await process.stdin.aclose()
    if await _ended(process, STOP_AFTER_CLOSE_S):
        return
    _signal_group(process, signal.SIGTERM)
    if await _ended(process, STOP_AFTER_TERM_S):
        return
    _signal_group(process, signal.SIGKILL)
    await _ended(process, STOP_AFTER_KILL_S)


async def _ended(process: Process, within_s: float) -> bool:
    """Looked for, not waited for: asyncio's own wait also waits for whoever else holds the pipes."""
    with anyio.move_on_after(within_s):
        while process.returncode is None:
            await anyio.sleep(EXIT_LOOK_S)
    return process.returncode is not None


async def _let_go(process: Process) -> None:
    _signal_group(process, signal.SIGKILL)
    with anyio.move_on_after(STOP_AFTER_KILL_S):
        await process.aclose()


def _signal_group(process: Process, number: signal.Signals) -> None:
    """The keeper leads the group and is not reaped before `returncode` is known: the number is still its."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


# ------------------------------------------------------------------------------- to the server


@dataclass(frozen=True)
class _Queued:
    line: bytes
    flight: Flight | None


class _Outgoing:
    """Where the SDK writes. Never waits: a server that does not read must not hold up whoever calls it."""

    def __init__(self, queue: MemoryObjectSendStream[_Queued], connection: Connection) -> None:
        self._queue = queue
        self._connection = connection

    async def send(self, item: SessionMessage, /) -> None:
        line = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        try:
            self._queue.send_nowait(_Queued(line, flight_of_task.get()))
        except anyio.WouldBlock:
            self._connection.lose()
            raise anyio.BrokenResourceError from None

    async def aclose(self) -> None:
        self._queue.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.close()


async def _write(
    queued: MemoryObjectReceiveStream[_Queued], stdin: ByteSendStream, connection: Connection
) -> None:
    """A task of its own, because a line that is cut off by a cancelled caller would spoil the stream."""
    try:
        async for each in queued:
            if each.flight is not None:
                if each.flight.is_void:
                    continue
                each.flight.sent = True
            await stdin.send(each.line)
    except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        connection.lose()


# ------------------------------------------------------------------------------- from the server


async def _read(stdout: ByteReceiveStream, messages: Messages, connection: Connection) -> None:
    """Hand on messages until the output ends or cannot be trusted; then nobody's answer comes any more."""
    with messages:
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await _hand_on(stdout, messages)
        connection.lose()


async def _hand_on(stdout: ByteReceiveStream, messages: Messages) -> None:
    lines = Lines(RESULT_BYTES_MAX)
    garbage = 0
    async for chunk in stdout:
        for line in lines.feed(chunk):
            message = _understood(line)
            if message is not None:
                with suppress(anyio.BrokenResourceError):  # emptied also when nobody listens
                    await messages.send(message)
            elif not isinstance(line, bytes):
                return  # whose answer it was cannot be told, so no answer can be waited for
            elif line.strip() and (garbage := garbage + 1) > GARBAGE_LINES_MAX:
                return


@dataclass(frozen=True)
class Overlong:
    """A line that was too long to keep: its two ends, ENDS_BYTES each."""

    head: bytes
    tail: bytes


class Lines:
    """Cuts what arrives into lines, and holds at most `bytes_max` and one chunk of them."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held = bytearray()
        self._head: bytes | None = None

    def feed(self, chunk: bytes) -> Iterator[bytes | Overlong]:
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._hold(piece)
            yield self._take()
        self._hold(rest)

    def _hold(self, piece: bytes) -> None:
        self._held += piece
        if self._head is None and len(self._held) > self._bytes_max:
            self._head = bytes(self._held[:ENDS_BYTES])
        if self._head is not None:
            self._held = self._held[-ENDS_BYTES:]

    def _take(self) -> bytes | Overlong:
        held, head = bytes(self._held), self._head
        self._held, self._head = bytearray(), None
        return held if head is None else Overlong(head, held)


def _understood(line: bytes | Overlong) -> SessionMessage | None:
    """The message in a line, or the end of the wait for it; None for what is neither."""
    if isinstance(line, Overlong):
        answered = answered_id(line.head, line.tail)
        return None if answered is None else fault_message(answered, Reason.TOO_LARGE)
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValidationError:
        answered = answered_id(line[:ENDS_BYTES], line[-ENDS_BYTES:])
        return None if answered is None else fault_message(answered, Reason.GARBAGE)


_VERSION: Final = rb'"jsonrpc"\s*:\s*"2\.0"'
_ID: Final = rb'"id"\s*:\s*(?:(\d{1,18})|"([\w.:-]{1,64})")'
_IN_FRONT: Final = rb"\s*\{\s*(?:" + _VERSION + rb"\s*,\s*)?"
_ID_IN_FRONT: Final = re.compile(_IN_FRONT + _ID + rb'\s*,(?!\s*"method")')
_OUTCOME_IN_FRONT: Final = re.compile(_IN_FRONT + rb'"(?:result|error)"')
_ID_AT_THE_END: Final = re.compile(rb",\s*" + _ID + rb"\s*(?:,\s*" + _VERSION + rb"\s*)?\}\s*\Z")


def answered_id(head: bytes, tail: bytes) -> RequestId | None:
    """The call that a line answers, if its id stands first or last in the message, as servers write it.

    Elsewhere it could be a piece of the result, and beside a method it is the id of a server's own question.
    """
    found = _ID_IN_FRONT.match(head)
    if found is None and _OUTCOME_IN_FRONT.match(head):
        found = _ID_AT_THE_END.search(tail)
    if found is None:
        return None
    number, text = found.groups()
    return int(number) if number is not None else str(text, "ascii")


class _LastWords:
    """The end of what a server said on its standard error, with the operator's secrets masked."""

    def __init__(self, server: StdioServer) -> None:
        self._lines: deque[bytes] = deque(maxlen=STDERR_LINES_MAX)
        self._secrets = [value.encode() for value in server.env.values() if len(value) >= 6]

    async def listen(self, stderr: ByteReceiveStream) -> None:
        lines = Lines(STDERR_LINE_BYTES_MAX)
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for chunk in stderr:
                for line in lines.feed(chunk):
                    whole = line if isinstance(line, bytes) else line.head
                    self._lines.append(whole[:STDERR_LINE_BYTES_MAX])

    def lines(self) -> list[str]:
        return [self._shown(line) for line in self._lines]

    def _shown(self, line: bytes) -> str:
        for secret in self._secrets:
            line = line.replace(secret, b"***")
        return re.sub(r"[^\x20-\x7e\xa0-\uffff]", "?", line.decode("utf-8", "replace"))
