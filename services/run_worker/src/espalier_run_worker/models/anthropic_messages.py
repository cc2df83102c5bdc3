"""Anthropic's messages, for providers of that kind.

Importing this module loads the SDK. Above: `bound`. Below: `sdk_model` for all that does not depend on whose
wire it is.
"""

import httpx2
from anthropic import AsyncAnthropic
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

from espalier_run_worker.models.endpoint import Endpoint
from espalier_run_worker.models.provider_faults import ProviderFaults
from espalier_run_worker.models.sdk_model import SdkModel


def anthropic(endpoint: Endpoint, http: httpx2.AsyncClient) -> SdkModel:
    """A model at an endpoint, over a client that is the caller's to close."""
    client = AsyncAnthropic(
        base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=http, max_retries=0
    )
    provider = AnthropicProvider(anthropic_client=client)

    def named(model: str) -> AnthropicModel:
        return AnthropicModel(model, provider=provider)

    return SdkModel(named(endpoint.model), ProviderFaults(endpoint.secrets), named)
