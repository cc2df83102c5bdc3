"""`espalier agent prompt ...`: what an agent's prompt has been, and changes of it that wait for a person."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from espalier_client.client import AepClient
from espalier_client.commands.listing import LISTED_MAX, instant, tell
from espalier_client.commands.terminal import (
    AsJson,
    checked,
    chosen,
    fail,
    line,
    output,
    perform,
    put,
    show_pages,
)
from espalier_client.errors import ClientError
from espalier_protocol.agent import AgentGet, ApprovePromptChange, PendingPromptChange, PromptHistoryEntry

AgentId = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")]
ChangeId = Annotated[str, typer.Argument(metavar="CHANGE", help="The pending change's id.")]
Comment = Annotated[str | None, typer.Option(help="A word to the agent, and for the record.")]


def group() -> typer.Typer:
    app = typer.Typer(help="An agent's prompt: its history, and changes that wait.", no_args_is_help=True)
    for command in (history, pending, approve, reject):
        app.command()(command)
    return app


@dataclass(frozen=True, slots=True)
class _History:
    items: Sequence[PromptHistoryEntry]
    cursor: str | None


def history(context: typer.Context, *, agent: AgentId, as_json: AsJson = False) -> None:
    """Show every change that took effect, oldest first, as unified diffs."""

    async def ask(client: AepClient, cursor: str | None) -> _History:
        place = chosen(prompt_history_cursor=cursor)
        params = checked(AgentGet, {"agent_id": agent, "include": ["prompt_history"], **place})
        found = await client.agent_in_full(params)
        return _History(found.prompt_history or (), found.prompt_history_cursor)

    def show(entry: PromptHistoryEntry) -> None:
        if as_json:
            line(entry)
        else:
            tell(output(), _entry(entry))
            output().print()

    show_pages(context, lambda client, page: ask(client, page.get("cursor")), LISTED_MAX, show)


def pending(context: typer.Context, *, agent: AgentId, as_json: AsJson = False) -> None:
    """Show the changes that wait for a person, oldest first."""
    params = checked(AgentGet, {"agent_id": agent, "include": ["pending_prompt_changes"]})
    found = perform(context, lambda client: client.agent_in_full(params))
    for change in found.pending_prompt_changes or ():
        if as_json:
            line(change)
        else:
            tell(output(), _change(change))
            output().print()


def approve(
    context: typer.Context,
    *,
    agent: AgentId,
    change: ChangeId,
    comment: Comment = None,
    as_json: AsJson = False,
) -> None:
    """Apply a change that waits. A stale one, made against an older prompt, can only be rejected."""
    _resolve(context, agent, change, comment, approved=True, as_json=as_json)


def reject(
    context: typer.Context,
    *,
    agent: AgentId,
    change: ChangeId,
    comment: Comment = None,
    as_json: AsJson = False,
) -> None:
    """Reject a change that waits."""
    _resolve(context, agent, change, comment, approved=False, as_json=as_json)


def _resolve(
    context: typer.Context, agent: str, change: str, comment: str | None, *, approved: bool, as_json: bool
) -> None:
    members = {"agent_id": agent, "pending_change_id": change, "approve": approved, **chosen(comment=comment)}
    try:
        params = checked(ApprovePromptChange, members)
    except ClientError as error:
        fail(error)
    resolved = perform(context, lambda client: client.agent_approve_prompt_change(params))
    put(resolved, as_json, f"{change} {'applied' if resolved.applied else 'rejected'}")


def _entry(entry: PromptHistoryEntry) -> list[tuple[str, str]]:
    return [
        ("entry", entry.id),
        ("applied", instant(entry.applied_at)),
        ("approved by", entry.approved_by or ""),
        ("reason", entry.reason),
        ("diff", entry.diff),
    ]


def _change(change: PendingPromptChange) -> list[tuple[str, str]]:
    return [
        ("change", change.id),
        ("approval", change.approval_id),
        ("asked", instant(change.created_at)),
        ("run", change.run_id or ""),
        ("stale", "yes: the prompt was changed since" if change.stale else ""),
        ("reason", change.reason),
        ("diff", change.diff),
    ]
