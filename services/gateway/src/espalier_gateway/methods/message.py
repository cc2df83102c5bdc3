"""`message.send`, `message.inbox`, `message.list`: an embedder talks to agents, and looks on as they talk."""

from typing import Final

from espalier_acts.messages import MessageOrder, send_message
from espalier_domain.errors import NotFound
from espalier_gateway.methods.call import Call, named, place, unknown_cursor
from espalier_protocol.ids import from_wire
from espalier_protocol.message import Inbox, Message, MessageInbox, MessageList, MessagePage, MessageSend
from espalier_protocol.shapes import PAGE_MAX
from espalier_store.messages import MessageFilter, get_message, get_recipient, list_messages, list_unread
from espalier_store.paging import Page
from espalier_store.pool import reading

NOTHING: Final[Page[Message]] = Page([], more=False)


async def send(call: Call, params: MessageSend) -> Message:
    order = MessageOrder(named("agt", params.to_agent_id), params.body, params.tree_root_id)
    async with call.creating() as creation:
        sent = await send_message(creation.connection, call.owner_id, order)
        await creation.keep(sent.message)
    call.desk.couriers.wake(sent.wake_id)
    return sent.message


async def inbox(call: Call, params: MessageInbox) -> Inbox:
    """A look that changes nothing: only the agent itself reads its messages."""
    agent_id = named("agt", params.agent_id)
    async with reading(call.pool) as connection:
        if await get_recipient(connection, call.owner_id, agent_id) is None:
            raise NotFound("agent", params.agent_id)
        unread = await list_unread(connection, call.owner_id, agent_id, count_max=PAGE_MAX)
    return Inbox(messages=unread)


async def list_(call: Call, params: MessageList) -> MessagePage:
    where = place("msg", params)
    wanted = _filter(params)
    async with reading(call.pool) as connection:
        page = await list_messages(connection, call.owner_id, wanted, where) if wanted else NOTHING
        if where.after is not None and await get_message(connection, call.owner_id, where.after) is None:
            raise unknown_cursor()
    cursor = page.items[-1].id if page.more else None
    return MessagePage(items=page.items, cursor=cursor, messages=page.items, next_cursor=cursor)


def _filter(params: MessageList) -> MessageFilter | None:
    """None when an id is one that no agent can have, so that nothing matches."""
    asked = (params.agent_id, params.tree_root_id)
    ids = [None if text is None else from_wire("agt", text) for text in asked]
    if any(text is not None and id_ is None for text, id_ in zip(asked, ids, strict=True)):
        return None
    return MessageFilter(*ids)
