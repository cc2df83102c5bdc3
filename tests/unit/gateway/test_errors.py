"""The table of errors: complete, and silent about what a client must not read."""

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from espalier_domain import errors as domain
from espalier_domain.errors import (
    Conflicted,
    DomainError,
    InvalidInput,
    LifecycleConflict,
    NotFound,
    TreeBoundary,
    Unavailable,
)
from espalier_gateway.errors import TABLE, Fault, WireError, fault, fault_of, params_refused, status_of
from espalier_protocol.errors import ErrorCode
from espalier_protocol.methods import METHODS

REFERENCE = "0123abcd"


def kinds(root: type[DomainError]) -> Iterator[type[DomainError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_every_error_of_the_domain_has_its_line_in_the_table() -> None:
    assert set(TABLE) == set(kinds(DomainError))
    assert {kind.__module__ for kind in TABLE} == {domain.__name__}


def test_each_error_of_the_domain_is_told_with_its_facts() -> None:
    told = [
        fault_of(error, REFERENCE)
        for error in (
            NotFound("run", "run_x"),
            InvalidInput("cursor", "should be one that was answered"),
            LifecycleConflict("The run has ended."),
            TreeBoundary("Not here.", "agt_x"),
            Unavailable(700),
            Conflicted(700),
        )
    ]
    away = {"symbol": "unavailable", "retry_after_ms": 700, "reference": REFERENCE}
    assert [(each.code, each.data) for each in told] == [
        (ErrorCode.tool_not_found, {"symbol": "tool_not_found", "resource": "run", "id": "run_x"}),
        (
            ErrorCode.invalid_params,
            {"symbol": "invalid_params", "field": "cursor", "reason": "should be one that was answered"},
        ),
        (ErrorCode.lifecycle_conflict, {"symbol": "lifecycle_conflict", "reason": "The run has ended."}),
        (ErrorCode.tree_boundary_violation, {"symbol": "tree_boundary_violation", "id": "agt_x"}),
        (ErrorCode.internal_error, away),
        (ErrorCode.internal_error, away),
    ]


def test_a_refusal_of_the_wire_is_told_as_it_is() -> None:
    refusal = WireError(ErrorCode.authz_denied, "No.", required_scope="run.read")
    assert fault_of(refusal, REFERENCE) == Fault(
        ErrorCode.authz_denied, "No.", {"symbol": "authz_denied", "required_scope": "run.read"}
    )


def test_what_nobody_expected_is_told_as_a_reference_and_nothing_else() -> None:
    told = fault_of(RuntimeError("password=hunter2 in /srv/secret.py"), REFERENCE)
    assert told.code is ErrorCode.internal_error
    assert told.data == {"symbol": "internal_error", "reference": REFERENCE}
    assert "hunter2" not in told.message and REFERENCE in told.message


def test_plain_endpoints_have_a_status_for_every_refusal() -> None:
    told = {code.name: status_of(fault(code, "")) for code in ErrorCode}
    assert told == {
        "authn_failed": 401,
        "authz_denied": 403,
        "capability_not_supported": 403,
        "ceiling_exceeded": 409,
        "budget_exhausted": 409,
        "tree_boundary_violation": 403,
        "subject_not_found": 404,
        "constitution_policy_violation": 409,
        "tool_not_found": 404,
        "version_mismatch": 400,
        "session_expired": 401,
        "lifecycle_conflict": 409,
        "parse_error": 400,
        "invalid_request": 400,
        "method_not_found": 404,
        "invalid_params": 400,
        "internal_error": 500,
    }
    assert status_of(fault_of(Unavailable(1), REFERENCE)) == 503
    assert status_of(fault(ErrorCode.tool_not_found, "", symbol="log_pruned")) == 410


@pytest.mark.parametrize(
    ("params", "member", "reason"),
    [
        ({}, "agent_id", "is required"),
        ({"agent_id": "a", "goal": 1}, "goal", "should be a valid string"),
        ({"agent_id": "a", "goal": "g", "inputs": []}, "inputs", "should be an object"),
        ({"agent_id": "a", "goal": "g", "subject_ids": {}}, "subject_ids", "should be an array"),
        (
            {"agent_id": "a", "goal": "g", "subject_ids": ["s", 1]},
            "subject_ids.1",
            "should be a valid string",
        ),
        ({"agent_id": "a" * 65, "goal": "g"}, "agent_id", "should have at most 64 characters"),
        ({"agent_id": "a", "goal": "g", "gaol": 1}, "gaol", "is not a member that is known here"),
        ({"agent_id": "a", "goal": "g", "x" * 9_000: 1}, "x" * 200, "is not a member that is known here"),
    ],
)
def test_params_are_refused_in_one_sentence_about_one_member(
    params: dict[str, object], member: str, reason: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        METHODS["run.create"].params.model_validate(params)
    told = params_refused(caught.value).fault
    assert told == fault(ErrorCode.invalid_params, f"{member} {reason}.", field=member, reason=reason)
