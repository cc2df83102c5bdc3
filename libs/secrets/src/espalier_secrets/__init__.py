"""Secrets: how keys and session ids are made, the only form in which they are stored, and signatures.

Both carry at least 128 random bits, so a plain SHA-256 is enough: there is nothing to guess from it. What the
services say to each other is signed with a key that they share. Secrets that must be read again are sealed:
`sealing`.
"""

import hashlib
import hmac
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


def signature(key: str, path: str, body: bytes) -> str:
    """What proves that a request to `path` came from a service that has the internal key."""
    return hmac.new(key.encode(), path.encode() + b"\n" + body, hashlib.sha256).hexdigest()


def is_signed(key: str, path: str, body: bytes, given: str) -> bool:
    return hmac.compare_digest(signature(key, path, body).encode(), given.encode())
