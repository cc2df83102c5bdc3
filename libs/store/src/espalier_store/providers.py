"""Model providers that owners bring, and the probes by which they are tested.

A key lies here only sealed; what opens it is not known on this floor. A row becomes the protocol's Provider
as it is read, which has no member for the key. Taking probes is the fleet's (`fleet.take_probes`).
"""

from dataclasses import dataclass
from uuid import UUID

import asyncpg

from espalier_protocol.ids import to_wire
from espalier_protocol.provider import Provider, ProviderKind
from espalier_store.pool import Connection

LOCK_OWNER = "select count(*) from (select 1 from owners where id = $1 for no key update) locked"
COUNT_PROVIDERS = "select count(*) from providers where owner_id = $1"


async def count_providers(connection: Connection, owner_id: UUID) -> int:
    """How many the owner has; it holds still until the transaction ends."""
    await connection.execute(LOCK_OWNER, owner_id)
    return int(await connection.fetchval(COUNT_PROVIDERS, owner_id))


INSERT_PROVIDER = """
insert into providers (id, owner_id, name, kind, base_url, default_model, sealed_key, key_hint)
values ($1, $2, $3, $4, $5, $6, $7, $8)
on conflict (owner_id, name) do nothing
returning *
"""


async def insert_provider(
    connection: Connection,
    owner_id: UUID,
    provider_id: UUID,
    *,
    name: str,
    kind: ProviderKind,
    base_url: str | None,
    default_model: str | None,
    sealed_key: bytes,
    key_hint: str,
) -> Provider | None:
    """None if the owner has one of that name already."""
    row = await connection.fetchrow(
        INSERT_PROVIDER, provider_id, owner_id, name, kind, base_url, default_model, sealed_key, key_hint
    )
    return _provider(row) if row else None


GET_PROVIDER = "select * from providers where owner_id = $1 and id = $2"


async def get_provider(connection: Connection, owner_id: UUID, provider_id: UUID) -> Provider | None:
    row = await connection.fetchrow(GET_PROVIDER, owner_id, provider_id)
    return _provider(row) if row else None


LIST_PROVIDERS = "select * from providers where owner_id = $1 order by created_at desc, id desc"


async def list_providers(connection: Connection, owner_id: UUID) -> list[Provider]:
    """All of them, newest first; how many there can be is bounded where they are made."""
    return [_provider(row) for row in await connection.fetch(LIST_PROVIDERS, owner_id)]


HOLD_PROVIDER = "select default_model from providers where owner_id = $1 and id = $2 for key share"


@dataclass(frozen=True, slots=True)
class HeldProvider:
    """A provider that cannot be deleted until the transaction ends."""

    default_model: str | None


async def hold_provider(connection: Connection, owner_id: UUID, provider_id: UUID) -> HeldProvider | None:
    row = await connection.fetchrow(HOLD_PROVIDER, owner_id, provider_id)
    return HeldProvider(row["default_model"]) if row else None


LOCK_PROVIDER = "select * from providers where owner_id = $1 and id = $2 for no key update"
LOCK_TO_DELETE = "select * from providers where owner_id = $1 and id = $2 for update"


async def lock_provider(
    connection: Connection, owner_id: UUID, provider_id: UUID, *, to_delete: bool = False
) -> Provider | None:
    """The row, held still until the transaction ends. `to_delete` also waits for whoever holds it."""
    statement = LOCK_TO_DELETE if to_delete else LOCK_PROVIDER
    row = await connection.fetchrow(statement, owner_id, provider_id)
    return _provider(row) if row else None


UPDATE_PROVIDER = """
update providers set
    name = $3, base_url = $4, default_model = $5,
    sealed_key = coalesce($6, sealed_key), key_hint = coalesce($7, key_hint),
    last_tested_at = case when $8 then null else last_tested_at end,
    last_test_status = case when $8 then null else last_test_status end,
    updated_at = clock_timestamp()
where owner_id = $1 and id = $2
returning *
"""


async def update_provider(
    connection: Connection,
    owner_id: UUID,
    provider_id: UUID,
    *,
    name: str,
    base_url: str | None,
    default_model: str | None,
    sealed_key: bytes | None,
    key_hint: str | None,
    untested: bool,
) -> Provider | None:
    """None if another one of the owner has that name; then the transaction is lost. The caller has locked it.

    A `sealed_key` of None leaves the key as it is.
    """
    try:
        row = await connection.fetchrow(
            UPDATE_PROVIDER,
            owner_id,
            provider_id,
            name,
            base_url,
            default_model,
            sealed_key,
            key_hint,
            untested,
        )
    except asyncpg.UniqueViolationError:
        return None
    assert row is not None, "the caller has locked the row"
    return _provider(row)


COUNT_USERS = "select count(*) from agents where owner_id = $1 and runner_provider_id = $2"


async def count_users(connection: Connection, owner_id: UUID, provider_id: UUID) -> int:
    """The agents that are bound to it, in whatever state they are."""
    return int(await connection.fetchval(COUNT_USERS, owner_id, provider_id))


DELETE_PROBES = "delete from provider_probes where owner_id = $1 and provider_id = $2"
DELETE_PROVIDER = "delete from providers where owner_id = $1 and id = $2"


async def delete_provider(connection: Connection, owner_id: UUID, provider_id: UUID) -> None:
    """And its probes; whoever waits for one is told that nothing came of it."""
    await connection.execute(DELETE_PROBES, owner_id, provider_id)
    await connection.execute(DELETE_PROVIDER, owner_id, provider_id)


# --- probes ----------------------------------------------------------------------------------------------

OPEN_PROBES = """
select count(*) from provider_probes
where owner_id = $1 and provider_id = $2 and state <> 'done'
    and created_at > clock_timestamp() - make_interval(secs => $3)
"""
INSERT_PROBE = "insert into provider_probes (id, owner_id, provider_id) values ($1, $2, $3)"


async def ask_for_probe(
    connection: Connection, owner_id: UUID, provider_id: UUID, probe_id: UUID, life_s: float
) -> bool:
    """False if one that is at most `life_s` old is under way. The caller has locked the provider."""
    if await connection.fetchval(OPEN_PROBES, owner_id, provider_id, life_s):
        return False
    await connection.execute(INSERT_PROBE, probe_id, owner_id, provider_id)
    return True


DONE_PROBE = "delete from provider_probes where owner_id = $1 and id = $2 and state = 'done' returning *"


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """`outcome` is ok, or a kind of fault with a sentence."""

    outcome: str
    message: str


async def collect_probe(connection: Connection, owner_id: UUID, probe_id: UUID) -> ProbeOutcome | None:
    """What came of the probe, once: its row is gone then. None as long as nothing has."""
    row = await connection.fetchrow(DONE_PROBE, owner_id, probe_id)
    return ProbeOutcome(row["outcome"], row["message"] or "") if row else None


FORGET_PROBE = "delete from provider_probes where owner_id = $1 and id = $2"


async def forget_probe(connection: Connection, owner_id: UUID, probe_id: UUID) -> None:
    """Nobody waits for it any more."""
    await connection.execute(FORGET_PROBE, owner_id, probe_id)


SETTLE_PROBE = """
update provider_probes set
    state = 'done', outcome = $3, message = $4, done_at = clock_timestamp()
where owner_id = $1 and id = $2 and state <> 'done'
"""
NOTE_TEST = """
update providers set last_tested_at = clock_timestamp(), last_test_status = $3
where owner_id = $1 and id = $2 and sealed_key = $4
    and base_url is not distinct from $5 and default_model is not distinct from $6
"""


@dataclass(frozen=True, slots=True)
class TestedProvider:
    """What a probe asks, as it stood when the probe was taken."""

    owner_id: UUID
    provider_id: UUID
    kind: ProviderKind
    base_url: str | None
    default_model: str | None
    sealed_key: bytes


async def settle_probe(
    connection: Connection, tested: TestedProvider, probe_id: UUID, outcome: ProbeOutcome
) -> None:
    """Answer whoever waits, and note it at the provider unless that has changed since."""
    await connection.execute(SETTLE_PROBE, tested.owner_id, probe_id, outcome.outcome, outcome.message)
    await connection.execute(
        NOTE_TEST,
        tested.owner_id,
        tested.provider_id,
        outcome.outcome,
        tested.sealed_key,
        tested.base_url,
        tested.default_model,
    )


SHOWN = (
    *("name", "kind", "created_at", "updated_at", "base_url", "default_model"),
    *("last_tested_at", "last_test_status"),
)
"""Columns that are told as they are. The sealed key is none of them."""


def _provider(row: asyncpg.Record) -> Provider:
    return Provider(
        id=to_wire("prv", row["id"]),
        api_key_hint=row["key_hint"],
        **{name: row[name] for name in SHOWN},
    )
