"""The error codes of the wire: JSON-RPC's five and AEP's twelve. The symbol is the member's name."""

from enum import IntEnum
from typing import Final


class ErrorCode(IntEnum):
    """AEP claims -32000 to -32099 (spec section 11); private codes stay out of that range."""

    authn_failed = -32000
    authz_denied = -32001
    capability_not_supported = -32002
    ceiling_exceeded = -32003
    budget_exhausted = -32004
    tree_boundary_violation = -32005
    subject_not_found = -32006
    constitution_policy_violation = -32007
    tool_not_found = -32008
    version_mismatch = -32009
    session_expired = -32010
    lifecycle_conflict = -32011
    parse_error = -32700
    invalid_request = -32600
    method_not_found = -32601
    invalid_params = -32602
    internal_error = -32603


MEANINGS: Final[dict[ErrorCode, str]] = {
    ErrorCode.authn_failed: "No token, or one that is not valid at this runtime.",
    ErrorCode.authz_denied: "The token lacks the scope that the method needs.",
    ErrorCode.capability_not_supported: "The session has not negotiated what the method or member needs.",
    ErrorCode.ceiling_exceeded: "A hard limit of the run, or what it has left of it, does not allow this.",
    ErrorCode.budget_exhausted: "The cycle has used up its allowance.",
    ErrorCode.tree_boundary_violation: "The agent or memory that was named is in another tree.",
    ErrorCode.subject_not_found: "This owner has no such subject.",
    ErrorCode.constitution_policy_violation: "The constitution does not let the agent change its prompt.",
    ErrorCode.tool_not_found: "There is no such tool, or no resource with this id.",
    ErrorCode.version_mismatch: "The version is missing, not served, or not the session's.",
    ErrorCode.session_expired: "The session is missing, unknown or has expired: initialize again.",
    ErrorCode.lifecycle_conflict: "The agent, run or change is in a state that does not allow this.",
    ErrorCode.parse_error: "The body is not JSON.",
    ErrorCode.invalid_request: "The body is no JSON-RPC 2.0 request.",
    ErrorCode.method_not_found: "There is no method of this name.",
    ErrorCode.invalid_params: "A parameter is missing, unknown, or not what was expected.",
    ErrorCode.internal_error: "The runtime could not do this; with retry_after_ms, try again.",
}
"""One sentence for each code, for the documents. An answer's own message says more."""
