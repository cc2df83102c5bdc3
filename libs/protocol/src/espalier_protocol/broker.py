"""What a worker and the tool broker say to each other: plain JSON over HTTP, in the shapes of MCP.

It is no part of AEP and no embedder sees it. An order names a call and nothing of it: the broker reads name
and arguments from the call's row. Requests are signed with the internal key; there is no clock in them, since
the row lets a call be sent only once.
"""

from typing import Final, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from espalier_protocol.shapes import JsonObject

CALL_PATH: Final = "/internal/tools/call"
LIST_PATH: Final = "/internal/tools/list"
SIGNATURE_HEADER: Final = "Espalier-Signature"


class _Word(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CallOrder(_Word):
    """Carry out a planned call for whoever holds `lease_token`; or, if it was sent, say how it stands.

    `seconds_max` is how long the run can wait for the answer.
    """

    owner_id: UUID
    run_id: UUID
    call_id: str
    lease_token: int
    seconds_max: float


CallState = Literal["done", "failed", "in_doubt", "elsewhere", "refused"]


class CallStanding(_Word):
    """How a call stands. `content` is what the model is shown of the outcome; empty where there is none.

    `elsewhere`: another broker has sent it; its row will tell. `refused`: nothing was sent, because the lease
    is lost, the run is to stop, or this broker may not send now.
    """

    state: CallState
    content: str = ""


class ToolsWanted(_Word):
    """The tools that a toolset names, of the agent's own servers too. Without an agent, of all others."""

    owner_id: UUID
    agent_id: UUID | None = None
    toolset: tuple[str, ...]


class OfferedTool(_Word):
    """A tool under the name that agents call it by. `input_schema` is JSON Schema."""

    name: str
    description: str
    input_schema: JsonObject


class ToolsOffered(_Word):
    """`troubles`: one sentence for each server whose tools could not be listed."""

    tools: tuple[OfferedTool, ...]
    troubles: tuple[str, ...] = ()
