"""TCP proxies on loopback that go wrong on demand: late, deaf, cut off at a byte or at a COMMIT, reset.

They know nothing of what they carry, but for one word: Postgres' COMMIT, whose answer is what a client must
be able to live without. Connections begin well; a fault is for those that are open, or for a while.

In a storm they are a process of their own, so that what they carry waits for nobody: `proxy_process` starts
it, and a `Proxy` is what the bench has of each. It ends with its standard input.
"""

import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from anyio.abc import Process, SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

LOOPBACK: Final = "127.0.0.1"
CONNECT_S: Final = 5.0
STARTS_S: Final = 20.0
LINE_BYTES_MAX: Final = 64 * 1024
ARRIVES_S: Final = 0.05
"""How long the server has for what was let through before the line is cut."""

COMMIT: Final = b"COMMIT"
RESET: Final = b"\x01\x00\x00\x00\x00\x00\x00\x00"
"""SO_LINGER of no time: closing sends a reset."""

BROKEN: Final = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)


@dataclass(eq=False)
class _Line:
    """One connection through the proxy, both its ends."""

    client: SocketStream
    server: SocketStream
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    answer_bytes_left: int | None = None
    reset: bool = False


class FaultProxy:
    """Carries bytes between whoever connects to `port` and a server, or does not."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.server_port = server_port
        self._lines: set[_Line] = set()
        self._delay_s = 0.0
        self._open = anyio.Event()
        self._open.set()
        self._commit_cut: bool | None = None
        self._cut = anyio.Event()

    # ---- what it does to those who use it

    def heal(self) -> None:
        """Carry everything again, also what was held back."""
        self._delay_s, self._commit_cut = 0.0, None
        self._open.set()

    def black_hole(self) -> None:
        """Take connections and bytes and hand on none, until it is healed."""
        if self._open.is_set():
            self._open = anyio.Event()

    def delay(self, seconds: float) -> None:
        """Every piece of data waits so long before it goes on."""
        self._delay_s = seconds

    async def cut_at_commit(self, *, sent: bool, within_s: float) -> bool:
        """Break the next connection that says COMMIT: `sent`, after the server has it; else before.

        Whether one did within this time; otherwise none is broken any more.
        """
        self._commit_cut, self._cut = sent, anyio.Event()
        with anyio.move_on_after(within_s):
            await self._cut.wait()
        cut, self._commit_cut = self._cut.is_set(), None
        return cut

    def cut_answers_after(self, count: int) -> None:
        """Break each open connection once it has carried so many more bytes of answers."""
        for line in self._lines:
            line.answer_bytes_left = count

    def reset(self) -> int:
        """Break all open connections, as a router does that was restarted; how many there were."""
        broken = list(self._lines)
        for line in broken:
            self._break(line)
        return len(broken)

    # ---- how

    async def serve(self, client: SocketStream) -> None:
        async with client:
            try:
                await self._open.wait()
                with anyio.fail_after(CONNECT_S):
                    server = await anyio.connect_tcp(LOOPBACK, self.server_port)
            except (*BROKEN, TimeoutError):
                return
            async with server:
                await self._carry(_Line(client, server))

    async def _carry(self, line: _Line) -> None:
        self._lines.add(line)
        try:
            with line.scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(self._asks, line)
                    group.start_soon(self._answers, line)
        finally:
            self._lines.discard(line)
            if line.reset:
                for end in (line.client, line.server):
                    _reset_on_close(end)

    async def _asks(self, line: _Line) -> None:
        with suppress(*BROKEN):
            while True:  # bounded: as long as both ends live
                piece = await self._held(line.client)
                cut = self._commit_cut if COMMIT in piece else None
                if cut is not None:
                    self._commit_cut = None
                    self._cut.set()
                if cut is not False:
                    await line.server.send(piece)
                if cut is not None:
                    await anyio.sleep(ARRIVES_S if cut else 0)
                    return self._break(line)
        line.scope.cancel()
        return None

    async def _answers(self, line: _Line) -> None:
        with suppress(*BROKEN):
            while True:  # bounded: as long as both ends live
                piece = await self._held(line.server)
                left = line.answer_bytes_left
                if left is not None:
                    line.answer_bytes_left = left - len(piece)
                    piece = piece[:left]
                await line.client.send(piece)
                if line.answer_bytes_left is not None and line.answer_bytes_left <= 0:
                    return self._break(line)
        line.scope.cancel()
        return None

    async def _held(self, end: SocketStream) -> bytes:
        piece = await end.receive()
        if self._delay_s:
            await anyio.sleep(self._delay_s)
        await self._open.wait()
        return piece

    def _break(self, line: _Line) -> None:
        line.reset = True
        line.scope.cancel()


def _reset_on_close(end: SocketStream) -> None:
    raw: socket.socket = end.extra(SocketAttribute.raw_socket)  # noqa: S610 - no database
    with suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@asynccontextmanager
async def fault_proxy(server_port: int) -> AsyncIterator[FaultProxy]:
    """A proxy in front of a port of loopback, which need not be open yet."""
    proxy = FaultProxy(server_port)
    async with (
        await anyio.create_tcp_listener(local_host=LOOPBACK) as listener,
        anyio.create_task_group() as group,
    ):
        proxy.port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - no database
        group.start_soon(listener.serve, proxy.serve)
        yield proxy
        group.cancel_scope.cancel()


# --- as a process ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Proxy:
    """One proxy of the process: what a `FaultProxy` does, from afar."""

    name: str
    port: int
    _ask: Callable[[str, str, dict[str, Any]], Awaitable[Any]]

    async def heal(self) -> None:
        await self._ask(self.name, "heal", {})

    async def black_hole(self) -> None:
        await self._ask(self.name, "black_hole", {})

    async def delay(self, seconds: float) -> None:
        await self._ask(self.name, "delay", {"seconds": seconds})

    async def cut_at_commit(self, *, sent: bool, within_s: float) -> bool:
        return bool(await self._ask(self.name, "cut_at_commit", {"sent": sent, "within_s": within_s}))

    async def cut_answers_after(self, count: int) -> None:
        await self._ask(self.name, "cut_answers_after", {"count": count})

    async def reset(self) -> int:
        return int(await self._ask(self.name, "reset", {}))


class _Asking:
    """Orders to the process, one line each, and its answers, in whatever order they come."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._orders = process.stdin
        self._lines = BufferedByteReceiveStream(process.stdout)
        self._answers: dict[int, Any] = {}
        self._came = anyio.Condition()
        self._asked = 0

    async def line(self) -> Any:
        return json.loads(await self._lines.receive_until(b"\n", LINE_BYTES_MAX))

    async def listen(self) -> None:
        with suppress(anyio.IncompleteRead, anyio.ClosedResourceError, anyio.EndOfStream):
            while True:  # bounded: as long as the process lives
                number, answer = await self.line()
                async with self._came:
                    self._answers[number] = answer
                    self._came.notify_all()

    async def ask(self, proxy: str, act: str, given: dict[str, Any]) -> Any:
        self._asked += 1
        number = self._asked
        await self._orders.send(json.dumps([number, proxy, act, given]).encode() + b"\n")
        async with self._came:
            while number not in self._answers:
                await self._came.wait()
            return self._answers.pop(number)


@asynccontextmanager
async def proxy_process(server_ports: Mapping[str, int]) -> AsyncIterator[dict[str, Proxy]]:
    """A process with a proxy in front of each of these ports, by name."""
    command = [sys.executable, __file__, json.dumps(dict(server_ports))]
    async with (
        await anyio.open_process(command, stderr=None) as process,
        anyio.create_task_group() as group,
    ):
        asking = _Asking(process)
        with anyio.fail_after(STARTS_S):
            ports = await asking.line()
        group.start_soon(asking.listen)
        yield {name: Proxy(name, port, asking.ask) for name, port in ports.items()}
        group.cancel_scope.cancel()
        process.kill()


async def _serve(server_ports: Mapping[str, int]) -> None:
    async with AsyncExitStack() as stack:
        proxies = {
            name: await stack.enter_async_context(fault_proxy(port)) for name, port in server_ports.items()
        }
        _say({name: proxy.port for name, proxy in proxies.items()})
        async with anyio.create_task_group() as group:
            async for line in anyio.wrap_file(sys.stdin):
                group.start_soon(_obey, proxies, *json.loads(line))
            group.cancel_scope.cancel()


async def _obey(proxies: Mapping[str, FaultProxy], number: int, name: str, act: str, given: Any) -> None:
    answer = getattr(proxies[name], act)(**given)
    _say([number, await answer if act == "cut_at_commit" else answer])


def _say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(_serve, json.loads(sys.argv[1]), backend_options={"use_uvloop": True})
