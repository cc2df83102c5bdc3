"""What the list marks as later: how the runtime says so today.

Each of these fails when its capability is built. Then the requirement is shown where it belongs, in a test of
its own, and loses its mark in the list.
"""

from typing import Any, Final

import pytest
from _pytest.mark import ParameterSet
from tests.contract.embedder import UNKNOWN, Embedder, refused
from tests.contract.requirements import BY_ID, requirement
from tests.integration.wire import AGENT

from espalier_protocol.errors import ErrorCode

pytestmark = pytest.mark.anyio

SECRET: Final = "hunter2-canary"
SERVER: Final = {"url": "https://example.invalid/mcp", "name": "smoke-server", "auth": {"bearer": SECRET}}
SUBJECT: Final = {"subject_id": "sub_" + UNKNOWN}
REDACTION: Final = {**SUBJECT, "mode": "redact"}
CHANGE: Final = {"agent_id": "agt_" + UNKNOWN, "pending_change_id": "pch_" + UNKNOWN, "approve": True}


def waiting(requirement_id: str, *values: Any) -> ParameterSet:
    """The capability that a requirement waits for, and what is tried today."""
    capability = BY_ID[requirement_id].later
    return pytest.param(capability, *values, id=requirement_id, marks=requirement(requirement_id))


def not_supported(capability: str) -> tuple[ErrorCode, dict[str, str]]:
    code = ErrorCode.capability_not_supported
    return code, {"symbol": code.name, "capability": capability}


@pytest.mark.parametrize(
    ("capability", "method", "params"),
    [
        waiting("AEP-PROVIDER-01", "provider.list", {}),
        waiting("AEP-PROMPT-01", "agent.approve_prompt_change", CHANGE),
        waiting("AEP-SUBJECT-01", "subject.read", SUBJECT),
        waiting("AEP-SUBJECT-03", "subject.read", SUBJECT),
        waiting("AEP-SUBJECT-04", "subject.export", SUBJECT),
        waiting("AEP-SUBJECT-05", "subject.export", SUBJECT),
        waiting("AEP-SUBJECT-06", "subject.erase", REDACTION),
        waiting("AEP-SUBJECT-07", "subject.erase", REDACTION),
        waiting("AEP-SUBJECT-08", "subject.erase", REDACTION),
    ],
)
async def test_a_method_is_refused_by_the_published_client_itself_and_by_the_runtime(
    embedder: Embedder, capability: str, method: str, params: dict[str, Any]
) -> None:
    assert embedder.capabilities[capability] is False
    service, act = method.split(".")
    unasked = await refused(getattr(getattr(embedder.client, service), act)(**params))
    assert (unasked.symbol, unasked.data) == ("capability_not_supported", None), "the runtime would say more"
    error = await embedder.wire.refused(method, **params)
    assert (error["code"], error["data"]) == not_supported(capability)


@pytest.mark.parametrize(
    ("capability", "member"),
    [
        waiting("AEP-MCP-01", {"external_mcp_servers": [SERVER]}),
        waiting("AEP-MCP-02", {"external_mcp_servers": [SERVER]}),
        waiting("AEP-SMOKE-02", {"external_mcp_servers": [SERVER]}),
        waiting("AEP-SMOKE-04", {"runner": {"provider_id": SECRET, "model": "m"}}),
    ],
)
async def test_no_agent_is_made_without_what_it_was_to_have(
    embedder: Embedder, capability: str, member: dict[str, Any]
) -> None:
    """The published client does ask; what it is told repeats no secret."""
    assert embedder.capabilities[capability] is False
    error = await refused(embedder.client.agent.create(**AGENT, **member))
    assert (error.code, error.data) == not_supported(capability)
    assert SECRET not in str(error)
    assert (await embedder.client.agent.list())["items"] == []


@pytest.mark.parametrize(
    ("capability", "verb", "path"),
    [
        waiting("AEP-SUBJECT-02", "POST", "/api/me/subjects"),
        waiting("AEP-SMOKE-03", "POST", "/api/me/subjects"),
        waiting("AEP-SMOKE-05", "POST", "/api/auth/oauth2/token"),
        waiting("AEP-OAUTH-01", "GET", "/.well-known/oauth-authorization-server"),
        waiting("AEP-OAUTH-02", "GET", "/.well-known/oauth-protected-resource"),
    ],
)
async def test_nothing_is_served_beside_the_protocol(
    embedder: Embedder, capability: str, verb: str, path: str
) -> None:
    assert embedder.capabilities[capability] is False
    response = await embedder.wire.http.request(verb, path, headers=embedder.wire.headers())
    assert (response.status_code, response.json()["error"]) == (404, "not_found")
