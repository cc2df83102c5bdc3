"""Runs: one goal pursued in cycles, and the parameters of `run.*` (AEP spec sections 5.2 and 6)."""

from typing import Literal

from espalier_protocol.shapes import (
    Id,
    JsonAny,
    JsonObject,
    PageParams,
    Params,
    Resource,
    SubjectIds,
    Text,
    Timestamp,
)

RunState = Literal["running", "sleeping", "complete", "cancelled", "error"]
EndState = Literal["complete", "cancelled", "error"]
WaitReason = Literal["timer", "message", "child", "approval", "retry"]


class Run(Resource):
    """`inputs` come back as `metadata`, as published runtimes do.

    The last three members are our extension: what a sleeping run waits for, when its timer is due, and
    since when a cancel is under way.
    """

    id: str
    agent_id: str
    goal: str
    state: RunState
    started_at: Timestamp
    ended_at: Timestamp | None
    cycle_count: int
    result: JsonAny
    subject_ids: list[str]
    metadata: JsonObject
    wait_reason: WaitReason | None
    next_wake_at: Timestamp | None
    cancel_requested_at: Timestamp | None


class RunDone(Run):
    ok: Literal[True] = True


class RunPage(Resource):
    items: list[Run]
    cursor: str | None
    runs: list[Run]
    next_cursor: str | None


class RunCreate(Params):
    agent_id: Id
    goal: Text
    inputs: JsonObject = {}
    subject_ids: SubjectIds = []


class RunRef(Params):
    run_id: Id


class RunList(PageParams):
    agent_id: Id


class RunSubscribe(Params):
    """`since` is the id of the last event that the caller has; without it the log comes from the start."""

    run_id: Id
    since: Id | None = None


class RunSubscribed(Resource):
    """Events follow as `run.event` notifications with this id, the end as `run.subscription_ended`."""

    subscription_id: str


class RunUnsubscribe(Params):
    subscription_id: Id


class RunUnsubscribed(Resource):
    """No event of the subscription follows this answer. `ended` is false if there was none of that id."""

    ended: bool
