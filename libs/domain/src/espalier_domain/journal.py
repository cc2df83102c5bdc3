"""The journal: everything that happened to a run, in the words that `run.apply` reads.

Entries are facts, written once in the transaction of the step that made them. `events_of` gives the wire's
projection of each; nothing ever decides from an event. The codec is here because the entries' shape is.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter

from espalier_domain.decisions import Complete, ContinueNow, CycleDecision, Sleep
from espalier_protocol import events
from espalier_protocol.agent import Budgets
from espalier_protocol.errors import ErrorCode
from espalier_protocol.events import CycleOutcome, Payload
from espalier_protocol.run import EndState
from espalier_protocol.strict_json import dumps

PREVIEW_CHARS_MAX: Final = 500
ARG_CHARS_MAX: Final = 4_000


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
class ReadMessage:
    message_id: str
    from_agent_id: str


@dataclass(frozen=True, slots=True)
class InboxRead:
    """`wake_seen` is the wake counter from before the inbox was read: a later message still wakes."""

    messages: tuple[ReadMessage, ...]
    wake_seen: int
    kind: Literal["inbox_read"] = "inbox_read"


@dataclass(frozen=True, slots=True)
class LimitReached:
    """A ceiling or budget that stopped something, told to readers as an `error` event."""

    cycle: int | None
    symbol: Literal["ceiling_exceeded", "budget_exhausted"]
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
class CycleEnded:
    """`decision` is None when the run was stopped in mid-cycle."""

    cycle: int
    decision: Annotated[Sleep | ContinueNow | Complete, Field(discriminator="kind")] | None
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
    | InboxRead
    | LimitReached
    | Parked
    | CycleEnded
    | RunEnded
)
_CODEC: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


def encode(entry: Entry) -> str:
    return _CODEC.dump_json(entry).decode()


def decode(text: str) -> Entry:
    return _CODEC.validate_json(text)


def events_of(run_id: str, entry: Entry) -> list[Payload]:
    """What readers are told of an entry: bodies without seq, id or time."""
    match entry:
        case RunCreated(agent_id):
            return [events.RunStarted(run_id=run_id, agent_id=agent_id)]
        case CycleStarted(cycle, budgets=budgets):
            return [events.CycleStarted(run_id=run_id, cycle_number=cycle, budget_snapshot=budgets)]
        case ModelAnswered(cycle, calls=calls):
            return [_called(cycle, call) for call in calls]
        case ToolReturned(cycle, call_id, tool, ok, content, in_doubt=in_doubt):
            preview = content[:PREVIEW_CHARS_MAX]
            summary = events.ResultSummary(ok=ok, preview=preview, in_doubt=in_doubt)
            return [
                events.ToolReturned(
                    cycle_number=cycle, call_id=call_id, tool_name=tool, result_summary=summary
                )
            ]
        case ArtifactCreated(artifact_id, name, mime_type, size_bytes):
            return [
                events.ArtifactCreated(
                    artifact_id=artifact_id, name=name, mime_type=mime_type, size_bytes=size_bytes
                )
            ]
        case MemoryWritten(memory_id, namespace, key, subject_id):
            return [
                events.MemoryWritten(memory_id=memory_id, namespace=namespace, key=key, subject_id=subject_id)
            ]
        case MessageSent(message_id, to_agent_id):
            return [events.MessageSent(to_agent_id=to_agent_id, message_id=message_id)]
        case InboxRead(messages):
            return [
                events.MessageDelivered(from_agent_id=each.from_agent_id, message_id=each.message_id)
                for each in messages
            ]
        case ModelFailed(cycle, reason):
            return [_trouble("internal_error", f"The model gave no answer: {reason}.", cycle)]
        case ToolsMissing(cycle, message):
            return [_trouble("tool_not_found", message, cycle)]
        case LimitReached(cycle, symbol, message):
            return [_trouble(symbol, message, cycle)]
        case CycleEnded():
            return [_cycle_ended(run_id, entry)]
        case RunEnded(final_state, result):
            return [events.RunEnded(run_id=run_id, final_state=final_state, result=result)]
        case ModelCallStarted() | CallsPlanned() | Parked():
            return []


def _called(cycle: int, call: ToolCall) -> Payload:
    args = {name: _shortened(value) for name, value in call.args.items()}
    return events.ToolCalled(cycle_number=cycle, call_id=call.call_id, tool_name=call.name, args=args)


def _shortened(value: Any) -> Any:
    """An argument as an event tells it. The journal keeps the whole; a reader need not take in a file."""
    text = value if isinstance(value, str) else dumps(value).decode()
    return value if len(text) <= ARG_CHARS_MAX else f"{text[:ARG_CHARS_MAX]} [shortened]"


def _trouble(symbol: str, message: str, cycle: int | None) -> Payload:
    return events.Trouble(code=ErrorCode[symbol], symbol=symbol, message=message, cycle_number=cycle)


def _cycle_ended(run_id: str, entry: CycleEnded) -> Payload:
    return events.CycleEnded(
        run_id=run_id,
        cycle_number=entry.cycle,
        tokens_used=entry.tokens_used,
        tool_calls_made=entry.tool_calls_made,
        outcome=_outcome(entry.decision),
        reason=entry.decision.reason if isinstance(entry.decision, Sleep) else None,
    )


def _outcome(decision: CycleDecision | None) -> CycleOutcome:
    match decision:
        case Sleep(forced=True):
            return "forced_sleep"
        case Sleep():
            return "slept"
        case ContinueNow():
            return "continue"
        case Complete():
            return "completed"
        case None:
            return "stopped_mid_cycle"
