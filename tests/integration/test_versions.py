"""Several versions of the protocol at once. The second one is the test's own; one of its shapes differs."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.integration.wire import AGENT, Gateway, Wire, running_gateway, symbol

from espalier_gateway.settings import GatewaySettings
from espalier_protocol.versions import SERVED, Version
from espalier_store.pool import Pool

pytestmark = pytest.mark.anyio

TODAY = next(iter(SERVED))
LATER = "aep-2099-01-01"


def titled(agent: dict[str, Any]) -> dict[str, Any]:
    return {("title" if name == "name" else name): value for name, value in agent.items()}


TWO = {LATER: Version(LATER, {"agent.get": titled}), **SERVED}


@pytest.fixture
async def gateway(gateway_settings: GatewaySettings, pool: Pool) -> AsyncIterator[Gateway]:
    async with running_gateway(gateway_settings, pool, TWO) as running:
        yield running


async def in_version(wire: Wire, version: str) -> Wire:
    other = replace(wire, version=version, session_id="")
    await other.begin()
    return other


async def test_each_session_sees_the_shapes_of_its_version(wire: Wire) -> None:
    later = await in_version(wire, LATER)
    agent_id = await wire.agent()
    today = await wire.call("agent.get", agent_id=agent_id)
    assert today["name"] == AGENT["name"]
    assert await later.call("agent.get", agent_id=agent_id) == titled(today)
    assert (await later.call("agent.list"))["items"] == [today], "only one shape differs"


async def test_a_response_names_the_version_that_it_is_in(wire: Wire, gateway: Gateway) -> None:
    told = {}
    for version in (TODAY, LATER, "aep-1999-01-01", None):
        response = await wire.get("/aep/v1/runs/x/events", wire.headers(Agent_Protocol_Version=version))
        told[version] = response.headers.get_list("agent-protocol-version")
    assert told == {TODAY: [TODAY], LATER: [LATER], "aep-1999-01-01": [LATER], None: [LATER]}


async def test_a_session_is_of_one_version(wire: Wire) -> None:
    error = await replace(wire, version=LATER).refused("agent.list")
    assert error["data"] == {"symbol": "version_mismatch", "supported_versions": [LATER, TODAY]}


async def test_the_first_of_the_versions_asked_for_that_is_served_is_agreed_on(wire: Wire) -> None:
    chosen = {}
    for asked in ((TODAY, LATER), (LATER, TODAY), ("aep-1999-01-01", TODAY)):
        answer = await wire.call(
            "initialize", client_info={}, requested_capabilities={}, requested_versions=list(asked)
        )
        chosen[asked] = answer["protocol_version"]
    assert chosen == {
        (TODAY, LATER): TODAY,
        (LATER, TODAY): LATER,
        ("aep-1999-01-01", TODAY): TODAY,
    }
    refused = await wire.answer(
        "initialize", {"client_info": {}, "requested_capabilities": {}, "requested_versions": ["x"]}
    )
    assert symbol(refused) == "version_mismatch"
