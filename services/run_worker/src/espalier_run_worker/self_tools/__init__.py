"""The tools that an agent has by being an agent: an MCP server inside the worker.

They run in the step's own transaction, so they happen exactly when the step does. There is one in-memory
client per process; the step that a call belongs to travels in a context variable. No tool here can touch the
agent's toolset or ceilings. Each subject has its file beside this one; `tool` is what they share.
"""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from mcp.client import Client
from mcp.server.lowlevel import Server
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool

from espalier_domain.journal import Entry, LimitReached, LimitSymbol, ToolCall
from espalier_embeddings import Embedder
from espalier_protocol.access import Capability
from espalier_run_worker.draft import Draft
from espalier_run_worker.models.model import ToolDefinition
from espalier_run_worker.self_tools import artifacts, control, memory, messages, prompt, spawn
from espalier_run_worker.self_tools.tool import NAME_CHARS_MAX, SelfTool, ToolRefused, Under
from espalier_store.pool import AWAY, REPEATABLE

ALWAYS: Final = (*control.TOOLS, *artifacts.TOOLS)
BY_CAPABILITY: Final[Mapping[Capability, Sequence[SelfTool]]] = {
    "self.learning_memory": memory.TOOLS,
    "messaging.peer": messages.TOOLS,
    "self.modify_prompt": prompt.TOOLS,
    "self.spawn_subagent": (*spawn.TOOLS, messages.INBOX_READ),
}
"""Tools that are there while their capability is offered."""


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

    def __init__(
        self, client: Client, definitions: tuple[ToolDefinition, ...], embedder: Embedder | None
    ) -> None:
        self._client, self._definitions, self._embedder = client, definitions, embedder

    def definitions(self) -> tuple[ToolDefinition, ...]:
        return self._definitions

    async def call(self, draft: Draft, call: ToolCall) -> Outcome:
        """Run one call inside the draft's transaction. A tool nobody knows is an outcome, not an error.

        Raises what Postgres raised: MCP would make a tool's error of it, but the whole step has failed.
        """
        under = Under(draft, self._embedder)
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
async def open_self_tools(
    offered: Collection[str], embedder: Embedder | None = None
) -> AsyncIterator[SelfTools]:
    """The server with the tools of these capabilities, and its one client, for the life of the process.

    Left by the task that entered it.
    """
    optional = chain.from_iterable(tools for name, tools in BY_CAPABILITY.items() if name in offered)
    tools = {tool.definition.name: tool for tool in (*ALWAYS, *optional)}
    definitions = tuple(tool.definition for tool in tools.values())

    async def list_tools(*_: object) -> ListToolsResult:
        return ListToolsResult(
            tools=[
                Tool(name=t.name, description=t.description, input_schema=t.input_schema) for t in definitions
            ]
        )

    async def call_tool(_: object, params: CallToolRequestParams) -> CallToolResult:
        return await _call_tool(tools, params)

    server = Server("espalier-self", on_list_tools=list_tools, on_call_tool=call_tool)
    async with Client(server) as client:
        yield SelfTools(client, definitions, embedder)


async def _call_tool(tools: Mapping[str, SelfTool], params: CallToolRequestParams) -> CallToolResult:
    tool = tools.get(params.name)
    under = _UNDER.get()
    try:
        if tool is None:
            reason = f"this agent has no tool called {params.name[:NAME_CHARS_MAX]!r}"
            raise ToolRefused(reason, symbol="tool_not_found")
        text = await tool.run(under, params.arguments or {})
    except ToolRefused as refused:
        if refused.symbol is not None:
            under.entries.append(_told(under, params.name, refused.symbol, str(refused)))
        return _error(str(refused))
    except (*AWAY, *REPEATABLE) as failure:
        under.failure = failure
        return _error("unavailable")
    return CallToolResult(content=[TextContent(type="text", text=text)])


def _told(under: Under, tool: str, symbol: LimitSymbol, text: str) -> LimitReached:
    cycle = under.draft.progress.cycle
    assert cycle is not None, "a call is made in a cycle"
    why = text.removeprefix(f"{symbol}: ").rstrip(".")
    return LimitReached(cycle.number, symbol, f"{tool[:NAME_CHARS_MAX]} was refused: {why}.")


def _error(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)
