"""Model providers that an owner brings (AEP spec section 6, capability `runner.byo_llm`)."""

from typing import Literal

from espalier_protocol.shapes import Params, Resource, Timestamp


class NoParams(Params):
    """A method without parameters."""


class Provider(Resource):
    """`api_key_hint` is bullets and the last four characters; the key itself is never returned."""

    id: str
    name: str
    kind: Literal["openai_compat", "anthropic", "gemini"]
    api_key_hint: str
    created_at: Timestamp
    updated_at: Timestamp
    base_url: str | None
    default_model: str | None
    last_tested_at: Timestamp | None
    last_test_status: str | None


class Providers(Resource):
    providers: list[Provider]
