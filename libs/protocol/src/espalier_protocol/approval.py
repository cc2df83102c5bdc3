"""What waits for a person: our extension `espalier.approvals`, one queue for every kind of question."""

from typing import Literal

from espalier_protocol.shapes import Id, PageParams, Params, Resource, Text, Timestamp


class Approval(Resource):
    id: str
    kind: Literal["tool_call", "in_doubt", "prompt_change"]
    agent_id: str
    run_id: str | None
    created_at: Timestamp


class ApprovalPage(Resource):
    items: list[Approval]
    cursor: str | None


class ApprovalRef(Params):
    approval_id: Id


class ApprovalList(PageParams):
    agent_id: Id | None = None


class ApprovalResolve(Params):
    approval_id: Id
    resolution: Literal["approve", "deny", "done", "not_done", "retry"]
    comment: Text | None = None
