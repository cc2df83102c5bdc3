"""`/api/me/llm-providers`: model providers that an owner brings, made, changed, tested and deleted.

A key is sealed here before anything else is done with it, and comes back out only in a worker that asks the
model. A test is such an asking: the gateway leaves a probe for the workers and waits a while for what came of
it. AEP's own `provider.list` is a method like others. Below: `rest` for what these endpoints share.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from uuid import UUID

import anyio
from starlette.responses import Response
from starlette.routing import Route

from espalier_acts.providers import (
    PROBE_LIFE_S,
    ProviderRefused,
    SealedKey,
    Why,
    begin_probe,
    change_provider,
    create_provider,
    remove_provider,
)
from espalier_domain.errors import NotFound, Unavailable
from espalier_gateway.http import NO_STORE
from espalier_gateway.methods.call import named
from espalier_gateway.rest import RestCall, RestRefusal, Verb, rest_route, shown
from espalier_protocol.provider import (
    FaultKind,
    ProbeFailed,
    ProbePassed,
    ProviderChange,
    ProviderCreate,
    Providers,
    hint_of,
)
from espalier_secrets.sealing import SealingOff, place_of
from espalier_store.ids import new_id
from espalier_store.pool import reading, transaction
from espalier_store.providers import (
    ProbeOutcome,
    collect_probe,
    forget_probe,
    get_provider,
    list_providers,
)

PATH: Final = "/api/me/llm-providers"
PROBE_POLL_S: Final = 0.1
PROBE_ANSWER_S: Final = 5.0
"""What a test may take beside the wait for the workers."""

_AGAIN_MS: Final = 1000
_SLUGS: Final[Mapping[Why, str]] = {
    "name_taken": "duplicate_name",
    "too_many": "too_many_providers",
    "in_use": "provider_in_use",
    "test_under_way": "test_under_way",
}


def provider_routes() -> list[Route]:
    one = f"{PATH}/{{provider_id}}"
    probe = Verb("provider.write", test, wait_s=PROBE_LIFE_S + PROBE_ANSWER_S)
    return [
        rest_route(
            PATH,
            {"GET": Verb("provider.read", list_), "POST": Verb("provider.write", create, ProviderCreate)},
        ),
        rest_route(
            one,
            {
                "GET": Verb("provider.read", get),
                "PATCH": Verb("provider.write", change, ProviderChange),
                "DELETE": Verb("provider.write", delete),
            },
        ),
        rest_route(f"{one}/test", {"POST": probe}),
    ]


async def list_(call: RestCall, _: None) -> Response:
    async with reading(call.state.pool) as connection:
        return shown(Providers(providers=await list_providers(connection, call.caller.owner_id)))


async def get(call: RestCall, _: None) -> Response:
    provider_id = _provider_id(call)
    async with reading(call.state.pool) as connection:
        provider = await get_provider(connection, call.caller.owner_id, provider_id)
    if provider is None:
        raise NotFound("provider", call.request.path_params["provider_id"])
    return shown(provider)


async def create(call: RestCall, wanted: ProviderCreate) -> Response:
    provider_id = new_id()
    key = _sealed(call, provider_id, wanted.api_key.get_secret_value())
    with _refused_plainly():
        async with transaction(call.state.pool) as connection:
            made = await create_provider(connection, call.caller.owner_id, provider_id, wanted, key)
    return shown(made, 201)


async def change(call: RestCall, wanted: ProviderChange) -> Response:
    provider_id = _provider_id(call)
    key = _sealed(call, provider_id, wanted.api_key.get_secret_value()) if wanted.api_key else None
    with _refused_plainly():
        async with transaction(call.state.pool) as connection:
            changed = await change_provider(connection, call.caller.owner_id, provider_id, wanted, key)
    return shown(changed)


async def delete(call: RestCall, _: None) -> Response:
    with _refused_plainly():
        async with transaction(call.state.pool) as connection:
            await remove_provider(connection, call.caller.owner_id, _provider_id(call))
    return Response(status_code=204, headers=NO_STORE)


async def test(call: RestCall, _: None) -> Response:
    """What a worker heard from the provider. Nobody's silence is a failure of the provider, and says so."""
    owner_id = call.caller.owner_id
    with _refused_plainly():
        async with transaction(call.state.pool) as connection:
            probe_id = await begin_probe(connection, owner_id, _provider_id(call))
    outcome = await _outcome(call, probe_id)
    if outcome is None:
        async with transaction(call.state.pool) as connection:
            # Once more: it may have come just now, and is noted at the provider then.
            outcome = await collect_probe(connection, owner_id, probe_id)
            await forget_probe(connection, owner_id, probe_id)
    if outcome is None:
        return shown(ProbeFailed(kind="other", message="No worker took the test, or none ended it, in time."))
    if outcome.outcome == "ok":
        return shown(ProbePassed())
    kind: FaultKind = outcome.outcome  # type: ignore[assignment]
    return shown(ProbeFailed(kind=kind, message=outcome.message))


async def _outcome(call: RestCall, probe_id: UUID) -> ProbeOutcome | None:
    """Within the life of a probe. No connection is held between two looks."""
    until = anyio.current_time() + PROBE_LIFE_S
    while anyio.current_time() < until:
        if call.state.closing.is_set():
            raise Unavailable(_AGAIN_MS)
        async with reading(call.state.pool) as connection:
            outcome = await collect_probe(connection, call.caller.owner_id, probe_id)
        if outcome is not None:
            return outcome
        await anyio.sleep(PROBE_POLL_S)
    return None


def _provider_id(call: RestCall) -> UUID:
    return named("prv", call.request.path_params["provider_id"])


def _sealed(call: RestCall, provider_id: UUID, api_key: str) -> SealedKey:
    place = place_of(call.caller.owner_id, "providers", provider_id, "key")
    try:
        return SealedKey(call.state.sealer.seal(api_key.encode(), place), hint_of(api_key))
    except SealingOff as off:
        raise RestRefusal(403, "secrets_off", str(off)) from off


@contextmanager
def _refused_plainly() -> Iterator[None]:
    try:
        yield
    except ProviderRefused as refused:
        counted = {"agent_count": refused.agent_count} if refused.why == "in_use" else {}
        raise RestRefusal(409, _SLUGS[refused.why], refused.text, **counted) from refused
