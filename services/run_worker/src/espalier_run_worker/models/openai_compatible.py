"""Any server that speaks OpenAI's chat completions, OpenAI itself among them.

Importing this module loads the SDK, so only the choice of a model does. Above: `choice` for the operator's
own model, `bound` for those that owners bring. Below: `sdk_model` for all that does not depend on whose wire
it is, `bounded_http` for the operator's connection.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx2
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from pydantic import ValidationError
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers import Provider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

from espalier_run_worker.models.bounded_http import READ_TIMEOUT_S, open_http
from espalier_run_worker.models.endpoint import OPENAI_HOST, Endpoint
from espalier_run_worker.models.provider_faults import ProviderFaults
from espalier_run_worker.models.sdk_model import SdkModel, Unreadable, used

NO_KEY: Final = "none"
"""The SDK wants to send some key."""


@asynccontextmanager
async def open_openai_compatible(
    endpoint: Endpoint, *, read_timeout_s: float = READ_TIMEOUT_S
) -> AsyncIterator[SdkModel]:
    """A model at an endpoint, and the connections to it as long as the context is open."""
    async with open_http(read_timeout_s) as http:
        yield openai_compatible(endpoint, http)


def openai_compatible(endpoint: Endpoint, http: httpx2.AsyncClient) -> SdkModel:
    """A model at an endpoint, over a client that is the caller's to close."""
    client = AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key or NO_KEY, http_client=http, max_retries=0
    )
    provider = _provider(endpoint, client)

    def named(model: str) -> OpenAIChatModel:
        return _CheckedModel(model, provider=provider)

    return SdkModel(named(endpoint.model), ProviderFaults(endpoint.secrets), named)


def _provider(endpoint: Endpoint, client: AsyncOpenAI) -> Provider[AsyncOpenAI]:
    """OpenAI's newer models refuse the name `max_tokens`; not every other server knows the newer name."""
    if endpoint.host == OPENAI_HOST:
        return OpenAIProvider(openai_client=client)
    profile = OpenAIModelProfile(openai_chat_supports_max_completion_tokens=False)
    return OpenAICompatibleProvider("openai-compatible", openai_client=client, profile=profile)


class _CheckedModel(OpenAIChatModel):
    """The SDK's model, which also sees an error that came as a success, and what a broken answer cost."""

    def _validate_completion(self, response: ChatCompletion) -> Any:
        error = (response.model_extra or {}).get("error")
        if error and not response.choices:
            raise ModelHTTPError(_status_of(error), self.model_name, error)
        try:
            return super()._validate_completion(response)
        except ValidationError as invalid:
            raise Unreadable(used(response.usage)) from invalid


def _status_of(error: object) -> int:
    """Gateways put the status into an error's code; what says nothing is the provider's own trouble."""
    code = str(error.get("code")) if isinstance(error, dict) else ""
    return int(code) if code in map(str, range(400, 600)) else 500
