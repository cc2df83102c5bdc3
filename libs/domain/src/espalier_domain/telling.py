"""What readers are told of a run: the wire's projection of each entry of its journal.

Pure, and never read back: nothing decides from an event. Above: whoever appends entries. Below: `journal`.
"""

from typing import Any, Final

from espalier_domain.decisions import Complete, ContinueNow, CycleDecision, Sleep, Wait
from espalier_domain.journal import (
    ApprovalRequested,
    ApprovalResolved,
    ArtifactCreated,
    CallsPlanned,
    CycleEnded,
    CycleStarted,
    Entry,
    HeadroomAwaited,
    InboxRead,
    LimitReached,
    MemoryWritten,
    MessageSent,
    ModelAnswered,
    ModelCallStarted,
    ModelFailed,
    Parked,
    PromptChangeQueued,
    PromptChangeRejected,
    PromptModified,
    RunCreated,
    RunEnded,
    SubagentSpawned,
    ToolCall,
    ToolReturned,
    ToolsMissing,
)
from espalier_protocol import events
from espalier_protocol.errors import ErrorCode
from espalier_protocol.events import CycleOutcome, Payload
from espalier_protocol.strict_json import dumps

PREVIEW_CHARS_MAX: Final = 500
ARG_CHARS_MAX: Final = 4_000

Act = (
    ArtifactCreated
    | MemoryWritten
    | MessageSent
    | SubagentSpawned
    | PromptModified
    | PromptChangeQueued
    | PromptChangeRejected
    | ApprovalRequested
    | ApprovalResolved
    | InboxRead
)
"""Entries that tell of an act's effect outside the run's own progress."""


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
        case ModelFailed(cycle, reason):
            message = f"The model gave no answer: {reason.removesuffix('.')}."
            return [_trouble("internal_error", message, cycle)]
        case ToolsMissing(cycle, message):
            return [_trouble("tool_not_found", message, cycle)]
        case LimitReached(cycle, symbol, message):
            return [_trouble(symbol, message, cycle)]
        case CycleEnded():
            return [_cycle_ended(run_id, entry)]
        case RunEnded(final_state, result):
            return [events.RunEnded(run_id=run_id, final_state=final_state, result=result)]
        case ModelCallStarted() | CallsPlanned() | Parked() | HeadroomAwaited():
            return []
        case _:
            return _of_act(entry)


def _of_act(act: Act) -> list[Payload]:
    match act:
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
        case SubagentSpawned(child_agent_id, child_run_id):
            return [events.SubagentSpawned(child_agent_id=child_agent_id, child_run_id=child_run_id)]
        case PromptModified(diff, reason, approved_by):
            return [events.PromptModified(diff=diff, reason=reason, approved_by=approved_by)]
        case PromptChangeQueued(change, diff, reason):
            return [events.PromptChangeQueued(pending_change_id=change, diff=diff, reason=reason)]
        case PromptChangeRejected(change, reason, rejected_by, comment):
            return [
                events.PromptChangeRejected(
                    pending_change_id=change, reason=reason, rejected_by=rejected_by, comment=comment
                )
            ]
        case ApprovalRequested(approval_id, about):
            return [events.ApprovalRequested(approval_id=approval_id, kind=about)]
        case ApprovalResolved(approval_id, about, resolution):
            return [events.ApprovalResolved(approval_id=approval_id, kind=about, resolution=resolution)]
        case InboxRead(messages):
            return [
                events.MessageDelivered(from_agent_id=each.from_agent_id, message_id=each.message_id)
                for each in messages
            ]


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
        case Sleep() | Wait():
            return "slept"
        case ContinueNow():
            return "continue"
        case Complete():
            return "completed"
        case None:
            return "stopped_mid_cycle"
