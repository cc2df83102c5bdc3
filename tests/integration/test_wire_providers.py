"""`/api/me/llm-providers` and `provider.list` on the wire: what owners bring is kept, shown without its key,
bound to agents, and not deleted under them."""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from uuid import UUID

import anyio
import asyncpg
import httpx2
import pytest
from pydantic import SecretStr
from tests.integration.conftest import SECRETS_KEY
from tests.integration.wire import AGENT, UNKNOWN_TAIL, Gateway, Wire, running_gateway, symbol

from espalier_acts import providers as acts
from espalier_gateway import providers_rest
from espalier_gateway.settings import GatewaySettings
from espalier_protocol.errors import ErrorCode
from espalier_protocol.ids import from_wire
from espalier_secrets.sealing import SealBroken, place_of, sealer
from espalier_store.agents import set_runner
from espalier_store.pool import Pool
from espalier_store.providers import hold_provider

pytestmark = pytest.mark.anyio

PATH = "/api/me/llm-providers"
KEY = "sk-canary-0123456789-wxyz"
LOCAL: dict[str, Any] = {
    "name": "mine",
    "kind": "openai_compat",
    "api_key": KEY,
    "base_url": "http://127.0.0.1:1/v1",
    "default_model": "small",
}
NO_BASE_URL = "base_url should be http(s)://host[:port][/path], and nothing else."
LOCK_WAIT_S = 10.0


async def ask(wire: Wire, verb: str, path: str = "", body: Any = None, **headers: str) -> httpx2.Response:
    """A REST request: a key and nothing of AEP."""
    sent = {"Authorization": f"Bearer {wire.key}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    if isinstance(body, bytes):
        return await wire.http.request(verb, PATH + path, content=body, headers=sent)
    return await wire.http.request(
        verb, PATH + path, headers=sent, **({} if body is None else {"json": body})
    )


async def made(wire: Wire, **changes: Any) -> dict[str, Any]:
    response = await ask(wire, "POST", body={**LOCAL, **changes})
    assert response.status_code == 201, response.text
    provider: dict[str, Any] = response.json()
    return provider


async def at_once(*calls: Callable[[], Awaitable[httpx2.Response]]) -> list[httpx2.Response]:
    answers: list[httpx2.Response] = []

    async def one(call: Callable[[], Awaitable[httpx2.Response]]) -> None:
        answers.append(await call())

    async with anyio.create_task_group() as group:
        for call in calls:
            group.start_soon(one, call)
    return answers


def told(response: httpx2.Response) -> tuple[int, str]:
    body = response.json()
    assert body["message"], "one sentence for whoever reads it"
    return response.status_code, body["error"]


# ---------------------------------------------------------------- making and showing


async def test_a_provider_is_made_without_a_session_and_shown_without_its_key(wire: Wire) -> None:
    response = await ask(wire, "POST", body=LOCAL)

    provider = response.json()
    assert response.status_code == 201
    assert {name: value for name, value in provider.items() if not name.endswith("_at")} == {
        "id": provider["id"],
        "name": "mine",
        "kind": "openai_compat",
        "api_key_hint": "••••wxyz",
        "base_url": "http://127.0.0.1:1/v1",
        "default_model": "small",
        "last_test_status": None,
    }
    assert provider["id"].startswith("prv_")
    assert provider["last_tested_at"] is None
    assert provider["created_at"] == provider["updated_at"]
    assert response.headers["cache-control"] == "no-store"
    assert (await ask(wire, "GET", f"/{provider['id']}")).json() == provider
    assert (await ask(wire, "GET")).json() == {"providers": [provider]}
    assert await wire.call("provider.list") == {"providers": [provider]}


async def test_the_list_is_the_owners_own_and_newest_first(gateway: Gateway) -> None:
    one, other = await gateway.caller("one"), await gateway.caller("other")
    ids = [(await made(one, name=f"n{number}"))["id"] for number in range(3)]
    await made(other)
    for listed in ((await ask(one, "GET")).json(), await one.call("provider.list")):
        assert [each["id"] for each in listed["providers"]] == ids[::-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_url": None}, "base_url is required for a provider of the kind openai_compat."),
        ({"base_url": "ftp://host/v1"}, NO_BASE_URL),
        (
            {"base_url": "https://user:pw@host/v1"},
            NO_BASE_URL,
        ),
        ({"base_url": "https://host:port/v1"}, NO_BASE_URL),
        ({"base_url": "https://host/v1#x"}, NO_BASE_URL),
        ({"base_url": "https:///v1"}, NO_BASE_URL),
        ({"base_url": "https://host\\@evil/v1"}, NO_BASE_URL),
        (
            {"base_url": "https://host/v1?key=x"},
            NO_BASE_URL,
        ),
        ({"kind": "other"}, "kind should be 'openai_compat', 'anthropic' or 'gemini'."),
        ({"api_key": ""}, "api_key should have at least 1 item."),
        (
            {"api_key": KEY + "\n"},
            "api_key should hold only the characters that a key can have.",
        ),
        ({"name": ""}, "name should have at least 1 character."),
        ({"nmae": "x"}, "nmae is not a member that is known here."),
    ],
)
async def test_what_does_not_fit_is_refused_in_a_sentence_that_repeats_no_key(
    wire: Wire, changes: dict[str, Any], message: str
) -> None:
    response = await ask(wire, "POST", body={**LOCAL, **changes})
    body = response.json()
    assert (response.status_code, body["error"], body["message"]) == (400, "invalid_request", message)
    assert "canary" not in response.text
    assert (await ask(wire, "GET")).json() == {"providers": []}


async def test_bodies_that_are_no_small_json_object_are_refused(wire: Wire) -> None:
    json_type = {"Content_Type": "application/json"}
    answers = [
        await ask(wire, "POST", body=b"{", **json_type),
        await ask(wire, "POST", body=b"[]", **json_type),
        await ask(wire, "POST", body=b'{"name": "a", "name": "b"}', **json_type),
        await ask(wire, "POST", body=b"{}", Content_Type="text/plain"),
        await ask(wire, "POST", body=b'"' + b"x" * 1024 * 1024 + b'"', **json_type),
    ]
    assert [told(answer) for answer in answers] == [
        (400, "invalid_request"),
        (400, "invalid_request"),
        (400, "invalid_request"),
        (415, "unsupported_media_type"),
        (413, "too_large"),
    ]


async def test_a_name_is_given_once_for_each_owner(gateway: Gateway) -> None:
    one, other = await gateway.caller("one"), await gateway.caller("other")
    first, second = await made(one), await made(one, name="second")
    await made(other)
    assert told(await ask(one, "POST", body=LOCAL)) == (409, "duplicate_name")
    assert told(await ask(one, "PATCH", f"/{second['id']}", {"name": "mine"})) == (409, "duplicate_name")
    assert (await ask(one, "PATCH", f"/{first['id']}", {"name": "mine"})).status_code == 200
    assert (await ask(one, "GET", f"/{second['id']}")).json() == second


async def test_an_owner_has_a_bounded_number_of_providers(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acts, "PROVIDERS_MAX", 2)
    answers = await at_once(*(partial(ask, wire, "POST", body={**LOCAL, "name": f"n{n}"}) for n in range(6)))
    assert sorted(answer.status_code for answer in answers) == [201, 201, 409, 409, 409, 409]
    assert {told(each) for each in answers if each.status_code == 409} == {(409, "too_many_providers")}


# ---------------------------------------------------------------- who may


async def test_keys_and_scopes_are_asked_for_and_calls_are_counted(
    gateway: Gateway, gateway_settings: GatewaySettings
) -> None:
    reader = await gateway.stranger("one", ("provider.read",))
    writer = await gateway.stranger("one", ("provider.write",))
    nobody = Wire(gateway.http, "esp_nobody")
    provider = await made(writer)
    one = f"/{provider['id']}"
    assert told(await ask(nobody, "GET")) == (401, "unauthorized")
    assert (await ask(nobody, "GET")).headers["www-authenticate"] == "Bearer"
    assert told(await ask(reader, "POST", body=LOCAL)) == (403, "forbidden")
    assert told(await ask(reader, "PATCH", one, {"name": "x"})) == (403, "forbidden")
    assert told(await ask(reader, "DELETE", one)) == (403, "forbidden")
    assert told(await ask(reader, "POST", f"{one}/test")) == (403, "forbidden")
    assert told(await ask(writer, "GET")) == (403, "forbidden")
    assert told(await ask(writer, "GET", one)) == (403, "forbidden")
    assert (await ask(reader, "GET", one)).json() == provider
    limited = gateway_settings.model_copy(update={"rpc_rate": 1.0, "rpc_burst": 2})
    async with running_gateway(limited, gateway.pool) as tight:
        caller = await tight.stranger("one")
        answers = [await ask(caller, "GET") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert told(answers[-1]) == (429, "rate_limited")
    assert answers[-1].headers["retry-after"] == "1"


async def test_the_provider_of_another_owner_is_like_none(gateway: Gateway) -> None:
    one, other = await gateway.caller("one"), await gateway.caller("other")
    theirs = (await made(other))["id"]
    nobodys = "prv_" + UNKNOWN_TAIL
    for id_ in (theirs, nobodys, "prv_x", "agt_" + UNKNOWN_TAIL):
        answers = [
            await ask(one, "GET", f"/{id_}"),
            await ask(one, "PATCH", f"/{id_}", {"name": "mine now"}),
            await ask(one, "DELETE", f"/{id_}"),
            await ask(one, "POST", f"/{id_}/test"),
        ]
        assert [told(answer) for answer in answers] == [(404, "not_found")] * 4
        error = await one.refused("agent.create", **AGENT, runner={"provider_id": id_, "model": "m"})
        assert (error["code"], error["data"]) == (
            ErrorCode.tool_not_found,
            {"symbol": "tool_not_found", "resource": "provider", "id": id_},
        )
    assert (await ask(other, "GET", f"/{theirs}")).json()["name"] == "mine"
    assert (await one.call("agent.list"))["items"] == []


async def test_unknown_verbs_and_a_runtime_without_the_capability_serve_nothing(
    wire: Wire, gateway: Gateway, gateway_settings: GatewaySettings
) -> None:
    assert (await ask(wire, "PUT", body=LOCAL)).status_code == 405
    off = gateway_settings.model_copy(update={"capabilities": "streaming.sse"})
    async with running_gateway(off, gateway.pool) as without:
        caller = await without.caller("one")
        assert told(await ask(caller, "GET")) == (404, "not_found")
        assert symbol(await caller.answer("provider.list")) == "capability_not_supported"


# ---------------------------------------------------------------- the key


async def test_a_key_lies_sealed_for_its_row_and_its_owner_only(gateway: Gateway) -> None:
    one, other = await gateway.caller("one"), await gateway.caller("other")
    provider, twin = await made(one), await made(other)
    rows = {row["id"]: row for row in await gateway.pool.fetch("select * from providers")}
    box = sealer(SecretStr(SECRETS_KEY))
    mine, theirs = (rows[from_wire("prv", each["id"])] for each in (provider, twin))

    def place(row: asyncpg.Record) -> str:
        return place_of(row["owner_id"], "providers", row["id"], "key")

    assert box.open(mine["sealed_key"], place(mine)) == KEY.encode()
    with pytest.raises(SealBroken):
        box.open(mine["sealed_key"], place(theirs))
    dump = json.dumps([{k: str(v) for k, v in row.items()} for row in rows.values()])
    assert "canary" not in dump
    assert KEY.encode() not in b"".join(row["sealed_key"] for row in rows.values())


async def test_a_new_key_or_address_clears_what_a_test_had_shown_and_a_new_name_does_not(
    wire: Wire, gateway: Gateway
) -> None:
    provider = await made(wire)
    one = f"/{provider['id']}"

    async def tested() -> None:
        await gateway.pool.execute("update providers set last_tested_at = now(), last_test_status = 'ok'")

    after = provider
    for body, status, hint in (
        ({"name": "renamed"}, "ok", "••••wxyz"),
        ({"default_model": None}, "ok", "••••wxyz"),
        ({}, "ok", "••••wxyz"),
        ({"base_url": "http://127.0.0.1:1/v2"}, None, "••••wxyz"),
        ({"api_key": "sk-another-key-7777"}, None, "••••7777"),
        ({"api_key": "short"}, None, "••••"),
    ):
        await tested()
        after = (await ask(wire, "PATCH", one, body)).json()
        assert (after["last_test_status"], after["api_key_hint"]) == (status, hint)
        assert (after["last_tested_at"] is None) == (status is None)
    assert after["name"] == "renamed"
    assert after["default_model"] is None
    assert after["base_url"] == "http://127.0.0.1:1/v2"
    assert after["updated_at"] > provider["updated_at"]


async def test_a_key_does_not_go_to_another_server_unless_it_is_brought_along(wire: Wire) -> None:
    provider = await made(wire, base_url="https://api.example/v1")
    one = f"/{provider['id']}"
    for elsewhere in ("https://evil.example/v1", "http://api.example/v1", "https://api.example:444/v1"):
        response = await ask(wire, "PATCH", one, {"base_url": elsewhere})
        assert (response.status_code, response.json()["message"]) == (
            400,
            "api_key is required when base_url names another server.",
        )
    assert (await ask(wire, "PATCH", one, {"base_url": None})).status_code == 400
    assert (await ask(wire, "GET", one)).json() == provider
    moved = {"base_url": "https://evil.example/v1", "api_key": "sk-their-own-key"}
    assert (await ask(wire, "PATCH", one, moved)).json()["base_url"] == "https://evil.example/v1"


async def test_without_a_secrets_key_no_provider_is_taken_and_the_rest_works(
    gateway: Gateway, gateway_settings: GatewaySettings
) -> None:
    provider = await made(await gateway.stranger("one"))
    none = gateway_settings.model_copy(update={"secrets_key": SecretStr("")})
    async with running_gateway(none, gateway.pool) as keyless:
        caller = await keyless.stranger("one")
        for response in (
            await ask(caller, "POST", body={**LOCAL, "name": "new"}),
            await ask(caller, "PATCH", f"/{provider['id']}", {"api_key": "sk-new-key-12345"}),
        ):
            assert told(response) == (403, "secrets_off")
            assert "ESPALIER_SECRETS_KEY" in response.json()["message"]
        assert (await ask(caller, "GET")).json() == {"providers": [provider]}
        assert (await ask(caller, "DELETE", f"/{provider['id']}")).status_code == 204


# ---------------------------------------------------------------- binding


async def test_an_agent_is_bound_at_create_and_shows_the_model_it_got(wire: Wire) -> None:
    provider = (await made(wire))["id"]
    told_of = {
        "default": {"provider_id": provider},
        "named": {"provider_id": provider, "model": "large"},
        "operator": {"model": "large"},
        "empty": {},
        "none": None,
    }
    shown = {}
    for name, runner in told_of.items():
        agent_id = await wire.agent(runner=runner)
        shown[name] = (await wire.call("agent.get", agent_id=agent_id))["runner"]
    assert shown == {
        "default": {"provider_id": provider, "model": "small"},
        "named": {"provider_id": provider, "model": "large"},
        "operator": {"provider_id": None, "model": "large"},
        "empty": None,
        "none": None,
    }


async def test_an_update_binds_and_detaches_and_leaves_alone_what_it_does_not_name(wire: Wire) -> None:
    provider = (await made(wire))["id"]
    agent_id = await wire.agent()

    async def runner_after(**change: Any) -> Any:
        return (await wire.call("agent.update", agent_id=agent_id, **change))["runner"]

    bound = {"provider_id": provider, "model": "small"}
    assert await runner_after(runner={"provider_id": provider}) == bound
    # The model was copied at bind time: what is the default later does not matter.
    await ask(wire, "PATCH", f"/{provider}", {"default_model": "other"})
    assert await runner_after(name="renamed") == bound
    assert await runner_after(runner={"provider_id": provider}) == {**bound, "model": "other"}
    assert await runner_after(runner=None) is None
    assert (await wire.call("agent.get", agent_id=agent_id))["name"] == "renamed"


async def test_a_provider_without_any_model_is_a_conflict_and_nothing_is_made_or_changed(
    wire: Wire, gateway: Gateway
) -> None:
    provider = (await made(wire, default_model=None))["id"]
    agent_id = await wire.agent()
    before = await wire.call("agent.list")
    runner = {"provider_id": provider}
    answers = [
        await wire.answer("agent.create", {**AGENT, "runner": runner}),
        await wire.answer("agent.update", {"agent_id": agent_id, "name": "not kept", "runner": runner}),
    ]
    assert [symbol(answer) for answer in answers] == ["lifecycle_conflict"] * 2
    assert await wire.call("agent.list") == before


async def test_a_provider_in_use_is_not_deleted_until_its_last_agent_lets_go(wire: Wire) -> None:
    provider = (await made(wire))["id"]
    runner = {"provider_id": provider}
    agents = [await wire.agent(runner=runner) for _ in range(2)]
    await wire.call("agent.archive", agent_id=agents[0])
    for left in (2, 1):
        response = await ask(wire, "DELETE", f"/{provider}")
        assert (response.status_code, response.json()["error"]) == (409, "provider_in_use")
        assert response.json()["agent_count"] == left
        await wire.call("agent.update", agent_id=agents[left - 1], runner=None)
    response = await ask(wire, "DELETE", f"/{provider}")
    assert (response.status_code, response.content) == (204, b"")
    assert told(await ask(wire, "GET", f"/{provider}")) == (404, "not_found")


async def blocked(pool: Pool) -> int:
    return int(await pool.fetchval("select count(*) from pg_locks where not granted"))


async def test_a_deletion_waits_for_a_binding_under_way_and_then_sees_it(
    wire: Wire, gateway: Gateway
) -> None:
    provider = (await made(wire))["id"]
    agent_id = await wire.agent()
    provider_id, agent_uuid = from_wire("prv", provider), from_wire("agt", agent_id)
    owner_id: UUID = await gateway.pool.fetchval("select owner_id from providers")
    answers: list[httpx2.Response] = []

    async def delete() -> None:
        answers.append(await ask(wire, "DELETE", f"/{provider}"))

    assert provider_id is not None
    assert agent_uuid is not None
    async with (
        anyio.create_task_group() as group,
        gateway.pool.acquire() as connection,
        connection.transaction(),
    ):
        held = await hold_provider(connection, owner_id, provider_id)
        assert held is not None
        group.start_soon(delete)
        with anyio.fail_after(LOCK_WAIT_S):
            while not await blocked(gateway.pool):
                await anyio.sleep(0.01)
        await set_runner(connection, owner_id, agent_uuid, provider_id, "small")
    assert told(answers[0]) == (409, "provider_in_use")
    assert answers[0].json()["agent_count"] == 1


async def test_deletions_and_bindings_at_once_never_leave_an_agent_without_its_provider(
    wire: Wire, gateway: Gateway
) -> None:
    agents = [await wire.agent() for _ in range(4)]
    for _ in range(5):
        provider = (await made(wire))["id"]
        bound: dict[str, str] = {}
        deleted: list[int] = []

        async def bind(agent_id: str, provider: str, bound: dict[str, str]) -> None:
            params = {"agent_id": agent_id, "runner": {"provider_id": provider}}
            bound[agent_id] = symbol(await wire.answer("agent.update", params))

        async def delete(provider: str, deleted: list[int]) -> None:
            deleted.append((await ask(wire, "DELETE", f"/{provider}")).status_code)

        async with anyio.create_task_group() as group:
            for each in agents:
                group.start_soon(bind, each, provider, bound)
            group.start_soon(delete, provider, deleted)
        assert (
            set(bound.values()) == {"tool_not_found"}
            if deleted == [204]
            else {"result"} <= set(bound.values())
        )
        left = await gateway.pool.fetchval(
            "select count(*) from agents a where a.runner_provider_id is not null"
            " and not exists (select from providers p where p.id = a.runner_provider_id)"
        )
        assert left == 0
        for each in agents:
            await wire.call("agent.update", agent_id=each, runner=None)
        await ask(wire, "DELETE", f"/{provider}")


# ---------------------------------------------------------------- a test that nobody answers


async def test_a_test_that_no_worker_takes_says_so_in_time_and_leaves_nothing(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers_rest, "PROBE_LIFE_S", 0.3)
    provider = await made(wire)
    response = await ask(wire, "POST", f"/{provider['id']}/test")
    assert (response.status_code, response.json()) == (
        200,
        {"ok": False, "kind": "other", "message": "No worker took the test, or none ended it, in time."},
    )
    assert await gateway.pool.fetchval("select count(*) from provider_probes") == 0
    assert (await ask(wire, "GET", f"/{provider['id']}")).json() == provider


async def test_one_test_of_a_provider_is_under_way_at_a_time(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers_rest, "PROBE_LIFE_S", 0.5)
    provider = (await made(wire))["id"]
    answers = await at_once(*(partial(ask, wire, "POST", f"/{provider}/test") for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
    assert {told(each) for each in answers if each.status_code == 409} == {(409, "test_under_way")}
