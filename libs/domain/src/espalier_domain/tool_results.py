"""What a tool's answer means: from a call's row to the entry that tells of it.

The row keeps the whole answer as MCP gave it; the entry keeps what the model is shown, which is bounded. A
call whose outcome nobody knows is shown as exactly that.
"""

import re
from typing import Any, Final, Literal

from espalier_domain.journal import ToolCall, ToolReturned
from espalier_protocol.strict_json import dumps

SHOWN_BYTES_MAX: Final = 256 * 1024
DOUBT: Final = "outcome unknown: the call may have run, and it is not repeated"
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")

SettledState = Literal["done", "failed", "in_doubt"]
CallState = Literal["planned", "sent", "skipped"] | SettledState


def returned(cycle: int, call: ToolCall, state: CallState, content: str) -> ToolReturned:
    """The entry for a call that has come to `state`; one that was `sent` is in doubt by now."""
    doubt = state in ("sent", "in_doubt")
    content = (content or DOUBT) if doubt else content
    return ToolReturned(cycle, call.call_id, call.name, state == "done", content, in_doubt=doubt)


def shown(result: dict[str, Any]) -> str:
    """What the model is shown of a `CallToolResult`: its text, else its structured content.

    What is neither is named and left out. At most SHOWN_BYTES_MAX of UTF-8.
    """
    parts = result.get("content") or ()
    text = "\n".join(_part(part) for part in parts)
    if not text and result.get("structuredContent") is not None:
        text = dumps(result["structuredContent"]).decode()
    return _cut(_UNSTORABLE.sub("\ufffd", text))


def text_result(text: str) -> dict[str, Any]:
    """A failed `CallToolResult` that the broker itself has to give."""
    return {"content": [{"type": "text", "text": text}], "isError": True}


def _part(part: dict[str, Any]) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "resource", "resource": {"text": str(text)}}:
            return text
        case {"type": "resource_link", "uri": str(uri)}:
            return f"[resource: {uri}]"
        case _:
            return f"[{str(part.get('type', 'content'))[:40]} left out]"


def _cut(text: str) -> str:
    data = text.encode()
    if len(data) <= SHOWN_BYTES_MAX:
        return text
    note = f"\n[shortened: the first part of {len(data)} bytes]"
    return data[: SHOWN_BYTES_MAX - len(note)].decode("utf-8", "ignore") + note
