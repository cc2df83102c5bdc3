"""Model providers that an owner brings (AEP spec sections 6 and 12, capability `runner.byo_llm`).

`provider.list` is AEP's; making, changing and testing them are small REST endpoints beside it.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr
from pydantic_core import PydanticCustomError

from espalier_protocol.agent import Change
from espalier_protocol.shapes import Name, Params, Resource, Timestamp

ProviderKind = Literal["openai_compat", "anthropic", "gemini"]
FaultKind = Literal[
    "auth_failed",
    "rate_limited",
    "upstream_error",
    "unreachable",
    "model_invalid",
    "parse_error",
    "decrypt_failed",
    "other",
]
"""Why a test of a provider failed."""

KEY_CHARS_MAX = 4096
HINT_CHARS = 4
HINT_KEY_CHARS_MIN = 8
"""Of a shorter key the last four characters would be too much of it."""

BASE_URL_CHARS_MAX = 2048
_HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_BASE_URL = re.compile(
    rf"(?P<server>https?://{_HOST}(?::[0-9]{{1,5}})?)(?:/[\w.~!$&'()*+,;=:@%/-]*)?", re.ASCII
)

BULLETS = "\u2022" * 4


def _plain(key: SecretStr) -> SecretStr:
    """It becomes a header's value."""
    text = key.get_secret_value()
    if not (text.isascii() and text.isprintable() and " " not in text):
        raise PydanticCustomError("api_key", "should hold only the characters that a key can have")
    return key


ApiKey = Annotated[SecretStr, Field(min_length=1, max_length=KEY_CHARS_MAX), AfterValidator(_plain)]


def _beginning_of_a_url(text: str) -> str:
    """Whether it may be reached is found out when it is."""
    if not _BASE_URL.fullmatch(text):
        raise PydanticCustomError("base_url", "should be http(s)://host[:port][/path], and nothing else")
    return text


BaseUrl = Annotated[str, Field(max_length=BASE_URL_CHARS_MAX), AfterValidator(_beginning_of_a_url)]


def server_of(base_url: str | None) -> str | None:
    """Where a key goes: the scheme, host and port as they are spelled. None is the maker's own address."""
    match = _BASE_URL.fullmatch(base_url) if base_url else None
    return match["server"].lower() if match else None


def hint_of(api_key: str) -> str:
    return BULLETS + (api_key[-HINT_CHARS:] if len(api_key) >= HINT_KEY_CHARS_MIN else "")


class Provider(Resource):
    """`api_key_hint` is bullets and the last four characters; the key itself is never returned.

    `last_test_status` is `ok` or a kind of fault.
    """

    id: str
    name: str
    kind: ProviderKind
    api_key_hint: str
    created_at: Timestamp
    updated_at: Timestamp
    base_url: str | None
    default_model: str | None
    last_tested_at: Timestamp | None
    last_test_status: str | None


class Providers(Resource):
    providers: list[Provider]


class ProviderCreate(Params):
    name: Name
    kind: ProviderKind
    api_key: ApiKey
    base_url: BaseUrl | None = None
    default_model: Name | None = None


class ProviderChange(Params):
    """What is absent stays as it is; a null takes `base_url` or `default_model` away."""

    name: Change[Name] = None
    api_key: Change[ApiKey] = None
    base_url: BaseUrl | None = None
    default_model: Name | None = None


class ProbePassed(Resource):
    ok: Literal[True] = True


class ProbeFailed(Resource):
    ok: Literal[False] = False
    kind: FaultKind
    message: str
