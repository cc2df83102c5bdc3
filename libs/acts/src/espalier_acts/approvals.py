"""Acts on what waits for a person: giving the answer.

The answer to a change of a prompt is the change's own act (`prompts`). The answer to a call in doubt is what
became of it, or that it may be made again: it goes to the agent as a message, because the call was told as
doubtful and is not told again. Nothing here makes a call; only an agent does.
"""

from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from espalier_acts.log import Written, tell_live_run
from espalier_acts.messages import MessageOrder, send_message
from espalier_acts.prompts import resolve_change
from espalier_domain.errors import InvalidInput, LifecycleConflict, NotFound
from espalier_domain.journal import ApprovalResolved
from espalier_protocol.approval import ApprovalKind, CallInQuestion, Resolution
from espalier_protocol.ids import to_wire
from espalier_protocol.shapes import NAME_CHARS_MAX
from espalier_store.agents import lock_agent
from espalier_store.approvals import Question, find_question, get_approval, resolve_approval
from espalier_store.pool import Connection

ANSWERS: Final[dict[ApprovalKind, tuple[Resolution, ...]]] = {
    "prompt_change": ("approve", "deny"),
    "in_doubt": ("done", "not_done", "retry"),
    "tool_call": ("approve", "deny"),
}
"""Which resolution fits which kind."""

BECAME: Final[dict[Resolution, str]] = {
    "done": "it was carried out",
    "not_done": "it was not carried out",
    "retry": "make it again if you still want what it does; that is safe, whatever became of the first one",
}
"""What the agent is told of its call in doubt."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A person's word. `by` is the wire id of the key that gave it."""

    resolution: Resolution
    comment: str | None
    by: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a live run was told, and the wake of the message to its agent: both for after the commit."""

    written: Written | None
    wake_id: int | None = None


async def resolve(connection: Connection, owner_id: UUID, approval_id: UUID, answer: Answer) -> Resolved:
    """Answer a question that waits.

    Raises NotFound, InvalidInput for a resolution that does not fit the kind, or LifecycleConflict when it
    was answered before, or cannot be carried out now.
    """
    question = await find_question(connection, owner_id, approval_id)
    if question is None:
        raise NotFound("approval", to_wire("apr", approval_id))
    if answer.resolution not in ANSWERS[question.kind]:
        fits = " or ".join(ANSWERS[question.kind])
        raise InvalidInput("resolution", f"should be {fits} for {question.kind}")
    if question.kind == "in_doubt":
        return await _settle_call(connection, owner_id, approval_id, question, answer)
    assert question.change_id is not None, "no other kind of question is asked yet"
    resolved = await resolve_change(
        connection,
        owner_id,
        question.agent_id,
        question.change_id,
        approve=answer.resolution == "approve",
        comment=answer.comment,
        by=answer.by,
    )
    return Resolved(resolved.written)


async def _settle_call(
    connection: Connection, owner_id: UUID, approval_id: UUID, question: Question, answer: Answer
) -> Resolved:
    """The agent is locked first, so of two answers the second one finds the first."""
    agent = await lock_agent(connection, owner_id, question.agent_id)
    approval = await get_approval(connection, owner_id, approval_id)
    if agent is None or approval is None:
        raise NotFound("approval", to_wire("apr", approval_id))
    if approval.resolution is not None:
        raise LifecycleConflict(f"It was resolved as {approval.resolution} already.")
    await resolve_approval(
        connection, owner_id, approval_id, resolution=answer.resolution, comment=answer.comment, by=answer.by
    )
    notice = ApprovalResolved(approval.id, question.kind, answer.resolution)
    written = await tell_live_run(connection, owner_id, question.agent_id, (notice,), run_id=question.run_id)
    if agent.lifecycle_state in ("cancelled", "archived"):
        return Resolved(written)  # it reads nothing any more
    assert isinstance(approval.about, CallInQuestion)
    order = MessageOrder(
        question.agent_id, _message(approval.about, answer), from_run_id=question.run_id
    )  # it is about whom the run knows of
    return Resolved(written, (await send_message(connection, owner_id, order)).wake_id)


def _message(call: CallInQuestion, answer: Answer) -> dict[str, Any]:
    became = BECAME[answer.resolution]
    return {
        "text": f"A person looked into your call {call.call_id}, whose outcome was unknown: {became}.",
        "call_id": call.call_id,
        "tool_name": call.tool_name and call.tool_name[:NAME_CHARS_MAX],
        "resolution": answer.resolution,
        "comment": answer.comment,
    }
