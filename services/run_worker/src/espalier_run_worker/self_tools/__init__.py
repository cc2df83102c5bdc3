"""The tools that an agent has by being an agent: an MCP server inside the worker.

They run in the step's own transaction, so they happen exactly when the step does. There is one in-memory
client per process; the step that a call belongs to travels in a context variable. No tool here can touch the
agent's toolset or ceilings. Each subject has its file beside this one; `tool` is what they share.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from mcp.client import Client
from mcp.server.lowlevel import Server
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool

from espalier_domain.journal import Entry, ToolCall
from espalier_run_worker.draft import Draft
from espalier_run_worker.models.model import ToolDefinition
from espalier_run_worker.self_tools import artifacts, control, memory, messages
from espalier_run_worker.self_tools.tool import NAME_CHARS_MAX, ToolRefused, Under
from espalier_store.pool import AWAY, REPEATABLE

ALL: Final = (*control.TOOLS, *artifacts.TOOLS, *memory.TOOLS, *messages.TOOLS)
TOOLS: Final = {tool.definition.name: tool for tool in ALL}
DEFINITIONS: Final = tuple(tool.definition for tool in TOOLS.values())


@dataclass
class Outcome:
    """What the model is shown of a call, and the entries and wakes that it left behind."""

    ok: bool = True
    content: str = ""
    entries: list[Entry] = field(default_factory=list)
    wakes: list[int] = field(default_factory=list)


_UNDER: ContextVar[Under] = ContextVar("self_tool_step")


class SelfTools:
    """The worker's end of the in-memory MCP session."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @staticmethod
    def definitions() -> tuple[ToolDefinition, ...]:
        return DEFINITIONS

    async def call(self, draft: Draft, call: ToolCall) -> Outcome:
        """Run one call inside the draft's transaction. A tool nobody knows is an outcome, not an error.

        Raises what Postgres raised: MCP would make a tool's error of it, but the whole step has failed.
        """
        under = Under(draft)
        token = _UNDER.set(under)
        try:
            result = await self._client.call_tool(call.name, call.args)
        finally:
            _UNDER.reset(token)
        if under.failure:
            raise under.failure
        text = "\n".join(part.text for part in result.content if isinstance(part, TextContent))
        return Outcome(not result.is_error, text, under.entries, under.wakes)


@asynccontextmanager
async def open_self_tools() -> AsyncIterator[SelfTools]:
    """The server and its one client, for the life of the process. Left by the task that entered it."""
    server = Server("espalier-self", on_list_tools=_list_tools, on_call_tool=_call_tool)
    async with Client(server) as client:
        yield SelfTools(client)


async def _list_tools(*_: object) -> ListToolsResult:
    return ListToolsResult(
        tools=[Tool(name=t.name, description=t.description, input_schema=t.input_schema) for t in DEFINITIONS]
    )


async def _call_tool(_: object, params: CallToolRequestParams) -> CallToolResult:
    tool = TOOLS.get(params.name)
    if tool is None:
        return _error(f"tool_not_found: this agent has no tool called {params.name[:NAME_CHARS_MAX]!r}")
    under = _UNDER.get()
    try:
        text = await tool.run(under, params.arguments or {})
    except ToolRefused as refused:
        return _error(str(refused))
    except (*AWAY, *REPEATABLE) as failure:
        under.failure = failure
        return _error("unavailable")
    return CallToolResult(content=[TextContent(type="text", text=text)])


def _error(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)
