"""The error codes of the wire: JSON-RPC's five and AEP's twelve. The symbol is the member's name."""

from enum import IntEnum


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
