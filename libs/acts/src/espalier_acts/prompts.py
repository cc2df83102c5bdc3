"""Acts on an agent's constitution: what its embedder changes, what the agent changes itself, and what waits.

Every act locks the agent before any run of it, so that prompts change one after the other, each against the
one that stands. Who reads the prompt reads the agent's row: a change shows in the next cycle.
"""

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from espalier_acts.log import Notice, Written, tell_live_run
from espalier_acts.subjects import known_subjects, spread_to_siblings
from espalier_domain.errors import InvalidInput, LifecycleConflict, NotFound
from espalier_domain.journal import (
    ApprovalRequested,
    ApprovalResolved,
    LimitReached,
    PromptChangeQueued,
    PromptChangeRejected,
    PromptModified,
)
from espalier_domain.prompts import PENDING_MAX, PROMPT_CHARS_MAX, patched, told, unified_diff
from espalier_protocol.agent import ConstitutionChange
from espalier_protocol.ids import to_wire
from espalier_store.approvals import resolve_approval
from espalier_store.ids import new_id
from espalier_store.pool import Connection
from espalier_store.prompts import (
    LockedPrompt,
    NewChange,
    NewPrompt,
    PromptChange,
    close_change,
    get_change,
    had_run,
    insert_change,
    lock_prompt,
    set_constitution,
    set_prompt,
)
from espalier_store.runs import LockedRun

BY_EMBEDDER = "Changed by the embedder."
LOCKED = "The constitution locks the prompt."


async def change_constitution(
    connection: Connection, owner_id: UUID, agent_id: UUID, change: ConstitutionChange, *, by: str
) -> Written | None:
    """Write what `change` names. What a live run of the agent was told, if the prompt is another now.

    `by` is the wire id of the key that asks. Raises NotFound, or LifecycleConflict when the directives would
    change after the agent's first run began.
    """
    prompt = await _lock(connection, owner_id, agent_id)
    directives = change.immutable_directives
    if directives not in (None, prompt.immutable_directives) and await had_run(
        connection, owner_id, agent_id
    ):
        reason = "constitution.immutable_directives cannot change once the agent has had a run."
        raise LifecycleConflict(reason)
    if directives is not None or change.mutable_prompt_policy is not None:
        await set_constitution(connection, owner_id, agent_id, directives, change.mutable_prompt_policy)
    if change.mutable_prompt is None or change.mutable_prompt == prompt.text:
        return None
    diff = unified_diff(prompt.text, change.mutable_prompt)
    new = NewPrompt(new_id(), change.mutable_prompt, diff, BY_EMBEDDER, by, None)
    await set_prompt(connection, owner_id, agent_id, new)
    notice = PromptModified(told(diff), BY_EMBEDDER, by)
    return await tell_live_run(connection, owner_id, agent_id, (notice,), run_id=None)


@dataclass(frozen=True, slots=True)
class PromptEdit:
    """What an agent wants its prompt to be: `content` is the whole text, or a diff to the one that stands."""

    mode: Literal["replace", "diff"]
    content: str
    reason: str


@dataclass(frozen=True, slots=True)
class Applied:
    """The prompt is another now. Here and in its siblings `entries` tell of it: the caller writes them."""

    history_entry_id: str
    entries: tuple[PromptModified, ...]


@dataclass(frozen=True, slots=True)
class Queued:
    """The change waits for a person."""

    pending_change_id: str
    entries: tuple[PromptChangeQueued | ApprovalRequested, ...]


@dataclass(frozen=True, slots=True)
class Forbidden:
    """The policy forbids it, and nothing else is written."""

    reason: str
    entries: tuple[LimitReached, ...]


async def modify_prompt(
    connection: Connection, run: LockedRun, edit: PromptEdit, *, cycle: int
) -> Applied | Queued | Forbidden:
    """Change the prompt of the run's agent as far as its policy allows. The agent was locked before the run.

    Raises InvalidInput for a diff that does not fit, a prompt that is too long or the one that stands, and
    LifecycleConflict when PENDING_MAX changes wait already.
    """
    prompt = await _lock(connection, run.owner_id, run.agent_id)
    if prompt.policy == "locked":
        return Forbidden(LOCKED, (LimitReached(cycle, "constitution_policy_violation", LOCKED),))
    text = _edited(prompt.text, edit)
    diff = unified_diff(prompt.text, text)
    if prompt.policy == "auto":
        await spread_to_siblings(connection, run.owner_id, run.agent_id, run.run_id)
        new = NewPrompt(new_id(), text, diff, edit.reason, None, run.run_id)
        await set_prompt(connection, run.owner_id, run.agent_id, new)
        return Applied(to_wire("phe", new.entry_id), (PromptModified(told(diff), edit.reason, None),))
    return await _ask(connection, run, NewChange(new_id(), new_id(), run.run_id, text, diff, edit.reason))


@dataclass(frozen=True, slots=True)
class ChangeResolved:
    """`entry_id` is the history's, None for a rejection; `written` what a live run was told, if any."""

    entry_id: UUID | None
    written: Written | None


async def resolve_change(
    connection: Connection,
    owner_id: UUID,
    agent_id: UUID,
    change_id: UUID,
    *,
    approve: bool,
    comment: str | None,
    by: str,
) -> ChangeResolved:
    """Apply or reject a change that waits, and answer the approval that asked for it.

    Raises NotFound, or LifecycleConflict when it was answered before, or is to be applied to another prompt
    than the one that it was made against.
    """
    prompt = await _lock(connection, owner_id, agent_id)
    change = await get_change(connection, owner_id, agent_id, change_id)
    if change is None:
        raise NotFound("prompt_change", to_wire("pch", change_id))
    if change.state != "pending":
        raise LifecycleConflict(f"The change was {change.state} already.")
    if approve and change.base_no != prompt.number:
        raise LifecycleConflict("The prompt was changed since this change was made; it can only be rejected.")
    if change.run_id is not None:  # whichever run is told of the outcome
        await spread_to_siblings(connection, owner_id, agent_id, change.run_id)
    entry_id = await _apply(connection, owner_id, agent_id, change, by) if approve else None
    await close_change(connection, owner_id, change_id, "applied" if approve else "rejected")
    resolution: Literal["approve", "deny"] = "approve" if approve else "deny"
    await resolve_approval(
        connection, owner_id, change.approval_id, resolution=resolution, comment=comment, by=by
    )
    answered = ApprovalResolved(to_wire("apr", change.approval_id), "prompt_change", resolution)
    outcome: Notice = (
        PromptModified(told(change.diff), change.reason, by)
        if approve
        else PromptChangeRejected(to_wire("pch", change_id), change.reason, by, comment)
    )
    written = await tell_live_run(connection, owner_id, agent_id, (outcome, answered), run_id=change.run_id)
    return ChangeResolved(entry_id, written)


async def _lock(connection: Connection, owner_id: UUID, agent_id: UUID) -> LockedPrompt:
    prompt = await lock_prompt(connection, owner_id, agent_id)
    if prompt is None:
        raise NotFound("agent", to_wire("agt", agent_id))
    return prompt


def _edited(before: str, edit: PromptEdit) -> str:
    text = patched(before, edit.content) if edit.mode == "diff" else edit.content
    if len(text) > PROMPT_CHARS_MAX:
        raise InvalidInput("content", f"makes a prompt of more than {PROMPT_CHARS_MAX} characters")
    if text == before:
        raise InvalidInput("content", "changes nothing: the prompt is this already")
    return text


async def _ask(connection: Connection, run: LockedRun, new: NewChange) -> Queued:
    await known_subjects(connection, run.owner_id, run.run_id)
    if not await insert_change(connection, run.owner_id, run.agent_id, new, pending_max=PENDING_MAX):
        reason = (
            f"{PENDING_MAX} changes of the prompt wait for a person already, which is the most there may be."
        )
        raise LifecycleConflict(reason)
    change_id = to_wire("pch", new.change_id)
    queued = PromptChangeQueued(change_id, told(new.diff), new.reason)
    asked = ApprovalRequested(to_wire("apr", new.approval_id), "prompt_change")
    return Queued(change_id, (queued, asked))


async def _apply(
    connection: Connection, owner_id: UUID, agent_id: UUID, change: PromptChange, by: str
) -> UUID:
    new = NewPrompt(new_id(), change.proposal, change.diff, change.reason, by, change.run_id)
    await set_prompt(connection, owner_id, agent_id, new)
    return new.entry_id
