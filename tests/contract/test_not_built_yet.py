"""What the list marks as later: how the runtime says so today.

Each of these fails when its capability is built. Then the requirement is shown where it belongs, in a test of
its own, and loses its mark in the list.
"""

from typing import Any

import pytest
from _pytest.mark import ParameterSet
from tests.contract.embedder import Embedder
from tests.contract.requirements import BY_ID, requirement

pytestmark = pytest.mark.anyio


def waiting(requirement_id: str, *values: Any) -> ParameterSet:
    """The capability that a requirement waits for, and what is tried today."""
    capability = BY_ID[requirement_id].later
    return pytest.param(capability, *values, id=requirement_id, marks=requirement(requirement_id))


@pytest.mark.parametrize(
    ("capability", "verb", "path"),
    [
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
