"""What a database refuses, as a sentence for a person."""

import socket

import asyncpg
import pytest

from espalier_local.schema import unreachable

URL = "postgresql://me:hidden@db:6000/mine"


def wrapped(inner: Exception) -> Exception:
    outer = RuntimeError(f"(some.library.Error) {inner}")
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (wrapped(asyncpg.InvalidPasswordError("no")), "it refuses this user or password"),
        (wrapped(asyncpg.InvalidCatalogNameError("no")), "it does not exist"),
        (ConnectionRefusedError(111, "Connect call failed"), "nobody answers there"),
        (TimeoutError(), "nobody answers there"),
        (socket.gaierror(-2, "Name or service not known"), "no machine of that name is known"),
        (ConnectionError("the server rejected SSL upgrade"), "the server rejected SSL upgrade"),
        (ValueError("invalid literal: 'hidden'"), "the address is not well-formed"),
        (wrapped(RuntimeError("the disk is full.\nand more")), "the disk is full"),
    ],
)
def test_a_database_that_cannot_be_used_is_a_plain_sentence(error: Exception, reason: str) -> None:
    said = unreachable(URL, error).sentence
    assert said == f"The database mine on db, port 6000, cannot be used: {reason}."


def test_an_address_that_cannot_be_taken_apart_is_not_repeated() -> None:
    said = unreachable("postgresql://me:hidden@db:port/mine", ValueError("'hidden'")).sentence
    assert said == "The database at the given address cannot be used: the address is not well-formed."
