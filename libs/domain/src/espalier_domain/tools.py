"""Which tool a name means, and whether an agent has it.

A bare name is a self-tool, which every agent has; a name with dots is the broker's: `espalier.<tool>` is
bundled, `mcp.<server>.<tool>` belongs to a server. Of these an agent has what its toolset names: a tool, or
with `mcp.<server>.*` all tools of a server, with `espalier.*` all that are bundled.
"""

from collections.abc import Sequence
from typing import Final

BUNDLED: Final = "espalier."
BUNDLED_ELSEWHERE: Final = "helix."
"""How the protocol's first runtime spells its bundled tools; accepted for ours."""

EXTERNAL: Final = "mcp."
ALL_OF_IT: Final = "*"


def is_brokered(tool: str) -> bool:
    """Whether the broker carries the call out."""
    return "." in tool


def canonical(tool: str) -> str:
    """The one spelling of a tool's name, or of an entry of a toolset."""
    if tool.startswith(BUNDLED_ELSEWHERE):
        return BUNDLED + tool.removeprefix(BUNDLED_ELSEWHERE)
    return tool


def has_tool(toolset: Sequence[str], tool: str) -> bool:
    """Whether a toolset names a tool of the broker."""
    name = canonical(tool)
    depth = 2 if name.startswith(EXTERNAL) else 1  # a tool's own name may hold dots
    shelf = ".".join(name.split(".")[:depth])
    return any(canonical(entry) in (name, f"{shelf}.{ALL_OF_IT}") for entry in toolset)
