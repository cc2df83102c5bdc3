"""The calls that end a cycle: `sleep`, `continue_now`, `complete`. What they mean is the domain's to say."""

from typing import Any, Final

from espalier_domain.decisions import SLEEP_S_MAX, Unreadable, read_decision
from espalier_run_worker.models.model import ToolDefinition
from espalier_run_worker.self_tools.tool import SelfTool, ToolRefused, Under, object_schema


def _decide(tool: str, args: dict[str, Any]) -> str:
    decision = read_decision(tool, args)
    if isinstance(decision, Unreadable):
        raise ToolRefused(decision.reason)
    return "ok"


async def _sleep(_: Under, args: dict[str, Any]) -> str:
    return _decide("sleep", args)


async def _continue_now(_: Under, args: dict[str, Any]) -> str:
    return _decide("continue_now", args)


async def _complete(_: Under, args: dict[str, Any]) -> str:
    return _decide("complete", args)


TOOLS: Final = (
    SelfTool(
        ToolDefinition(
            "sleep",
            "End this cycle and sleep until a moment or for a while. You wake earlier when a message comes.",
            object_schema(
                [],
                until={"type": "string", "description": "ISO 8601 time with an offset"},
                duration_seconds={"type": "number", "minimum": 0, "maximum": SLEEP_S_MAX},
                reason={"type": "string", "maxLength": 500},
            ),
        ),
        _sleep,
    ),
    SelfTool(
        ToolDefinition("continue_now", "End this cycle and begin the next one at once.", object_schema([])),
        _continue_now,
    ),
    SelfTool(
        ToolDefinition(
            "complete",
            "End this run. Give either a result or a final message.",
            object_schema(
                [],
                result={"description": "any JSON value"},
                final_message={"type": "string", "minLength": 1},
                artifact_ids={"type": "array", "items": {"type": "string"}},
            ),
        ),
        _complete,
    ),
)
