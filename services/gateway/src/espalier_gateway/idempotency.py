"""`Idempotency-Key`: a create that names a key happens once, and its first answer is its only one for a day.

The answer is written with the create, in one transaction, so that it survives this gateway and is found by
every other one. Which methods keep a key, the method table says. Above: the dispatcher, which reads the key
and gives kept answers out as they are, and the handlers of creates. Below: `store.idempotency`.
"""

import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from espalier_domain.errors import InvalidInput
from espalier_protocol.shapes import Resource
from espalier_protocol.strict_json import JsonValue
from espalier_store.idempotency import CreateKey, begin_create, keep_answer
from espalier_store.pool import Connection, Pool, transaction

FIELD: Final = "Idempotency-Key"
KEY_CHARS_MAX: Final = 255
_KEY: Final = re.compile(rf"[!-~]{{1,{KEY_CHARS_MAX}}}")


class AnsweredBefore(Exception):
    """Not a failure: the create happened, and `answer` is the JSON of its result, byte for byte."""

    def __init__(self, answer: str) -> None:
        super().__init__()
        self.answer = answer


def create_key(method: str, key: str, params: JsonValue) -> CreateKey:
    """Params are the same when they are the same JSON, in whatever order their members come.

    Raises InvalidInput for what is no key.
    """
    if not _KEY.fullmatch(key):
        raise InvalidInput(FIELD, f"should be 1 to {KEY_CHARS_MAX} visible ASCII characters, without blanks")
    told = json.dumps(params or {}, sort_keys=True, separators=(",", ":"))
    return CreateKey(method, key, hashlib.sha256(told.encode()).digest())


@dataclass(slots=True)
class Creation:
    """A create under way, in its transaction."""

    connection: Connection
    _owner_id: UUID
    _named: CreateKey | None
    _kept: bool = False

    async def keep(self, result: Resource) -> None:
        """What the create is answered with. The last thing that a create does in its transaction."""
        self._kept = True
        if self._named is not None:
            await keep_answer(self.connection, self._owner_id, self._named, result.model_dump_json())

    def require_kept(self) -> None:
        assert self._kept, "a create keeps its answer before it commits"


@asynccontextmanager
async def creating(pool: Pool, owner_id: UUID, named: CreateKey | None) -> AsyncIterator[Creation]:
    """The transaction of a create. Raises AnsweredBefore if its key has an answer, and InvalidInput if that
    was for other params; then nothing is done.
    """
    async with transaction(pool) as connection:
        if named is not None:
            await _require_first(connection, owner_id, named)
        creation = Creation(connection, owner_id, named)
        yield creation
        creation.require_kept()


async def _require_first(connection: Connection, owner_id: UUID, named: CreateKey) -> None:
    first = await begin_create(connection, owner_id, named)
    if first is None:
        return
    if first.params_hash != named.params_hash:
        raise InvalidInput(FIELD, "was used for other params")
    raise AnsweredBefore(first.answer)
