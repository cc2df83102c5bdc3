"""JSON-RPC 2.0 as AEP speaks it, and the versions of the protocol."""

from typing import Any, Final

from espalier_client.conformance.expected import all_methods, expected, nobody
from espalier_client.conformance.ground import Trial, agent_params
from espalier_client.conformance.verdicts import Failed, brief, expect, same
from espalier_client.conformance.wire import (
    RPC,
    Caller,
    bytes_path,
    envelope,
    events_path,
    hello,
    require_error,
    require_response,
    symbol_in,
)

LARGE_BYTES: Final = 2 * 1024 * 1024
DEEP: Final = 100_000
MANY: Final = 300
ASK_FOR_NOTHING: Final = ("agent.list", "artifact.list", "message.list", "approval.list")
PARSED_AS_ERROR: Final = ("parse_error", "invalid_request", "invalid_params")


async def _error(caller: Caller, body: Any, symbol: str, what: str, request_id: Any = None) -> None:
    answer = await caller.post(body)
    expect(answer.status < 500, f"{what}: HTTP {answer.status}.")
    told = answer.json()
    if not isinstance(told, dict) or "id" not in told:
        raise Failed(f"{what}: expected one response with an id, got {brief(told)}.")
    require_error(require_response(told, request_id, what), symbol, what)


async def envelope_01_not_json(trial: Trial) -> None:
    for body in (b"{", b"", b"nonsense", b'{"jsonrpc": "2.0",}', b"\xff\xfe", b'[{"jsonrpc"'):
        await _error(trial.me, body, "parse_error", f"the body {body!r}")


async def envelope_02_not_a_request(trial: Trial) -> None:
    bad: list[tuple[Any, Any]] = [
        (5, None),
        ("agent.list", None),
        ({"jsonrpc": "1.0", "id": 7, "method": "agent.list"}, 7),
        ({"id": 7, "method": "agent.list"}, 7),
        ({"jsonrpc": "2.0", "id": "a", "method": 5}, "a"),
        ({"jsonrpc": "2.0", "id": 7}, 7),
    ]
    for body, request_id in bad:
        answer = (await trial.me.post(body)).json()
        told = answer.get("id") if isinstance(answer, dict) else None
        # Repeating a readable id and null are both read out of JSON-RPC.
        echoed = request_id if told == request_id else None
        require_error(require_response(answer, echoed, brief(body)), "invalid_request", brief(body))


async def envelope_03_ids_come_back(trial: Trial) -> None:
    ids: tuple[Any, ...] = (1, 0, -7, 2**53 - 1, "1", "an id", "ünïcode", "")
    for request_id in ids:
        for params in ({"limit": 1}, {"limit": "no"}):
            answer = (await trial.me.post(envelope("agent.list", params, request_id))).json()
            require_response(answer, request_id, f"the id {request_id!r}")


async def envelope_04_unknown_method(trial: Trial) -> None:
    for method in ("agent.nonsense", "", "agent", "agent.create ", "Agent.create", "rpc.nonsense"):
        require_error(await trial.me.answer(method, {}), "method_not_found", repr(method))


async def envelope_05_missing_member(trial: Trial) -> None:
    for method, needs in all_methods().items():
        offered = "capability" not in needs or trial.has(needs["capability"])
        if offered and needs["params"] and method not in ASK_FOR_NOTHING:
            await trial.me.refused("invalid_params", method)


async def envelope_06_positional(trial: Trial) -> None:
    for method, params in (("agent.get", [nobody("agt")]), ("agent.list", []), ("agent.list", [1])):
        require_error(await trial.me.answer(method, params), "invalid_params", f"{method} {params}")


async def envelope_07_wrong_types(trial: Trial) -> None:
    agent = await trial.agent()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("agent.create", agent_params(name=5)),
        ("agent.create", agent_params(toolset="helix.web_search")),
        ("agent.create", agent_params(ceilings__max_cycles="5")),
        ("agent.create", agent_params(ceilings__max_cycles=True)),
        ("agent.create", agent_params(ceilings__max_cycles=1.5)),
        ("agent.create", agent_params(constitution="Be brief.")),
        ("agent.create", agent_params(metadata=[])),
        ("agent.list", {"limit": "5"}),
        ("agent.get", {"agent_id": 5}),
        ("agent.get", {"agent_id": None}),
        ("run.create", {"agent_id": agent["id"], "goal": 5}),
        ("run.create", {"agent_id": agent["id"], "goal": "x", "inputs": "x"}),
        ("run.create", {"agent_id": agent["id"], "goal": "x", "subject_ids": "sub_abc"}),
    ]
    for method, params in wrong:
        what = f"{method} {brief(params)}"
        require_error(await trial.me.answer(method, params), "invalid_params", what)


async def envelope_08_unknown_members(trial: Trial) -> None:
    unknown: list[tuple[str, dict[str, Any]]] = [
        ("agent.create", {**agent_params(), "nonsense": 1}),
        ("agent.create", agent_params(ceilings__max_cycle=1)),
        ("agent.create", agent_params(constitution__nonsense="x")),
        ("agent.list", {"lifecyle_state": "active"}),
        ("run.get", {"run_id": nobody("run"), "nonsense": None}),
    ]
    for method, params in unknown:
        what = f"{method} {brief(params)}"
        require_error(await trial.me.answer(method, params), "invalid_params", what)


async def envelope_09_notifications(trial: Trial) -> None:
    for extra in ({}, {"id": None}):
        agent, name = await trial.agent(), trial.word()
        params = {"agent_id": agent["id"], "name": name}
        body = {"jsonrpc": "2.0", "method": "agent.update", "params": params, **extra}
        answer = await trial.me.post(body)
        same((answer.body, answer.status < 400), (b"", True), "the answer to a notification")
        same((await trial.me.call("agent.get", agent_id=agent["id"]))["name"], name, "what it asked for")


async def envelope_10_failing_notifications(trial: Trial) -> None:
    for method, params in (("agent.nonsense", {}), ("agent.get", {}), ("agent.get", {"agent_id": "x"})):
        answer = await trial.me.post({"jsonrpc": "2.0", "method": method, "params": params})
        same((answer.body, answer.status < 400), (b"", True), f"the answer to the notification {method}")


async def envelope_11_batches(trial: Trial) -> None:
    agent = await trial.agent()
    batch = [
        envelope("agent.get", {"agent_id": agent["id"]}, "first"),
        envelope("agent.nonsense", {}, 2),
        envelope("agent.get", {"agent_id": nobody("agt")}, 3),
        envelope("agent.list", {"limit": 1}, 4),
    ]
    answers = (await trial.me.post(batch)).json()
    expect(isinstance(answers, list) and len(answers) == 4, f"expected four responses, got {brief(answers)}.")
    told = [
        symbol_in(require_response(answer, sent["id"], "a batch"))
        for answer, sent in zip(answers, batch, strict=True)
    ]
    same(told, ["result", "method_not_found", "tool_not_found", "result"], "the answers to a batch")
    same(answers[0]["result"]["id"], agent["id"], "the first answer")


async def envelope_12_notifications_in_batches(trial: Trial) -> None:
    silent = {"jsonrpc": "2.0", "method": "agent.list", "params": {"limit": 1}}
    answers = (await trial.me.post([silent, envelope("agent.list", {"limit": 1}, 9), silent])).json()
    expect(isinstance(answers, list) and len(answers) == 1, f"expected one response, got {brief(answers)}.")
    require_response(answers[0], 9, "a batch")
    only = await trial.me.post([silent, silent])
    same((only.body, only.status < 400), (b"", True), "the answer to a batch of notifications")


async def envelope_13_empty_batch(trial: Trial) -> None:
    await _error(trial.me, [], "invalid_request", "an empty batch")


async def envelope_14_malformed_entries(trial: Trial) -> None:
    answers = (await trial.me.post([1, envelope("agent.list", {"limit": 1}, 5), {"foo": "boo"}])).json()
    expect(
        isinstance(answers, list) and len(answers) == 3, f"expected three responses, got {brief(answers)}."
    )
    told = [symbol_in(answer) for answer in answers]
    same(told, ["invalid_request", "result", "invalid_request"], "the answers to a batch")


async def envelope_15_initialize_in_batch(trial: Trial) -> None:
    answers = (await trial.me.post([envelope("initialize", hello(), 1)])).json()
    answer = answers[0] if isinstance(answers, list) else answers
    require_error(answer, "invalid_request", "initialize in a batch")


async def envelope_16_batch_limit(trial: Trial) -> None:
    batch = [envelope("agent.list", {"limit": 1}, number) for number in range(MANY)]
    answer = (await trial.me.post(batch)).json()
    expect(isinstance(answer, dict), f"expected one response to {MANY} calls, got {brief(answer)}.")
    require_error(answer, "invalid_request", f"a batch of {MANY}")


async def envelope_17_status(trial: Trial) -> None:
    me = trial.me
    bad_token = me.headers(Authorization="Bearer nobody")
    for what, answer in {
        "an unknown id": await me.post(envelope("agent.get", {"agent_id": nobody("agt")})),
        "bad params": await me.post(envelope("agent.create", {})),
        "an unknown token": await me.post(envelope("agent.list", {}), bad_token),
        "an unknown session": await me.post(envelope("agent.list", {}), me.headers(X_AEP_Session_Id="ses_x")),
        "an unknown version": await me.post(
            envelope("agent.list", {}), me.headers(Agent_Protocol_Version="aep-1999-01-01")
        ),
    }.items():
        expect(answer.status < 500, f"{what} is answered under HTTP {answer.status}.")
        expect("error" in answer.json(), f"{what} should be an error, got {brief(answer.json())}.")


async def envelope_18_symbols(trial: Trial) -> None:
    asked: list[tuple[str, Any]] = [
        ("agent.get", {"agent_id": nobody("agt")}),
        ("agent.create", {}),
        ("agent.nonsense", {}),
        ("agent.list", {"cursor": "nonsense"}),
    ]
    for method, params in asked:
        answer = await trial.me.answer(method, params)
        data = answer.get("error", {}).get("data")
        told = data.get("symbol") if isinstance(data, dict) else None
        same(told, symbol_in(answer), f"the symbol of {brief(answer)}")


async def envelope_19_get(trial: Trial) -> None:
    answer = await trial.me.get(RPC)
    same(answer.status, 405, f"the status of GET {RPC}")
    expect("POST" in answer.headers.get("allow", ""), "the header Allow should name POST.")


async def envelope_20_large_body(trial: Trial) -> None:
    body = b'{"jsonrpc":"2.0","id":1,"method":"agent.list","params":{"cursor":"' + b"x" * LARGE_BYTES + b'"}}'
    answer = await trial.me.post(body)
    expect(answer.status < 500, f"{LARGE_BYTES} bytes are answered under HTTP {answer.status}.")
    expect("error" in answer.json(), f"{LARGE_BYTES} bytes should be refused, got {brief(answer.json())}.")


async def envelope_21_deep_body(trial: Trial) -> None:
    body = b'{"jsonrpc":"2.0","id":1,"method":"agent.list","params":' + b"[" * DEEP + b"]" * DEEP + b"}"
    answer = await trial.me.post(body)
    expect(answer.status < 500, f"{DEEP} levels are answered under HTTP {answer.status}.")
    told = symbol_in(answer.json())
    expect(told in PARSED_AS_ERROR, f"{DEEP} levels should be refused as bad JSON, got {told}.")
    await trial.me.call("agent.list", limit=1)


async def envelope_22_absent_params(trial: Trial) -> None:
    answer = (await trial.me.post({"jsonrpc": "2.0", "id": 1, "method": "agent.list"})).json()
    same(symbol_in(require_response(answer, 1, "agent.list")), "result", "agent.list without params")


async def envelope_23_content_type(trial: Trial) -> None:
    for body in (envelope("agent.list", {"limit": 1}), envelope("agent.nonsense"), b"nonsense"):
        same((await trial.me.post(body)).kind(), "application/json", "the content type")


async def envelope_24_header_case(trial: Trial) -> None:
    headers = {name.upper(): value for name, value in trial.me.headers().items()}
    lower = {name.lower(): value for name, value in trial.me.headers().items()}
    for told in (headers, lower):
        same(symbol_in(await trial.me.answer("agent.list", {"limit": 1}, told)), "result", "the answer")


# -------------------------------------------------------------------- versions


async def version_01_unknown_requested(trial: Trial) -> None:
    params = {**hello(), "requested_versions": ["aep-1999-01-01"]}
    require_error(await trial.stranger.answer("initialize", params), "version_mismatch", "initialize")


async def version_02_unknown_header(trial: Trial) -> None:
    me = trial.me
    for method, params in (("agent.list", {}), ("initialize", hello())):
        headers = me.headers(Agent_Protocol_Version="aep-1999-01-01")
        require_error(await me.answer(method, params, headers), "version_mismatch", method)


async def version_03_no_header(trial: Trial) -> None:
    headers = trial.me.headers(Agent_Protocol_Version=None)
    for method, params in (("agent.list", {}), ("initialize", hello())):
        require_error(await trial.me.answer(method, params, headers), "version_mismatch", method)


async def version_04_answers_name_it(trial: Trial) -> None:
    me = trial.me
    run = await trial.run()
    answers = {
        "a result": await me.post(envelope("agent.list", {"limit": 1})),
        "an error": await me.post(envelope("agent.nonsense")),
        "a parse error": await me.post(b"{"),
        "an unknown token": await me.post(envelope("agent.list"), me.headers(Authorization="Bearer nobody")),
        "an unknown stream": await me.get(events_path(nobody("run"))),
        "unknown bytes": await me.get(bytes_path(nobody("art"))),
    }
    told = {what: answer.headers.get("agent-protocol-version") for what, answer in answers.items()}
    if trial.has("streaming.sse"):
        told["a stream"] = (await me.listen(run["id"], enough=1)).headers.get("agent-protocol-version")
    same(told, dict.fromkeys(told, expected().version), "the header Agent-Protocol-Version")


async def version_05_says_what_is_served(trial: Trial) -> None:
    params = {**hello(), "requested_versions": ["aep-1999-01-01"]}
    error = require_error(await trial.stranger.answer("initialize", params), "version_mismatch", "initialize")
    served = (error.get("data") or {}).get("supported_versions")
    expect(
        isinstance(served, list) and expected().version in served,
        f"data.supported_versions is {brief(served)}.",
    )


async def version_06_first_served(trial: Trial) -> None:
    params = {**hello(), "requested_versions": ["aep-1999-01-01", expected().version, "aep-2999-01-01"]}
    result = await trial.stranger.call("initialize", **params)
    same(result.get("protocol_version"), expected().version, "protocol_version")


async def version_07_streams_and_bytes(trial: Trial) -> None:
    for path in (events_path(nobody("run")), bytes_path(nobody("art"))):
        answer = await trial.me.get(path, Agent_Protocol_Version="aep-1999-01-01")
        same(answer.status, 400, f"the status of {path} in an unknown version")


async def version_08_before_the_token(trial: Trial) -> None:
    headers = trial.me.headers(Agent_Protocol_Version="aep-1999-01-01", Authorization="Bearer nobody")
    require_error(await trial.me.answer("agent.list", {}, headers), "version_mismatch", "a doubly bad call")
