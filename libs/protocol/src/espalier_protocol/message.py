"""Messages between agents of one tree, and the parameters of `message.*` (AEP spec sections 5.5 and 6)."""

from typing import Final, Literal

from espalier_protocol.shapes import Id, JsonAny, PageParams, Params, Resource, Timestamp

BODY_BYTES_MAX: Final = 64 * 1024
"""Of a body as compact JSON in UTF-8."""

SenderKind = Literal["agent", "embedder"]


class MessageSender(Resource):
    """Who really wrote it: only the runtime sets this."""

    kind: SenderKind


class Message(Resource):
    """`sender` is our extension. What an embedder writes comes from the root of the recipient's tree."""

    id: str
    from_agent_id: str
    to_agent_id: str
    tree_root_id: str
    body: JsonAny
    sent_at: Timestamp
    delivered_at: Timestamp | None
    read_at: Timestamp | None
    sender: MessageSender


class Inbox(Resource):
    """What an agent has not read yet, oldest first: the oldest of it, if it is a lot."""

    messages: list[Message]


class MessagePage(Resource):
    items: list[Message]
    cursor: str | None
    messages: list[Message]
    next_cursor: str | None


class MessageSend(Params):
    """`tree_root_id` is the recipient's when it is absent; any other is a tree boundary violation."""

    to_agent_id: Id
    body: JsonAny
    tree_root_id: Id | None = None


class MessageInbox(Params):
    agent_id: Id


class MessageList(PageParams):
    """`agent_id` is the recipient."""

    agent_id: Id | None = None
    tree_root_id: Id | None = None
