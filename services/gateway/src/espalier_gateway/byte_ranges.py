"""What a request for bytes asks of an artifact: nothing new, a part, or all of it (RFC 9110, 13 and 14).

Artifacts never change, so that their entity tags are strong and dates are not known. One range is answered;
several at once, and whatever is no range, are answered with the whole, as the standard allows. Pure.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_RANGE: Final = re.compile(r"bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})", re.ASCII | re.IGNORECASE)
_TAG: Final = re.compile(r'(?:W/)?("[\x21\x23-\x7e\x80-\xff]*")')


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes from `start` up to, not including, `end`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class Unchanged(Exception):
    """The caller has these bytes."""


class Mismatched(Exception):
    """The caller wants other bytes than these."""


class OutOfRange(Exception):
    """No byte of the artifact is in the range that was asked for."""


def wanted_part(headers: Mapping[str, str], etag: str, size: int, *, may_be_part: bool) -> Part | None:
    """The part that is asked for, None for the whole. Raises Unchanged, Mismatched, OutOfRange."""
    if (match := headers.get("if-match")) is not None and not _lists(match, etag, weakly=False):
        raise Mismatched
    if (none_match := headers.get("if-none-match")) is not None and _lists(none_match, etag, weakly=True):
        raise Unchanged
    asked = headers.get("range")
    if asked is None or not may_be_part or headers.get("if-range", etag).strip() != etag:
        return None
    return _part(asked, size)


def _lists(field: str, etag: str, *, weakly: bool) -> bool:
    if field.strip() == "*":
        return True
    return any(tag[1] == etag and (weakly or tag[0] == tag[1]) for tag in _TAG.finditer(field))


def _part(asked: str, size: int) -> Part | None:
    match = _RANGE.fullmatch(asked.strip())
    if match is None or match[1] == match[2] == "":
        return None
    if not match[1]:
        start, end = max(size - int(match[2]), 0), size
    else:
        start, end = int(match[1]), min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= end:
        raise OutOfRange
    return Part(start, end)
