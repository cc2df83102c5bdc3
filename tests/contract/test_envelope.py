"""What surrounds every call: the JSON-RPC envelope, versions, tokens, sessions and capabilities."""

from typing import Any

import pytest
from helix_sdk import PROTOCOL_VERSION, AEPAuthzError
from helix_sdk.capabilities import METHOD_CAPABILITY
from tests.contract.conftest import Runtime
from tests.contract.embedder import NINE, UNKNOWN, Embedder, bytes_path, events_path, refused
from tests.contract.requirements import requirement
from tests.integration.wire import request, symbol

pytestmark = pytest.mark.anyio

UNKNOWN_VERSION = "aep-1999-01-01"
NOBODYS_TOKEN = "Bearer hlx_that_nobody_ever_minted"
BEGIN: dict[str, Any] = {
    "client_info": {"name": "contract", "version": "0"},
    "requested_versions": [PROTOCOL_VERSION],
    "requested_capabilities": {},
}


# --- the envelope ------------------------------------------------------------------------------------------


@requirement("AEP-ENVELOPE-01")
async def test_what_is_not_json_is_a_parse_error_without_an_id(embedder: Embedder) -> None:
    response = await embedder.wire.post(b'{"jsonrpc": "2.0", "id": 1')
    answer = response.json()
    assert (symbol(answer), answer["id"], response.status_code) == ("parse_error", None, 400)


@requirement("AEP-ENVELOPE-02")
async def test_json_that_is_no_request_is_an_invalid_request(embedder: Embedder) -> None:
    bodies = [{"id": 1, "method": "initialize"}, {"jsonrpc": "2.0", "id": 1, "method": 7}, "initialize", 1]
    responses = [await embedder.wire.post(body) for body in bodies]
    told = [(symbol(each.json()), each.status_code) for each in responses]
    assert told == [("invalid_request", 400)] * len(bodies)


@requirement("AEP-ENVELOPE-03")
async def test_an_id_comes_back_with_its_json_type(embedder: Embedder) -> None:
    sent = ["s-1", "7", 7, 0, -1]
    results = [(await embedder.wire.post(request("initialize", BEGIN, each))).json() for each in sent]
    errors = [(await embedder.wire.post(request("no.such", {}, each))).json() for each in sent]
    told = [(answer["id"], type(answer["id"])) for answer in results + errors]
    assert told == [(each, type(each)) for each in sent + sent]


@requirement("AEP-ENVELOPE-04")
async def test_an_unknown_method_is_not_found(embedder: Embedder) -> None:
    assert symbol(await embedder.wire.answer("agent.destroy", {})) == "method_not_found"


@requirement("AEP-ENVELOPE-05")
async def test_params_without_a_required_member_are_invalid(embedder: Embedder) -> None:
    for params in ({}, None, {"agent_id": "agt_" + UNKNOWN}):
        assert symbol(await embedder.wire.answer("run.create", params)) == "invalid_params"


@requirement("AEP-ENVELOPE-06")
async def test_a_notification_is_done_and_not_answered(embedder: Embedder) -> None:
    agent = await embedder.agent()
    wanted = {"agent_id": agent["id"], "goal": "Say ok."}
    response = await embedder.wire.post({"jsonrpc": "2.0", "method": "run.create", "params": wanted})
    assert (response.status_code, response.content) == (204, b"")
    assert len((await embedder.client.run.list(agent["id"]))["items"]) == 1


@requirement("AEP-ENVELOPE-07")
async def test_a_batch_is_answered_in_its_order(embedder: Embedder) -> None:
    batch = [request("agent.list", {}, 1), request("no.such", {}, "b"), request("agent.list", {}, 0)]
    answers = (await embedder.wire.post(batch)).json()
    told = [(answer["id"], symbol(answer)) for answer in answers]
    assert told == [(1, "result"), ("b", "method_not_found"), (0, "result")]


# --- versions ----------------------------------------------------------------------------------------------


@requirement("AEP-VERSION-01")
async def test_asking_for_unknown_versions_only_is_a_mismatch(embedder: Embedder) -> None:
    assert (await refused(embedder.client.initialize([UNKNOWN_VERSION], {}))).symbol == "version_mismatch"
    begun = await embedder.client.initialize([UNKNOWN_VERSION, PROTOCOL_VERSION], {})
    assert begun["protocol_version"] == PROTOCOL_VERSION


@requirement("AEP-VERSION-02")
async def test_an_unknown_version_in_the_header_is_a_mismatch(embedder: Embedder) -> None:
    headers = embedder.wire.headers(Agent_Protocol_Version=UNKNOWN_VERSION)
    for method, params in (("initialize", BEGIN), ("agent.list", {})):
        answer = (await embedder.wire.post(request(method, params), headers)).json()
        assert symbol(answer) == "version_mismatch"


@requirement("AEP-VERSION-03")
async def test_every_answer_names_its_version(embedder: Embedder) -> None:
    wire, run = embedder.wire, await embedder.ended_run()
    nobody = wire.headers(Authorization=NOBODYS_TOKEN)
    answers = {
        "a result": await wire.post(request("initialize", BEGIN)),
        "an error": await wire.post(request("agent.get", {"agent_id": "agt_" + UNKNOWN})),
        "no token": await wire.post(request("agent.list", {}), nobody),
        "no json": await wire.post(b"{"),
        "a notification": await wire.post({"jsonrpc": "2.0", "method": "agent.list"}),
        "a stream": await embedder.get(events_path(run["id"])),
        "no stream": await embedder.get(events_path("run_" + UNKNOWN)),
        "no bytes": await embedder.get(bytes_path("art_" + UNKNOWN)),
    }
    told = {name: each.headers.get("agent-protocol-version") for name, each in answers.items()}
    assert told == dict.fromkeys(answers, PROTOCOL_VERSION)


# --- who is calling ----------------------------------------------------------------------------------------


@requirement("AEP-AUTH-01")
async def test_a_token_that_nobody_holds_is_not_authenticated(embedder: Embedder) -> None:
    headers = embedder.wire.headers(Authorization=NOBODYS_TOKEN)
    for method, params in (("initialize", BEGIN), ("agent.list", {})):
        response = await embedder.wire.post(request(method, params), headers)
        assert (symbol(response.json()), response.status_code) == ("authn_failed", 401)


@requirement("AEP-AUTH-02")
async def test_a_token_that_nobody_holds_follows_no_run(embedder: Embedder) -> None:
    for run_id in ((await embedder.run())["id"], "run_" + UNKNOWN):
        response = await embedder.get(events_path(run_id), Authorization=NOBODYS_TOKEN)
        assert response.status_code == 401


@requirement("AEP-AUTH-03")
async def test_a_token_that_nobody_holds_reads_no_bytes(embedder: Embedder) -> None:
    response = await embedder.get(bytes_path("art_" + UNKNOWN), Authorization=NOBODYS_TOKEN)
    assert response.status_code == 401


@requirement("AEP-AUTH-04")
async def test_a_missing_scope_is_an_error_of_its_own(runtime: Runtime) -> None:
    reader = await runtime.embedder(("agent.read",))
    error = await refused(reader.agent())
    assert isinstance(error, AEPAuthzError)
    assert (error.symbol, error.data["required_scope"]) == ("authz_denied", "agent.write")
    assert (await reader.client.agent.list())["items"] == []


# --- sessions and capabilities -----------------------------------------------------------------------------


@requirement("AEP-SESSION-01")
async def test_initialize_tells_what_was_agreed_on(embedder: Embedder) -> None:
    begun = await embedder.client.initialize([PROTOCOL_VERSION], {}, {"name": "contract", "version": "0"})
    assert {"server_info", "protocol_version", "capabilities", "session_id"} <= begun.keys()
    assert {"name", "version"} <= begun["server_info"].keys()
    assert begun["protocol_version"] == PROTOCOL_VERSION


@requirement("AEP-SESSION-02")
async def test_a_session_id_looks_like_one(embedder: Embedder) -> None:
    session_id = (await embedder.client.initialize([PROTOCOL_VERSION], {}))["session_id"]
    assert session_id.startswith("ses_") and len(session_id) <= 64


@requirement("AEP-SESSION-03")
async def test_a_session_that_nobody_began_has_expired(embedder: Embedder, runtime: Runtime) -> None:
    foreign = (await runtime.embedder()).wire.session_id
    for session_id in ("ses_" + UNKNOWN, "nothing like a session", foreign):
        headers = embedder.wire.headers(X_AEP_Session_Id=session_id)
        answer = (await embedder.wire.post(request("agent.list", {}), headers)).json()
        assert symbol(answer) == "session_expired"


@requirement("AEP-SESSION-04")
async def test_a_call_without_a_session_has_none_that_lives(embedder: Embedder) -> None:
    headers = embedder.wire.headers(X_AEP_Session_Id=None)
    answer = (await embedder.wire.post(request("agent.list", {}), headers)).json()
    assert symbol(answer) == "session_expired"


@requirement("AEP-SESSION-05")
async def test_a_client_with_a_stale_session_can_begin_again(embedder: Embedder) -> None:
    headers = embedder.wire.headers(X_AEP_Session_Id="ses_" + UNKNOWN)
    answer = (await embedder.wire.post(request("initialize", BEGIN), headers)).json()
    headers = embedder.wire.headers(X_AEP_Session_Id=answer["result"]["session_id"])
    assert symbol((await embedder.wire.post(request("agent.list", {}), headers)).json()) == "result"


@requirement("AEP-CAPABILITY-01")
async def test_a_method_is_refused_when_its_capability_was_not_agreed_on(embedder: Embedder) -> None:
    """For every method that the published client knows to be gated; `run.events` is no method."""
    await embedder.wire.begin(**{"streaming.sse": True})
    gated = {method: name for method, name in METHOD_CAPABILITY.items() if method != "run.events"}
    told = {method: (await embedder.wire.refused(method))["data"] for method in gated}
    assert told == {
        method: {"symbol": "capability_not_supported", "capability": name} for method, name in gated.items()
    }


@requirement("AEP-CAPABILITY-02")
async def test_all_nine_capabilities_are_answered(embedder: Embedder) -> None:
    begun = await embedder.client.initialize([PROTOCOL_VERSION], {"streaming.sse": True, "no.such": True})
    told = {name: type(begun["capabilities"].get(name)) for name in NINE}
    assert told == dict.fromkeys(NINE, bool)


@requirement("AEP-CAPABILITY-03")
async def test_streaming_is_agreed_on_without_being_asked_for(embedder: Embedder) -> None:
    begun = await embedder.client.initialize([PROTOCOL_VERSION], {"compliance.gdpr": True})
    assert begun["capabilities"]["streaming.sse"] is True
    assert [event.type for event in await embedder.events((await embedder.run())["id"])][-1] == "run.ended"
