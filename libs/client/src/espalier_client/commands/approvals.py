"""`espalier approvals ...`: what waits for a person, and the person's word.

A change of a prompt is approved or denied. Of a call in doubt a person says whether it was done; nothing
repeats it, and the agent gets the answer as a message.
"""

from typing import Annotated, Literal

import typer

from espalier_client.commands.listing import (
    ID_COLUMNS,
    LIMIT_DEFAULT,
    LISTED_MAX,
    TIME_COLUMNS,
    All,
    Limit,
    Listing,
    compact,
    instant,
    moment,
    tell,
)
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
from espalier_protocol.approval import (
    Approval,
    ApprovalList,
    ApprovalResolve,
    PromptChangeInQuestion,
    Resolution,
)

KIND_COLUMNS = len("prompt_change")
STATE_COLUMNS = len("resolved")

ApprovalId = Annotated[str, typer.Argument(metavar="APPROVAL", help="The approval's id.")]


def group() -> typer.Typer:
    app = typer.Typer(help="What waits for a person.", no_args_is_help=True)
    app.command("list")(list_)
    app.command()(get)
    app.command()(resolve)
    return app


def list_(
    context: typer.Context,
    *,
    agent: Annotated[str | None, typer.Option(help="Only those of this agent.")] = None,
    state: Annotated[Literal["open", "resolved", "all"], typer.Option(help="Which ones.")] = "open",
    limit: Limit = LIMIT_DEFAULT,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """List what waits, newest first."""
    wanted = chosen(agent_id=agent, state=state)
    columns = [("approval", ID_COLUMNS), ("kind", KIND_COLUMNS), ("state", STATE_COLUMNS)]
    listing = Listing(output(), [*columns, ("asked, UTC", TIME_COLUMNS)], "about")

    def show(approval: Approval) -> None:
        if as_json:
            line(approval)
        else:
            asked = moment(approval.created_at)
            listing.row(approval.id, approval.kind, approval.state, asked, _about(approval))

    show_pages(
        context,
        lambda client, page: client.approval_list(checked(ApprovalList, {**wanted, **page})),
        LISTED_MAX if everything else limit,
        show,
    )


def get(context: typer.Context, *, approval: ApprovalId, as_json: AsJson = False) -> None:
    """Show one in full: what it is about, and the answer if there is one."""
    found = perform(context, lambda client: client.approval_get(approval))
    if as_json:
        line(found)
    else:
        tell(output(), _facts(found))


def resolve(
    context: typer.Context,
    *,
    approval: ApprovalId,
    resolution: Annotated[
        Resolution,
        typer.Argument(
            metavar="RESOLUTION", help="approve or deny a prompt_change; done or not_done for in_doubt."
        ),
    ],
    comment: Annotated[str | None, typer.Option(help="A word to the agent, and for the record.")] = None,
    as_json: AsJson = False,
) -> None:
    """Answer one, once and for all."""
    members = chosen(approval_id=approval, resolution=resolution, comment=comment)
    try:
        params = checked(ApprovalResolve, members)
    except ClientError as error:
        fail(error)
    resolved = perform(context, lambda client: client.approval_resolve(params))
    put(resolved, as_json, f"{resolved.id} {resolved.resolution}")


def _about(approval: Approval) -> str:
    about = approval.about
    if isinstance(about, PromptChangeInQuestion):
        return f"{approval.agent_id}: {about.reason or ''}"
    return f"{approval.agent_id}: {about.tool_name or about.call_id}"


def _facts(approval: Approval) -> list[tuple[str, str]]:
    about = approval.about
    if isinstance(about, PromptChangeInQuestion):
        asked = [
            ("change", about.pending_change_id),
            ("reason", about.reason or ""),
            ("diff", about.diff or ""),
        ]
    else:
        asked = [("call", about.call_id), ("tool", about.tool_name or ""), ("arguments", compact(about.args))]
    return [
        ("approval", approval.id),
        ("kind", approval.kind),
        ("state", approval.state),
        ("agent", approval.agent_id),
        ("run", approval.run_id or ""),
        ("asked", instant(approval.created_at)),
        *asked,
        ("resolution", approval.resolution or ""),
        ("resolved", instant(approval.resolved_at)),
        ("by", approval.resolved_by or ""),
        ("comment", approval.comment or ""),
    ]
