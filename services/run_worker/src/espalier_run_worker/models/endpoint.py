"""Where a real model is asked: the settings of an operator, checked once at start.

It knows no SDK, so that a wrong setting is told at once. Above: the choice of a model.
"""

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

OPENAI_BASE_URL: Final = "https://api.openai.com/v1"
OPENAI_HOST: Final = "api.openai.com"


class EndpointInvalid(Exception):
    """The settings name no place to ask. One sentence for the operator, which repeats no secret."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server and the model asked there. The key may be empty."""

    model: str
    base_url: str
    api_key: str = field(default="", repr=False)

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def secrets(self) -> tuple[str, ...]:
        """What nobody may be told of it: the key, and where it is."""
        return tuple(text for text in (self.api_key, urlsplit(self.base_url).netloc) if text)


def endpoint(model: str, base_url: str, api_key: str) -> Endpoint:
    """The endpoint that three settings mean. Raises EndpointInvalid.

    A key alone is OpenAI's own; a base URL alone is a server that wants no key, as local ones do.
    """
    if not base_url and not api_key:
        raise EndpointInvalid(
            f"ESPALIER_MODEL names {model!r}, but neither OPENAI_BASE_URL nor OPENAI_API_KEY "
            "says where to ask it."
        )
    if not _is_http(base_url or OPENAI_BASE_URL):
        raise EndpointInvalid("OPENAI_BASE_URL has to be http(s)://host[:port][/path], and nothing else.")
    if not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise EndpointInvalid("OPENAI_API_KEY holds characters that no key has.")
    return Endpoint(model, base_url or OPENAI_BASE_URL, api_key)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 -- reading it checks it
    except ValueError:
        return False
    extras = (parts.username, parts.password, parts.query, parts.fragment)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not any(extras)
