"""An MCP server as a program of its own, that keeps a ledger of what it did and goes wrong on demand.

    python ledger.py LEDGER                     serve standard input and output, both eras of MCP
    python ledger.py LEDGER --http              serve http://127.0.0.1:<port>/mcp instead, both eras; the port
                                                is the first line on standard output
        --port N          listen there and not on a free port
        --handshake       speak only the handshake era (up to 2025-11-25)
        --hang-at-connect take the connection and never answer anything
        --clock           write into every line when that was: `at`, on the machine's monotonic clock

LEDGER is a file to which one JSON object a line is appended, each with a single write, so that it is whole
whenever this program dies:

    {"event": "called", "tool": "record", "argument": "a", "meta": {...}}    a call began to be carried out
    {"event": "done", "tool": "record", "argument": "a"}                     it was carried out to its end
    {"event": "cancelled", "tool": "record", "argument": "a"}                the server was told to stop it

`argument` is the call's `text`, or null. A handler is also cancelled by the end of its connection, which then
shows as `cancelled` too, unless the program was killed. The tools, by name:

    record {text, delay_s}   answers "recorded <text>" after the delay
    meta                     answers with the `_meta` that came with the call, as structured content
    surroundings             answers with environment, open files, folder and arguments, as structured content
    fail                     answers with isError
    refuse                   answers with a JSON-RPC error
    ask                      asks for input, in the way of its era
    grow                     adds the tool `grown` and says that the tools changed
    big {bytes}              answers with a text of so many bytes
    hang                     never answers
    die                      ends the program at once, with exit code 9
    flood {lines}            prints lines to standard error, and garbage to standard output, then answers
    fork                     starts a child that would live for ten minutes, and answers with its number
    forkdie                  the same, and dies without an answer
    stubborn                 from now on ignores SIGTERM and the end of its input, and answers
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.runner import serve_loop
from mcp.server.stdio import stdio_server
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler
from mcp.shared.subscriptions import ToolsListChanged
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    InputRequiredResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from starlette.types import ASGIApp, Receive, Scope, Send

NAMES = "record meta surroundings fail refuse ask grow big hang die flood fork forkdie stubborn".split()
FOREVER_S = 3600.0
ANYTHING = {"type": "object", "additionalProperties": True}
FORM = {"type": "object", "properties": {"password": {"type": "string"}}}

Answer = CallToolResult | InputRequiredResult


class Ledger:
    """The file. Appending is one write."""

    def __init__(self, path: Path, *, clock: bool = False) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._clock = clock

    def note(self, event: str, tool: str, argument: object, **more: object) -> None:
        if self._clock:
            more["at"] = time.monotonic()
        line = json.dumps({"event": event, "tool": tool, "argument": argument, **more})
        os.write(self._file, line.encode() + b"\n")


class Desk:
    """The tools."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._wire = os.dup(1)  # where garbage goes; the SDK takes standard output for itself
        self._names = list(NAMES)
        self.is_stubborn = False
        self._bus = InMemorySubscriptionBus()
        self.listen = ListenHandler(self._bus)

    async def list_tools(
        self, _: ServerRequestContext[Any], _params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(
            tools=[
                Tool(name=name, description=f"Does {name}.", input_schema=ANYTHING) for name in self._names
            ]
        )

    async def call(self, context: ServerRequestContext[Any], params: CallToolRequestParams) -> Answer:
        arguments = params.arguments or {}
        meta = {key: value for key, value in (context.meta or {}).items() if "/" not in key}
        self._ledger.note("called", params.name, arguments.get("text"), meta=meta)
        try:
            answer = await self._do(context, params.name, arguments, meta)
        except anyio.get_cancelled_exc_class():
            self._ledger.note("cancelled", params.name, arguments.get("text"))
            raise
        self._ledger.note("done", params.name, arguments.get("text"))
        return answer

    async def _do(
        self, context: ServerRequestContext[Any], tool: str, arguments: dict[str, Any], meta: dict[str, Any]
    ) -> Answer:
        match tool:
            case "record":
                await anyio.sleep(arguments.get("delay_s", 0))
                return says(f"recorded {arguments['text']}")
            case "meta":
                return CallToolResult(content=[], structured_content=meta)
            case "surroundings":
                return CallToolResult(content=[], structured_content=surroundings())
            case "fail":
                return CallToolResult(content=[TextContent(text="it did not work")], is_error=True)
            case "refuse":
                raise MCPError(INVALID_PARAMS, "the arguments are wrong")
            case "ask":
                return await self._ask(context)
            case "grow":
                self._names.append("grown")
                await context.session.send_tool_list_changed()
                await self._bus.publish(ToolsListChanged())
                return says("grown")
            case "big":
                return says("x" * arguments["bytes"])
            case "hang":
                await anyio.sleep(FOREVER_S)
            case "flood":
                self._flood(arguments["lines"])
            case "die":
                os._exit(9)
            case "fork" | "forkdie":
                child = start_child()
                if tool == "forkdie":
                    self._ledger.note("forked", tool, child)
                    os._exit(9)
                return says(str(child))
            case "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                self.is_stubborn = True
        return says("done")

    async def _ask(self, context: ServerRequestContext[Any]) -> Answer:
        form = ElicitRequestFormParams(message="Your password, please.", requested_schema=FORM)
        if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
            return InputRequiredResult(input_requests={"password": ElicitRequest(params=form)})
        await context.session.elicit_form("Your password, please.", FORM)
        return says("thank you")

    def _flood(self, lines: int) -> None:
        for number in range(lines):
            sys.stderr.write(f"stderr {number} " + "e" * 200 + "\n")
            os.write(self._wire, f"garbage {number}\n".encode())
        sys.stderr.flush()


def start_child() -> int:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]).pid


def says(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=text)])


def surroundings() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "files": sorted(str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if is_file(each)),
        "folder": str(Path.cwd()),
        "arguments": sys.argv[1:],
        "no_new_privileges": no_new_privileges(),
    }


def no_new_privileges() -> str:
    status = Path("/proc/self/status").read_text()
    return next(line.split()[1] for line in status.splitlines() if line.startswith("NoNewPrivs:"))


def is_file(link: Path) -> bool:
    """Not the descriptor by which the list itself was read."""
    return int(link.name) > 2 and link.is_symlink()


# ----------------------------------------------------------------------------- transports


async def serve_stdio(server: Server[Any], *, handshake: bool) -> None:
    async with stdio_server() as (read, write):
        options = server.create_initialization_options()
        if handshake:
            await serve_loop(server, read, write, lifespan_state={}, init_options=options)
        else:
            await server.run(read, write, options)


class HandshakeOnly:
    """A server from before 2026, which refuses versions that it does not know."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", []))
        if headers.get(b"mcp-protocol-version", b"").decode() in MODERN_PROTOCOL_VERSIONS:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"unknown version"})
        else:
            await self._app(scope, receive, send)


class Silent:
    """Takes connections and requests and answers none."""

    async def __call__(self, scope: Scope, _receive: Receive, _send: Send) -> None:
        if scope["type"] == "http":
            await anyio.sleep(FOREVER_S)


def serve_http(app: ASGIApp, port: int) -> None:
    config = uvicorn.Config(app, port=port, log_level="error", lifespan="on")
    listener = config.bind_socket()
    listener.listen()  # before anybody is told where
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(config).run([listener])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ledger", type=Path)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--handshake", action="store_true")
    parser.add_argument("--hang-at-connect", action="store_true")
    parser.add_argument("--clock", action="store_true")
    parser.add_argument("words", nargs="*", help="are only shown by `surroundings`")
    chosen = parser.parse_args()
    desk = Desk(Ledger(chosen.ledger, clock=chosen.clock))
    server: Server[Any] = Server(
        "ledger",
        on_list_tools=desk.list_tools,
        on_call_tool=desk.call,
        on_subscriptions_listen=desk.listen,
    )
    if chosen.http:
        app: ASGIApp = Silent() if chosen.hang_at_connect else server.streamable_http_app()
        serve_http(HandshakeOnly(app) if chosen.handshake else app, chosen.port)
    elif chosen.hang_at_connect:
        time.sleep(FOREVER_S)
    else:
        anyio.run(lambda: serve_stdio(server, handshake=chosen.handshake))
        if desk.is_stubborn:
            time.sleep(FOREVER_S)


if __name__ == "__main__":
    main()
