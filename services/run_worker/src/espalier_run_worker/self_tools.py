"""The tools that an agent has by being an agent: an MCP server inside the worker.

They run in the step's own transaction, so they happen exactly when the step does. There is one in-memory
client per process; the step that a call belongs to travels in a context variable. No tool here can touch the
agent's toolset or ceilings.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from mcp.client import Client
from mcp.server.lowlevel import Server
from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool

from espalier_acts.artifacts import Content, create_artifact
from espalier_domain.decisions import SLEEP_S_MAX, Unreadable, read_decision
from espalier_domain.journal import Entry, ToolCall
from espalier_run_worker.draft import Draft
from espalier_run_worker.models.model import ToolDefinition
from espalier_store.pool import AWAY, REPEATABLE

ARTIFACT_CHARS_MAX: Final = 5_000_000
NAME_CHARS_MAX: Final = 200


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


DEFINITIONS: Final = (
    ToolDefinition(
        "sleep",
        "End this cycle and sleep until a moment or for a while. You wake earlier when a message comes.",
        _object(
            [],
            until={"type": "string", "description": "ISO 8601 time with an offset"},
            duration_seconds={"type": "number", "minimum": 0, "maximum": SLEEP_S_MAX},
            reason={"type": "string", "maxLength": 500},
        ),
    ),
    ToolDefinition("continue_now", "End this cycle and begin the next one at once.", _object([])),
    ToolDefinition(
        "complete",
        "End this run. Give either a result or a final message.",
        _object(
            [],
            result={"description": "any JSON value"},
            final_message={"type": "string", "minLength": 1},
            artifact_ids={"type": "array", "items": {"type": "string"}},
        ),
    ),
    ToolDefinition(
        "artifact_create",
        "Leave a file behind. Returns its artifact_id.",
        _object(
            ["name", "content"],
            name={"type": "string", "minLength": 1, "maxLength": NAME_CHARS_MAX},
            content={"type": "string", "maxLength": ARTIFACT_CHARS_MAX},
            mime_type={"type": "string", "default": "text/markdown"},
        ),
    ),
)


@dataclass
class Outcome:
    """What the model is shown of a call, and the entries that it left behind."""

    ok: bool = True
    content: str = ""
    entries: list[Entry] = field(default_factory=list)


class ToolRefused(Exception):
    """The call's arguments are not what the tool takes; the text is for the model."""


@dataclass(slots=True)
class _Under:
    """The step that a call belongs to, and what went wrong with its transaction."""

    draft: Draft
    entries: list[Entry] = field(default_factory=list)
    failure: Exception | None = None


_UNDER: ContextVar[_Under] = ContextVar("self_tool_step")


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
        under = _Under(draft)
        token = _UNDER.set(under)
        try:
            result = await self._client.call_tool(call.name, call.args)
        finally:
            _UNDER.reset(token)
        if under.failure:
            raise under.failure
        text = "\n".join(part.text for part in result.content if isinstance(part, TextContent))
        return Outcome(not result.is_error, text, under.entries)


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
    handler = HANDLERS.get(params.name)
    if handler is None:
        return _error(f"tool_not_found: this agent has no tool called {params.name[:NAME_CHARS_MAX]!r}")
    under = _UNDER.get()
    try:
        text = await handler(under, params.name, params.arguments or {})
    except ToolRefused as refused:
        return _error(str(refused))
    except (*AWAY, *REPEATABLE) as failure:
        under.failure = failure
        return _error("unavailable")
    return CallToolResult(content=[TextContent(type="text", text=text)])


def _error(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)


async def _decide(_: _Under, tool: str, args: dict[str, Any]) -> str:
    decision = read_decision(tool, args)
    if isinstance(decision, Unreadable):
        raise ToolRefused(decision.reason)
    return "ok"


async def _artifact_create(under: _Under, tool: str, args: dict[str, Any]) -> str:
    wanted = _read_content(tool, args)
    run = under.draft.run
    entry = await create_artifact(under.draft.connection, run.owner_id, run.agent_id, run.run_id, wanted)
    under.entries.append(entry)
    return orjson.dumps({"artifact_id": entry.artifact_id, "size_bytes": entry.size_bytes}).decode()


def _read_content(tool: str, args: dict[str, Any]) -> Content:
    match args:
        case {"name": str(name), "content": str(content), **rest} if set(rest) <= {"mime_type"}:
            mime_type = rest.get("mime_type", "text/markdown")
            if (
                0 < len(name) <= NAME_CHARS_MAX
                and len(content) <= ARTIFACT_CHARS_MAX
                and _is_mime_type(mime_type)
            ):
                return Content(name, mime_type, content.encode())
    raise ToolRefused(
        f"{tool} takes name (1 to {NAME_CHARS_MAX} characters), content (text of at most "
        f"{ARTIFACT_CHARS_MAX} characters) and mime_type (such as text/markdown)."
    )


def _is_mime_type(text: object) -> bool:
    if (
        not isinstance(text, str)
        or len(text) > NAME_CHARS_MAX
        or not text.isascii()
        or not text.isprintable()
    ):
        return False
    kind, slash, rest = text.partition("/")
    return bool(kind.strip() and slash and rest.strip())


Handler = Callable[[_Under, str, dict[str, Any]], Awaitable[str]]
HANDLERS: Final[dict[str, Handler]] = {
    "sleep": _decide,
    "continue_now": _decide,
    "complete": _decide,
    "artifact_create": _artifact_create,
}
