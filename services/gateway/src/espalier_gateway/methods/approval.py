"""`approval.list`, `approval.get`, `approval.resolve`: what waits for a person, and the person's word."""

from typing import Final

from espalier_acts.approvals import Answer, resolve
from espalier_domain.errors import NotFound
from espalier_gateway.methods.agent import key_id, publish, telling
from espalier_gateway.methods.call import Call, named, place, unknown_cursor
from espalier_protocol.approval import Approval, ApprovalList, ApprovalPage, ApprovalRef, ApprovalResolve
from espalier_protocol.ids import from_wire
from espalier_store.approvals import ApprovalFilter, find_question, get_approval, list_approvals
from espalier_store.paging import Page
from espalier_store.pool import reading, transaction

NOTHING: Final[Page[Approval]] = Page([], more=False)


async def list_(call: Call, params: ApprovalList) -> ApprovalPage:
    where = place("apr", params)
    wanted = _filter(params)
    async with reading(call.pool) as connection:
        page = await list_approvals(connection, call.owner_id, wanted, where) if wanted else NOTHING
        # Asked afterwards: a cursor that is still there was there for the page too.
        if where.after is not None and await find_question(connection, call.owner_id, where.after) is None:
            raise unknown_cursor()
    return ApprovalPage(items=page.items, cursor=page.items[-1].id if page.more else None)


async def get(call: Call, params: ApprovalRef) -> Approval:
    approval_id = named("apr", params.approval_id)
    async with reading(call.pool) as connection:
        approval = await get_approval(connection, call.owner_id, approval_id)
    if approval is None:
        raise NotFound("approval", params.approval_id)
    return approval


async def resolve_(call: Call, params: ApprovalResolve) -> Approval:
    """One transaction; afterwards a live run is told, and the agent woken that got a message."""
    approval_id = named("apr", params.approval_id)
    answer = Answer(params.resolution, params.comment, key_id(call))
    async with reading(call.pool) as connection:
        question = await find_question(connection, call.owner_id, approval_id)
    if question is None:
        raise NotFound("approval", params.approval_id)
    async with telling(call, question.agent_id, question.run_id):
        async with transaction(call.pool) as connection:
            resolved = await resolve(connection, call.owner_id, approval_id, answer)
            approval = await get_approval(connection, call.owner_id, approval_id)
        publish(call, resolved.written)
    if resolved.wake_id is not None:
        call.desk.couriers.wake(resolved.wake_id)
    if approval is None:
        raise NotFound("approval", params.approval_id)
    return approval


def _filter(params: ApprovalList) -> ApprovalFilter | None:
    """None when the agent's id is one that no agent can have, so that nothing matches."""
    agent_id = None if params.agent_id is None else from_wire("agt", params.agent_id)
    if params.agent_id is not None and agent_id is None:
        return None
    return ApprovalFilter(agent_id, None if params.state == "all" else params.state)
