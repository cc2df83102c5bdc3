"""The runs of all owners at once: claiming, renewing, sweeping. The only statements without an owner.

A lease is a token and a time on this database's clock. Claiming raises the token, so that every later write
of whoever held the run before matches no row.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from uuid import UUID

import asyncpg

from espalier_store.pool import AWAY, REPEATABLE, Connection, Pool
from espalier_store.runs import (
    GIVEN,
    LIVED,
    LOADED_FROM,
    LOCKED,
    LoadedRun,
    LockedRun,
    loaded_run,
    locked_run,
)

CLAIM_RUN = f"""
with r as (
    update runs set
        lease_token = lease_token + 1,
        lease_until = clock_timestamp() + make_interval(secs => $2),
        expired_claims = expired_claims + (lease_until is not null)::int,
        state = 'running',
        wait_reason = null
    where id = (
        select id from runs
        where id = $1 and state in ('running', 'sleeping') and due_at <= now()
            and (lease_until is null or lease_until < now())
        for no key update skip locked
    )
    returning *
)
select {LOCKED}, {GIVEN}, {LIVED} from r {LOADED_FROM} $3
"""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A run that was taken. What it has lived is decoded apart, because not every run can be."""

    run: LockedRun
    row: asyncpg.Record

    def loaded(self) -> LoadedRun:
        """May lack entries of somebody who held the run when the statement began; `next_entry_no` tells."""
        return loaded_run(self.run.run_id, self.row)


async def claim_run(
    connection: Connection, run_id: UUID, lease_ttl_s: float, snapshot_version: int
) -> Claimed | None:
    """Take the run if it is due and free; None if it is not, or somebody else is taking it."""
    row = await connection.fetchrow(CLAIM_RUN, run_id, lease_ttl_s, snapshot_version)
    return Claimed(locked_run(row), row) if row else None


DUE_RUNS = """
select id from runs
where state in ('running', 'sleeping') and due_at <= now() and (lease_until is null or lease_until < now())
order by due_at limit $1
"""


async def due_runs(connection: Connection, limit: int) -> list[UUID]:
    """Runs that could be claimed now, longest due first."""
    return [row["id"] for row in await connection.fetch(DUE_RUNS, limit)]


RENEW_LEASES = """
update runs set lease_until = clock_timestamp() + make_interval(secs => $3)
from (
    select r.id from runs r join unnest($1::uuid[], $2::bigint[]) as held (id, token)
        on r.id = held.id and r.lease_token = held.token
    where r.lease_until is not null
    for no key update of r skip locked
) mine
where runs.id = mine.id
returning runs.id
"""


async def renew_leases(connection: Connection, tokens: dict[UUID, int], lease_ttl_s: float) -> set[UUID]:
    """Renew every lease in one statement. A run that is not returned is locked by its own step, or lost."""
    rows = await connection.fetch(RENEW_LEASES, list(tokens), list(tokens.values()), lease_ttl_s)
    return {row["id"] for row in rows}


HELD_STATE = """
select id, lease_token, cancel_requested_at is not null or wall_at <= now() as to_stop
from runs where id = any ($1::uuid[])
"""


@dataclass(frozen=True, slots=True)
class HeldState:
    """`to_stop` when somebody asked for a cancel or the time of the run is over."""

    lease_token: int
    to_stop: bool


async def held_states(connection: Connection, run_ids: Sequence[UUID]) -> dict[UUID, HeldState]:
    """Whose runs are, and whether they are to go on, read without a lock."""
    rows = await connection.fetch(HELD_STATE, run_ids)
    return {row["id"]: HeldState(row["lease_token"], row["to_stop"]) for row in rows}


RELEASE_LEASE = """
update runs set lease_token = lease_token + 1, lease_until = null
where id = $1 and lease_token = $2 and lease_until is not null
"""


async def release_lease(connection: Connection, run_id: UUID, lease_token: int) -> None:
    """Give a run back as it stands, so that another worker may claim it at once."""
    await connection.execute(RELEASE_LEASE, run_id, lease_token)


OVERDUE_CANCELS = """
select id, owner_id from runs
where state in ('running', 'sleeping') and cancel_requested_at < now() - make_interval(secs => $1)
limit $2
"""


async def overdue_cancels(connection: Connection, after_s: float, limit: int) -> list[tuple[UUID, UUID]]:
    """(run, owner) of cancels that no worker has carried out within `after_s`."""
    return [(row["id"], row["owner_id"]) for row in await connection.fetch(OVERDUE_CANCELS, after_s, limit)]


DELETE_PUBLISHED = """
delete from outbox where id in (select id from outbox where id = any ($1::bigint[]) for update skip locked)
"""


async def delete_published(connection: Connection, outbox_ids: Sequence[int]) -> None:
    """Forget acts that Redis has. Rows locked by a sweeper are left to it."""
    await connection.execute(DELETE_PUBLISHED, outbox_ids)


async def acknowledge(pool: Pool, outbox_ids: Sequence[int]) -> None:
    """The publisher's way to `delete_published`. A database that is away leaves the rows to the sweeper."""
    with suppress(*AWAY, *REPEATABLE):
        await pool.execute(DELETE_PUBLISHED, outbox_ids)


UNPUBLISHED = """
select id, owner_id, run_id, from_seq from outbox
where kind = 'publish' and created_at < now() - make_interval(secs => $1)
order by id limit $2 for update skip locked
"""


@dataclass(frozen=True, slots=True)
class Unpublished:
    outbox_id: int
    owner_id: UUID
    run_id: UUID
    from_seq: int


async def unpublished(connection: Connection, older_than_s: float, limit: int) -> list[Unpublished]:
    """Acts whose events may have missed Redis, locked until the transaction ends."""
    rows = await connection.fetch(UNPUBLISHED, older_than_s, limit)
    return [Unpublished(row["id"], row["owner_id"], row["run_id"], row["from_seq"]) for row in rows]


FOLLOWED = "select id, next_seq - 1 as last_seq from runs where id = any ($1::uuid[])"


async def last_seqs(connection: Connection, run_ids: Sequence[UUID]) -> dict[UUID, int]:
    """How far the logs of runs go, for a gateway that checks whether its tails missed a last event."""
    return {row["id"]: row["last_seq"] for row in await connection.fetch(FOLLOWED, run_ids)}
