"""The one way out to addresses that somebody else may choose: pages, MCP servers, discovery documents.

A name is resolved here, once for each connection; every answer is checked, and the connection goes to an
address that was checked. Nothing but public hosts is reached unless the operator's list says so, everything
that comes back is bounded, and errors are four categories without addresses. Nothing is known here of
tenants or of MCP. `client` is the door, `policy` says where it leads, `connections` and `transport` are how.
"""

from espalier_egress.client import Egress, Response, open_egress
from espalier_egress.errors import (
    EgressError,
    EgressRefused,
    EgressTooLarge,
    EgressTooSlow,
    EgressUnreachable,
)
from espalier_egress.policy import EgressSettings

__all__ = [
    "Egress",
    "EgressError",
    "EgressRefused",
    "EgressSettings",
    "EgressTooLarge",
    "EgressTooSlow",
    "EgressUnreachable",
    "Response",
    "open_egress",
]
