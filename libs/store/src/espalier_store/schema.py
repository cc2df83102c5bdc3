"""Which revisions of the schema this build knows, and whether the database is ready for it."""

from typing import TYPE_CHECKING, Final

import asyncpg

if TYPE_CHECKING:
    from espalier_store.pool import Connection

REVISIONS: Final = ("0001",)
"""Oldest first. An older one makes services wait; an unknown one is newer and accepted."""

REVISION = "select version_num from schema_revision"


async def schema_ready(connection: "Connection") -> bool:
    """Whether the schema is at this build's revision or a newer one."""
    try:
        revision = await connection.fetchval(REVISION)
    except asyncpg.UndefinedTableError:
        return False
    return revision is not None and revision not in REVISIONS[:-1]
