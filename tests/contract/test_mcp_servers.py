"""MCP servers that an embedder attaches, as the published client and its smoke do it. No server is asked."""

from typing import Any, Final

import pytest
from tests.contract.conftest import Runtime
from tests.contract.embedder import Embedder, refused
from tests.contract.requirements import requirement
from tests.integration.wire import AGENT

from espalier_protocol.errors import ErrorCode

pytestmark = pytest.mark.anyio

SECRET: Final = "hunter2-canary"
SERVER: Final = {"url": "https://example.invalid/mcp", "name": "smoke-server", "auth": {"bearer": SECRET}}
VIEW: Final = {"url": SERVER["url"], "name": "smoke-server", "enabled": True}


@requirement("AEP-MCP-01")
async def test_an_embedder_attaches_servers_and_exchanges_them_by_name(embedder: Embedder) -> None:
    open_one: dict[str, Any] = {"url": "http://tools.example:8080/mcp"}
    views = [VIEW, {**open_one, "name": "tools.example", "enabled": True}]

    agent = await embedder.client.agent.create(**AGENT, external_mcp_servers=[SERVER, open_one])
    assert agent["external_mcp_servers"] == views

    renamed = await embedder.client.agent.update(agent["id"], name="renamed")
    assert renamed["external_mcp_servers"] == views, "a field that is absent leaves all alone"

    servers = [{"url": SERVER["url"], "name": "another"}, {**open_one, "name": "tools.example"}]
    changed = await embedder.client.agent.update(agent["id"], external_mcp_servers=servers)
    assert [each["name"] for each in changed["external_mcp_servers"]] == ["another", "tools.example"]

    twice = await refused(embedder.client.agent.update(agent["id"], external_mcp_servers=servers * 2))
    assert twice.code == ErrorCode.invalid_params
    emptied = await embedder.client.agent.update(agent["id"], external_mcp_servers=[])
    assert emptied["external_mcp_servers"] == []


@requirement("AEP-MCP-02")
async def test_no_answer_and_no_refusal_holds_the_secret_of_a_server(embedder: Embedder) -> None:
    agent = await embedder.client.agent.create(**AGENT, external_mcp_servers=[SERVER])
    told = [
        agent,
        await embedder.client.agent.get(agent["id"], include=["prompt_history"]),
        await embedder.client.agent.list(),
        await embedder.client.agent.update(agent["id"], external_mcp_servers=[SERVER]),
        await embedder.wire.refused("agent.create", **AGENT, external_mcp_servers=[SERVER, SERVER]),
        await embedder.wire.refused(
            "agent.create", **AGENT, external_mcp_servers=[{**SERVER, "auth": SECRET}]
        ),
        await embedder.client.agent.archive(agent["id"]),
    ]
    assert SECRET not in str(told)
    assert "auth" not in str([each for each in told if "external_mcp_servers" in each])


@requirement("AEP-SMOKE-02")
async def test_the_smoke_of_servers_passes(runtime: Runtime) -> None:
    embedder = await runtime.embedder()
    assert embedder.capabilities["tools.mcp_external"] is True

    agent = await embedder.client.agent.create(**AGENT, external_mcp_servers=[SERVER])
    assert agent["external_mcp_servers"] == [VIEW]
    assert (await embedder.client.agent.get(agent["id"]))["external_mcp_servers"] == [VIEW]
