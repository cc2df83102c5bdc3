"""Pages of lists: newest first, bounded by number and by bytes, and a cursor is the id of the last item seen.

A list statement looks one item further than asked (`limit $3 + 1`) and stops at PAGE_BYTES_MAX, so a page of
large items is shorter than asked for and still says that more follows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar
from uuid import UUID

import asyncpg

PAGE_BYTES_MAX: Final = 1024 * 1024
"""Bytes of open objects and long texts after which a page ends; it has one item at least."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """`after` is None at the beginning; at most `size` items follow."""

    after: UUID | None
    size: int


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    items: list[T]
    more: bool


def read_page(rows: list[asyncpg.Record], place: Place, read: Callable[[asyncpg.Record], T]) -> Page[T]:
    """The page in `rows`; their column `reached` counts the rows before PAGE_BYTES_MAX cut some off."""
    more = bool(rows) and rows[0]["reached"] > min(len(rows), place.size)
    return Page([read(row) for row in rows[: place.size]], more)
