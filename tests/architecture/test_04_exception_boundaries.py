"""Absence 4: one place per process where exceptions become something on the wire.

Everywhere else a function catches what it can answer, by name, and lets the rest travel. A handler that ends
in a bare `raise` only tidies up and is not meant; neither is one that takes a group apart and raises.
"""

import ast
from collections.abc import Iterator

from tests.architecture.sources import Source, calls, findings, keyword, last_name, report, source, stale

GROUPS = {"BaseExceptionGroup", "ExceptionGroup"}
BROAD = {"Exception", "BaseException"} | GROUPS

# Where everything may be caught, and why. Add a file only with the sentence that says who answers for it.
BOUNDARIES: dict[str, str] = {
    "gateway/dispatcher.py": "every failure of a call becomes its JSON-RPC error here",
    "run_worker/models/sdk_model.py": "whatever the SDK makes of a provider's bytes is a run's fault",
    "client/conformance/attempts.py": "whatever a runtime sends, one check fails and the others go on",
    "mcp_broker/calls.py": "one call that fails must not end those of everybody else",
    "mcp_broker/session.py": "whatever the SDK raises, a call has an outcome and the broker lives on",
    "mcp_broker/app.py": "every failure of a worker's request becomes a bare status here",
    "local/first_key.py": "whatever a database answers becomes the launcher's one sentence about its address",
    "local/schema.py": "the same, for the four libraries that a migration passes through",
    "gateway/cancels.py": "one run that cannot be ended must not end the gateway",
    "run_worker/provider_probes.py": "a test of a provider that breaks must not end the runs of others",
    "run_worker/sweeper.py": "a run that cannot be ended must not keep the others from being ended",
    "run_worker/slots.py": "a failed step becomes a lease that runs out, never the end of the worker",
}

# The codes of the wire, as numbers: the protocol names them, the gateway's table hands them out.
CODE_HOMES = ("protocol/", "gateway/errors.py")
AEP_CODES = range(-32099, -31999)
JSONRPC_CODES = (-32700, -32600, -32601, -32602, -32603)


def broad_names(expression: ast.expr | None) -> set[str]:
    if expression is None:
        return BROAD
    parts = expression.elts if isinstance(expression, ast.Tuple) else [expression]
    return BROAD & {last_name(part) for part in parts}


def reraises(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and (last.exc is None or broad_names(handler.type) <= GROUPS)


def broad_anywhere(module: Source) -> Iterator[str]:
    escape = "catch the named error that can be answered here; the rest travels to the boundary"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and broad_names(node.type) and not reraises(node):
            yield module.finding(node, "everything is caught away from a boundary", escape)
    for call, name in calls(module.tree):
        if name == "suppress" and any(broad_names(argument) for argument in call.args):
            yield module.finding(call, "everything is suppressed", escape)
        if keyword(call, "return_exceptions") is not None:
            yield module.finding(call, "exceptions become values", escape)


def broad_handlers(module: Source) -> Iterator[str]:
    return iter(()) if module.name in BOUNDARIES else broad_anywhere(module)


def codes_by_number(module: Source) -> Iterator[str]:
    if module.name.startswith(CODE_HOMES):
        return
    for node in ast.walk(module.tree):
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))) if (
                -number in JSONRPC_CODES or -number in AEP_CODES
            ):
                escape = "raise a typed error of domain/errors; gateway/errors has the one table of codes"
                yield module.finding(node, f"the wire's code {-number} is written by number", escape)


def test_everything_is_caught_at_boundaries_alone() -> None:
    found = findings(broad_handlers)
    assert not found, report(found)


def test_every_listed_boundary_still_catches_everything() -> None:
    assert stale(BOUNDARIES, broad_anywhere) == [], "remove them from BOUNDARIES"


def test_codes_of_the_wire_have_one_table() -> None:
    found = findings(codes_by_number)
    assert not found, report(found)


def test_the_rules_find_broad_handlers_and_codes() -> None:
    bad = source(
        "acts/bad.py",
        "try: ...\nexcept Exception: ...\ntry: ...\nexcept (ValueError, BaseException): log()\n"
        "try: ...\nexcept: ...\n"
        "with suppress(Exception): ...\nfetch(return_exceptions=True)\n",
    )
    assert len(list(broad_handlers(bad))) == 5
    assert len(list(codes_by_number(source("acts/bad.py", "raise Fault(-32008)\nx = -32602\n")))) == 2


def test_the_rules_leave_tidying_and_named_errors_alone() -> None:
    good = "try: ...\nexcept OSError: ...\ntry: ...\nexcept BaseException:\n    close()\n    raise\n"
    assert not list(broad_handlers(source("acts/good.py", good)))
    assert not list(codes_by_number(source("protocol/errors.py", "x = -32602\n")))
