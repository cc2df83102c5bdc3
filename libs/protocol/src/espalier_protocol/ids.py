"""Ids: how they are composed, how they look on the wire, and how a wire form is read back.

Stored ids are uuid v7, so that rows made together lie together; on the wire they are a prefix and 26
characters of Crockford's base 32. Only the one canonical spelling is read: two spellings of one id would be
two keys in every cache and log. Not here: the clock and the dice that a new id needs (`espalier_store.ids`),
or whether an id exists and whose it is. Above: all that names a thing.
"""

import re
from base64 import b32hexencode
from functools import lru_cache
from typing import Literal, TypeAlias
from uuid import UUID

IdPrefix: TypeAlias = Literal[
    "agt",  # agent
    "run",
    "art",  # artifact
    "mem",  # memory record
    "msg",  # message
    "sub",  # subject
    "ses",  # AEP session
    "evt",  # event
    "phe",  # prompt history entry
    "pch",  # pending prompt change
    "apr",  # approval
    "prv",  # provider
    "key",
    "own",  # owner
]

EVENT_ID_DIGITS = 16

_BASE32HEX = "0123456789ABCDEFGHIJKLMNOPQRSTUV"
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_TO_CROCKFORD = str.maketrans(_BASE32HEX, _CROCKFORD)
_FROM_CROCKFORD = str.maketrans(_CROCKFORD, _BASE32HEX)
# 26 characters hold 130 bits: a first one above 7 would not fit a uuid.
_CANONICAL = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_EVENT_ID = re.compile(rf"[0-9]{{1,{EVENT_ID_DIGITS}}}")

RANDOM_BITS = 74
_STEP_BITS = 32


class IdSequence:
    """Uuids v7 in strictly rising order, also within one millisecond and when the clock goes back.

    Not for several threads at once: the sequence belongs to the thread of the event loop. Sequences in other
    processes need no agreement; the random bits keep them apart.
    """

    def __init__(self) -> None:
        self._last = 0

    def next(self, unix_ms: int, random_bits: int) -> UUID:
        """The id for this time of the wall clock, or one after the previous id if time has not moved on.

        The step is random rather than 1, so that a forked process does not repeat its parent's ids; when it
        overflows the random bits it carries into the milliseconds, which keeps the order.
        """
        chance = random_bits % 2**RANDOM_BITS
        step = 1 + random_bits % 2**_STEP_BITS
        self._last = max(unix_ms << RANDOM_BITS | chance, self._last + step)
        return _uuid7(self._last)


def session_id(random_bits: int) -> str:
    """A session id is a secret: 128 random bits, and it tells no time."""
    return f"ses_{_crockford(random_bits % 2**128)}"


REMEMBERED_IDS_MAX = 4096
"""A step names its run ten times: an id that was just written is not composed again."""


@lru_cache(maxsize=REMEMBERED_IDS_MAX)
def to_wire(prefix: IdPrefix, uuid: UUID) -> str:
    return f"{prefix}_{_crockford(uuid.int)}"


def from_wire(prefix: IdPrefix, text: str) -> UUID | None:
    """None for everything that `to_wire` with this prefix does not write."""
    digits = text.removeprefix(f"{prefix}_")
    if len(digits) == len(text) or not _CANONICAL.fullmatch(digits):
        return None
    return UUID(int=int(digits.translate(_FROM_CROCKFORD), 32))


def event_id(seq: int) -> str:
    """Padded, so that event ids of one run sort as text."""
    assert 0 <= seq < 10**EVENT_ID_DIGITS, "seq does not fit an event id"
    return f"{seq:0{EVENT_ID_DIGITS}d}"


def parse_event_id(text: str) -> int | None:
    """The seq, padded or not. Only ASCII digits: `int` alone would also take a sign, blanks and `1_0`."""
    return int(text) if _EVENT_ID.fullmatch(text) else None


def _crockford(number: int) -> str:
    # 20 bytes are 32 base-32 characters; the last 26 of them hold the lowest 130 bits.
    return b32hexencode(number.to_bytes(20)).decode("ascii")[-26:].translate(_TO_CROCKFORD)


def _uuid7(ordinal: int) -> UUID:
    """Spread 122 bits (48 of time, 74 of chance) around the fixed version and variant bits."""
    head, tail = divmod(ordinal, 2**62)
    unix_ms, middle = divmod(head, 2**12)
    return UUID(int=unix_ms << 80 | 7 << 76 | middle << 64 | 0b10 << 62 | tail)
