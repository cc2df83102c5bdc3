"""The ladder: who is refused at which rung, for every method of the table."""

from typing import Any

import pytest
from tests.integration.wire import AGENT, Gateway, Wire, request, symbol

from espalier_gateway.methods import HANDLERS
from espalier_protocol.access import SCOPES, SUPPORTED
from espalier_protocol.errors import ErrorCode
from espalier_protocol.methods import METHODS, Method
from espalier_protocol.versions import SERVED_VERSIONS
from espalier_store.idempotency import KEPT_S

pytestmark = pytest.mark.anyio

NOT_INITIALIZE = [method for name, method in METHODS.items() if name != "initialize" and not method.duplex]
"""Nor what is only there on a WebSocket: `test_subscriptions.py` has its rungs."""

BAD_PARAMS = {"a member that no method knows": 1}


def beyond_scope(method: Method) -> str:
    """Where a call with bad params ends when it has every scope."""
    usable = method.name in HANDLERS and (method.capability is None or method.capability in SUPPORTED)
    return "invalid_params" if usable else "capability_not_supported"


async def test_each_method_asks_for_exactly_its_scope(gateway: Gateway) -> None:
    """One caller per scope; whoever gets as far as the params had what the method asks for."""
    told: dict[tuple[str, str], str] = {}
    for scope in SCOPES:
        wire = await gateway.caller(f"has-{scope}", (scope,))
        for method in NOT_INITIALIZE:
            told[scope, method.name] = symbol(await wire.answer(method.name, BAD_PARAMS))

    def expected(scope: str, method: Method) -> str:
        beyond = beyond_scope(method)
        refused = method.scope not in (None, scope) and beyond == "invalid_params"
        return "authz_denied" if refused else beyond

    assert told == {
        (scope, method.name): expected(scope, method) for scope in SCOPES for method in NOT_INITIALIZE
    }
    assert "authz_denied" in told.values()


async def test_a_missing_scope_is_named_and_nothing_is_done(gateway: Gateway) -> None:
    wire = await gateway.caller("reader", ("agent.read", "run.read"))
    before = await gateway.rows()
    error = await wire.refused("agent.create", **AGENT)
    assert (error["code"], error["data"]) == (
        ErrorCode.authz_denied,
        {"symbol": "authz_denied", "required_scope": "agent.write"},
    )
    assert await gateway.rows() == before


async def test_each_method_asks_for_its_capability_before_its_scope(gateway: Gateway) -> None:
    nobody = await gateway.caller("nobody", ())
    told = {method.name: symbol(await nobody.answer(method.name, BAD_PARAMS)) for method in NOT_INITIALIZE}

    def expected(method: Method) -> str:
        beyond = beyond_scope(method)
        return "authz_denied" if beyond == "invalid_params" and method.scope else beyond

    assert told == {method.name: expected(method) for method in NOT_INITIALIZE}


async def test_fields_of_a_capability_that_is_off_are_refused(gateway: Gateway) -> None:
    wire = await gateway.stranger("one")
    await wire.begin(**{"streaming.sse": True})
    before = await gateway.rows()
    servers = [{"url": "https://example.invalid/mcp", "auth": {"bearer": "x"}}]
    told = [
        (await wire.refused("agent.create", **AGENT, external_mcp_servers=servers))["data"],
        (await wire.refused("agent.create", **AGENT, runner={"model": "m"}))["data"],
    ]
    assert told == [
        {"symbol": "capability_not_supported", "capability": "tools.mcp_external"},
        {"symbol": "capability_not_supported", "capability": "runner.byo_llm"},
    ]
    assert await gateway.rows() == before
    await wire.agent(external_mcp_servers=[], runner=None)


async def test_an_unknown_method_is_named(wire: Wire) -> None:
    error = await wire.refused("agent.destroy")
    assert (error["code"], error["data"]) == (
        ErrorCode.method_not_found,
        {"symbol": "method_not_found", "resource": "method", "id": "agent.destroy"},
    )


async def test_the_version_header_is_needed_by_every_endpoint_and_initialize(
    wire: Wire, gateway: Gateway
) -> None:
    run_id = await wire.run()
    before = await gateway.rows()
    for value in (None, "", "aep-1999-01-01", f"{wire.version}, {wire.version}", wire.version.upper()):
        headers = wire.headers(Agent_Protocol_Version=value)
        for method in ("initialize", "agent.list", "no.such.method"):
            answer = (await wire.post(request(method, {}), headers)).json()
            assert symbol(answer) == "version_mismatch"
            assert answer["error"]["data"]["supported_versions"] == list(SERVED_VERSIONS)
        for path in (f"/aep/v1/runs/{run_id}/events", "/aep/v1/artifacts/art_x/bytes"):
            response = await wire.get(path, headers)
            assert (response.status_code, response.json()["error"]) == (400, "version_mismatch")
    assert await gateway.rows() == before


def bad_credentials(wire: Wire) -> dict[str, str | None]:
    return {
        "none": None,
        "empty": "",
        "the word alone": "Bearer",
        "null": "Bearer null",
        "another scheme": f"Basic {wire.key}",
        "no scheme": wire.key,
        "a key nobody has": "Bearer esp_" + "A" * 43,
        "half a key": f"Bearer {wire.key[:-1]}",
        "more than a key": f"Bearer {wire.key}A",
        "two tokens": f"Bearer {wire.key} {wire.key}",
        "two headers": f"Bearer {wire.key}, Bearer {wire.key}",
        "a huge token": "Bearer " + "A" * 8_000,
        "not a token": f"Bearer {wire.key}%C3",
    }


async def test_anything_but_one_valid_token_is_unauthenticated_everywhere(
    wire: Wire, gateway: Gateway
) -> None:
    run_id = await wire.run()
    before = await gateway.rows()
    told: dict[str, list[Any]] = {}
    for name, value in bad_credentials(wire).items():
        headers = wire.headers(Authorization=value)
        answers = [
            await wire.post(request("agent.create", AGENT), headers),
            await wire.post(request("initialize", {}), headers),
            await wire.post([request("agent.create", AGENT)], headers),
            await wire.get(f"/aep/v1/runs/{run_id}/events", headers),
            await wire.get("/aep/v1/artifacts/art_x/bytes", headers),
        ]
        told[name] = [(each.status_code, each.headers.get("www-authenticate")) for each in answers]
        assert symbol(answers[0].json()) == symbol(answers[2].json()[0]) == "authn_failed"
        assert answers[3].json()["error"] == "authn_failed"
    assert told == dict.fromkeys(bad_credentials(wire), [(401, "Bearer")] * 5)
    assert await gateway.rows() == before


async def test_two_authorization_headers_are_no_credential(wire: Wire) -> None:
    headers = [
        *wire.headers().items(),
        ("Authorization", f"Bearer {wire.key}"),
        ("Content-Type", "application/json"),
    ]
    response = await wire.http.post("/aep/v1/rpc", json=request("agent.list"), headers=headers)
    assert (response.status_code, symbol(response.json())) == (401, "authn_failed")


async def test_a_revoked_key_is_refused_at_once_when_nothing_is_cached(wire: Wire, gateway: Gateway) -> None:
    assert "result" in await wire.answer("agent.list", {})
    await gateway.pool.execute("update keys set revoked_at = now()")
    assert symbol(await wire.answer("agent.list", {})) == "authn_failed"


async def test_only_a_living_session_of_the_same_owner_opens_the_methods(
    wire: Wire, gateway: Gateway
) -> None:
    other = await gateway.caller("two")
    same = await gateway.stranger("one")
    same.session_id = wire.session_id
    run_id = await wire.run()
    before = await gateway.rows()
    told = {}
    for name, value in {
        "missing": None,
        "unknown": "ses_" + "0" * 26,
        "foreign": other.session_id,
        "twice": f"{wire.session_id}, {wire.session_id}",
        "garbage": "'; drop table sessions --",
    }.items():
        headers = wire.headers(X_AEP_Session_Id=value)
        rpc = await wire.post(request("agent.create", AGENT), headers)
        events = await wire.get(f"/aep/v1/runs/{run_id}/events", headers)
        told[name] = (symbol(rpc.json()), rpc.json()["error"]["data"]["reason"], events.status_code)
    assert told == {
        "missing": ("session_expired", "missing_session", 401),
        **dict.fromkeys(
            ("unknown", "foreign", "twice", "garbage"), ("session_expired", "unknown_session", 401)
        ),
    }
    assert await gateway.rows() == before
    assert "result" in await same.answer("agent.list", {}), "another key of the same owner may use it"


async def test_a_session_expires_when_it_idles_and_initialize_ignores_it(
    wire: Wire, gateway: Gateway
) -> None:
    idle_s = gateway.state.settings.session_ttl_s
    await gateway.pool.execute(
        "update sessions set last_seen_at = now() - make_interval(secs => $1)", idle_s - 60
    )
    assert "result" in await wire.answer("agent.list", {}), "and being used keeps it alive"
    assert await gateway.pool.fetchval("select last_seen_at > now() - interval '1 minute' from sessions")
    await gateway.pool.execute("update sessions set last_seen_at = now() - make_interval(secs => $1)", idle_s)
    assert symbol(await wire.answer("agent.list", {})) == "session_expired"
    assert wire.session_id, "the old id is still sent"
    await wire.begin()
    assert "result" in await wire.answer("agent.list", {})


async def test_initialize_agrees_on_a_version_and_answers_every_capability(gateway: Gateway) -> None:
    wire = await gateway.stranger("one")
    asked = {"streaming.sse": False, "compliance.gdpr": True, "no.such": True}
    result = await wire.call(
        "initialize",
        client_info={"name": "a", "version": "1", "more": [1]},
        requested_versions=["aep-1999-01-01", wire.version],
        requested_capabilities=asked,
    )
    assert result.pop("session_id").startswith("ses_")
    assert result.pop("server_info")["name"] == "espalier"
    assert result == {
        "protocol_version": wire.version,
        "capabilities": {
            **dict.fromkeys(result["capabilities"], False),
            "streaming.sse": True,
            "compliance.gdpr": True,
        },
        "session_ttl_seconds": gateway.state.settings.session_ttl_s,
        "idempotency_ttl_seconds": KEPT_S,
    }
    assert len(result["capabilities"]) >= 9


async def test_initialize_refuses_versions_that_are_not_served(wire: Wire, gateway: Gateway) -> None:
    before = await gateway.rows()
    error = await wire.refused(
        "initialize", client_info={}, requested_versions=["aep-1999-01-01"], requested_capabilities={}
    )
    assert (error["code"], error["data"]["supported_versions"]) == (
        ErrorCode.version_mismatch,
        list(SERVED_VERSIONS),
    )
    assert await gateway.rows() == before


async def test_a_session_id_is_stored_only_as_its_hash(wire: Wire, gateway: Gateway) -> None:
    row = await gateway.pool.fetchval("select string_agg(to_jsonb(s)::text, ' ') from sessions s")
    assert row and wire.session_id not in row and wire.session_id.encode().hex() not in row


async def test_an_unexpected_failure_reaches_the_client_as_a_reference_and_no_more(
    wire: Wire, gateway: Gateway
) -> None:
    await gateway.pool.execute("alter table agents rename to agents_gone")
    response = await wire.post(request("agent.list"))
    error = response.json()["error"]
    assert response.status_code == 200
    assert (error["code"], sorted(error["data"])) == (ErrorCode.internal_error, ["reference", "symbol"])
    assert "agents" not in response.text.replace("agent.list", "")


async def test_a_database_that_is_away_is_a_passing_trouble(wire: Wire, gateway: Gateway) -> None:
    await gateway.state.pool.close()
    response = await wire.post(request("initialize", {}))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["data"]["symbol"]) == (
        200,
        ErrorCode.internal_error,
        "unavailable",
    )
    assert error["data"]["retry_after_ms"] > 0 and error["data"]["reference"]
    events = await wire.get("/aep/v1/artifacts/art_x/bytes")
    assert (events.status_code, events.json()["error"], events.headers["retry-after"]) == (
        503,
        "unavailable",
        "1",
    )
    assert (await wire.get("/readyz")).status_code == 503
    assert (await wire.get("/healthz")).status_code == 200
