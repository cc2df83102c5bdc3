"""Degrees of a runtime: what its operator switches off is gone, for embedders and for agents."""

from typing import Any

import anyio
import pytest
from pydantic import ValidationError
from scripted_runs import DONE, POLL_S, log_of
from tests.integration.conftest import Start
from tests.integration.wire import AGENT, Gateway, Wire, running_gateway, symbol

from espalier_gateway.settings import GatewaySettings
from espalier_protocol.access import CAPABILITIES, SUPPORTED
from espalier_protocol.methods import METHODS
from espalier_store.pool import Pool

pytestmark = pytest.mark.anyio

WAIT_S = 40.0
SERVERS = [{"url": "https://example.invalid/mcp"}]
REMEMBER = {"tool": "learning_memory_write", "args": {"namespace": "n", "key": "k", "value": 1}}
INBOX = {"tool": "inbox_read", "args": {}}
KEEP = {"tool": "artifact_create", "args": {"name": "n", "content": "c"}}


def narrowed(settings: GatewaySettings, capabilities: str) -> GatewaySettings:
    return settings.model_copy(update={"capabilities": capabilities})


def optional(capabilities: frozenset[str]) -> set[str]:
    """The methods that need one of these."""
    return {each.name for each in METHODS.values() if each.capability in capabilities and not each.duplex}


async def test_a_runtime_without_options_advertises_none_and_serves_no_method_of_them(
    gateway_settings: GatewaySettings, pool: Pool
) -> None:
    async with running_gateway(narrowed(gateway_settings, "none"), pool) as minimal:
        wire = await minimal.stranger("one")
        assert (await wire.begin())["capabilities"] == dict.fromkeys(CAPABILITIES, False)
        told = {name: symbol(await wire.answer(name, {})) for name in optional(SUPPORTED)}
        assert told == dict.fromkeys(optional(SUPPORTED), "capability_not_supported")
        described = await wire.call("rpc.discover")
        assert [each["name"] for each in described["methods"]] == [
            name for name, method in METHODS.items() if method.capability is None
        ]
        for member in ({"external_mcp_servers": SERVERS}, {"runner": {"model": "m"}}):
            refused = await wire.refused("agent.create", **{**AGENT, **member})
            assert refused["data"]["symbol"] == "capability_not_supported"
        run_id = await wire.run()
        response = await wire.get(f"/aep/v1/runs/{run_id}/events")
        assert (response.status_code, response.json()["error"]) == (403, "capability_not_supported")


async def test_what_is_named_is_offered_and_nothing_else(
    gateway_settings: GatewaySettings, pool: Pool
) -> None:
    async with running_gateway(
        narrowed(gateway_settings, "streaming.sse, self.learning_memory"), pool
    ) as gateway:
        wire = await gateway.stranger("one")
        offered = (await wire.begin())["capabilities"]
    assert {name for name, agreed in offered.items() if agreed} == {"streaming.sse", "self.learning_memory"}


async def test_a_session_does_not_keep_what_has_been_switched_off(
    gateway: Gateway, wire: Wire, gateway_settings: GatewaySettings, pool: Pool
) -> None:
    params = {"tree_root_id": await wire.agent(), "namespace": "n"}
    assert (await wire.call("memory.read", **params))["items"] == []
    async with running_gateway(narrowed(gateway_settings, "streaming.sse"), pool) as minimal:
        same_session = Wire(minimal.http, wire.key, wire.session_id)
        refused = await same_session.refused("memory.read", **params)
    assert refused["data"] == {"symbol": "capability_not_supported", "capability": "self.learning_memory"}


@pytest.mark.slow
async def test_an_agent_has_no_tool_of_what_is_switched_off(start: Start, wire: Wire, pool: Pool) -> None:
    start("worker", ESPALIER_MODELS_SCRIPTED="on", ESPALIER_CAPABILITIES="none")
    plan = {"answers": [{"calls": [REMEMBER, INBOX, KEEP]}, DONE]}
    run_id = await wire.run(await wire.agent(toolset=[]), inputs={"espalier.script": plan})
    with anyio.fail_after(WAIT_S):
        while (await wire.call("run.get", run_id=run_id))["ended_at"] is None:
            await anyio.sleep(POLL_S)
    returned: list[Any] = [body for _, type_, body in await log_of(pool, run_id) if type_ == "tool.returned"]
    told = {each["tool_name"]: each["result_summary"]["preview"] for each in returned}
    assert {name: text.split(":")[0] for name, text in told.items() if name != "artifact_create"} == {
        "learning_memory_write": "tool_not_found",
        "inbox_read": "tool_not_found",
    }
    assert [each["result_summary"]["ok"] for each in returned] == [False, False, True]
    memory = await wire.call("memory.read", tree_root_id=await _agent_of(wire, run_id), namespace="n")
    assert memory["items"] == []


def test_a_capability_that_nobody_knows_is_no_setting(gateway_settings: GatewaySettings) -> None:
    given = gateway_settings.model_dump() | {"capabilities": "streaming.sse,memory"}
    with pytest.raises(
        ValidationError, match="there is no capability 'memory' here; expected some of: all, none"
    ):
        GatewaySettings(**given)


async def _agent_of(wire: Wire, run_id: str) -> str:
    return str((await wire.call("run.get", run_id=run_id))["agent_id"])
