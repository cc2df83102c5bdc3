"""Runs for the wire's tests: held as a worker holds them, and what their rows and logs say."""

from typing import Any
from uuid import UUID

from espalier_domain.progress import SNAPSHOT_VERSION
from espalier_protocol.ids import IdPrefix, from_wire
from espalier_store.fleet import claim_run
from espalier_store.pool import Pool, transaction

LEASE_TTL_S = 60.0


def uuid(prefix: IdPrefix, text: str) -> UUID:
    found = from_wire(prefix, text)
    assert found is not None
    return found


async def lease(pool: Pool, run_id: str) -> int:
    """Hold the run as a worker would. The token."""
    async with transaction(pool) as connection:
        claimed = await claim_run(connection, uuid("run", run_id), LEASE_TTL_S, SNAPSHOT_VERSION)
    assert claimed is not None
    return claimed.run.lease_token


async def put_to_sleep(pool: Pool, run_id: str) -> None:
    """As a worker would have left it that sleeps for an hour."""
    asleep = "state = 'sleeping', wait_reason = 'timer', due_at = least(wall_at, now() + interval '1 hour')"
    await pool.execute(f"update runs set {asleep} where id = $1", uuid("run", run_id))


async def event_types(pool: Pool, run_id: str) -> list[str]:
    rows = await pool.fetch("select type from events where run_id = $1 order by seq", uuid("run", run_id))
    return [row["type"] for row in rows]


async def run_rows(pool: Pool) -> dict[UUID, dict[str, Any]]:
    """Every run's row, but not when its lease ends, which a worker moves all the time."""
    rows = [dict(row) for row in await pool.fetch("select * from runs")]
    return {row["id"]: {name: value for name, value in row.items() if name != "lease_until"} for row in rows}
