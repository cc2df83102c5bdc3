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
from espalier_store.providers import TestedProvider
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


RENEW_BROKER = """
insert into brokers (id, alive_until, listed)
values ($1, clock_timestamp() + make_interval(secs => $2), $3)
on conflict (id) do update set alive_until = excluded.alive_until
"""


async def renew_broker(
    connection: Connection, broker_id: UUID, ttl_s: float, listed: Sequence[str] = ()
) -> None:
    """Say that a broker lives, for `ttl_s` from now, and which servers its operator listed."""
    await connection.execute(RENEW_BROKER, broker_id, ttl_s, list(listed))


LISTED = "select distinct unnest(listed) as name from brokers"


async def listed_servers(connection: Connection) -> set[str]:
    """The names of the operator's servers, as the brokers of the last time told them."""
    return {row["name"] for row in await connection.fetch(LISTED)}


TO_STOP = """
select id from runs
where id = any ($1::uuid[])
    and (cancel_requested_at is not null or wall_at <= clock_timestamp() or state <> 'running')
"""


async def runs_to_stop(connection: Connection, run_ids: Sequence[UUID]) -> set[UUID]:
    """Those whose calls are to be stopped: a cancel was asked for, the time is over, or they have ended."""
    return {row["id"] for row in await connection.fetch(TO_STOP, run_ids)}


DOUBT_OVERDUE = """
update tool_calls c set state = 'in_doubt', settled_at = clock_timestamp()
from (
    select run_id, call_id from tool_calls
    where state = 'sent' and deadline_at < now() - make_interval(secs => $1)
    order by deadline_at limit $2 for update skip locked
) overdue
where c.run_id = overdue.run_id and c.call_id = overdue.call_id
"""


async def doubt_overdue(connection: Connection, grace_s: float, limit: int) -> None:
    """Calls whose deadline passed more than `grace_s` ago and that nobody has settled are in doubt."""
    await connection.execute(DOUBT_OVERDUE, grace_s, limit)


FORGET_BROKERS = """
delete from brokers where id in (
    select b.id from brokers b
    where b.alive_until < now() - make_interval(secs => $1)
        and not exists (select from tool_calls c where c.state = 'sent' and c.broker_id = b.id)
    limit $2 for update skip locked
)
"""


async def forget_brokers(connection: Connection, silent_s: float, limit: int) -> None:
    """Brokers that have been silent for `silent_s` and owe nothing are forgotten."""
    await connection.execute(FORGET_BROKERS, silent_s, limit)


FORGET_EXPIRED = """
with expired as materialized (
    select id from memory_records where expires_at <= now() order by expires_at limit $1
    for update skip locked
)
delete from memory_records using expired where memory_records.id = expired.id
"""


async def forget_expired(connection: Connection, limit: int) -> None:
    """Delete memory records that have expired, longest ago first. Nobody was shown them any more."""
    await connection.execute(FORGET_EXPIRED, limit)


FORGET_ANSWERS = """
delete from idempotency where (owner_id, method, key) in (
    select owner_id, method, key from idempotency
    where created_at < now() - make_interval(secs => $1)
    order by created_at limit $2 for update skip locked
)
"""


async def forget_answers(connection: Connection, older_than_s: float, limit: int) -> None:
    """Delete first answers of creates that were kept for long enough, oldest first."""
    await connection.execute(FORGET_ANSWERS, older_than_s, limit)


OVERDUE_WAKES = """
select id from outbox
where kind = 'wake' and created_at < now() - make_interval(secs => $1)
order by created_at limit $2 for update skip locked
"""


async def overdue_wakes(connection: Connection, older_than_s: float, limit: int) -> list[int]:
    """Wakes that whoever promised them has not carried out, and is not carrying out right now."""
    return [row["id"] for row in await connection.fetch(OVERDUE_WAKES, older_than_s, limit)]


PRUNE_LOGS = """
update runs set log_pruned_at = clock_timestamp() where id in (
    select r.id from runs r
    where r.ended_at < now() - make_interval(secs => $1) and r.log_pruned_at is null
        and not exists (
            select from approvals a
            where a.owner_id = r.owner_id and a.run_id = r.id and a.kind = 'in_doubt'
                and a.resolved_at is null)
        and not exists (
            select from subjects s
            where s.owner_id = r.owner_id and s.id = any (r.subject_ids) and s.legal_hold)
    order by r.ended_at limit $2 for update skip locked
)
"""


async def prune_logs(connection: Connection, kept_s: float, limit: int) -> None:
    """From now on nobody is shown the logs of runs that ended more than `kept_s` ago.

    A run that has a call in doubt which nobody has settled keeps its log until somebody does, and one that
    knows of a subject under a legal hold until the hold is lifted.
    """
    await connection.execute(PRUNE_LOGS, kept_s, limit)


TAKE_PRUNED = """
select id from runs where log_pruned_at is not null and log_removed_at is null
order by log_pruned_at limit 1 for no key update skip locked
"""
REMOVE_LOG = """
with gone_events as (
    delete from events where run_id = $1 and seq <= (
        select max(seq) from (select seq from events where run_id = $1 order by seq limit $2) first)
    returning 1
), gone_entries as (
    delete from journal where run_id = $1 and entry_no <= (
        select max(entry_no) from (
            select entry_no from journal where run_id = $1 order by entry_no limit $2) first)
    returning 1
), gone_calls as (
    delete from tool_calls where run_id = $1 and call_id <= (
        select max(call_id) from (
            select call_id from tool_calls where run_id = $1 order by call_id limit $2) first)
    returning 1
), gone_snapshot as (
    delete from snapshots where run_id = $1
)
select greatest(
    (select count(*) from gone_events),
    (select count(*) from gone_entries),
    (select count(*) from gone_calls)
)
"""
"""Ranges, not lists: a list is gone through for each row of a log that Postgres believes to be short."""
LOG_REMOVED = "update runs set log_removed_at = clock_timestamp() where id = $1"


async def remove_log(connection: Connection, limit: int) -> bool:
    """Delete up to `limit` rows of each kind of one pruned log; False if there is none to delete from.

    One that another sweeper is at work on is left to it. A log of which a part is left stays to be taken.
    """
    run_id = await connection.fetchval(TAKE_PRUNED)
    if run_id is None:
        return False
    if await connection.fetchval(REMOVE_LOG, run_id, limit) < limit:
        await connection.execute(LOG_REMOVED, run_id)
    return True


TAKE_WAKE = """
delete from outbox where id = $1 and kind = 'wake' returning owner_id, agent_id, message_id, child_run_id
"""


@dataclass(frozen=True, slots=True)
class Wake:
    """Whom to wake, and for which message; without one for any that is unread.

    `child_run_id` is the run whose end the message tells of, if it is about that.
    """

    owner_id: UUID
    agent_id: UUID
    message_id: UUID | None
    child_run_id: UUID | None = None


async def take_wake(connection: Connection, outbox_id: int) -> Wake | None:
    """The wake is the caller's, in whose transaction it is carried out; None if somebody else has done it."""
    row = await connection.fetchrow(TAKE_WAKE, outbox_id)
    return Wake(row["owner_id"], row["agent_id"], row["message_id"], row["child_run_id"]) if row else None


TAKE_PROBES = """
with taken as (
    update provider_probes set state = 'taken'
    where id in (
        select id from provider_probes
        where state = 'asked' and created_at > clock_timestamp() - make_interval(secs => $1)
        order by created_at limit $2 for update skip locked
    )
    returning id, owner_id, provider_id
)
select t.id as probe_id, p.id, p.owner_id, p.kind, p.base_url, p.default_model, p.sealed_key
from taken t join providers p on p.id = t.provider_id and p.owner_id = t.owner_id
"""


async def take_probes(connection: Connection, life_s: float, limit: int) -> dict[UUID, TestedProvider]:
    """Probes that somebody still waits for and nobody has taken; they are the caller's now."""
    return {
        row["probe_id"]: TestedProvider(
            row["owner_id"],
            row["id"],
            row["kind"],
            row["base_url"],
            row["default_model"],
            row["sealed_key"],
        )
        for row in await connection.fetch(TAKE_PROBES, life_s, limit)
    }


FORGET_PROBES = """
delete from provider_probes where id in (
    select id from provider_probes where created_at < clock_timestamp() - make_interval(secs => $1)
    limit $2 for update skip locked
)
"""


async def forget_probes(connection: Connection, older_than_s: float, limit: int) -> None:
    """Probes whose asker died before it could read what came of them."""
    await connection.execute(FORGET_PROBES, older_than_s, limit)
