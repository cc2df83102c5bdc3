"""The journal: everything that happened to a run, in the words that `run.apply` reads.

Entries are facts, written once in the transaction of the step that made them. The codec is here because the
entries' shape is. Not here: what readers are told of them (`telling`).
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from espalier_domain.decisions import Complete, ContinueNow, Sleep, Wait
from espalier_protocol.agent import Budgets
from espalier_protocol.run import EndState


@dataclass(frozen=True, slots=True)
class RunCreated:
    agent_id: str
    kind: Literal["run_created"] = "run_created"


@dataclass(frozen=True, slots=True)
class CycleStarted:
    """`started_s` is the run's age in seconds; `wake_seen` the wake counter that this cycle answers.

    `woken` says that the counter has risen since it was last seen: a message waits.
    """

    cycle: int
    started_s: float
    wake_seen: int
    budgets: Budgets
    woken: bool = False
    kind: Literal["cycle_started"] = "cycle_started"


@dataclass(frozen=True, slots=True)
class ModelCallStarted:
    """A reservation of tokens by the holder of `lease_token`; nobody else may still be asking."""

    cycle: int
    attempt: int
    reserved: int
    lease_token: int
    kind: Literal["model_call_started"] = "model_call_started"


@dataclass(frozen=True, slots=True)
class ToolCall:
    call_id: str
    name: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelAnswered:
    cycle: int
    text: str
    calls: tuple[ToolCall, ...]
    tokens: int
    kind: Literal["model_answered"] = "model_answered"


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """An attempt without an answer, charged `tokens`. `retryable`: asking again may help.

    `retry_after_s` is how long the provider asked to be left alone, None if it did not.
    """

    cycle: int
    reason: str
    retryable: bool
    tokens: int
    retry_after_s: float | None = None
    kind: Literal["model_failed"] = "model_failed"


@dataclass(frozen=True, slots=True)
class CallsPlanned:
    """Calls for the broker that no limit refused; each has its row, and from now on may be sent once."""

    cycle: int
    call_ids: tuple[str, ...]
    kind: Literal["calls_planned"] = "calls_planned"


@dataclass(frozen=True, slots=True)
class ToolsMissing:
    """A server whose tools the model was not offered in this cycle."""

    cycle: int
    message: str
    kind: Literal["tools_missing"] = "tools_missing"


@dataclass(frozen=True, slots=True)
class ToolReturned:
    """`content` is what the model is shown. A refused call never ran; one in doubt may have run."""

    cycle: int
    call_id: str
    tool: str
    ok: bool
    content: str
    refused: bool = False
    in_doubt: bool = False
    kind: Literal["tool_returned"] = "tool_returned"


@dataclass(frozen=True, slots=True)
class ArtifactCreated:
    artifact_id: str
    name: str
    mime_type: str
    size_bytes: int
    kind: Literal["artifact_created"] = "artifact_created"


@dataclass(frozen=True, slots=True)
class MemoryWritten:
    memory_id: str
    namespace: str
    key: str
    subject_id: str | None
    kind: Literal["memory_written"] = "memory_written"


@dataclass(frozen=True, slots=True)
class MessageSent:
    message_id: str
    to_agent_id: str
    kind: Literal["message_sent"] = "message_sent"


@dataclass(frozen=True, slots=True)
class SubagentSpawned:
    """A helper was begun. `cycles` and `subagents` of the spawner's headroom are granted to it."""

    child_agent_id: str
    child_run_id: str
    cycles: int
    subagents: int
    kind: Literal["subagent_spawned"] = "subagent_spawned"


@dataclass(frozen=True, slots=True)
class PromptModified:
    """`approved_by` is None when the policy let the agent do it."""

    diff: str
    reason: str
    approved_by: str | None
    kind: Literal["prompt_modified"] = "prompt_modified"


@dataclass(frozen=True, slots=True)
class PromptChangeQueued:
    pending_change_id: str
    diff: str
    reason: str
    kind: Literal["prompt_change_queued"] = "prompt_change_queued"


@dataclass(frozen=True, slots=True)
class PromptChangeRejected:
    """`reason` is the agent's, `comment` the rejecter's."""

    pending_change_id: str
    reason: str
    rejected_by: str
    comment: str | None
    kind: Literal["prompt_change_rejected"] = "prompt_change_rejected"


@dataclass(frozen=True, slots=True)
class ApprovalRequested:
    approval_id: str
    about: Literal["tool_call", "in_doubt", "prompt_change"]
    kind: Literal["approval_requested"] = "approval_requested"


@dataclass(frozen=True, slots=True)
class ApprovalResolved:
    approval_id: str
    about: Literal["tool_call", "in_doubt", "prompt_change"]
    resolution: str
    kind: Literal["approval_resolved"] = "approval_resolved"


@dataclass(frozen=True, slots=True)
class ReadMessage:
    message_id: str
    from_agent_id: str


@dataclass(frozen=True, slots=True)
class InboxRead:
    """`wake_seen` is the wake counter from before the inbox was read: a later message still wakes."""

    messages: tuple[ReadMessage, ...]
    wake_seen: int
    kind: Literal["inbox_read"] = "inbox_read"


LimitSymbol = Literal[
    "ceiling_exceeded",
    "budget_exhausted",
    "tree_boundary_violation",
    "constitution_policy_violation",
    "tool_not_found",
    "lifecycle_conflict",
]


@dataclass(frozen=True, slots=True)
class LimitReached:
    """A limit of the run, or of its cage, that stopped something; told to readers as an `error` event."""

    cycle: int | None
    symbol: LimitSymbol
    message: str
    kind: Literal["limit_reached"] = "limit_reached"


@dataclass(frozen=True, slots=True)
class Parked:
    """The cycle stays open while the run waits `seconds` for `reason`."""

    cycle: int
    reason: Literal["retry"]
    seconds: float
    kind: Literal["parked"] = "parked"


@dataclass(frozen=True, slots=True)
class HeadroomAwaited:
    """Woken between two cycles, the run could begin none: what it has left is granted to live children.

    `wake_seen` is the wake counter that it was woken with.
    """

    wake_seen: int
    kind: Literal["headroom_awaited"] = "headroom_awaited"


@dataclass(frozen=True, slots=True)
class CycleEnded:
    """`decision` is None when the run was stopped in mid-cycle."""

    cycle: int
    decision: Annotated[Sleep | ContinueNow | Complete | Wait, Field(discriminator="kind")] | None
    tokens_used: int
    tool_calls_made: int
    kind: Literal["cycle_ended"] = "cycle_ended"


@dataclass(frozen=True, slots=True)
class RunEnded:
    final_state: EndState
    result: Any
    kind: Literal["run_ended"] = "run_ended"


Entry = (
    RunCreated
    | CycleStarted
    | ModelCallStarted
    | ModelAnswered
    | ModelFailed
    | CallsPlanned
    | ToolsMissing
    | ToolReturned
    | ArtifactCreated
    | MemoryWritten
    | MessageSent
    | SubagentSpawned
    | PromptModified
    | PromptChangeQueued
    | PromptChangeRejected
    | ApprovalRequested
    | ApprovalResolved
    | InboxRead
    | LimitReached
    | Parked
    | HeadroomAwaited
    | CycleEnded
    | RunEnded
)
_CODEC: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


def encode(entry: Entry) -> str:
    return _CODEC.dump_json(entry).decode()


def decode(text: str) -> Entry:
    return _CODEC.validate_json(text)
