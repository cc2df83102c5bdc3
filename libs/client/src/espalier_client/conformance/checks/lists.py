"""Lists as published clients read them: two dialects for one list, and the pages of either."""

from typing import Any, Final

from espalier_client.conformance.verdicts import Failed, brief, expect, same
from espalier_client.conformance.wire import Caller

PAGES_MAX: Final = 20
"""Pages that a walk turns before it gives up; no list of a check has as many."""


async def walk(
    caller: Caller, method: str, entries: str = "items", cursor: str = "cursor", **filters: Any
) -> list[dict[str, Any]]:
    """Everything that a client finds which knows one dialect only, two at a time."""
    found: list[dict[str, Any]] = []
    place: dict[str, Any] = {}
    for _ in range(PAGES_MAX):
        page = await caller.call(method, **filters, **place, limit=2)
        if not isinstance(page, dict) or not isinstance(page.get(entries), list) or cursor not in page:
            raise Failed(f"{method} should answer {entries} and {cursor}, got {brief(page)}.")
        expect(len(page[entries]) <= 2, f"{method} answered more than its limit of 2.")
        found += page[entries]
        if page[cursor] is None:
            return found
        place = {"cursor": page[cursor]}
    raise Failed(f"{method} did not come to an end within {PAGES_MAX} pages of two.")


async def require_pages(caller: Caller, method: str, ids: list[str], plural: str, **filters: Any) -> None:
    """The list holds exactly these, in this order, in the dialect that the runtime speaks."""
    page = await caller.call(method, **filters, limit=1)
    entries, cursor = ("items", "cursor") if "items" in page else (plural, "next_cursor")
    found = await walk(caller, method, entries, cursor, **filters)
    same([each.get("id") for each in found], ids, f"what {method} finds page by page")


async def require_both_dialects(caller: Caller, method: str, plural: str, **filters: Any) -> None:
    """A first page that is not the last one says the same in both dialects, and each can be walked."""
    page = await caller.call(method, **filters, limit=1)
    missing = [name for name in ("items", "cursor", plural, "next_cursor") if name not in page]
    same(missing, [], f"members that the answer of {method} lacks")
    same(page["items"], page[plural], f"items and {plural} of {method}")
    same(page["cursor"], page["next_cursor"], f"cursor and next_cursor of {method}")
    expect(page["cursor"] is not None, f"{method} shows one of several and no cursor.")
    one = await walk(caller, method, "items", "cursor", **filters)
    other = await walk(caller, method, plural, "next_cursor", **filters)
    same([each["id"] for each in one], [each["id"] for each in other], f"{method} in both dialects")


async def require_unknown_cursors(caller: Caller, method: str, unknown: list[str], **filters: Any) -> None:
    for cursor in unknown:
        await caller.refused("invalid_params", method, **filters, cursor=cursor)
