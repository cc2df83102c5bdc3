"""Messages between agents of one tree, and the parameters of `message.*` (AEP spec sections 5.5 and 6)."""

from espalier_protocol.shapes import Id, JsonAny, PageParams, Params, Resource, Timestamp


class Message(Resource):
    id: str
    from_agent_id: str
    to_agent_id: str
    tree_root_id: str
    body: JsonAny
    sent_at: Timestamp
    delivered_at: Timestamp | None
    read_at: Timestamp | None


class Inbox(Resource):
    messages: list[Message]


class MessagePage(Resource):
    items: list[Message]
    cursor: str | None
    messages: list[Message]
    next_cursor: str | None


class MessageSend(Params):
    to_agent_id: Id
    body: JsonAny
    tree_root_id: Id | None = None


class MessageInbox(Params):
    agent_id: Id


class MessageList(PageParams):
    agent_id: Id | None = None
    tree_root_id: Id | None = None
