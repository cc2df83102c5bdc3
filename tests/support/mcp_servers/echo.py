"""An MCP server over HTTP that repeats what it was sent, secrets too, and notes each request in a file.

    python echo.py NOTES [--bearer TOKEN] [--redirect-to URL]   the port is the first line on standard output

NOTES gets one JSON object a line: `{"verb": "POST", "headers": {...}}`. With `--bearer` a request without
that token is answered with 401. With `--redirect-to` every request is answered with 307 to that URL.
The server speaks both eras. Its tools, whose descriptions repeat the header Authorization:

    echo     answers with headers and `_meta` of the request, as JSON in a text and as structured content
    fail     the same text, with isError
    refuse   a JSON-RPC error whose message is the same text
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import uvicorn
from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

Context = ServerRequestContext[Any, Request]


def headers_of(context: Context) -> dict[str, str]:
    assert context.request is not None
    return dict(context.request.headers)


async def list_tools(context: Context, _: PaginatedRequestParams | None) -> ListToolsResult:
    told = headers_of(context).get("authorization", "nothing")
    schema = {"type": "object", "properties": {"text": {"type": "string", "description": f"Not {told}."}}}
    return ListToolsResult(
        tools=[
            Tool(name=name, description=f"Got {told}.", input_schema=schema)
            for name in ("echo", "fail", "refuse")
        ]
    )


async def call(context: Context, params: CallToolRequestParams) -> CallToolResult:
    meta = {key: value for key, value in (context.meta or {}).items() if "/" not in key}
    got = {"headers": headers_of(context), "meta": meta}
    if params.name == "refuse":
        raise MCPError(INVALID_PARAMS, json.dumps(got))
    return CallToolResult(
        content=[TextContent(text=json.dumps(got))], structured_content=got, is_error=params.name == "fail"
    )


class Door:
    """Notes who comes, and lets in whoever may."""

    def __init__(self, app: ASGIApp, notes: Path, bearer: str, redirect_to: str) -> None:
        self._app, self._bearer, self._redirect_to = app, bearer, redirect_to
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        note = {"verb": request.method, "headers": dict(request.headers)}
        os.write(self._notes, json.dumps(note).encode() + b"\n")
        if self._redirect_to:
            await RedirectResponse(self._redirect_to, 307)(scope, receive, send)
        elif self._bearer and request.headers.get("authorization") != f"Bearer {self._bearer}":
            await Response(status_code=401, headers={"www-authenticate": "Bearer"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("notes", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bearer", default="")
    parser.add_argument("--redirect-to", default="")
    chosen = parser.parse_args()
    server: Server[Any] = Server("echo", on_list_tools=list_tools, on_call_tool=call)
    app = Door(server.streamable_http_app(), chosen.notes, chosen.bearer, chosen.redirect_to)
    config = uvicorn.Config(app, port=chosen.port, log_level="error", lifespan="on")
    listener = config.bind_socket()
    listener.listen()  # before anybody is told where
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
