"""Lists as long as they are: every item of any `*_list`, over as many pages as that takes.

For embedders. The commands print lists page by page with a limit of their own (`commands/listing`).
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

from espalier_client.errors import Cause, TransportError
from espalier_protocol.shapes import PageParams

PAGES_MAX: Final = 100_000
"""Nobody's list is longer; a runtime that goes on has lost its way."""

Item = TypeVar("Item", covariant=True)
Asked = TypeVar("Asked", bound=PageParams)


class Page(Protocol[Item]):
    """What every list answers."""

    @property
    def items(self) -> Sequence[Item]: ...

    @property
    def cursor(self) -> str | None: ...


async def every(ask: Callable[[Asked], Awaitable[Page[Item]]], params: Asked) -> AsyncGenerator[Item, None]:
    """Every item of a list in its order, from the page that `params` name to the last one.

        async for agent in every(client.agent_list, AgentList(lifecycle_state="active")): ...

    `params.limit` is the size of a page, not of the list. Raises what the call raises, and TransportError
    when the list does not end.
    """
    for _ in range(PAGES_MAX):
        page = await ask(params)
        for item in page.items:
            yield item
        if page.cursor is None or not page.items:  # a page that brings nothing is the last
            return
        params = params.model_copy(update={"cursor": page.cursor})
    raise TransportError(f"The list does not end after {PAGES_MAX} pages.", Cause.senseless)
