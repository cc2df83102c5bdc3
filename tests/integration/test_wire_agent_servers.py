"""`external_mcp_servers` over the wire: servers come, change and go, and nobody sees a secret.

No server is asked here, and none of the names can be resolved. Calling them is in `test_external_servers.py`.
"""

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import SecretStr
from tests.integration.conftest import Stores
from tests.integration.wire import AGENT, Gateway, Wire, running_gateway, symbol

from espalier_domain.mcp_servers import auth_place
from espalier_gateway.settings import GatewaySettings
from espalier_protocol.ids import from_wire
from espalier_protocol.mcp_server import SERVERS_MAX, McpServerAuth
from espalier_secrets.sealing import new_sealing_key, place_of, sealer
from espalier_store.pool import Pool

pytestmark = pytest.mark.anyio

SECRETS_KEY = new_sealing_key()
SECRET = "hunter2-canary"
URL = "https://example.invalid/mcp"
SMOKE = {"url": URL, "name": "smoke-server", "auth": {"bearer": SECRET}}


@pytest.fixture
def gateway_settings(stores: Stores) -> GatewaySettings:
    return GatewaySettings(
        postgres_url=stores.postgres_url,
        redis_url=stores.redis_url,
        redis_prefix=stores.redis_prefix,
        port=0,
        cache_s=0,
        gateway_drain_s=1,
        secrets_key=SecretStr(SECRETS_KEY),
    )


@pytest.fixture
async def keyless(gateway_settings: GatewaySettings, pool: Pool) -> AsyncIterator[Gateway]:
    settings = gateway_settings.model_copy(update={"secrets_key": SecretStr("")})
    async with running_gateway(settings, pool) as running:
        yield running


def view(name: str, url: str = URL) -> dict[str, Any]:
    return {"url": url, "name": name, "enabled": True}


def named(*names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"url": URL, "name": name, **more} for name in names]


async def attached(wire: Wire, *servers: dict[str, Any]) -> str:
    return await wire.agent(external_mcp_servers=list(servers))


async def rows_of(pool: Pool, agent_id: str) -> dict[str, Any]:
    """The agent's servers by slug."""
    query = "select * from agent_servers where agent_id = $1 order by place"
    return {row["slug"]: row for row in await pool.fetch(query, from_wire("agt", agent_id))}


async def servers_after(wire: Wire, agent_id: str, servers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    changed = await wire.call("agent.update", agent_id=agent_id, external_mcp_servers=servers)
    shown: list[dict[str, Any]] = changed["external_mcp_servers"]
    assert (await wire.call("agent.get", agent_id=agent_id))["external_mcp_servers"] == shown
    return shown


def opened(row: Any) -> McpServerAuth:
    """The credential of a row, as the broker reads it."""
    place = place_of(*auth_place(row["owner_id"], row["url"]))
    plain = sealer(SecretStr(SECRETS_KEY)).open(row["sealed_auth"], place)
    return McpServerAuth.model_validate_json(plain)


async def test_every_answer_shows_a_servers_url_and_name_and_never_its_credential(
    wire: Wire, pool: Pool
) -> None:
    url = "http://tools.example:8080/mcp?a=b"
    other = {"url": url, "auth": {"headers": {"X-Key": SECRET}}}
    views = [view("smoke-server"), view("tools.example", url)]

    made = await wire.call("agent.create", **AGENT, external_mcp_servers=[SMOKE, other])

    assert made["external_mcp_servers"] == views
    assert await wire.call("agent.get", agent_id=made["id"]) == made
    assert (await wire.call("agent.list"))["items"] == [made]
    kept = await rows_of(pool, made["id"])
    assert [opened(row) for row in kept.values()] == [
        McpServerAuth(bearer=SECRET),
        McpServerAuth(headers={"X-Key": SECRET}),
    ]
    assert SECRET.encode() not in b"".join(row["sealed_auth"] for row in kept.values())


async def test_the_order_of_the_servers_is_the_embedders(wire: Wire) -> None:
    agent_id = await attached(wire, *named("c", "a", "b"))
    assert await servers_after(wire, agent_id, named("b", "d", "a")) == [view("b"), view("d"), view("a")]


async def test_an_update_detaches_what_is_missing_and_leaves_all_alone_if_it_names_none(
    wire: Wire, pool: Pool
) -> None:
    agent_id = await attached(wire, SMOKE, *named("Git Hub", "git-hub"))
    before = await rows_of(pool, agent_id)
    assert list(before) == ["smoke_server", "git_hub", "git_hub_2"]

    await wire.call("agent.update", agent_id=agent_id, name="renamed")
    assert await rows_of(pool, agent_id) == before

    assert await servers_after(wire, agent_id, named("git-hub", "new")) == [view("git-hub"), view("new")]
    assert list(await rows_of(pool, agent_id)) == ["git_hub_2", "new"]

    assert await servers_after(wire, agent_id, []) == []


async def test_an_update_keeps_the_credential_of_a_server_that_stays_where_it_is(
    wire: Wire, pool: Pool
) -> None:
    agent_id = await attached(wire, SMOKE)
    before = (await rows_of(pool, agent_id))["smoke_server"]

    await servers_after(wire, agent_id, [*named("first"), *named("smoke-server")])
    kept = (await rows_of(pool, agent_id))["smoke_server"]
    assert (kept["sealed_auth"], kept["updated_at"]) == (before["sealed_auth"], before["updated_at"])

    await servers_after(wire, agent_id, named("smoke-server", auth={"bearer": "another-canary"}))
    changed = (await rows_of(pool, agent_id))["smoke_server"]
    assert opened(changed) == McpServerAuth(bearer="another-canary")
    assert changed["updated_at"] > before["updated_at"]


async def test_a_server_that_is_spelled_anew_is_known_by_its_new_name(wire: Wire, pool: Pool) -> None:
    agent_id = await attached(wire, SMOKE)
    anew = named("Smoke Server", auth={"bearer": "another-canary"})
    await servers_after(wire, agent_id, anew)
    assert await servers_after(wire, agent_id, named("Smoke Server"))
    (row,) = (await rows_of(pool, agent_id)).values()
    assert (row["slug"], row["name"]) == ("smoke_server", "Smoke Server")
    assert opened(row) == McpServerAuth(bearer="another-canary")


@pytest.mark.parametrize(
    "change",
    [{"url": "https://elsewhere.invalid/mcp"}, {"auth": None}, {"auth": {}}, {"auth": {"headers": {}}}],
)
async def test_a_credential_is_gone_when_the_server_moves_or_is_to_have_none(
    wire: Wire, pool: Pool, change: dict[str, Any]
) -> None:
    agent_id = await attached(wire, SMOKE)
    await servers_after(wire, agent_id, [{"url": URL, "name": "smoke-server", **change}])
    assert (await rows_of(pool, agent_id))["smoke_server"]["sealed_auth"] is None


async def test_an_update_of_servers_alone_moves_the_agents_updated_at(wire: Wire, pool: Pool) -> None:
    agent_id = await attached(wire)
    query = "select updated_at from agents where id = $1"
    before = await pool.fetchval(query, from_wire("agt", agent_id))
    await servers_after(wire, agent_id, named("a"))
    assert await pool.fetchval(query, from_wire("agt", agent_id)) > before


async def test_a_server_never_gets_the_slug_of_one_that_the_operator_listed(wire: Wire, pool: Pool) -> None:
    await pool.execute(
        "insert into brokers (id, alive_until, listed) values (gen_random_uuid(), now(), '{git}')"
    )
    agent_id = await attached(wire, *named("Git"))
    assert list(await rows_of(pool, agent_id)) == ["git_2"]


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ([{"name": "a"}], "external_mcp_servers.0.url"),
        ([{"url": "ftp://example.invalid/"}], "external_mcp_servers.0.url"),
        ([{"url": f"https://me:{SECRET}@example.invalid/"}], "external_mcp_servers.0.url"),
        ([{**SMOKE, "name": ""}], "external_mcp_servers.0.name"),
        ([{**SMOKE, "transport": "stdio"}], "external_mcp_servers.0.transport"),
        ([{**SMOKE, "auth": SECRET}], "external_mcp_servers.0.auth"),
        ([{**SMOKE, "auth": {"token": SECRET}}], "external_mcp_servers.0.auth.token"),
        ([{**SMOKE, "auth": {"bearer": f"{SECRET}\n"}}], "external_mcp_servers.0.auth.bearer"),
        ([{**SMOKE, "auth": {"headers": {"Host": SECRET}}}], "external_mcp_servers.0.auth.headers"),
        ([SMOKE, SMOKE], "external_mcp_servers.1.name"),
        ([{"url": URL}, {"url": URL + "/2"}], "external_mcp_servers.1.name"),
        (named(*map(str, range(SERVERS_MAX + 1))), "external_mcp_servers"),
    ],
)
async def test_what_does_not_fit_is_refused_whole_and_no_secret_is_repeated(
    wire: Wire, pool: Pool, caplog: pytest.LogCaptureFixture, wanted: Any, field: str
) -> None:
    caplog.set_level(logging.DEBUG)
    agent_id = await attached(wire, *named("before"))
    before = await rows_of(pool, agent_id)
    refusals = [
        await wire.answer("agent.create", {**AGENT, "external_mcp_servers": wanted}),
        await wire.answer("agent.update", {"agent_id": agent_id, "external_mcp_servers": wanted}),
    ]
    assert [(symbol(each), each["error"]["data"]["field"]) for each in refusals] == [
        ("invalid_params", field)
    ] * 2
    assert SECRET not in str(refusals) + caplog.text
    assert await rows_of(pool, agent_id) == before
    assert await pool.fetchval("select count(*) from agents") == 1


async def test_a_runtime_without_a_secrets_key_takes_servers_and_no_credentials(
    keyless: Gateway, pool: Pool
) -> None:
    wire = await keyless.caller("one")
    agent_id = await attached(wire, *named("open", auth={}), *named("open too"))
    assert [row["sealed_auth"] for row in (await rows_of(pool, agent_id)).values()] == [None, None]

    refusals = [
        await wire.refused("agent.create", **AGENT, external_mcp_servers=[*named("open"), SMOKE]),
        await wire.refused("agent.update", agent_id=agent_id, external_mcp_servers=[*named("open"), SMOKE]),
    ]

    sentence = "This runtime keeps no secrets of others, because its operator set no ESPALIER_SECRETS_KEY."
    data = {"symbol": "capability_not_supported", "field": "external_mcp_servers.1.auth"}
    assert [(each["message"], each["data"]) for each in refusals] == [(sentence, data)] * 2
    assert list(await rows_of(pool, agent_id)) == ["open", "open_too"]
    assert await pool.fetchval("select count(*) from agents") == 1


async def test_a_session_that_did_not_ask_for_the_capability_attaches_nothing(
    gateway: Gateway, wire: Wire, pool: Pool
) -> None:
    agent_id = await attached(wire, SMOKE)
    before = await rows_of(pool, agent_id)
    modest = await gateway.stranger("one")
    await modest.begin(**{"streaming.sse": True})

    refusals = [
        await modest.refused("agent.create", **AGENT, external_mcp_servers=[SMOKE]),
        *[
            await modest.refused("agent.update", agent_id=agent_id, external_mcp_servers=servers)
            for servers in ([], [SMOKE])
        ],
    ]

    data = {"symbol": "capability_not_supported", "capability": "tools.mcp_external"}
    assert [each["data"] for each in refusals] == [data] * 3
    assert await rows_of(pool, agent_id) == before


async def test_nobody_changes_the_servers_of_another_owners_agent(
    gateway: Gateway, wire: Wire, pool: Pool
) -> None:
    agent_id = await attached(wire, SMOKE)
    before = await rows_of(pool, agent_id)
    stranger = await gateway.caller("two")
    error = await stranger.refused("agent.update", agent_id=agent_id, external_mcp_servers=[])
    assert error["data"]["symbol"] == "tool_not_found"
    assert await rows_of(pool, agent_id) == before
