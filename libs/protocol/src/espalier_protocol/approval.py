"""What waits for a person: our extension `espalier.approvals`, one queue for every kind of question."""

from typing import Annotated, Literal

from pydantic import Field

from espalier_protocol.shapes import Id, JsonObject, PageParams, Params, Resource, Timestamp

COMMENT_CHARS_MAX = 4_000
Comment = Annotated[str, Field(max_length=COMMENT_CHARS_MAX)]

ApprovalKind = Literal["tool_call", "in_doubt", "prompt_change"]
ApprovalState = Literal["open", "resolved"]
Resolution = Literal["approve", "deny", "done", "not_done", "retry"]


class PromptChangeInQuestion(Resource):
    """A change that an agent wants to make to its prompt. The texts are null once they were erased."""

    pending_change_id: str
    diff: str | None
    reason: str | None


class CallInQuestion(Resource):
    """A tool call. `tool_name` and `args` are null when the log of its run is gone."""

    call_id: str
    tool_name: str | None
    args: JsonObject | None


class Approval(Resource):
    """`about` is the change of a `prompt_change`, and of the other kinds the call.

    `resolved_by` is the id of the key that answered.
    """

    id: str
    kind: ApprovalKind
    state: ApprovalState
    agent_id: str
    run_id: str | None
    about: PromptChangeInQuestion | CallInQuestion
    resolution: Resolution | None
    comment: str | None
    resolved_by: str | None
    created_at: Timestamp
    resolved_at: Timestamp | None


class ApprovalPage(Resource):
    items: list[Approval]
    cursor: str | None


class ApprovalRef(Params):
    approval_id: Id


class ApprovalList(PageParams):
    """Without `state` those that still wait."""

    agent_id: Id | None = None
    state: Literal["open", "resolved", "all"] = "open"


class ApprovalResolve(Params):
    """A `prompt_change` takes approve or deny; a call `in_doubt` takes done or not_done."""

    approval_id: Id
    resolution: Resolution
    comment: Comment | None = None
