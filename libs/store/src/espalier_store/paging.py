"""Where a page begins: lists run newest first, and a cursor is the id of the last item that was seen."""

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Place:
    """`after` is None at the beginning; at most `size` items follow."""

    after: UUID | None
    size: int
