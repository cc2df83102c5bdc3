"""`send_message` and `inbox_read`: what an agent says to others of its tree, and hears."""

from typing import Any, Final

import orjson

from espalier_acts.messages import MessageOrder, read_inbox, send_message
from espalier_domain.errors import InvalidInput, LifecycleConflict, NotFound, TreeBoundary
from espalier_domain.journal import MessageSent
from espalier_protocol.ids import from_wire, to_wire
from espalier_protocol.message import BODY_BYTES_MAX
from espalier_protocol.shapes import ID_CHARS_MAX, timestamp
from espalier_run_worker.models.model import ToolDefinition
from espalier_run_worker.self_tools.tool import SelfTool, ToolRefused, Under, object_schema
from espalier_store.messages import TakenMessage

NOBODY: Final = "there is no agent with this id"


async def _send_message(under: Under, args: dict[str, Any]) -> str:
    """The sender is whoever's step this is; nothing in the arguments can say otherwise."""
    run, facts = under.draft.run, under.draft.facts
    match args:
        case {"to_agent_id": str(text), "body": body} if len(args) == 2 and len(text) <= ID_CHARS_MAX:
            to_agent_id = from_wire("agt", text)
        case _:
            raise ToolRefused("send_message takes to_agent_id (an agent's id) and body (any JSON value).")
    if to_agent_id is None:
        raise ToolRefused(NOBODY, symbol="tool_not_found")
    order = MessageOrder(
        to_agent_id, body, facts.root_agent_id, from_agent_id=run.agent_id, from_run_id=run.run_id
    )
    try:
        sent = await send_message(under.draft.connection, run.owner_id, order)
    except NotFound as error:
        raise ToolRefused(NOBODY, symbol="tool_not_found") from error
    except TreeBoundary as error:
        raise ToolRefused(error.reason, symbol="tree_boundary_violation") from error
    except LifecycleConflict as error:
        raise ToolRefused(error.reason, symbol="lifecycle_conflict") from error
    except InvalidInput as error:
        raise ToolRefused(f"send_message: {error.field} {error.reason}") from error
    under.entries.append(MessageSent(sent.message.id, sent.message.to_agent_id))
    under.wakes.append(sent.wake_id)
    return orjson.dumps({"message_id": sent.message.id}).decode()


async def _inbox_read(under: Under, args: dict[str, Any]) -> str:
    if args:
        raise ToolRefused("inbox_read takes no arguments.")
    connection = under.draft.connection
    try:
        async with connection.transaction():
            entry, taken = await read_inbox(connection, under.draft.run)
    except LifecycleConflict as error:
        raise ToolRefused(f"lifecycle_conflict: {error.reason}") from error
    under.entries.append(entry)
    return orjson.dumps({"messages": [_shown(each) for each in taken]}).decode()


def _shown(message: TakenMessage) -> dict[str, Any]:
    return {
        "id": to_wire("msg", message.message_id),
        "from_agent_id": to_wire("agt", message.from_agent_id),
        "body": orjson.Fragment(message.body),
        "sent_at": timestamp(message.sent_at),
    }


INBOX_READ: Final = SelfTool(
    ToolDefinition(
        "inbox_read",
        "Read the messages that came for you and that you have not read, oldest first.",
        object_schema([]),
    ),
    _inbox_read,
)
"""Offered to whoever spawns, too: a helper's result comes as a message."""

TOOLS: Final[tuple[SelfTool, ...]] = (
    SelfTool(
        ToolDefinition(
            "send_message",
            "Send a message to another agent of your tree; it wakes when it sleeps. Returns its message_id.",
            object_schema(
                ["to_agent_id", "body"],
                to_agent_id={"type": "string", "maxLength": ID_CHARS_MAX},
                body={"description": f"any JSON value of at most {BODY_BYTES_MAX} bytes"},
            ),
        ),
        _send_message,
    ),
    INBOX_READ,
)
