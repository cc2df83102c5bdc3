"""Agents: who they are, what binds them, and the parameters of `agent.*` (AEP spec sections 5.1 and 6)."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, GetCoreSchemaHandler

from espalier_protocol.approval import Comment
from espalier_protocol.mcp_server import ExternalMcpServers, ExternalMcpServerView
from espalier_protocol.shapes import (
    LIST_ENTRIES_MAX,
    Id,
    JsonObject,
    Name,
    PageParams,
    Params,
    Resource,
    SubjectIds,
    Text,
    Timestamp,
)

INT_MAX = 2**31 - 1
LifecycleState = Literal["active", "sleeping", "complete", "cancelled", "error", "archived"]
ClosedState = Literal["cancelled", "archived"]
"""States of an agent that takes no new run. They are final, but a cancelled agent may be archived."""

PromptPolicy = Literal["auto", "approval_required", "locked"]
Toolset = Annotated[list[Name], Field(max_length=LIST_ENTRIES_MAX)]
Positive = Annotated[int, Field(ge=1, le=INT_MAX)]
NotNegative = Annotated[int, Field(ge=0, le=INT_MAX)]
T = TypeVar("T")


class _NoNull:
    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        nullable: Any = handler(source)
        return nullable["schema"]


Change = Annotated[T | None, _NoNull()]
"""A member of an update. None says that it was left out; a null that was sent does not fit."""


def _absent(value: object) -> bool:
    return value is None


Told = Annotated[T | None, Field(exclude_if=_absent)]
"""A member of a result that is not sent where there is nothing to say."""


class Ceilings(Params):
    """Hard limits of a run. Reaching `max_cycles` or `max_wall_seconds` (sleep included) ends it in error."""

    max_cycles: Positive
    max_subagents: NotNegative
    max_tool_calls_per_cycle: Positive
    max_wall_seconds: Positive


class Budgets(Params):
    """Soft limits of a cycle. Running out ends the cycle, not the run."""

    tokens_per_cycle: Positive
    tool_calls_per_cycle: Positive
    seconds_per_cycle: Positive


class CeilingsChange(Params):
    """The ceilings that an update names; the others stay."""

    max_cycles: Change[Positive] = None
    max_subagents: Change[NotNegative] = None
    max_tool_calls_per_cycle: Change[Positive] = None
    max_wall_seconds: Change[Positive] = None


class BudgetsChange(Params):
    """The budgets that an update names; the others stay."""

    tokens_per_cycle: Change[Positive] = None
    tool_calls_per_cycle: Change[Positive] = None
    seconds_per_cycle: Change[Positive] = None


class Constitution(Params):
    immutable_directives: Text
    mutable_prompt: Text
    mutable_prompt_policy: PromptPolicy


class ConstitutionChange(Params):
    """The parts that an update names; the others stay."""

    immutable_directives: Change[Text] = None
    mutable_prompt: Change[Text] = None
    mutable_prompt_policy: Change[PromptPolicy] = None


class RunnerConfig(Params):
    provider_id: Id | None = None
    model: Name | None = None


class Agent(Resource):
    id: str
    name: str
    constitution: Constitution
    toolset: list[str]
    ceilings: Ceilings
    budgets: Budgets
    root_agent_id: str
    parent_agent_id: str | None
    lifecycle_state: LifecycleState
    next_wake_at: Timestamp | None
    subject_ids: list[str]
    external_mcp_servers: list[ExternalMcpServerView]
    metadata: JsonObject
    runner: RunnerConfig | None
    max_live_runs: int
    created_at: Timestamp
    updated_at: Timestamp


class AgentPage(Resource):
    """Both published list dialects at once."""

    items: list[Agent]
    cursor: str | None
    agents: list[Agent]
    next_cursor: str | None


class AgentDone(Agent):
    ok: Literal[True] = True


class AgentCreate(Params):
    """`max_live_runs` is our extension: how many runs of the agent may live at once."""

    name: Name
    constitution: Constitution
    toolset: Toolset
    ceilings: Ceilings
    budgets: Budgets
    external_mcp_servers: ExternalMcpServers = []
    subject_ids: SubjectIds = []
    metadata: JsonObject = {}
    runner: RunnerConfig | None = None
    max_live_runs: Annotated[int, Field(ge=1, le=1000)] = 8


class AgentGet(Params):
    agent_id: Id
    include: list[Literal["prompt_history", "pending_prompt_changes"]] = []
    prompt_history_cursor: Id | None = None


class AgentList(PageParams):
    root_agent_id: Id | None = None
    parent_agent_id: Id | None = None
    lifecycle_state: LifecycleState | None = None
    subject_id: Id | None = None


class AgentUpdate(Params):
    """What is absent stays as it is; `metadata` is replaced as a whole.

    A `runner` of null would detach it, so that it is given even then.
    """

    agent_id: Id
    name: Change[Name] = None
    metadata: Change[JsonObject] = None
    ceilings: Change[CeilingsChange] = None
    budgets: Change[BudgetsChange] = None
    constitution: Change[ConstitutionChange] = None
    runner: RunnerConfig | None = None
    external_mcp_servers: Change[ExternalMcpServers] = None


class AgentRef(Params):
    agent_id: Id


class PromptHistoryEntry(Resource):
    """A change of the prompt that took effect. `approved_by` is null when the policy let the agent do it."""

    id: str
    agent_id: str
    diff: str
    reason: str
    applied_at: Timestamp
    approved_by: str | None


class PendingPromptChange(Resource):
    """A change that waits for a person. A `stale` one was made against a prompt that no longer stands."""

    id: str
    agent_id: str
    run_id: str | None
    approval_id: str
    diff: str
    reason: str
    stale: bool
    created_at: Timestamp


class AgentInFull(Agent):
    """With what was asked for by `include`, oldest first. Without more history the cursor is absent."""

    prompt_history: Told[list[PromptHistoryEntry]] = None
    prompt_history_cursor: Told[str] = None
    pending_prompt_changes: Told[list[PendingPromptChange]] = None


class ApprovePromptChange(Params):
    agent_id: Id
    pending_change_id: Id
    approve: bool
    comment: Comment | None = None


class PromptChangeResult(Resource):
    """What a change came to. The entry of the history is there when it was applied."""

    applied: bool
    history_entry_id: Told[str] = None
