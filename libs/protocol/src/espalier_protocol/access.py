"""What a session may use (capabilities) and what a key may do (scopes).

Both vocabularies are AEP's own, verbatim; names that start with `espalier.` are this runtime's extensions.
"""

from collections.abc import Collection
from typing import Annotated, Final, Literal, get_args

from pydantic import AfterValidator

PublishedCapability = Literal[
    "auth.oauth2",
    "compliance.gdpr",
    "tools.mcp_external",
    "self.modify_prompt",
    "self.spawn_subagent",
    "self.learning_memory",
    "messaging.peer",
    "streaming.sse",
    "runner.byo_llm",
]
OwnCapability = Literal["espalier.approvals", "espalier.events"]
Capability = PublishedCapability | OwnCapability

CAPABILITIES: Final[tuple[str, ...]] = (*get_args(PublishedCapability), *get_args(OwnCapability))

SUPPORTED: Final[frozenset[str]] = frozenset(
    {
        "compliance.gdpr",
        "streaming.sse",
        "tools.mcp_external",
        "self.learning_memory",
        "self.modify_prompt",
        "self.spawn_subagent",
        "messaging.peer",
        "runner.byo_llm",
        "espalier.approvals",
        "espalier.events",
    }
)
"""What this build advertises as true. A capability joins when all that it gates is built."""

Scope = Literal[
    "agent.read",
    "agent.write",
    "run.read",
    "run.create",
    "run.cancel",
    "stream.subscribe",
    "memory.read",
    "memory.write",
    "tool.invoke",
    "subject.read",
    "subject.erase",
    "subject.export",
    "provider.read",
    "provider.write",
]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)


def served(wanted: str) -> frozenset[str]:
    """What is offered by a runtime whose operator wrote `wanted`: `all`, `none`, or names with commas.

    Raises ValueError for a name that is not in SUPPORTED.
    """
    if wanted == "all":
        return SUPPORTED
    names = frozenset() if wanted == "none" else frozenset(name.strip() for name in wanted.split(","))
    if unknown := sorted(names - SUPPORTED):
        expected = ", ".join(("all", "none", *sorted(SUPPORTED)))
        raise ValueError(f"there is no capability {unknown[0]!r} here; expected some of: {expected}")
    return names


def _checked(wanted: str) -> str:
    served(wanted)
    return wanted


ServedCapabilities = Annotated[str, AfterValidator(_checked)]
"""A setting that `served` reads."""


def negotiate(requested: dict[str, bool], offered: Collection[str]) -> dict[str, bool]:
    """Every capability name with its answer: offered and asked for.

    `streaming.sse` does not wait to be asked: published clients stream without requesting it.
    """
    return {
        name: name in offered and (name == "streaming.sse" or requested.get(name) is True)
        for name in CAPABILITIES
    }
