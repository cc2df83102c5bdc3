"""The events of a run: fifteen types, one payload model each, and the envelope (AEP spec section 7).

A payload knows neither its place nor its time: `seq` and `emitted_at` are given under the run row's lock by
whoever appends. The payload's JSON text is made once, stored, and published as the same bytes.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict

from espalier_protocol.agent import Budgets
from espalier_protocol.ids import event_id
from espalier_protocol.run import EndState
from espalier_protocol.shapes import JsonAny, JsonObject, timestamp
from espalier_protocol.strict_json import one_line

EventType = Literal[
    "run.started",
    "run.ended",
    "cycle.started",
    "cycle.ended",
    "tool.called",
    "tool.returned",
    "subagent.spawned",
    "message.sent",
    "message.delivered",
    "prompt.modified",
    "prompt.change_queued",
    "prompt.change_rejected",
    "memory.written",
    "artifact.created",
    "error",
]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
OwnEventType = Literal["espalier.approval.requested", "espalier.approval.resolved"]
"""Sent only to sessions that negotiated `espalier.events`; numbered in the same log as the fifteen."""

LAST_EVENT: EventType = "run.ended"

CycleOutcome = Literal["slept", "completed", "continue", "forced_sleep", "stopped_mid_cycle"]


class Payload(BaseModel):
    """What one event says. Each subclass names its type."""

    model_config = ConfigDict(frozen=True, strict=True)
    type: ClassVar[EventType | OwnEventType]

    def text(self) -> str:
        """The JSON that is stored and sent, on one line whatever an SSE parser takes for a line end."""
        return one_line(self.model_dump_json().encode()).decode()


class RunStarted(Payload):
    type = "run.started"
    run_id: str
    agent_id: str


class RunEnded(Payload):
    type = "run.ended"
    run_id: str
    final_state: EndState
    result: JsonAny


class CycleStarted(Payload):
    type = "cycle.started"
    run_id: str
    cycle_number: int
    budget_snapshot: Budgets


class CycleEnded(Payload):
    """`tool_calls_made` counts tools, not the call that ends the cycle."""

    type = "cycle.ended"
    run_id: str
    cycle_number: int
    tokens_used: int
    tool_calls_made: int
    outcome: CycleOutcome
    reason: str | None


class ToolCalled(Payload):
    """`call_id` pairs the call with its `tool.returned` (our extension). Long arguments are shortened."""

    type = "tool.called"
    cycle_number: int
    call_id: str
    tool_name: str
    args: JsonObject


class ResultSummary(BaseModel):
    """`in_doubt` (our extension): the call may have run and is not repeated; nobody knows its outcome."""

    model_config = ConfigDict(frozen=True, strict=True)
    ok: bool
    preview: str
    in_doubt: bool = False


class ToolReturned(Payload):
    """`preview` holds at most 500 characters."""

    type = "tool.returned"
    cycle_number: int
    call_id: str
    tool_name: str
    result_summary: ResultSummary


class MemoryWritten(Payload):
    """Not the value: it may be about a person."""

    type = "memory.written"
    memory_id: str
    namespace: str
    key: str
    subject_id: str | None


class SubagentSpawned(Payload):
    """On the parent's run."""

    type = "subagent.spawned"
    child_agent_id: str
    child_run_id: str


class PromptModified(Payload):
    """`approved_by` is null when the policy let the agent do it; `diff` is a unified diff."""

    type = "prompt.modified"
    diff: str
    reason: str
    approved_by: str | None


class PromptChangeQueued(Payload):
    type = "prompt.change_queued"
    pending_change_id: str
    diff: str
    reason: str


class PromptChangeRejected(Payload):
    """`reason` is the agent's, `comment` the rejecter's."""

    type = "prompt.change_rejected"
    pending_change_id: str
    reason: str
    rejected_by: str
    comment: str | None


class ApprovalRequested(Payload):
    """Something of this run waits for a person, who answers by `approval.resolve` (our extension)."""

    type = "espalier.approval.requested"
    approval_id: str
    kind: str


class ApprovalResolved(Payload):
    type = "espalier.approval.resolved"
    approval_id: str
    kind: str
    resolution: str


class MessageSent(Payload):
    type = "message.sent"
    to_agent_id: str
    message_id: str


class MessageDelivered(Payload):
    """The recipient has read it."""

    type = "message.delivered"
    from_agent_id: str
    message_id: str


class ArtifactCreated(Payload):
    type = "artifact.created"
    artifact_id: str
    name: str
    mime_type: str
    size_bytes: int


class Trouble(Payload):
    """The `error` event: a limit that was reached or a failure that the run met. It does not end the run."""

    type = "error"
    code: int
    symbol: str
    message: str
    cycle_number: int | None


PAYLOADS: tuple[type[Payload], ...] = (
    RunStarted,
    RunEnded,
    CycleStarted,
    CycleEnded,
    ToolCalled,
    ToolReturned,
    MemoryWritten,
    SubagentSpawned,
    PromptModified,
    PromptChangeQueued,
    PromptChangeRejected,
    ApprovalRequested,
    ApprovalResolved,
    MessageSent,
    MessageDelivered,
    ArtifactCreated,
    Trouble,
)
"""Of every type, in the order of this page."""


class Event(BaseModel):
    """The envelope as a reader gets it. `type` is open: a later version may send types unknown here."""

    model_config = ConfigDict(frozen=True, extra="allow")
    event_id: str
    run_id: str
    type: str
    emitted_at: str
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """An event in its place, as it is stored. `payload` is JSON text."""

    seq: int
    type: str
    emitted_at: datetime
    payload: str

    def line(self, run_id: str) -> "EventLine":
        """The envelope around the stored payload, which is not parsed again. `run_id` is a wire id."""
        data = (
            f'{{"event_id":"{event_id(self.seq)}","run_id":"{run_id}","type":"{self.type}",'
            f'"emitted_at":"{timestamp(self.emitted_at)}","payload":{self.payload}}}'
        )
        return EventLine(self.seq, self.type, data)


class EventLine(NamedTuple):
    """An event ready to be sent: `data` is its envelope, JSON on one line."""

    seq: int
    type: str
    data: str
