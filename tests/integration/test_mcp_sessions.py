"""Calls to real MCP servers, over stdio and HTTP and in both eras: every call has exactly one outcome.

The servers are programs of their own that keep a ledger of what they really did
(`tests/support/mcp_servers/ledger.py`); what a server can do wrong below MCP is answered by hand here.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
import psutil
import pytest
from anyio.abc import Process, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp.server import Server, ServerRequestContext
from mcp_servers.running import (
    POLL_S,
    SOON_S,
    comes_true,
    http_ledger,
    notes,
    stdio_ledger,
)
from mcp_types import HEADER_MISMATCH, CallToolRequestParams, CallToolResult

from espalier_local.ports import free_port
from espalier_mcp_broker import stdio
from espalier_mcp_broker.catalog import Catalog, open_catalog
from espalier_mcp_broker.flight import CALLS_MAX
from espalier_mcp_broker.outcomes import (
    RESULT_BYTES_MAX,
    Answer,
    Answered,
    NotSent,
    Reason,
    TooLarge,
    Unknown,
    failed,
)
from espalier_mcp_broker.servers import HttpServer, ServerSpec, StdioServer
from espalier_mcp_broker.session import ASKED_TEXT, BACKOFF_FIRST_S, REFUSED_TEXT, McpSession

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

STDIO = ("stdio", "stdio_handshake")
HTTP = ("http", "http_handshake")
EVERY = (*STDIO, *HTTP)
CALL_S = 45.0
SHORT_S = 0.4
OWNER = Path(__file__).parents[1] / "support/mcp_servers/owner.py"
REPLY_BYTES_MAX = 4096
KEPT_MIB_MAX = 40.0
"""What an answer of 20 MB may cost: the 10 MiB that are kept of it, a few times over; not the whole."""


@dataclass(frozen=True)
class Ledgers:
    """One server of each kind, connected, and their ledgers."""

    catalog: Catalog
    folder: Path

    def session(self, kind: str) -> McpSession:
        found = self.catalog.find(f"mcp.{kind}.record")
        assert found is not None
        return found.session

    def notes(self, kind: str, **wanted: object) -> list[dict[str, Any]]:
        return notes(self.folder / kind, **wanted)


@pytest.fixture(scope="module")
async def ledgers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ledgers]:
    folder = tmp_path_factory.mktemp("ledgers")
    async with (
        http_ledger(folder / "http") as modern,
        http_ledger(folder / "http_handshake", "--handshake") as handshake,
        open_catalog(
            [
                stdio_ledger("stdio", folder / "stdio"),
                stdio_ledger("stdio_handshake", folder / "stdio_handshake", "--handshake"),
                modern.as_server("http"),
                handshake.as_server("http_handshake"),
            ],
            None,
        ) as catalog,
    ):
        yield Ledgers(catalog, folder)


@asynccontextmanager
async def session_of(server: ServerSpec) -> AsyncIterator[McpSession]:
    async with open_catalog([server], None) as catalog:
        found = catalog.find(f"mcp.{server.name}.any")
        assert found is not None
        yield found.session


def text_of(answer: Answer) -> str:
    assert isinstance(answer, Answered), answer
    return str(answer.result["content"][0]["text"])


def says(text: str) -> Answered:
    return Answered({"content": [{"type": "text", "text": text}], "isError": False})


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("kind", EVERY)
async def test_a_call_is_answered_with_the_json_of_the_tools_result(ledgers: Ledgers, kind: str) -> None:
    session = ledgers.session(kind)
    meta = {"run_id": "run_1", "subject_ids": ["s"]}
    assert await session.call("record", {"text": "a"}, meta=meta, seconds=CALL_S) == says("recorded a")
    assert ledgers.notes(kind, argument="a") == [
        {"event": "called", "tool": "record", "argument": "a", "meta": meta},
        {"event": "done", "tool": "record", "argument": "a"},
    ]
    answer = await session.call("meta", {}, meta=meta, seconds=CALL_S)
    assert answer == Answered({"content": [], "isError": False, "structuredContent": meta})


@pytest.mark.parametrize("kind", EVERY)
async def test_a_failure_that_the_server_tells_is_an_answer(ledgers: Ledgers, kind: str) -> None:
    session = ledgers.session(kind)
    assert await session.call("fail", {}, seconds=CALL_S) == failed("it did not work")
    assert await session.call("refuse", {}, seconds=CALL_S) == failed("the arguments are wrong")


@pytest.mark.parametrize("kind", EVERY)
async def test_a_server_that_asks_for_input_gets_none_and_the_call_is_not_repeated(
    ledgers: Ledgers, kind: str
) -> None:
    answer = await ledgers.session(kind).call("ask", {"text": "once"}, seconds=CALL_S)
    assert answer == failed("Elicitation not supported" if "handshake" in kind else ASKED_TEXT)
    assert len(ledgers.notes(kind, event="called", tool="ask")) == 1


@pytest.mark.parametrize("kind", EVERY)
async def test_calls_on_one_connection_run_side_by_side(ledgers: Ledgers, kind: str) -> None:
    session = ledgers.session(kind)
    await session.call("record", {"text": "warm"}, seconds=CALL_S)
    answers: dict[int, Answer] = {}

    async def call(number: int) -> None:
        arguments = {"text": f"beside {number}", "delay_s": 0.2}
        answers[number] = await session.call("record", arguments, seconds=CALL_S)

    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(call, number)
    assert anyio.current_time() - began < 2.0  # one after the other they take 4 s
    assert answers == {number: says(f"recorded beside {number}") for number in range(20)}


async def test_calls_above_the_bound_wait_for_a_place_and_are_not_sent() -> None:
    called = 0

    async def hang(_: ServerRequestContext[Any], _params: CallToolRequestParams) -> CallToolResult:
        nonlocal called
        called += 1
        await anyio.sleep_forever()
        raise AssertionError

    async with open_catalog([], Server("bundled", on_call_tool=hang)) as catalog:
        found = catalog.find("espalier.hang")
        assert found is not None
        call = partial(found.session.call, "hang", {})
        async with anyio.create_task_group() as tasks:
            for _ in range(CALLS_MAX):
                tasks.start_soon(partial(call, seconds=CALL_S))
            await comes_true(lambda: called == CALLS_MAX)
            assert await call(seconds=SHORT_S) == NotSent(Reason.BUSY)
            assert called == CALLS_MAX
            tasks.cancel_scope.cancel()


# ------------------------------------------------------------------------------ giving up


@pytest.mark.parametrize("kind", EVERY)
async def test_when_the_time_is_over_the_server_is_told_and_the_connection_stays(
    ledgers: Ledgers, kind: str
) -> None:
    session = ledgers.session(kind)
    await session.call("record", {"text": "warm"}, seconds=CALL_S)
    connected = session.tools_version
    answer = await session.call("record", {"text": "late", "delay_s": 60}, seconds=SHORT_S)
    assert answer == Unknown(Reason.DEADLINE)
    await comes_true(lambda: bool(ledgers.notes(kind, event="cancelled", argument="late")))
    assert await session.call("record", {"text": "after"}, seconds=CALL_S) == says("recorded after")
    assert session.tools_version == connected
    assert len(ledgers.notes(kind, event="called", argument="late")) == 1


@pytest.mark.parametrize("kind", EVERY)
async def test_when_the_caller_is_cancelled_the_server_is_told_and_the_connection_stays(
    ledgers: Ledgers, kind: str
) -> None:
    session = ledgers.session(kind)
    await session.call("record", {"text": "warm"}, seconds=CALL_S)
    connected = session.tools_version
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: session.call("record", {"text": "stopped", "delay_s": 60}, seconds=CALL_S))
        await comes_true(lambda: bool(ledgers.notes(kind, event="called", argument="stopped")))
        tasks.cancel_scope.cancel()
    await comes_true(lambda: bool(ledgers.notes(kind, event="cancelled", argument="stopped")))
    assert await session.call("record", {"text": "after"}, seconds=CALL_S) == says("recorded after")
    assert session.tools_version == connected


async def test_a_call_that_a_server_never_read_is_not_sent_later(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with session_of(stdio_ledger("s", ledger)) as session:
        program = psutil.Process(json.loads(text_of(await session.call("fork", {}, seconds=CALL_S)))).parent()
        assert program is not None
        program.suspend()
        filling = {"text": "x" * 1_000_000}  # more than a pipe holds, so the writer is stuck in it
        assert await session.call("record", filling, seconds=SHORT_S) == Unknown(Reason.DEADLINE)
        assert await session.call("record", {"text": "b"}, seconds=SHORT_S) == NotSent(Reason.DEADLINE)
        program.resume()
        assert await session.call("record", {"text": "c"}, seconds=CALL_S) == says("recorded c")
    assert notes(ledger, argument="b") == []


@pytest.mark.parametrize("looks", [0, 1], ids=["before-it-is-handed-on", "at-the-first-byte"])
@pytest.mark.parametrize("kind", EVERY)
async def test_a_call_leaves_only_while_its_broker_lives(ledgers: Ledgers, kind: str, looks: int) -> None:
    session = ledgers.session(kind)
    lives = iter([True] * looks)
    fenced = partial(session.call, seconds=SHORT_S, may_leave=lambda: next(lives, False))

    assert isinstance(await fenced("record", {"text": "fenced"}), NotSent)
    assert await session.call("record", {"text": "later"}, seconds=CALL_S) == says("recorded later")
    assert ledgers.notes(kind, argument="fenced") == []


# ------------------------------------------------------------------------------ too large


@pytest.mark.parametrize("kind", EVERY)
async def test_an_answer_that_is_too_large_is_dropped_and_the_connection_stays(
    ledgers: Ledgers, kind: str
) -> None:
    session = ledgers.session(kind)
    assert await session.call("big", {"bytes": RESULT_BYTES_MAX}, seconds=CALL_S) == TooLarge()
    assert await session.call("record", {"text": "after"}, seconds=CALL_S) == says("recorded after")
    most = RESULT_BYTES_MAX - 1024  # of which the envelope takes a part
    assert len(text_of(await session.call("big", {"bytes": most}, seconds=CALL_S))) == most
    assert len(ledgers.notes(kind, event="called", tool="big")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stdio", "http", "http_handshake"])
async def test_an_answer_of_20_mb_costs_no_more_memory_than_what_is_kept(tmp_path: Path, kind: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        entry = await _entry(kind, tmp_path, stack)
        owner = await stack.enter_async_context(_owner(tmp_path, entry))
        before = await owner.call("mcp.s.record", {"text": "warm"})
        after = await owner.call("mcp.s.big", {"bytes": 20_000_000})
    assert (before["answer"], after["answer"]) == ("Answered", "TooLarge")
    assert after["peak_mib"] - before["peak_mib"] < KEPT_MIB_MAX


async def _entry(kind: str, folder: Path, stack: contextlib.AsyncExitStack) -> dict[str, Any]:
    ledger = folder / "ledger"
    if kind == "stdio":
        server = stdio_ledger("s", ledger)
        return {"command": server.command, "args": list(server.args)}
    words = ["--handshake"] if kind == "http_handshake" else []
    running = await stack.enter_async_context(http_ledger(ledger, *words))
    return {"url": running.as_server("s").url}


@dataclass(frozen=True)
class _Owner:
    process: Process
    replies: BufferedByteReceiveStream

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        await self.process.stdin.send(json.dumps({"tool": tool, "arguments": arguments}).encode() + b"\n")
        with anyio.fail_after(CALL_S):
            while True:  # bounded by CALL_S; log lines come between
                line = await self.replies.receive_until(b"\n", REPLY_BYTES_MAX)
                if line.startswith(b"{"):
                    reply: dict[str, Any] = json.loads(line)
                    return reply


@asynccontextmanager
async def _owner(folder: Path, entry: Mapping[str, Any]) -> AsyncIterator[_Owner]:
    servers = folder / "servers.json"
    servers.write_text(json.dumps({"mcpServers": {"s": entry}}))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(OWNER), str(servers)]
    async with await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=None, env=env) as process:
        assert process.stdout is not None
        try:
            yield _Owner(process, BufferedByteReceiveStream(process.stdout))
        finally:
            if process.returncode is None:
                process.kill()


# ------------------------------------------------------------------------------ servers that die or hang


@pytest.mark.parametrize("words", [(), ("--handshake",)])
async def test_a_program_that_dies_in_a_call_is_started_again_for_the_next_one_only(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    ledger = tmp_path / "ledger"
    async with session_of(stdio_ledger("s", ledger, *words)) as session:
        assert await session.call("die", {}, seconds=CALL_S) == Unknown(Reason.CONNECTION_LOST)
        assert await session.call("record", {"text": "b"}, seconds=CALL_S) == says("recorded b")
    assert [note["tool"] for note in notes(ledger, event="called")] == ["die", "record"]


@pytest.mark.parametrize("words", [(), ("--handshake",)])
async def test_a_call_in_which_an_http_server_dies_is_not_repeated_when_it_is_back(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    ledger = tmp_path / "ledger"
    async with http_ledger(ledger, *words) as first, session_of(first.as_server("s")) as session:
        assert await session.call("die", {}, seconds=CALL_S) == Unknown(Reason.CONNECTION_LOST)
        await first.process.wait()
        assert await session.call("record", {"text": "a"}, seconds=CALL_S) == NotSent(Reason.CANNOT_CONNECT)
        async with http_ledger(ledger, *words, port=first.port):
            if words:  # the session died with the server: that is found out by a call that it refuses
                answer = await session.call("record", {"text": "b"}, seconds=CALL_S)
                assert isinstance(answer, Answered) and answer.result["isError"]
                assert not notes(ledger, argument="b")
            assert await session.call("record", {"text": "c"}, seconds=CALL_S) == says("recorded c")
    assert [note["argument"] for note in notes(ledger, event="called")] == [None, "c"]


@pytest.mark.slow
async def test_a_server_that_cannot_be_had_costs_others_nothing_and_is_not_asked_at_once_again(
    tmp_path: Path,
) -> None:
    hanging = stdio_ledger("hanging", tmp_path / "none", "--hang-at-connect", connect_timeout_s=2.0)
    async with http_ledger(tmp_path / "none", "--hang-at-connect") as silent:
        listed: list[ServerSpec] = [
            hanging,
            silent.as_server("silent", connect_timeout_s=2.0),
            StdioServer(name="missing", command="/nonexistent/program"),
            StdioServer(name="unfound", command="no-such-program-anywhere"),
            StdioServer(name="ending", command=sys.executable, args=("-c", "pass")),
            HttpServer(name="closed", url=f"http://127.0.0.1:{free_port()}/mcp"),
            stdio_ledger("good", tmp_path / "good"),
        ]
        answers: dict[str, Answer] = {}
        async with open_catalog(listed, None) as catalog:

            async def call(name: str) -> None:
                found = catalog.find(f"mcp.{name}.record")
                assert found is not None
                answers[name] = await found.session.call("record", {"text": "a"}, seconds=CALL_S)

            await call("good")
            async with anyio.create_task_group() as tasks:
                for name in ("hanging", "silent"):
                    tasks.start_soon(call, name)
                await anyio.sleep(POLL_S)
                began = anyio.current_time()
                await call("good")
                assert anyio.current_time() - began < 1.0
            for name in ("missing", "unfound", "ending", "closed"):
                await call(name)
            assert answers == {
                "good": says("recorded a"),
                "hanging": NotSent(Reason.CONNECT_TIMEOUT),
                "silent": NotSent(Reason.CONNECT_TIMEOUT),
                "missing": NotSent(Reason.CANNOT_CONNECT),
                "unfound": NotSent(Reason.CANNOT_START),
                "ending": NotSent(Reason.CANNOT_CONNECT),
                "closed": NotSent(Reason.CANNOT_CONNECT),
            }
    assert notes(tmp_path / "none") == []


async def test_a_server_that_cannot_be_had_is_tried_less_and_less_often() -> None:
    accepted = 0

    async def hang_up(stream: SocketStream) -> None:
        nonlocal accepted
        accepted += 1
        await stream.aclose()

    async with loopback(hang_up) as url, session_of(HttpServer(name="s", url=url)) as session:
        began = anyio.current_time()
        while anyio.current_time() - began < 1.0:
            answer = await session.call("record", {}, seconds=CALL_S)
            assert answer == NotSent(Reason.CONNECTION_LOST)
            await anyio.sleep(POLL_S)
        elapsed = anyio.current_time() - began
    pauses = list(accumulate(BACKOFF_FIRST_S * 2**n for n in range(10)))
    attempts = accepted / 2  # each asks for both eras
    assert 2 <= attempts <= 1 + sum(pause <= elapsed for pause in pauses)


# ------------------------------------------------------------------------------ programs


async def test_noise_beside_the_messages_is_read_and_dropped(ledgers: Ledgers) -> None:
    session = ledgers.session("stdio")
    assert await session.call("flood", {"lines": 500}, seconds=CALL_S) == says("done")
    assert await session.call("record", {"text": "after"}, seconds=CALL_S) == says("recorded after")


async def test_a_flood_of_garbage_ends_the_connection(tmp_path: Path) -> None:
    async with session_of(stdio_ledger("s", tmp_path / "ledger")) as session:
        lines = stdio.GARBAGE_LINES_MAX + 1
        answer = await session.call("flood", {"lines": lines}, seconds=CALL_S)
        assert answer == Unknown(Reason.CONNECTION_LOST)


async def test_a_program_sees_nothing_of_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_INTERNAL_KEY", "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    words = ("; touch /tmp/x", "$(id)", "a\nb", "*")
    ledger = tmp_path / "ledger"
    inheritable, other_end = os.pipe()
    os.set_inheritable(inheritable, True)
    link = os.readlink(f"/proc/self/fd/{inheritable}")  # noqa: PTH115 - it leads to no path
    try:
        server = stdio_ledger("s", ledger, *words, env={"TOKEN": "t"})
        async with session_of(server) as session:
            answer = await session.call("surroundings", {}, seconds=CALL_S)
    finally:
        os.close(inheritable)
        os.close(other_end)
    assert isinstance(answer, Answered)
    seen = answer.result["structuredContent"]
    assert seen["arguments"] == [str(ledger), *words]
    assert set(seen["environment"]) - {"LC_CTYPE"} <= {*stdio.INHERITED, "TOKEN"}
    assert (seen["environment"]["TOKEN"], seen["environment"]["LANG"]) == ("t", "C.UTF-8")
    assert link.startswith("pipe:") and link not in seen["files"]
    assert "/espalier-mcp-" in seen["folder"] and not await anyio.Path(seen["folder"]).exists()
    assert seen["no_new_privileges"] == "1"


async def test_what_a_program_started_ends_with_the_connection(tmp_path: Path) -> None:
    async with session_of(stdio_ledger("s", tmp_path / "ledger")) as session:
        child = int(text_of(await session.call("fork", {}, seconds=CALL_S)))
        assert lives(child)
    await comes_true(lambda: not lives(child))


async def test_what_a_dead_program_left_behind_is_ended_at_once(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with session_of(stdio_ledger("s", ledger)) as session:
        began = anyio.current_time()
        assert await session.call("forkdie", {}, seconds=60) == Unknown(Reason.CONNECTION_LOST)
        assert anyio.current_time() - began < SOON_S  # although the child holds the program's output open
        (forked,) = notes(ledger, event="forked")
        await comes_true(lambda: not lives(forked["argument"]))


@pytest.mark.slow
async def test_a_program_that_will_not_end_is_killed_within_the_bound(tmp_path: Path) -> None:
    async with session_of(stdio_ledger("s", tmp_path / "ledger")) as session:
        child = int(text_of(await session.call("fork", {}, seconds=CALL_S)))
        program = psutil.Process(child).parent()
        assert program is not None
        assert await session.call("stubborn", {}, seconds=CALL_S) == says("done")
        began = anyio.current_time()
    assert stdio.STOP_AFTER_CLOSE_S + stdio.STOP_AFTER_TERM_S <= anyio.current_time() - began < 4.0
    await comes_true(lambda: not lives(program.pid) and not lives(child))


@pytest.mark.slow
async def test_no_program_outlives_a_killed_owner(tmp_path: Path) -> None:
    server = stdio_ledger("s", tmp_path / "ledger")
    async with _owner(tmp_path, {"command": server.command, "args": list(server.args)}) as owner:
        child = int((await owner.call("mcp.s.fork", {}))["text"])
        family = [*psutil.Process(owner.process.pid).children(recursive=True)]
        assert child in [each.pid for each in family] and len(family) == 3  # keeper, program, child
        owner.process.send_signal(signal.SIGKILL)
        await comes_true(lambda: not any(lives(each.pid) for each in family), within_s=5.0)


async def test_a_server_from_the_registry_works(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "Sow the first seed")
    command = str(Path(sys.executable).with_name("mcp-server-git"))
    server = StdioServer(name="git", command=command, args=("--repository", str(tmp_path)))
    async with open_catalog([server], None) as catalog:
        tools, troubles = await catalog.definitions(["mcp.git.*"])
        assert troubles == () and "mcp.git.git_log" in [tool.name for tool in tools]
        found = catalog.find("mcp.git.git_log")
        assert found is not None
        answer = await found.session.call(found.tool, {"repo_path": str(tmp_path)}, seconds=CALL_S)
        assert "Sow the first seed" in text_of(answer)


# ------------------------------------------------------------------------------ odd HTTP


@dataclass(frozen=True)
class Reply:
    """What the odd server answers: a status and a body, or a part of one before it hangs up."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    more: str = ""
    cut: bool = False

    def as_bytes(self) -> bytes:
        length = len(self.body) + (10 if self.cut else 0)
        head = f"HTTP/1.1 {self.status} X\r\ncontent-type: {self.content_type}\r\n{self.more}"
        return f"{head}content-length: {length}\r\n\r\n".encode() + self.body


def result(request: Mapping[str, Any], value: Mapping[str, Any]) -> Reply:
    return Reply(body=json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": value}).encode())


@dataclass
class OddServer:
    """Speaks just enough of MCP to be connected to, and answers `tools/call` as a test says."""

    reply: Callable[[Mapping[str, Any]], Reply]
    handshake: bool = False
    posted: list[str] = field(default_factory=list)
    sessions: int = 0

    async def serve(self, stream: SocketStream) -> None:
        async with stream:
            reading = BufferedByteReceiveStream(stream)
            with contextlib.suppress(anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
                while True:  # bounded by the client, which closes
                    reply = await self._answer(reading)
                    await stream.send(reply.as_bytes())
                    if reply.cut:
                        return

    async def _answer(self, reading: BufferedByteReceiveStream) -> Reply:
        head = (await reading.receive_until(b"\r\n\r\n", 65_536)).decode().lower()
        lengths = [line.partition(":")[2] for line in head.split("\r\n") if line.startswith("content-length")]
        request = json.loads(await reading.receive_exactly(int(lengths[0]))) if lengths else {}
        method = request.get("method", head.split()[0])
        self.posted.append(method)
        match method:
            case "server/discover" if not self.handshake:
                version = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
                return result(
                    request, {**version, "resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
                )
            case "initialize":
                self.sessions += 1
                info = {"protocolVersion": "2025-11-25", "serverInfo": {"name": "odd", "version": "1"}}
                made = result(request, {**info, "capabilities": {"tools": {}}})
                return Reply(body=made.body, more=f"mcp-session-id: s{self.sessions}\r\n")
            case "tools/call":
                return self.reply(request)
            case _:
                return Reply(status=405 if method == "get" else 202 if "id" not in request else 400)


@asynccontextmanager
async def odd_session(odd: OddServer) -> AsyncIterator[McpSession]:
    async with loopback(odd.serve) as url, session_of(HttpServer(name="s", url=url)) as session:
        yield session


@asynccontextmanager
async def loopback(serve: Callable[[SocketStream], Awaitable[None]]) -> AsyncIterator[str]:
    port = free_port()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{port}/mcp"
        tasks.cancel_scope.cancel()


def rpc_error(request: Mapping[str, Any], code: int, status: int = 400) -> Reply:
    error = {"jsonrpc": "2.0", "id": request["id"], "error": {"code": code, "message": "no"}}
    return Reply(status, json.dumps(error).encode())


DONE = {"content": [], "resultType": "complete"}
ODD: dict[str, tuple[Callable[[Mapping[str, Any]], Reply], Answer]] = {
    "as it should": (lambda request: result(request, DONE), Answered({"content": []})),
    "unauthorized": (lambda _: Reply(401), failed(REFUSED_TEXT)),
    "too many": (lambda _: Reply(429, b"slow down", "text/plain"), failed(REFUSED_TEXT)),
    "redirect": (lambda _: Reply(307, more="location: http://127.0.0.1:9/mcp\r\n"), failed(REFUSED_TEXT)),
    "redirect within": (lambda _: Reply(308, more="location: /mcp/\r\n"), failed(REFUSED_TEXT)),
    "header mismatch": (lambda request: rpc_error(request, HEADER_MISMATCH), failed("no")),
    "error with status": (lambda request: rpc_error(request, -32000, 500), failed("no")),
    "server error": (lambda _: Reply(502, b"<html>", "text/html"), Unknown(Reason.SERVER_FAILED)),
    "accepted": (lambda _: Reply(202), Unknown(Reason.GARBAGE)),
    "no json": (lambda _: Reply(body=b"<html>"), Unknown(Reason.GARBAGE)),
    "deep json": (lambda _: Reply(body=b"[" * 100_000), Unknown(Reason.GARBAGE)),
    "no result": (lambda request: result(request, {"content": 7}), Unknown(Reason.GARBAGE)),
    "another call's": (lambda request: result({"id": request["id"] + 1}, DONE), Unknown(Reason.GARBAGE)),
    "other content": (lambda _: Reply(body=b"a,b", content_type="text/csv"), Unknown(Reason.GARBAGE)),
    "packed": (
        lambda request: Reply(body=result(request, DONE).body, more="content-encoding: gzip\r\n"),
        Unknown(Reason.GARBAGE),
    ),
    "cut": (lambda _: Reply(body=b"{", cut=True), Unknown(Reason.CONNECTION_LOST)),
    "empty stream": (lambda _: Reply(content_type="text/event-stream"), Unknown(Reason.CONNECTION_LOST)),
    "resumable stream": (
        lambda _: Reply(body=b"id: 1\ndata:\n\n", content_type="text/event-stream"),
        Unknown(Reason.CONNECTION_LOST),
    ),
}


@pytest.mark.parametrize("handshake", [False, True])
@pytest.mark.parametrize("case", ODD)
async def test_whatever_http_answers_a_call_is_posted_once(case: str, handshake: bool) -> None:
    reply, expected = ODD[case]
    odd = OddServer(reply, handshake)
    async with odd_session(odd) as session:
        assert await session.call("any", {}, seconds=CALL_S) == expected
        assert await session.call("any", {}, seconds=CALL_S) == expected
    assert odd.posted.count("tools/call") == 2
    assert odd.sessions == handshake


async def test_a_lost_session_is_begun_anew_for_the_next_call_only() -> None:
    odd = OddServer(lambda request: result(request, DONE) if odd.sessions > 1 else Reply(404), handshake=True)
    async with odd_session(odd) as session:
        assert await session.call("any", {}, seconds=CALL_S) == failed(REFUSED_TEXT)
        assert await session.call("any", {}, seconds=CALL_S) == Answered({"content": []})
    assert odd.posted.count("tools/call") == 2
    assert odd.sessions == 2
