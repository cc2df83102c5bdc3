"""Acts on messages: sending one, reading an inbox, and waking a run for what was sent.

Sending commits with whatever sent it; the wake is an act of its own afterwards, in a transaction of its own,
which the sender's process begins and a sweeper repeats if that process died. So no sender ever locks a run
that is not its own.
"""

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from espalier_acts.subjects import spread_subjects, subjects_of_message
from espalier_domain.errors import Conflicted, InvalidInput, LifecycleConflict, NotFound, TreeBoundary
from espalier_domain.journal import InboxRead, ReadMessage
from espalier_protocol.ids import to_wire
from espalier_protocol.message import BODY_BYTES_MAX, Message
from espalier_protocol.shapes import JsonAny
from espalier_protocol.strict_json import JsonError, dumps, loads
from espalier_store.fleet import Wake, take_wake
from espalier_store.ids import new_id
from espalier_store.messages import (
    NewMessage,
    Recipient,
    TakenMessage,
    await_new_runs,
    get_recipient,
    insert_message,
    is_unread,
    lock_picked,
    pick_run,
    raise_wake,
    take_unread,
)
from espalier_store.pool import RETRY_AFTER_MS, Connection
from espalier_store.runs import LockedRun
from espalier_store.trees import return_cycles

UNREAD_MAX: Final = 1000
"""Messages that wait in one agent's inbox. Senders that commit at the same moment may exceed it."""

READ_MAX: Final = 200
READ_BYTES_MAX: Final = 256 * 1024
"""What one reading of an inbox takes: messages, and bytes of them as they are shown."""

PICKS_MAX: Final = 8
"""Runs that a wake picks, and that end before it can lock them, until it is left to a sweeper."""


@dataclass(frozen=True, slots=True)
class MessageOrder:
    """What somebody says to an agent. Without `from_agent_id` an embedder says it.

    `from_run_id` is the sender's run, whose subjects the message is about. `tree_root_id`, a wire id, is the
    tree that it may not leave; None: whichever the recipient is in.
    """

    to_agent_id: UUID
    body: JsonAny
    tree_root_id: str | None = None
    from_agent_id: UUID | None = None
    from_run_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """The message, and its wake, which is to be carried out after the commit."""

    message: Message
    wake_id: int


async def send_message(connection: Connection, owner_id: UUID, order: MessageOrder) -> Sent:
    """Put a message into an agent's inbox.

    Raises NotFound, TreeBoundary, InvalidInput for a body that is too large or no JSON, or LifecycleConflict
    when the agent is closed, its inbox is full, or a subject that it is about has been erased.
    """
    to_agent_id = to_wire("agt", order.to_agent_id)
    recipient = await get_recipient(connection, owner_id, order.to_agent_id)
    if recipient is None:
        raise NotFound("agent", to_agent_id)
    _within_the_tree(order, recipient)
    if recipient.lifecycle_state in ("cancelled", "archived"):
        raise LifecycleConflict(f"The agent is {recipient.lifecycle_state} and takes no message.")
    message = NewMessage(
        message_id=new_id(),
        root_id=recipient.root_id,
        from_agent_id=order.from_agent_id or recipient.root_id,
        to_agent_id=order.to_agent_id,
        sender="agent" if order.from_agent_id else "embedder",
        body=_encoded(order.body),
        subject_ids=await subjects_of_message(connection, owner_id, order.from_run_id, order.to_agent_id),
    )
    sent = await insert_message(connection, owner_id, message, unread_max=UNREAD_MAX)
    if sent is None:
        raise LifecycleConflict(f"The agent has {UNREAD_MAX} unread messages, which is the limit.")
    return Sent(*sent)


async def read_inbox(connection: Connection, run: LockedRun) -> tuple[InboxRead, list[TakenMessage]]:
    """Take the oldest unread messages for the locked run, oldest first, and the entry that says so.

    The wake counter is the locked row's, from before the reading: a message that comes later is not read
    here, and its wake finds the counter unseen. While messages are left, one wake stays unseen, so that the
    run does not sleep on them.

    The run knows of the messages' subjects from now on. Raises LifecycleConflict when one is being erased at
    this moment; then the messages count as read, unless the caller undoes it.
    """
    seen = run.wake_seq
    taken, more = await take_unread(
        connection, run.owner_id, run.agent_id, run.run_id, count_max=READ_MAX, bytes_max=READ_BYTES_MAX
    )
    await spread_subjects(connection, run, {subject for each in taken for subject in each.subject_ids})
    read = tuple(
        ReadMessage(to_wire("msg", each.message_id), to_wire("agt", each.from_agent_id)) for each in taken
    )
    return InboxRead(read, seen - 1 if more else seen), taken


async def wake_for_message(connection: Connection, outbox_id: int) -> UUID | None:
    """Carry out one wake, in a transaction of its own; the run to ring for, if one became due by it.

    It may be repeated, also at the same time: only one of them finds the row. The spawner of a child that has
    ended gets back what the child did not use, whether or not it has read of the end already. A message that
    was read wakes nobody, and one for an agent without a live run stays in the inbox. Raises Conflicted when
    every run that was picked had ended; then the row is still there.
    """
    wake = await take_wake(connection, outbox_id)
    if wake is None:
        return None
    run_id = await _lock_one_to_wake(connection, wake)
    if run_id is not None and wake.child_run_id is not None:
        await return_cycles(connection, wake.owner_id, run_id, wake.child_run_id)
    if run_id is None or not await is_unread(
        connection, wake.owner_id, wake.agent_id, run_id, wake.message_id
    ):
        return None
    return run_id if await raise_wake(connection, wake.owner_id, run_id) else None


async def _lock_one_to_wake(connection: Connection, wake: Wake) -> UUID | None:
    """A run that has ended before it was locked is not picked again."""
    awaited = False
    for _ in range(PICKS_MAX):
        run_id = await pick_run(connection, wake.owner_id, wake.agent_id, wake.message_id)
        if run_id is not None and await lock_picked(connection, wake.owner_id, run_id):
            return run_id
        if run_id is None and awaited:
            return None
        if run_id is None:
            await await_new_runs(connection, wake.owner_id, wake.agent_id)
            awaited = True
    raise Conflicted(RETRY_AFTER_MS)


def _within_the_tree(order: MessageOrder, recipient: Recipient) -> None:
    if order.tree_root_id in (None, to_wire("agt", recipient.root_id)):
        return
    reason = "The agent that the message is for is in another tree."
    if order.from_agent_id is not None:
        raise TreeBoundary(reason, to_wire("agt", order.to_agent_id))
    assert order.tree_root_id is not None
    raise TreeBoundary(reason, order.tree_root_id)


def _encoded(body: JsonAny) -> str:
    """Compact JSON as it is stored and shown. A model's answer was never checked as a request is."""
    try:
        encoded = dumps(body)
        if len(encoded) <= BODY_BYTES_MAX:
            loads(encoded)
    except JsonError as error:
        raise InvalidInput("body", f"is refused: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput("body", "should be JSON") from error
    if len(encoded) > BODY_BYTES_MAX:
        raise InvalidInput("body", f"should be at most {BODY_BYTES_MAX} bytes of JSON")
    return encoded.decode()
