"""The first answer to a create that named a key, kept for a day with the very transaction that made it.

The key belongs to an owner and a method. Its row comes first in the create's transaction, so that a twin
waits for that transaction and then finds the answer; if the create fails, nothing is left of the row. Rows
that are old enough are deleted by `fleet.forget_answers`.
"""

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from espalier_domain.errors import Conflicted
from espalier_store.pool import RETRY_AFTER_MS, Connection

KEPT_S: Final = 24 * 3600
"""How long an answer is kept at least."""


@dataclass(frozen=True, slots=True)
class CreateKey:
    """What a caller named a create, and the SHA-256 of what it asked for."""

    method: str
    key: str
    params_hash: bytes


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """`answer` is the JSON that the first create was answered with."""

    params_hash: bytes
    answer: str


BEGIN_CREATE = """
insert into idempotency (owner_id, method, key, params_hash) values ($1, $2, $3, $4)
on conflict do nothing returning true
"""


async def begin_create(connection: Connection, owner_id: UUID, named: CreateKey) -> FirstAnswer | None:
    """None if this create is the first one, which then has to `keep_answer` in this transaction.

    Waits for a twin under way. Raises Conflicted in the one moment in which an answer was just forgotten.
    """
    if await connection.fetchval(BEGIN_CREATE, owner_id, named.method, named.key, named.params_hash):
        return None
    first = await _first_answer(connection, owner_id, named)
    if first is None:
        raise Conflicted(RETRY_AFTER_MS)
    return first


FIRST_ANSWER = """
select params_hash, answer from idempotency where owner_id = $1 and method = $2 and key = $3
"""


async def _first_answer(connection: Connection, owner_id: UUID, named: CreateKey) -> FirstAnswer | None:
    row = await connection.fetchrow(FIRST_ANSWER, owner_id, named.method, named.key)
    return FirstAnswer(row["params_hash"], row["answer"]) if row else None


KEEP_ANSWER = "update idempotency set answer = $4 where owner_id = $1 and method = $2 and key = $3"


async def keep_answer(connection: Connection, owner_id: UUID, named: CreateKey, answer: str) -> None:
    await connection.execute(KEEP_ANSWER, owner_id, named.method, named.key, answer)
