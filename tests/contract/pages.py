"""Lists as the published clients read them: two dialects for one list, and the pages of either."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

PAGES_MAX: Final = 10
"""Pages that a walk turns before it gives up: more than any list of the contract has."""

Fetch = Callable[..., Awaitable[dict[str, Any]]]


async def walked(fetch: Fetch, entries: str, cursor: str, **filters: Any) -> list[dict[str, Any]]:
    """Everything that a client finds which knows one dialect only, two at a time."""
    found: list[dict[str, Any]] = []
    place: dict[str, Any] = {}
    for _ in range(PAGES_MAX):
        page = await fetch(**filters, **place, limit=2)
        assert len(page[entries]) <= 2
        found += page[entries]
        if page[cursor] is None:
            return found
        place = {"cursor": page[cursor]}
    raise AssertionError(f"the list did not end within {PAGES_MAX} pages")


async def both_dialects_agree(fetch: Fetch, plural: str, **filters: Any) -> bool:
    """Whether a first page that is not the last one says the same in both dialects."""
    page = await fetch(**filters, limit=1)
    assert page["cursor"] is not None, "there is more than one page"
    return bool(page["items"] == page[plural] and page["cursor"] == page["next_cursor"])
