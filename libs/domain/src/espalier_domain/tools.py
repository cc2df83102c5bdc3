"""Which tool a name means, and whether an agent has it.

A bare name is a self-tool, which every agent has; a name with dots is the broker's: `espalier.<tool>` is
bundled, `mcp.<server>.<tool>` belongs to a server. Of these an agent has what its toolset names: a tool, or
with `mcp.<server>.*` all tools of a server, with `espalier.*` all that are bundled. Of a server that was
attached to the agent itself it has all, without naming it.
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


def all_of_server(slug: str) -> str:
    """The entry of a toolset that names all tools of a server."""
    return f"{EXTERNAL}{slug}.{ALL_OF_IT}"


def server_of(entry: str) -> str:
    """The slug of the server that a tool, or an entry of a toolset, belongs to; empty if it is none's."""
    if not entry.startswith(EXTERNAL):
        return ""
    slug, dot, tool = entry.removeprefix(EXTERNAL).partition(".")
    return slug if dot and tool else ""


def servers_of(toolset: Sequence[str]) -> list[str]:
    """The slugs of all servers that a toolset names."""
    return sorted({server_of(entry) for entry in toolset} - {""})


def has_tool(toolset: Sequence[str], tool: str) -> bool:
    """Whether a toolset names a tool of the broker."""
    name = canonical(tool)
    depth = 2 if name.startswith(EXTERNAL) else 1  # a tool's own name may hold dots
    shelf = ".".join(name.split(".")[:depth])
    return any(canonical(entry) in (name, f"{shelf}.{ALL_OF_IT}") for entry in toolset)
