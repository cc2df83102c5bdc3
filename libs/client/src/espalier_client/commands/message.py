"""`espalier message ...`: a word to an agent, what it has not read yet, and what was said.

A message wakes an agent that sleeps. Looking into its inbox does not mark anything as read.
"""

from typing import Annotated

import typer

from espalier_client.commands.listing import (
    ID_COLUMNS,
    LIMIT_DEFAULT,
    LISTED_MAX,
    TIME_COLUMNS,
    All,
    Limit,
    Listing,
    moment,
    plain,
)
from espalier_client.commands.terminal import (
    AsJson,
    checked,
    chosen,
    fail,
    json_value,
    line,
    output,
    perform,
    put,
    show_pages,
)
from espalier_client.errors import ClientError
from espalier_protocol.message import Message, MessageList, MessageSend

AgentId = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")]


def group() -> typer.Typer:
    app = typer.Typer(help="Messages to agents and between them.", no_args_is_help=True)
    app.command()(send)
    app.command()(inbox)
    app.command("list")(list_)
    return app


def send(
    context: typer.Context,
    *,
    agent: AgentId,
    body: Annotated[
        str, typer.Argument(metavar="BODY", help="JSON, or text that is none (- for standard input).")
    ],
    as_json: AsJson = False,
) -> None:
    """Send an agent a message and print its id."""
    try:
        params = checked(MessageSend, {"to_agent_id": agent, "body": json_value(body)})
    except ClientError as error:
        fail(error)
    message = perform(context, lambda client: client.message_send(params))
    put(message, as_json, message.id)


def inbox(context: typer.Context, *, agent: AgentId, as_json: AsJson = False) -> None:
    """List what an agent has not read yet, oldest first."""
    columns = [("message", ID_COLUMNS), ("from", ID_COLUMNS), ("sent, UTC", TIME_COLUMNS)]
    listing = Listing(output(), columns, "body")
    for message in perform(context, lambda client: client.message_inbox(agent)).messages:
        if as_json:
            line(message)
        else:
            sent = moment(message.sent_at)
            listing.row(message.id, _sender(message), sent, plain(message.body))


def list_(
    context: typer.Context,
    *,
    agent: Annotated[str | None, typer.Option(help="Only those to this agent.")] = None,
    tree: Annotated[
        str | None, typer.Option(help="Only those in the tree with this agent at its root.")
    ] = None,
    limit: Limit = LIMIT_DEFAULT,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """List messages, newest first, and when they were read."""
    wanted = chosen(agent_id=agent, tree_root_id=tree)
    columns = [("message", ID_COLUMNS), ("from", ID_COLUMNS), ("to", ID_COLUMNS)]
    times = [("sent, UTC", TIME_COLUMNS), ("read, UTC", TIME_COLUMNS)]
    listing = Listing(output(), [*columns, *times], "body")

    def show(message: Message) -> None:
        if as_json:
            line(message)
        else:
            sent, seen = moment(message.sent_at), moment(message.read_at)
            listing.row(message.id, _sender(message), message.to_agent_id, sent, seen, plain(message.body))

    show_pages(
        context,
        lambda client, page: client.message_list(checked(MessageList, {**wanted, **page})),
        LISTED_MAX if everything else limit,
        show,
    )


def _sender(message: Message) -> str:
    """What an embedder writes is sent in the name of the tree's root."""
    return "embedder" if message.sender.kind == "embedder" else message.from_agent_id
