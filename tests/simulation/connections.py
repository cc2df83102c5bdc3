"""Pools and connections to the model of Postgres, as the store uses them, with the troubles that they have.

Not here: what a statement does (`database`).
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

from tests.simulation.database import Database, Row

from espalier_store.pool import Connection, Pool

Trouble = Literal["", "before", "after"]
"""The next commit fails: nothing was written, or all of it was. Whoever committed cannot tell which."""


class ModelPool:
    """One process's way to the database. A process that has died has none."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.dead = False
        self.trouble: Trouble = ""

    def get_idle_size(self) -> int:
        return 1

    @asynccontextmanager
    async def acquire(self, **_: float | None) -> AsyncIterator[Connection]:
        """There is always one at once."""
        if self.dead:
            raise OSError("the process is dead")
        yield cast(Connection, ModelConnection(self))

    def committed(self) -> None:
        """Raises OSError where the answer to a commit is to be lost."""
        self.trouble, trouble = "", self.trouble
        if trouble:
            raise OSError("the connection broke")


class ModelConnection:
    """What the store calls. Outside a transaction each statement commits by itself."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool
        self._blocks = 0

    async def fetch(self, statement: str, *args: Any) -> list[Row]:
        db = self._pool.db
        if self._blocks or not self._pool.trouble:
            return db.run(statement, args)
        undo, before = db.mark(), self._pool.trouble == "before"
        rows = db.run(statement, args)
        if before:
            undo()
        self._pool.committed()
        return rows

    async def fetchrow(self, statement: str, *args: Any) -> Row | None:
        rows = await self.fetch(statement, *args)
        return rows[0] if rows else None

    async def fetchval(self, statement: str, *args: Any) -> Any:
        row = await self.fetchrow(statement, *args)
        return next(iter(row.values())) if row else None

    async def execute(self, statement: str, *args: Any) -> str:
        return f"UPDATE {len(await self.fetch(statement, *args))}"

    def transaction(self) -> "Block":
        return Block(self, self._pool)

    def terminate(self) -> None:
        self._blocks = 0

    def enter(self) -> None:
        self._blocks += 1

    def leave(self) -> bool:
        """Whether that was the outermost block."""
        self._blocks -= 1
        return self._blocks == 0


class Block:
    """A transaction, or a savepoint within one."""

    def __init__(self, connection: ModelConnection, pool: ModelPool) -> None:
        self._connection, self._pool = connection, pool
        self._undo: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self._connection.enter()
        self._undo = self._pool.db.mark()

    async def commit(self) -> None:
        if self._connection.leave():
            if self._pool.trouble == "before":
                self._undo()
            self._pool.committed()

    async def rollback(self) -> None:
        self._connection.leave()
        self._undo()

    async def __aenter__(self) -> "Block":
        await self.start()
        return self

    async def __aexit__(self, failure: type[BaseException] | None, *_: object) -> None:
        await (self.rollback() if failure else self.commit())


def as_pool(pool: ModelPool) -> Pool:
    return cast(Pool, pool)
