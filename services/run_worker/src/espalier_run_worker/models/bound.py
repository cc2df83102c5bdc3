"""Models of providers that owners bring, and which model answers for which agent.

A provider's address was chosen by somebody else, so it is reached over `espalier_egress`; its key is opened
here for one attempt and kept nowhere. Nothing else is kept either: a connection would be closed before the
next attempt, and a key or an address that changes must count in the next cycle. Above: the composition root
and `provider_probes`. Below: a module for each kind of provider, loaded when the first one is asked.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

import anyio.to_thread
import httpx2
import structlog

from espalier_domain.run import BoundProvider
from espalier_egress import Egress, EgressRefused
from espalier_protocol.provider import ProviderKind
from espalier_run_worker.models.bounded_http import ANSWER_BYTES_MAX
from espalier_run_worker.models.endpoint import OPENAI_BASE_URL, Endpoint
from espalier_run_worker.models.model import ModelAnswer, ModelFault, ModelRequest, OperatorModel
from espalier_secrets.sealing import SealBroken, Sealer, place_of

if TYPE_CHECKING:
    from espalier_run_worker.models.sdk_model import SdkModel

DECRYPT_FAILED: Final = "decrypt_failed"
BASE_URLS: Final[dict[ProviderKind, str]] = {
    "openai_compat": OPENAI_BASE_URL,
    "anthropic": "https://api.anthropic.com",
    # Google's own endpoint for clients of OpenAI's wire, which needs no SDK of its own.
    "gemini": "https://generativelanguage.googleapis.com/v1beta/openai",
}
TOLD: Final = {
    *("host", "connection", "accept", "accept-encoding", "user-agent", "content-type", "content-length"),
    *("anthropic-version", "anthropic-beta"),
}
"""The headers that a provider is sent. SDKs also take some from the environment, which is the operator's."""

CREDENTIALS: Final[dict[ProviderKind, Callable[[str], tuple[str, str]]]] = {
    "openai_compat": lambda key: ("authorization", f"Bearer {key}"),
    "anthropic": lambda key: ("x-api-key", key),
    "gemini": lambda key: ("authorization", f"Bearer {key}"),
}
"""How each takes its key."""

SWITCHED_OFF: Final = "runner_off: this runtime does not let agents bring their own models"

Make: TypeAlias = "Callable[[Endpoint, httpx2.AsyncClient], SdkModel]"
log = structlog.get_logger(__name__)


class Providers:
    """Opens models of providers. One per process."""

    def __init__(self, egress: Egress, sealer: Sealer) -> None:
        self._egress, self._sealer = egress, sealer

    @asynccontextmanager
    async def open(self, provider: BoundProvider, model: str) -> "AsyncIterator[SdkModel]":
        """The model, as long as the context is open. Raises ModelFault if it can never be asked."""
        key = self._key(provider)
        make = await anyio.to_thread.run_sync(_maker, provider.kind)
        base_url = provider.base_url or BASE_URLS[provider.kind]
        try:
            http = self._egress.checked_client(base_url, body_bytes_max=ANSWER_BYTES_MAX)
        except EgressRefused as refused:
            raise ModelFault(f"address_refused: {refused}", retryable=False) from refused
        http.event_hooks = {"request": [partial(_tell_no_more, CREDENTIALS[provider.kind](key))]}
        async with http:
            yield make(Endpoint(model, base_url, key), http)

    def _key(self, provider: BoundProvider) -> str:
        """Raises ModelFault; what an operator's mistake with keys breaks, its correction mends."""
        place = place_of(provider.owner_id, "providers", provider.provider_id, "key")
        try:
            return self._sealer.open(provider.sealed_key, place).decode()
        except SealBroken as broken:
            log.warning("provider.key_does_not_open", provider_id=str(provider.provider_id))
            reason = f"{DECRYPT_FAILED}: the key of the provider cannot be read; give it again"
            raise ModelFault(reason, retryable=True) from broken


class ChosenModel:
    """For each agent its own: the model of its runner, else the operator's.

    Without `providers` the operator has switched runners off; what an agent of one was to use, nothing does
    in its place.
    """

    def __init__(self, operator: OperatorModel, providers: Providers | None) -> None:
        self._operator, self._providers = operator, providers

    async def answer(self, request: ModelRequest) -> ModelAnswer:
        runner = request.run.runner
        if runner is None:
            return await self._operator.answer(request)
        if self._providers is None:
            raise ModelFault(SWITCHED_OFF, retryable=True)
        if runner.provider is None:
            assert runner.model is not None, "a runner names a provider, a model, or both"
            return await self._operator.named(runner.model).answer(request)
        assert runner.model is not None, "a provider is bound with a model"
        async with self._providers.open(runner.provider, runner.model) as model:
            return await model.answer(request)


def _maker(kind: ProviderKind) -> Make:
    """In a thread: an SDK takes about two seconds to load, and leases are renewed meanwhile."""
    if kind == "anthropic":
        from espalier_run_worker.models.anthropic_messages import anthropic

        return anthropic
    from espalier_run_worker.models.openai_compatible import openai_compatible

    return openai_compatible


async def _tell_no_more(credential: tuple[str, str], request: httpx2.Request) -> None:
    """Of the headers only those that are needed, and no credential but the provider's own."""
    for name in set(request.headers) - TOLD:
        del request.headers[name]
    name, value = credential
    request.headers[name] = value
