"""Acts on model providers: making, changing and deleting them, binding agents to them, asking for a test.

Keys come and go sealed: nothing on this floor can open them. An agent holds its provider while it is bound
(`bind_runner`), so that a provider in use is never deleted, whatever happens at the same time.
"""

from dataclasses import dataclass
from typing import Final, Literal
from uuid import UUID

from espalier_domain.errors import InvalidInput, LifecycleConflict, NotFound
from espalier_protocol.agent import RunnerConfig
from espalier_protocol.ids import from_wire, to_wire
from espalier_protocol.provider import Provider, ProviderChange, ProviderCreate, server_of
from espalier_store.agents import set_runner
from espalier_store.ids import new_id
from espalier_store.pool import Connection
from espalier_store.providers import (
    ask_for_probe,
    count_providers,
    count_users,
    delete_provider,
    hold_provider,
    insert_provider,
    lock_provider,
    update_provider,
)

PROVIDERS_MAX: Final = 100
"""Of one owner: they are listed all at once."""

PROBE_LIFE_S: Final = 20.0
"""For how long somebody waits for a probe; a worker takes none that is older."""


Why = Literal["name_taken", "too_many", "in_use", "test_under_way"]


class ProviderRefused(Exception):
    """An expected outcome that only those who manage providers meet. The text is for them.

    `agent_count` is how many agents are bound to a provider that is in use.
    """

    def __init__(self, why: Why, text: str, agent_count: int = 0) -> None:
        super().__init__(text)
        self.why, self.text, self.agent_count = why, text, agent_count


@dataclass(frozen=True, slots=True)
class SealedKey:
    """A key as it is kept: sealed for its one place, with what may be shown of it."""

    sealed: bytes
    hint: str


async def create_provider(
    connection: Connection, owner_id: UUID, provider_id: UUID, wanted: ProviderCreate, key: SealedKey
) -> Provider:
    """Raises InvalidInput or ProviderRefused. The id was given out before: the key is sealed for it."""
    if wanted.kind == "openai_compat" and wanted.base_url is None:
        raise InvalidInput("base_url", "is required for a provider of the kind openai_compat")
    if await count_providers(connection, owner_id) >= PROVIDERS_MAX:
        raise ProviderRefused("too_many", f"There are {PROVIDERS_MAX} providers already, which is the most.")
    made = await insert_provider(
        connection,
        owner_id,
        provider_id,
        name=wanted.name,
        kind=wanted.kind,
        base_url=wanted.base_url,
        default_model=wanted.default_model,
        sealed_key=key.sealed,
        key_hint=key.hint,
    )
    if made is None:
        raise _name_taken()
    return made


async def change_provider(
    connection: Connection, owner_id: UUID, provider_id: UUID, change: ProviderChange, key: SealedKey | None
) -> Provider:
    """What `change` leaves out stays. Raises NotFound, InvalidInput, ProviderRefused.

    A key is not sent to a new address unless it is brought along: whoever may change a provider need not be
    someone who may know its key. What was learned in a test counts no more once key or address are new.
    """
    before = await _locked(connection, owner_id, provider_id)
    named = change.model_fields_set
    base_url = change.base_url if "base_url" in named else before.base_url
    if before.kind == "openai_compat" and base_url is None:
        raise InvalidInput("base_url", "is required for a provider of the kind openai_compat")
    if server_of(base_url) != server_of(before.base_url) and key is None:
        raise InvalidInput("api_key", "is required when base_url names another server")
    after = await update_provider(
        connection,
        owner_id,
        provider_id,
        name=change.name or before.name,
        base_url=base_url,
        default_model=change.default_model if "default_model" in named else before.default_model,
        sealed_key=key.sealed if key else None,
        key_hint=key.hint if key else None,
        untested=key is not None or base_url != before.base_url,
    )
    if after is None:
        raise _name_taken()
    return after


async def remove_provider(connection: Connection, owner_id: UUID, provider_id: UUID) -> None:
    """Raises NotFound, or ProviderRefused while any agent is bound to it."""
    if await lock_provider(connection, owner_id, provider_id, to_delete=True) is None:
        raise _unknown(provider_id)
    if users := await count_users(connection, owner_id, provider_id):
        text = "Agents are bound to this provider; give them another runner first."
        raise ProviderRefused("in_use", text, users)
    await delete_provider(connection, owner_id, provider_id)


async def bind_runner(
    connection: Connection, owner_id: UUID, agent_id: UUID, runner: RunnerConfig | None
) -> None:
    """Let the agent be run as `runner` says; None detaches it. The caller has locked or made the agent.

    Raises NotFound for a provider that is not the owner's, LifecycleConflict if nothing names a model. A
    model without a provider is one where the operator's own model is.
    """
    if runner is None:
        await set_runner(connection, owner_id, agent_id, None, None)
        return
    if runner.provider_id is None:
        await set_runner(connection, owner_id, agent_id, None, runner.model)
        return
    provider_id = from_wire("prv", runner.provider_id)
    held = await hold_provider(connection, owner_id, provider_id) if provider_id else None
    if held is None:
        raise NotFound("provider", runner.provider_id)
    model = runner.model or held.default_model
    if model is None:
        raise LifecycleConflict("The provider has no default model, so runner.model has to name one.")
    await set_runner(connection, owner_id, agent_id, provider_id, model)


async def begin_probe(connection: Connection, owner_id: UUID, provider_id: UUID) -> UUID:
    """Ask the workers for a test. Raises NotFound or ProviderRefused."""
    await _locked(connection, owner_id, provider_id)
    probe_id = new_id()
    if not await ask_for_probe(connection, owner_id, provider_id, probe_id, PROBE_LIFE_S):
        raise ProviderRefused("test_under_way", "A test of this provider is under way.")
    return probe_id


async def _locked(connection: Connection, owner_id: UUID, provider_id: UUID) -> Provider:
    provider = await lock_provider(connection, owner_id, provider_id)
    if provider is None:
        raise _unknown(provider_id)
    return provider


def _name_taken() -> ProviderRefused:
    return ProviderRefused("name_taken", "There is a provider of this name already.")


def _unknown(provider_id: UUID) -> NotFound:
    return NotFound("provider", to_wire("prv", provider_id))
