"""Taking a server's credential out of what the server says: it knows it, models and embedders need not.

A server that repeats what it was sent must not hand a secret to a model, an event or a log. Only what is
repeated as it was, or as JSON in a text spells it, is found; a server that wants to tell its own secret to
somebody has other ways.
"""

import json
from collections.abc import Iterable
from typing import Any, Final

SECRET_CHARS_MIN: Final = 6
"""Shorter values would be found in words that are no secrets."""

MASKED: Final = "[secret]"


class Mask:
    """What may not be repeated: values of headers, and of `Bearer x` also the `x`."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        secrets = {part for value in values for part in (value, value.split()[-1])}
        spelled = {json.dumps(secret)[1:-1] for secret in secrets} | secrets
        known = (secret for secret in spelled if len(secret) >= SECRET_CHARS_MIN)
        self._secrets = sorted(known, key=len, reverse=True)  # a longer one may hold a shorter one

    def text(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASKED)
        return text

    def json(self, value: dict[str, Any]) -> dict[str, Any]:
        """An object with masked keys and texts; its depth is bounded by the parser that read it."""
        if not self._secrets:
            return value
        return {self.text(key): self._value(each) for key, each in value.items()}

    def _value(self, value: Any) -> Any:
        match value:
            case str():
                return self.text(value)
            case dict():
                return self.json(value)
            case list():
                return [self._value(each) for each in value]
            case _:
                return value
