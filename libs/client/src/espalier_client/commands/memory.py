"""`espalier memory ...`: what a tree of agents remembers, read and changed by its embedder.

A tree is named by the agent at its root; an agent that nobody spawned is the root of its own.
"""

from typing import Annotated, Any

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
    Unusable,
    checked,
    chosen,
    fail,
    json_value,
    line,
    output,
    perform,
    put,
    say,
    show_pages,
)
from espalier_client.errors import ClientError
from espalier_protocol.memory import (
    FOUND_DEFAULT,
    FOUND_MAX,
    MemoryDelete,
    MemoryRead,
    MemoryRecord,
    MemorySearch,
    MemoryWrite,
    Ranking,
)

KEY_COLUMNS = 24
SCORE_COLUMNS = len("score")
RANKED: dict[Ranking, str] = {"text": "Ranked by words.", "semantic": "Ranked by words and meaning."}
COLUMNS = [("record", ID_COLUMNS), ("created, UTC", TIME_COLUMNS), ("key", KEY_COLUMNS)]

Root = Annotated[str, typer.Argument(metavar="AGENT", help="The id of the agent at the tree's root.")]
Namespace = Annotated[str, typer.Argument(metavar="NAMESPACE", help="The part of its memory.")]


def group() -> typer.Typer:
    app = typer.Typer(help="Memory: what a tree of agents remembers.", no_args_is_help=True)
    for command in (write, read, search, delete):
        app.command()(command)
    return app


def write(
    context: typer.Context,
    *,
    root: Root,
    namespace: Namespace,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The record's key in it.")],
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="JSON, or text that is none (- for standard input).")
    ],
    subject: Annotated[str | None, typer.Option(help="The id of the subject whom it is about.")] = None,
    ttl: Annotated[int | None, typer.Option(help="Seconds after which it is forgotten.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a record and print its id. A record with the same key is replaced."""
    try:
        members = {"tree_root_id": root, "namespace": namespace, "key": key, "value": json_value(value)}
        params = checked(MemoryWrite, {**members, **chosen(subject_id=subject, ttl_seconds=ttl)})
    except ClientError as error:
        fail(error)
    record = perform(context, lambda client: client.memory_write(params))
    put(record, as_json, record.id)


def read(
    context: typer.Context,
    *,
    root: Root,
    namespace: Namespace,
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="Only the record with this key.")] = None,
    limit: Limit = LIMIT_DEFAULT,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """List the records of a namespace, newest first."""
    wanted = {"tree_root_id": root, "namespace": namespace, **chosen(key=key)}
    listing = Listing(output(), COLUMNS, "value")

    def show(record: MemoryRecord) -> None:
        if as_json:
            line(record)
        else:
            listing.row(*_cells(record))

    show_pages(
        context,
        lambda client, page: client.memory_read(checked(MemoryRead, {**wanted, **page})),
        LISTED_MAX if everything else limit,
        show,
    )


def search(
    context: typer.Context,
    *,
    root: Root,
    namespace: Namespace,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What to look for: words, or parts of them.")],
    limit: Annotated[int, typer.Option(min=1, max=FOUND_MAX, help="How many, best first.")] = FOUND_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """List the records that fit the query best, and below the table what they were ranked by."""
    members = {"tree_root_id": root, "namespace": namespace, "query": query, "k": limit}
    try:
        params = checked(MemorySearch, members)
    except ClientError as error:
        fail(error)
    listing = Listing(output(), [("score", SCORE_COLUMNS), *COLUMNS], "value")
    found = perform(context, lambda client: client.memory_search(params))
    for match in found.items:
        if as_json:
            line(match)
        else:
            listing.row(f"{match.score:.2f}", *_cells(match))
    if found.items and found.ranking is not None and not as_json:
        say(RANKED[found.ranking])


def delete(
    context: typer.Context,
    *,
    record: Annotated[str | None, typer.Argument(metavar="RECORD", help="The record's id.")] = None,
    tree: Annotated[
        str | None, typer.Option(help="Instead of a record: all of the tree with this agent at its root,")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="of it only those in this namespace,")] = None,
    subject: Annotated[str | None, typer.Option(help="or with this subject's id.")] = None,
    as_json: AsJson = False,
) -> None:
    """Delete one record, or many of a tree, and print how many that were."""
    try:
        params = checked(
            MemoryDelete, _deleted(record, tree, chosen(namespace=namespace, subject_id=subject))
        )
    except ClientError as error:
        fail(error)
    done = perform(context, lambda client: client.memory_delete(params))
    put(done, as_json, f"{done.deleted} deleted")


def _deleted(record: str | None, tree: str | None, narrowed: dict[str, Any]) -> dict[str, Any]:
    """Either a record or a tree: a slip must not delete more than was meant."""
    if (record is None) == (tree is None) or (record is not None and narrowed):
        raise Unusable("Name either a record, or --tree and what of it is to go.")
    return {"id": record} if record is not None else {"tree_root_id": tree, **narrowed}


def _cells(record: MemoryRecord) -> tuple[str, ...]:
    return record.id, moment(record.created_at), record.key, plain(record.value)
