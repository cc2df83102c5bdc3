"""Secrets at rest: how keys and session ids are made, and the only form in which they are stored.

Both carry at least 128 random bits, so a plain SHA-256 is enough: there is nothing to guess from it.
"""

import hashlib
import secrets
from typing import Final

KEY_PREFIX: Final = "esp_"
KEY_BYTES: Final = 32


def new_key() -> str:
    """A fresh API key, to be shown once."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def fingerprint(secret: str) -> bytes:
    """The 32 bytes by which a key or session id is stored and found."""
    return hashlib.sha256(secret.encode()).digest()
