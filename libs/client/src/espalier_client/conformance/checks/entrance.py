"""Who is let in, and to what: tokens, sessions, capabilities, scopes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from espalier_client.conformance.expected import (
    all_methods,
    expected,
    nobody,
    require_shape,
    sample_params,
    symbol_of,
)
from espalier_client.conformance.ground import Trial, agent_params
from espalier_client.conformance.verdicts import Failed, Skipped, brief, expect, same
from espalier_client.conformance.wire import (
    Caller,
    bytes_path,
    envelope,
    events_path,
    hello,
    require_error,
    symbol_in,
)

NOBODY_S: Final = "hlx_nobody0123456789abcdefghijklmnopqrstu"
SERVER: Final = {"url": "https://example.invalid/mcp", "name": "kit"}

# -------------------------------------------------------------------- tokens


async def auth_01_unknown_token(trial: Trial) -> None:
    me = trial.me
    for token in (None, f"Bearer {NOBODY_S}", f"Bearer {me.key}x", f"Bearer {me.key[:-1]}"):
        for method, params in (("agent.list", {}), ("initialize", hello()), ("run.get", {"run_id": "run_x"})):
            answer = await me.answer(method, params, me.headers(Authorization=token))
            require_error(answer, "authn_failed", f"{method} without a known token")


async def _challenged(trial: Trial, path: str) -> None:
    for token in (None, f"Bearer {NOBODY_S}"):
        answer = await trial.me.get(path, Authorization=token)
        same(answer.status, 401, f"the status of {path} without a known token")
        challenge = answer.headers.get("www-authenticate", "")
        expect(challenge.lower().startswith("bearer"), f"WWW-Authenticate says {challenge!r}.")


async def auth_02_stream(trial: Trial) -> None:
    await _challenged(trial, events_path((await trial.run())["id"]))


async def auth_03_bytes(trial: Trial) -> None:
    await _challenged(trial, bytes_path(nobody("art")))


async def auth_04_not_one_token(trial: Trial) -> None:
    key = trial.me.key
    for header in ("Bearer", key, f"Basic {key}", f"Bearer {key} {key}", f"Bearer {key}, {key}"):
        answer = await trial.me.answer("agent.list", {}, trial.me.headers(Authorization=header))
        require_error(answer, "authn_failed", f"Authorization {header.replace(key, 'KEY')!r}")


async def auth_05_session_is_no_token(trial: Trial) -> None:
    me = trial.me
    for header in (None, f"Bearer {me.session_id}"):
        answer = await me.answer("agent.list", {}, me.headers(Authorization=header))
        require_error(answer, "authn_failed", "a call with a session alone")


async def auth_06_token_is_not_repeated(trial: Trial) -> None:
    headers = trial.me.headers(Authorization=f"Bearer {NOBODY_S}")
    answer = await trial.me.post(envelope("agent.list", {}), headers)
    expect(NOBODY_S.encode() not in answer.body, "the refusal repeats the token.")


# -------------------------------------------------------------------- sessions


async def session_01_initialize(trial: Trial) -> None:
    result = await trial.stranger.call("initialize", **hello())
    require_shape(result, "Initialized", "the result of initialize")
    same(result["protocol_version"], expected().version, "protocol_version")


async def session_02_id(trial: Trial) -> None:
    sessions = [(await trial.stranger.initialize()).session_id for _ in range(2)]
    for session in sessions:
        expect(session.startswith("ses_") and len(session) <= 64, f"the session id is {session[:80]!r}.")
        expect(all(each.isalnum() or each in "-_.~" for each in session), "the session id is not URL-safe.")
    expect(sessions[0] != sessions[1], "two sessions have one id.")


async def session_03_unknown(trial: Trial) -> None:
    me = trial.me
    for session in (nobody("ses"), "nonsense", f"{me.session_id[:-1]}x"):
        answer = await me.answer("agent.list", {}, me.headers(X_AEP_Session_Id=session))
        require_error(answer, "session_expired", "a call under an unknown session")


async def session_04_missing(trial: Trial) -> None:
    answer = await trial.stranger.answer("agent.list", {})
    require_error(answer, "session_expired", "a call without a session")


async def session_05_initialize_again(trial: Trial) -> None:
    for session in (nobody("ses"), trial.me.session_id):
        await replace(trial.stranger, session_id=session).initialize()


async def session_06_of_another(trial: Trial) -> None:
    borrowed = replace(trial.me, session_id=trial.they.session_id)
    require_error(await borrowed.answer("agent.list", {}), "session_expired", "a call under their session")


async def session_07_stream_and_bytes(trial: Trial) -> None:
    for path in (events_path((await trial.run())["id"]), bytes_path(nobody("art"))):
        for session in (None, nobody("ses")):
            answer = await trial.me.get(path, X_AEP_Session_Id=session)
            same(answer.status, 401, f"the status of {path} without a known session")


async def session_08_side_by_side(trial: Trial) -> None:
    bare = await trial.stranger.initialize(capabilities=[])
    rich = await trial.stranger.initialize()
    gated = next(
        (name for name in expected().capabilities if name != "streaming.sse" and trial.has(name)), None
    )
    for _ in range(2):
        for caller in (bare, rich):
            await caller.call("agent.list", limit=1)
        if gated is not None and (method := _gated_by(gated)):
            params = sample_params(method)
            require_error(await bare.answer(method, params), "capability_not_supported", method)
            told = symbol_in(await rich.answer(method, params))
            expect(
                told != "capability_not_supported", f"{method} is refused in the session that has {gated}."
            )


async def session_09_missing_members(trial: Trial) -> None:
    for name in hello():
        params = {key: value for key, value in hello().items() if key != name}
        answer = await trial.stranger.answer("initialize", params)
        require_error(answer, "invalid_params", f"initialize without {name}")


# -------------------------------------------------------------------- capabilities


def _gated_by(capability: str) -> str | None:
    return next(
        (name for name, needs in all_methods().items() if needs.get("capability") == capability), None
    )


async def capability_01_nine_booleans(trial: Trial) -> None:
    for asked in ([], expected().capabilities):
        agreed = (await trial.stranger.initialize(capabilities=asked)).capabilities
        missing = [name for name in expected().capabilities if not isinstance(agreed.get(name), bool)]
        same(missing, [], "capabilities that are not answered as booleans")


async def capability_02_streaming_unasked(trial: Trial) -> None:
    if not trial.has("streaming.sse"):
        raise Skipped("The runtime does not offer streaming.sse.")
    wishes: tuple[list[str] | dict[str, bool], ...] = ([], {"streaming.sse": False})
    for asked in wishes:
        agreed = (await trial.stranger.initialize(capabilities=asked)).capabilities
        same(agreed.get("streaming.sse"), True, "streaming.sse")


async def capability_03_unknown(trial: Trial) -> None:
    name = "kit.nonsense"
    agreed = (await trial.stranger.initialize(capabilities=[name, "streaming.sse"])).capabilities
    expect(agreed.get(name) in (None, False), f"{name} was agreed on.")


async def capability_04_not_asked_for(trial: Trial) -> None:
    names = [name for name in expected().capabilities if name != "streaming.sse"]
    asked: dict[str, bool]
    for asked in ({}, dict.fromkeys(names, False)):
        agreed = (await trial.stranger.initialize(capabilities=asked)).capabilities
        same(
            [name for name in names if agreed.get(name)], [], "capabilities agreed on without being asked for"
        )


async def _gated(trial: Trial, capability: str) -> None:
    bare = await trial.stranger.initialize(capabilities=[])
    others = [name for name in (*expected().capabilities, *expected().extensions) if name != capability]
    all_others = await trial.stranger.initialize(capabilities=others)
    for method, needs in all_methods().items():
        if needs.get("capability") == capability:
            for caller in (bare, all_others):
                answer = await caller.answer(method, sample_params(method))
                require_error(answer, "capability_not_supported", f"{method} without {capability}")


async def capability_05_memory(trial: Trial) -> None:
    await _gated(trial, "self.learning_memory")


async def capability_06_messages(trial: Trial) -> None:
    await _gated(trial, "messaging.peer")


async def capability_07_subjects(trial: Trial) -> None:
    await _gated(trial, "compliance.gdpr")


async def capability_08_prompt_changes(trial: Trial) -> None:
    await _gated(trial, "self.modify_prompt")


async def capability_09_providers(trial: Trial) -> None:
    await _gated(trial, "runner.byo_llm")


async def _gated_fields(trial: Trial, field: str, values: Sequence[Any]) -> None:
    bare = await trial.stranger.initialize(capabilities=[])
    agent = await bare.call("agent.create", **agent_params())
    for value in values:
        created = await bare.answer("agent.create", agent_params(**{field: value}))
        require_error(created, "capability_not_supported", f"agent.create with {field}")
        updated = await bare.answer("agent.update", {"agent_id": agent["id"], field: value})
        require_error(updated, "capability_not_supported", f"agent.update with {field}")


async def capability_10_servers(trial: Trial) -> None:
    await _gated_fields(trial, "external_mcp_servers", [[SERVER]])


async def capability_11_runner(trial: Trial) -> None:
    await _gated_fields(trial, "runner", [{"model": "x"}, {"provider_id": nobody("prv")}])


async def capability_12_false_is_false(trial: Trial) -> None:
    for method, needs in all_methods().items():
        capability = needs.get("capability")
        if capability in expected().capabilities and not trial.has(capability):
            answer = await trial.me.answer(method, sample_params(method))
            require_error(
                answer, "capability_not_supported", f"{method}, whose {capability} is answered false"
            )


async def capability_13_true_is_true(trial: Trial) -> None:
    for method, needs in all_methods().items():
        if "capability" not in needs or trial.has(needs["capability"]):
            told = symbol_in(await trial.me.answer(method, sample_params(method)))
            wrong = told in ("capability_not_supported", "method_not_found")
            expect(not wrong, f"{method}: {needs.get('capability', 'a core method')} is offered, got {told}.")


async def capability_14_before_scope(trial: Trial) -> None:
    asked = 0
    for caller, scopes in await trial.limited():
        bare = await caller.initialize(capabilities=[])
        for method, needs in expected().methods.items():
            if "capability" in needs and needs["scope"] not in scopes:
                answer = await bare.answer(method, sample_params(method))
                require_error(answer, "capability_not_supported", method)
                asked += 1
    if not asked:
        raise Skipped("No limited key lacks the scope of a method that a capability gates.")


# -------------------------------------------------------------------- scopes


async def _needs_scopes(trial: Trial, methods: Sequence[str]) -> None:
    """With keys that have it each is let past this rung, with keys that lack it none is."""
    lacking: set[str] = set()
    for caller, scopes in await trial.limited():
        for method in methods:
            scope = all_methods()[method]["scope"]
            told = symbol_in(await caller.answer(method, _with_create(method)))
            if scope in scopes:
                expect(told != "authz_denied", f"{method} is refused to a key that has {scope}.")
                continue
            same(
                told,
                "authz_denied",
                f"{method} with a key that has {', '.join(sorted(scopes)) or 'no scope'}",
            )
            lacking.add(method)
    missing = [method for method in methods if method not in lacking]
    if missing:
        raise Skipped(f"No limited key lacks the scope of {', '.join(missing)}.")


def _with_create(method: str) -> dict[str, Any]:
    return agent_params(name=5) if method == "agent.create" else sample_params(method)


async def scope_01_agent_read(trial: Trial) -> None:
    await _needs_scopes(trial, ["agent.get", "agent.list"])


async def scope_02_agent_write(trial: Trial) -> None:
    await _needs_scopes(trial, ["agent.create", "agent.update", "agent.cancel", "agent.archive"])


async def scope_03_run_create(trial: Trial) -> None:
    await _needs_scopes(trial, ["run.create", "run.continue", "artifact.delete"])


async def scope_04_run_cancel(trial: Trial) -> None:
    await _needs_scopes(trial, ["run.cancel"])


async def scope_05_run_read(trial: Trial) -> None:
    await _needs_scopes(trial, ["run.get", "run.list", "artifact.get", "artifact.list"])


async def _needs_on(trial: Trial, path: str, needed: set[str]) -> None:
    lacking = False
    for caller, scopes in await trial.limited():
        status = (await caller.get(path)).status
        if needed <= scopes:
            same(status, 404, f"the status of {path} with {', '.join(sorted(needed))}")
        else:
            same(status, 403, f"the status of {path} with a key that has {', '.join(sorted(scopes))}")
            lacking = True
    if not lacking:
        raise Skipped(f"No limited key lacks {' or '.join(sorted(needed))}.")


async def scope_06_streams(trial: Trial) -> None:
    await _needs_on(trial, events_path(nobody("run")), {"stream.subscribe", "run.read"})


async def scope_07_bytes(trial: Trial) -> None:
    await _needs_on(trial, bytes_path(nobody("art")), {"run.read"})


async def scope_08_memory(trial: Trial) -> None:
    await _needs_scopes(trial, ["memory.read", "memory.search", "memory.write", "memory.delete"])


async def scope_09_messages(trial: Trial) -> None:
    await _needs_scopes(trial, ["message.send", "message.inbox", "message.list"])


async def scope_10_subjects(trial: Trial) -> None:
    await _needs_scopes(trial, ["subject.read", "subject.export", "subject.erase"])


async def scope_11_providers(trial: Trial) -> None:
    await _needs_scopes(trial, ["provider.list"])


async def scope_12_prompt_changes(trial: Trial) -> None:
    await _needs_scopes(trial, ["agent.approve_prompt_change"])


async def scope_13_approvals(trial: Trial) -> None:
    await _needs_scopes(trial, list(expected().extension_methods))


async def scope_14_names_it(trial: Trial) -> None:
    for caller, scopes in await trial.limited():
        for method in ("agent.list", "run.cancel"):
            scope = expected().methods[method]["scope"]
            if scope not in scopes:
                error = await caller.refused("authz_denied", method, **sample_params(method))
                same(
                    (error.get("data") or {}).get("required_scope"), scope, f"data.required_scope of {method}"
                )
                return
    raise Skipped("No limited key lacks agent.read or run.cancel.")


async def scope_15_initialize(trial: Trial) -> None:
    keys = list(trial.ground.keys.limited)
    for key in keys:
        answer = await Caller(trial.ground.http, key, notes=trial.notes).answer("initialize", hello())
        if "error" in answer:
            told = symbol_of(answer["error"]["code"])
            raise Failed(f"initialize is refused to a limited key with {told}: {brief(answer['error'])}.")
