"""What a session may use (capabilities) and what a key may do (scopes).

Both vocabularies are AEP's own, verbatim; names that start with `espalier.` are this runtime's extensions.
"""

from typing import Final, Literal, get_args

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
    {"streaming.sse", "self.learning_memory", "messaging.peer", "espalier.events"}
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


def negotiate(requested: dict[str, bool]) -> dict[str, bool]:
    """Every capability name with its answer: supported and asked for.

    `streaming.sse` does not wait to be asked: published clients stream without requesting it.
    """
    return {
        name: name in SUPPORTED and (name == "streaming.sse" or requested.get(name) is True)
        for name in CAPABILITIES
    }
