"""Encryption at rest of what must be read again: provider keys, credentials of MCP servers.

A sealed value is one format byte, the id of the key that sealed it, a random nonce and AES-256-GCM. Where it
belongs (owner, table, row, field) is authenticated and not stored, so that a value that was moved to another
row or another owner does not open. What is only compared, never read, is hashed instead: see the package.
"""

import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

FORMAT: Final = b"\x01"
KEY_ID_BYTES: Final = 8
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
CIPHER_KEY_BYTES: Final = 32
HEAD_BYTES: Final = len(FORMAT) + KEY_ID_BYTES + NONCE_BYTES
KEY_CHARS_MIN: Final = 32
KEYS_MAX: Final = 16
_SEPARATORS: Final = re.compile(r"[,\s]+")


class SealBroken(Exception):
    """A sealed value does not open: another place, another owner, an unknown key, or changed bytes.

    Which of them is not told apart, because whoever moved it could learn from that.
    """


class SealingOff(Exception):
    """There is no key, so nothing can be sealed. The text is a sentence for whoever brought a secret."""

    def __init__(self) -> None:
        super().__init__(
            "This runtime keeps no secrets of others, because its operator set no ESPALIER_SECRETS_KEY."
        )


class SecretsSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="ESPALIER_", use_attribute_docstrings=True, frozen=True, hide_input_in_errors=True
    )

    secrets_key: SecretStr = Field(default=SecretStr(""))
    """What provider keys and MCP credentials are encrypted with: 32 random characters or more, the same for
    gateways, workers and brokers. Several are separated by commas: the first encrypts, all decrypt. Without
    one, nothing that needs a secret of an embedder is taken."""

    @field_validator("secrets_key")
    @classmethod
    def _long_enough(cls, value: SecretStr) -> SecretStr:
        keys = _split(value.get_secret_value())
        if len(keys) > KEYS_MAX:
            raise ValueError(f"at most {KEYS_MAX} keys")
        if any(len(key) < KEY_CHARS_MIN for key in keys):
            raise ValueError(f"each key needs {KEY_CHARS_MIN} characters or more")
        return value


def new_sealing_key() -> str:
    return secrets.token_urlsafe(CIPHER_KEY_BYTES)


def place_of(*parts: object) -> str:
    """The context of a sealed value: owner, table, what names the row, field, in this order.

    Each as its text. Raises ValueError for one that would make two places look alike.
    """
    texts = [str(part) for part in parts]
    if not all(text and "/" not in text for text in texts):
        raise ValueError("a part of a sealed value's place is empty or holds a slash")
    return "/".join(texts)


@dataclass(frozen=True, slots=True)
class _Key:
    id: bytes
    cipher: AESGCM


class Sealer:
    """Seals with the first key, opens with any. Without keys it does neither. One per process."""

    def __init__(self, keys: tuple[_Key, ...]) -> None:
        self._keys = keys

    @property
    def can_seal(self) -> bool:
        return bool(self._keys)

    def seal(self, plain: bytes, context: str) -> bytes:
        """Raises SealingOff without a key. `context` is made by `place_of`."""
        if not self._keys:
            raise SealingOff
        key = self._keys[0]
        head = FORMAT + key.id + secrets.token_bytes(NONCE_BYTES)
        return head + key.cipher.encrypt(head[-NONCE_BYTES:], plain, _bound_to(head, context))

    def open(self, sealed: bytes, context: str) -> bytes:
        """Raises SealBroken."""
        head, body = sealed[:HEAD_BYTES], sealed[HEAD_BYTES:]
        key_id = head[len(FORMAT) : len(FORMAT) + KEY_ID_BYTES]
        if head[: len(FORMAT)] != FORMAT or len(body) < TAG_BYTES:
            raise SealBroken
        for key in self._keys:
            if key.id == key_id:
                try:
                    return key.cipher.decrypt(head[-NONCE_BYTES:], body, _bound_to(head, context))
                except InvalidTag as error:
                    raise SealBroken from error
        raise SealBroken

    def is_current(self, sealed: bytes) -> bool:
        """Whether the key that would seal now has sealed it; others ask for being sealed again."""
        return bool(self._keys) and sealed.startswith(FORMAT + self._keys[0].id)


def sealer(keys: SecretStr) -> Sealer:
    """The sealer of the setting `secrets_key`."""
    return Sealer(tuple(_key(text) for text in _split(keys.get_secret_value())))


def _split(keys: str) -> list[str]:
    return [key for key in _SEPARATORS.split(keys) if key]


def _bound_to(head: bytes, context: str) -> bytes:
    """The associated data: format and key id too, so that a head cannot be exchanged for another."""
    return head[:-NONCE_BYTES] + context.encode()


@lru_cache(maxsize=KEYS_MAX)
def _key(text: str) -> _Key:
    """The settings hold a text with enough chance in it, so that it needs no slow derivation."""
    derived = HKDF(SHA256(), CIPHER_KEY_BYTES + KEY_ID_BYTES, salt=None, info=b"espalier sealing 1")
    material = derived.derive(text.encode())
    return _Key(material[CIPHER_KEY_BYTES:], AESGCM(material[:CIPHER_KEY_BYTES]))
