"""Data subjects on the wire: made, found, read, exported, erased, each in both published dialects."""

import json
from typing import Any

import anyio
import pytest
from families import BUDGETS, CEILINGS, HELPER, SLEEPS, WAITS, asleep, children, spawn
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from scripted_runs import row_of
from tests.integration.conftest import Start
from tests.integration.test_wire_agent_changes import meanwhile
from tests.integration.wire import AGENT, ANSWER_WAIT_S, POLL_S, Gateway, Wire, running_gateway, symbol
from tests.integration.wire_artifacts import keep_artifact
from tests.integration.wire_runs import event_types, lease, put_to_sleep, uuid

from espalier_acts.prompts import change_constitution
from espalier_acts.runs import cancel_run
from espalier_acts.subjects import begin_erasure, erase_a_part
from espalier_eventlog import stream_key
from espalier_gateway.settings import GatewaySettings
from espalier_local.ports import free_port
from espalier_protocol.agent import ConstitutionChange
from espalier_protocol.ids import to_wire
from espalier_store.pool import Connection, Pool, transaction

pytestmark = pytest.mark.anyio

SUBJECTS = "/api/me/subjects"
KINDS = ("agents", "runs", "artifacts", "memory", "messages", "prompt_history")


async def rest(wire: Wire, verb: str, path: str, body: Any = None) -> tuple[int, Any]:
    """(status, JSON) of a call of the REST surface, which needs a key and no session."""
    response = await wire.http.request(verb, path, json=body, headers={"Authorization": f"Bearer {wire.key}"})
    return response.status_code, response.json() if response.content else None


async def counts(wire: Wire, subject: str) -> dict[str, int]:
    """How many records of each kind a read finds, without those of which there are none."""
    found = (await wire.call("subject.read", subject_id=subject))["counts"]
    return {kind: number for kind, number in found.items() if number}


def acts(manifest: dict[str, Any]) -> set[tuple[str, str, str]]:
    """(what was done, kind, id) of every entry."""
    return {
        (action, entry["kind"], entry["id"])
        for action in ("deleted", "redacted", "stripped", "retained")
        for entry in manifest[action]
    }


async def one_of_each(wire: Wire, pool: Pool, subject: str) -> dict[str, str]:
    """An agent of the subject with a run that has an artifact, a memory record and a message. Their ids."""
    agent = await wire.agent(subject_ids=[subject])
    run = await wire.run(agent)
    await put_to_sleep(pool, run)
    record = await wire.call(
        "memory.write", tree_root_id=agent, namespace="n", key="k", value="v", subject_id=subject
    )
    message = await wire.call("message.send", to_agent_id=agent, body="hello")
    artifact = await keep_artifact(pool, run, b"words", subject_id=subject)
    return {
        "agent": agent,
        "run": run,
        "artifact": artifact,
        "memory": record["id"],
        "message": message["id"],
    }


# ------------------------------------------------------------------ the subjects themselves


async def test_a_subject_is_made_changed_listed_and_deleted(wire: Wire) -> None:
    status, made = await rest(wire, "POST", SUBJECTS, {"metadata": {"a": 1}, "aepId": "sub_abc"})
    assert status == 200
    assert (made["id"], made["subject_id"], made["metadata"], made["legal_hold"], made["erased_at"]) == (
        "sub_abc",
        "sub_abc",
        {"a": 1},
        False,
        None,
    )
    status, changed = await rest(wire, "PATCH", f"{SUBJECTS}/sub_abc", {"legalHold": True})
    assert (status, changed["metadata"], changed["legal_hold"]) == (200, {"a": 1}, True)
    _, listed = await rest(wire, "GET", SUBJECTS)
    assert listed == {"subjects": [changed], "next_cursor": None}
    assert (await rest(wire, "DELETE", f"{SUBJECTS}/sub_abc"))[0] == 409, "a legal hold is on it"
    await rest(wire, "PATCH", f"{SUBJECTS}/sub_abc", {"legalHold": False})
    assert await rest(wire, "DELETE", f"{SUBJECTS}/sub_abc") == (204, None)
    status, gone = await rest(wire, "GET", f"{SUBJECTS}/sub_abc")
    assert (status, gone["error"]) == (404, "not_found")


async def test_a_subject_without_an_id_gets_one_and_a_second_one_with_the_same_id_is_refused(
    wire: Wire,
) -> None:
    _, made = await rest(wire, "POST", SUBJECTS, {})
    assert made["id"].startswith("sub_")
    status, refused = await rest(wire, "POST", SUBJECTS, {"aepId": made["id"]})
    assert (status, refused["error"]) == (409, "conflict")


async def test_a_subject_with_records_is_not_deleted(wire: Wire) -> None:
    await wire.agent(subject_ids=["sub_abc"])
    status, refused = await rest(wire, "DELETE", f"{SUBJECTS}/sub_abc")
    assert (status, refused["error"]) == (409, "conflict")


async def test_subjects_of_others_are_unknown(wire: Wire, gateway: Gateway) -> None:
    await wire.agent(subject_ids=["sub_abc"])
    other = await gateway.caller("two")
    for method in ("subject.read", "subject.export"):
        assert symbol(await other.answer(method, {"subject_id": "sub_abc"})) == "subject_not_found"
    erased = await other.answer("subject.erase", {"subject_id": "sub_abc", "mode": "redact"})
    assert symbol(erased) == "subject_not_found"
    for verb, path, body in (
        ("GET", "", None),
        ("PATCH", "", {"legalHold": True}),
        ("DELETE", "", None),
        ("POST", "/erase", {"mode": "redact"}),
        ("GET", "/export", None),
    ):
        assert (await rest(other, verb, f"{SUBJECTS}/sub_abc{path}", body))[0] == 404, (verb, path)
    assert await counts(wire, "sub_abc") == {"agents": 1}


# ------------------------------------------------------------------ tags


async def test_a_tag_makes_the_subject_known_and_a_run_has_those_of_its_agent_too(wire: Wire) -> None:
    agent = await wire.agent(subject_ids=["sub_a", "sub_a"])
    run = await wire.run(agent, subject_ids=["sub_b"])
    assert (await wire.call("run.get", run_id=run))["subject_ids"] == ["sub_a", "sub_b"]
    assert await counts(wire, "sub_a") == {"agents": 1, "runs": 1}
    assert await counts(wire, "sub_b") == {"runs": 1}


async def test_a_message_of_an_embedder_is_about_the_recipients_subjects(wire: Wire) -> None:
    agent = await wire.agent(subject_ids=["sub_a"])
    await wire.call("message.send", to_agent_id=agent, body="hello")
    assert await counts(wire, "sub_a") == {"agents": 1, "messages": 1}


async def test_an_empty_id_is_no_subject(wire: Wire) -> None:
    error = await wire.refused("run.create", agent_id=await wire.agent(), goal="x", subject_ids=[""])
    assert error["data"]["symbol"] == "invalid_params"


# ------------------------------------------------------------------ reading


async def test_a_read_has_both_dialects_and_everything_that_is_tagged(wire: Wire, pool: Pool) -> None:
    ids = await one_of_each(wire, pool, "sub_a")
    await wire.agent()
    read = await wire.call("subject.read", subject_id="sub_a")
    assert read["counts"] == {**dict.fromkeys(KINDS, 1), "prompt_history": 0}
    assert read["left_out"] == dict.fromkeys(KINDS, 0)
    assert {kind: [each["id"] for each in read["records"][kind]] for kind in KINDS} == {
        "agents": [ids["agent"]],
        "runs": [ids["run"]],
        "artifacts": [ids["artifact"]],
        "memory": [ids["memory"]],
        "messages": [ids["message"]],
        "prompt_history": [],
    }
    for kind in KINDS:
        top = "memory_records" if kind == "memory" else kind
        assert read[top] == read["records"][kind]
        assert all(each["aepId"] == each["id"] for each in read[top])
    assert (read["subject_id"], read["metadata"], read["legal_hold"]) == ("sub_a", {}, False)
    assert read["portable_format_version"] == "1"
    assert read["generated_at"] == read["fetched_at"] == read["exported_at"]
    artifact = read["artifacts"][0]
    assert (artifact["content_preview"], artifact["has_binary_bytes"]) == ("words", False)
    assert "bytes_base64" not in artifact
    assert (await rest(wire, "GET", f"{SUBJECTS}/sub_a"))[1]["counts"] == read["counts"]


async def test_an_export_has_contents_as_text_and_as_bytes(wire: Wire, pool: Pool) -> None:
    run = await wire.run()
    await keep_artifact(pool, run, "wörds".encode(), subject_id="sub_a")
    await keep_artifact(pool, run, b"\xff\xfe", subject_id="sub_a")
    await wire.call(
        "memory.write", tree_root_id=await wire.agent(), namespace="n", key="k", value=1, subject_id="sub_a"
    )
    export = await wire.call("subject.export", subject_id="sub_a")
    told = [
        (each["content"], each["bytes_base64"], each["content_preview"], each["has_binary_bytes"])
        for each in export["artifacts"]
    ]
    assert told == [(None, "//4=", None, True), ("wörds", "d8O2cmRz", "wörds", False)]


@pytest.mark.slow
async def test_an_answer_has_room_for_a_hundred_of_a_kind_and_says_what_is_left_out(wire: Wire) -> None:
    root = await wire.agent()
    for number in range(101):
        await wire.call(
            "memory.write", tree_root_id=root, namespace="n", key=str(number), value=1, subject_id="sub_a"
        )
    read = await wire.call("subject.read", subject_id="sub_a")
    assert (len(read["memory_records"]), read["counts"]["memory"], read["left_out"]["memory"]) == (
        100,
        101,
        1,
    )
    response = await wire.http.get(
        f"{SUBJECTS}/sub_a/export", headers={"Authorization": f"Bearer {wire.key}"}
    )
    assert response.headers["content-disposition"].startswith("attachment")
    lines = [json.loads(line) for line in response.content.splitlines()]
    assert (lines[0]["bundle"], lines[0]["portable_format_version"]) == ("espalier.subject", "1")
    assert sum(line.get("kind") == "memory" for line in lines) == 101
    assert lines[-1] == {"kind": "end", "counts": {**dict.fromkeys(KINDS, 0), "memory": 101}}


# ------------------------------------------------------------------ erasing


async def test_a_redaction_takes_the_words_and_leaves_husks(wire: Wire, pool: Pool) -> None:
    ids = await one_of_each(wire, pool, "sub_a")
    manifest = await wire.call("subject.erase", subject_id="sub_a", mode="redact")
    assert acts(manifest) == {("redacted", kind, id_) for kind, id_ in ids.items()}
    assert (manifest["subject_id"], manifest["mode"], manifest["entries_left_out"]) == ("sub_a", "redact", 0)
    assert manifest["generated_at"] == manifest["performed_at"]
    assert all(entry["resource"] == entry["kind"] for entry in manifest["redacted"])
    agent = await wire.call("agent.get", agent_id=ids["agent"])
    assert (agent["name"], agent["metadata"], agent["subject_ids"], agent["toolset"]) == (
        "[REDACTED]",
        {},
        [],
        [],
    )
    assert agent["lifecycle_state"] == "archived", "without its directives it must not go on"
    run = await wire.call("run.get", run_id=ids["run"])
    assert (run["state"], run["goal"], run["metadata"], run["result"], run["subject_ids"]) == (
        "cancelled",
        "[REDACTED]",
        {},
        {"redacted": True},
        ["sub_a"],
    )
    artifact = await wire.call("artifact.get", artifact_id=ids["artifact"])
    assert (artifact["name"], artifact["size_bytes"], artifact["subject_id"]) == ("[REDACTED]", 0, None)
    content = await wire.get(f"/aep/v1/artifacts/{ids['artifact']}/bytes")
    assert (content.status_code, content.content) == (200, b"")
    message = (await wire.call("message.list", agent_id=ids["agent"]))["items"][0]
    assert message["body"] == {"redacted": True}
    memory = await wire.call("memory.read", tree_root_id=ids["agent"], namespace="[REDACTED]")
    assert [record["value"] for record in memory["items"]] == [{"redacted": True}]
    assert await event_types(pool, ids["run"]) == ["run.started", "run.ended"]
    assert await counts(wire, "sub_a") == {"runs": 1}
    assert await pool.fetchval("select count(*) from blob_chunks") == 0


async def test_a_hard_delete_leaves_the_agent_as_a_husk_and_nothing_else(wire: Wire, pool: Pool) -> None:
    ids = await one_of_each(wire, pool, "sub_a")
    await pool.execute("update messages set read_at = now()")
    manifest = await wire.call("subject.erase", subject_id="sub_a", mode="hard_delete")
    agent = ids.pop("agent")
    assert acts(manifest) == {
        ("redacted", "agent", agent),
        *(("deleted", kind, id_) for kind, id_ in ids.items()),
    }
    assert manifest["redacted"][0]["reason"] == "agents_stay"
    assert await counts(wire, "sub_a") == {}
    for table in ("runs", "journal", "events", "snapshots", "artifacts", "blobs", "messages"):
        assert await pool.fetchval(f"select count(*) from {table}") == 0, table
    assert await pool.fetchval("select count(*) from memory_records") == 0


async def test_a_hard_delete_after_a_redaction_takes_the_husks_of_runs_too(wire: Wire, pool: Pool) -> None:
    ids = await one_of_each(wire, pool, "sub_a")
    await wire.call("subject.erase", subject_id="sub_a", mode="redact")
    again = await wire.call("subject.erase", subject_id="sub_a", mode="redact")
    assert acts(again) == set()
    gone = await wire.call("subject.erase", subject_id="sub_a", mode="hard_delete")
    assert acts(gone) == {("deleted", "run", ids["run"]), ("deleted", "artifact", ids["artifact"])}


async def test_what_is_about_others_too_is_stripped_and_not_destroyed(wire: Wire, pool: Pool) -> None:
    agent = await wire.agent(subject_ids=["sub_a", "sub_b"], name="both")
    run = await wire.run(agent, goal="for both")
    await wire.call("message.send", to_agent_id=agent, body="to both")
    manifest = await wire.call("subject.erase", subject_id="sub_a", mode="hard_delete")
    assert {(action, kind) for action, kind, _ in acts(manifest)} == {
        ("stripped", "agent"),
        ("stripped", "run"),
        ("stripped", "message"),
    }
    kept = await wire.call("agent.get", agent_id=agent)
    assert (kept["name"], kept["subject_ids"], kept["lifecycle_state"]) == ("both", ["sub_b"], "active")
    stripped = await wire.call("run.get", run_id=run)
    assert (stripped["goal"], stripped["subject_ids"]) == ("for both", ["sub_b"])
    assert stripped["state"] == "cancelled", "it knew of both, and would have gone on to write of both"
    assert await counts(wire, "sub_b") == {"agents": 1, "runs": 1, "messages": 1}


async def test_bytes_that_somebody_elses_artifact_has_too_stay(wire: Wire, pool: Pool) -> None:
    run = await wire.run()
    mine = await keep_artifact(pool, run, b"the same", subject_id="sub_a")
    other = await keep_artifact(pool, run, b"the same")
    await wire.call("subject.erase", subject_id="sub_a", mode="hard_delete")
    assert (await wire.get(f"/aep/v1/artifacts/{mine}/bytes")).status_code == 404
    assert (await wire.get(f"/aep/v1/artifacts/{other}/bytes")).content == b"the same"


async def test_a_legal_hold_lets_nothing_be_touched(wire: Wire, pool: Pool) -> None:
    await one_of_each(wire, pool, "sub_a")
    await rest(wire, "PATCH", f"{SUBJECTS}/sub_a", {"legalHold": True, "metadata": {"kept": 1}})
    before = await pool.fetch("select * from runs")
    manifest = await wire.call("subject.erase", subject_id="sub_a", mode="hard_delete")
    assert acts(manifest) == {("retained", "subject", "sub_a")}
    assert manifest["retained"][0]["reason"] == "legal_hold"
    assert await pool.fetch("select * from runs") == before
    read = await wire.call("subject.read", subject_id="sub_a")
    assert (read["metadata"], read["counts"]["agents"]) == ({"kept": 1}, 1)


async def test_each_erasure_is_on_record_also_one_that_a_hold_stopped(wire: Wire, pool: Pool) -> None:
    ids = await one_of_each(wire, pool, "sub_a")
    await rest(wire, "PATCH", f"{SUBJECTS}/sub_a", {"legalHold": True})
    await wire.call("subject.erase", subject_id="sub_a", mode="redact")
    await rest(wire, "PATCH", f"{SUBJECTS}/sub_a", {"legalHold": False})
    await wire.call("subject.erase", subject_id="sub_a", mode="hard_delete")
    rows = await pool.fetch(
        "select mode, performed_at is not null as done, array(select kind from erased_records r"
        " where r.erasure_id = e.id order by kind) as kinds from erasures e order by created_at"
    )
    assert [tuple(row) for row in rows] == [
        ("redact", True, ["subject"]),
        ("hard_delete", True, sorted(ids)),
    ]


async def test_an_erased_subject_is_not_named_again_until_it_is_made_anew(wire: Wire) -> None:
    agent = await wire.agent()
    await rest(wire, "POST", SUBJECTS, {"aepId": "sub_a", "metadata": {"name": "x"}})
    await wire.call("subject.erase", subject_id="sub_a", mode="redact")
    tags: list[tuple[str, dict[str, Any]]] = [
        ("run.create", {"agent_id": agent, "goal": "x", "subject_ids": ["sub_a"]}),
        (
            "memory.write",
            {"tree_root_id": agent, "namespace": "n", "key": "k", "value": 1, "subject_id": "sub_a"},
        ),
    ]
    for method, params in tags:
        assert symbol(await wire.answer(method, params)) == "lifecycle_conflict", method
    status, refused = await rest(wire, "PATCH", f"{SUBJECTS}/sub_a", {"metadata": {"name": "x"}})
    assert (status, refused["error"]) == (409, "conflict")
    read = await wire.call("subject.read", subject_id="sub_a")
    assert read["metadata"] == {}, "the subject itself has lost its words, and can be read"
    status, anew = await rest(wire, "POST", SUBJECTS, {"aepId": "sub_a"})
    assert (status, anew["erased_at"]) == (200, None)
    for method, params in tags:
        await wire.call(method, **params)


@pytest.mark.slow
async def test_a_run_that_a_worker_holds_is_ended_over_its_head(wire: Wire, pool: Pool) -> None:
    run = await wire.run(await wire.agent(subject_ids=["sub_a"]), goal="secret")
    token = await lease(pool, run)
    manifest = await wire.call("subject.erase", subject_id="sub_a", mode="redact")
    assert ("redacted", "run", run) in acts(manifest)
    row = await pool.fetchrow("select state, goal, lease_token from runs where id = $1", uuid("run", run))
    assert row is not None
    assert (row["state"], row["goal"], row["lease_token"] > token) == ("cancelled", "[REDACTED]", True)


async def test_what_an_answer_to_a_create_said_is_forgotten_with_its_key(wire: Wire, pool: Pool) -> None:
    agent = await wire.agent(subject_ids=["sub_a"])
    for key, subjects in (("secret-key", ["sub_a"]), ("other-key", [])):
        await wire.post(
            {
                "jsonrpc": "2.0",
                "id": 1,
                "method": "run.create",
                "params": {
                    "agent_id": agent if subjects else await wire.agent(),
                    "goal": key,
                    "subject_ids": subjects,
                },
            },
            wire.headers(Idempotency_Key=key),
        )
    assert await pool.fetchval("select count(*) from idempotency") == 2
    await wire.call("subject.erase", subject_id="sub_a", mode="hard_delete")
    assert [row["key"] for row in await pool.fetch("select key from idempotency")] == ["other-key"]


async def test_an_unknown_mode_is_no_erasure(wire: Wire) -> None:
    await wire.agent(subject_ids=["sub_a"])
    assert (await wire.refused("subject.erase", subject_id="sub_a", mode="shred"))["data"][
        "symbol"
    ] == "invalid_params"
    status, refused = await rest(wire, "POST", f"{SUBJECTS}/sub_a/erase", {"mode": "shred"})
    assert (status, refused["error"]) == (400, "invalid_request")
    assert await counts(wire, "sub_a") == {"agents": 1}


async def test_rest_erases_like_the_method(wire: Wire) -> None:
    agent = await wire.agent(subject_ids=["sub_a"])
    status, manifest = await rest(wire, "POST", f"{SUBJECTS}/sub_a/erase", {"mode": "redact"})
    assert (status, acts(manifest)) == (200, {("redacted", "agent", agent)})


# ------------------------------------------------------------------ broken off


async def test_an_erasure_that_was_broken_off_is_finished_by_asking_again(wire: Wire, pool: Pool) -> None:
    """What one part has done is committed; the manifest in the end tells of all parts."""
    ids = await one_of_each(wire, pool, "sub_a")
    owner_id = await pool.fetchval("select owner_id from subjects")
    async with transaction(pool) as connection:
        begun = await begin_erasure(connection, owner_id, "sub_a", "redact")
    async with transaction(pool) as connection:
        assert await erase_a_part(connection, owner_id, begun.erasure)
    done = await pool.fetchval("select count(*) from erased_records")
    assert done == 1
    status, refused = await rest(wire, "POST", SUBJECTS, {"aepId": "sub_a"})
    assert (status, refused["error"]) == (409, "conflict"), "not made anew in the middle"
    manifest = await wire.call("subject.erase", subject_id="sub_a", mode="redact")
    assert acts(manifest) == {("redacted", kind, id_) for kind, id_ in ids.items()}
    assert await pool.fetchval("select count(*) from erasures") == 1


async def test_a_legal_hold_in_the_middle_stops_what_is_left(wire: Wire, pool: Pool) -> None:
    ids = await one_of_each(wire, pool, "sub_a")
    owner_id = await pool.fetchval("select owner_id from subjects")
    async with transaction(pool) as connection:
        begun = await begin_erasure(connection, owner_id, "sub_a", "redact")
    async with transaction(pool) as connection:
        assert await erase_a_part(connection, owner_id, begun.erasure)
    await rest(wire, "PATCH", f"{SUBJECTS}/sub_a", {"legalHold": True})
    manifest = await wire.call("subject.erase", subject_id="sub_a", mode="redact")
    assert acts(manifest) == {("redacted", "artifact", ids["artifact"]), ("retained", "subject", "sub_a")}
    assert (await wire.call("agent.get", agent_id=ids["agent"]))["name"] == AGENT["name"]


async def test_without_redis_an_erasure_is_not_said_to_be_done(
    gateway_settings: GatewaySettings, wire: Wire, pool: Pool
) -> None:
    """Its streams may still have the words. Asked again when Redis is there, it says what was done in all."""
    ids = await one_of_each(wire, pool, "sub_a")
    alone = gateway_settings.model_copy(update={"redis_url": f"redis://127.0.0.1:{free_port()}/0"})
    async with running_gateway(alone, pool) as other:
        refused = await (await other.caller("one")).refused(
            "subject.erase", subject_id="sub_a", mode="redact"
        )
    assert refused["data"]["symbol"] == "unavailable"
    assert await pool.fetchval("select performed_at from erasures") is None
    manifest = await wire.call("subject.erase", subject_id="sub_a", mode="redact")
    assert acts(manifest) == {("redacted", kind, id_) for kind, id_ in ids.items()}


async def test_a_stream_that_was_cleared_takes_no_older_event_any_more(
    gateway: Gateway, wire: Wire, pool: Pool
) -> None:
    """What another process has still queued comes late, and Redis refuses it."""
    run = await wire.run(await wire.agent(subject_ids=["sub_a"]))
    settings = gateway.state.settings
    async with Redis.from_url(settings.redis_url) as redis:
        key = stream_key(settings.redis_prefix, uuid("run", run))
        with anyio.fail_after(ANSWER_WAIT_S):
            while not await redis.xlen(key):
                await anyio.sleep(POLL_S)
        await wire.call("subject.erase", subject_id="sub_a", mode="redact")
        with pytest.raises(ResponseError, match="equal or smaller"):
            await redis.xadd(key, {"d": "late"}, id="99-0")
        assert await redis.xlen(key) == 0


# ------------------------------------------------------------------ while something else goes on


async def test_a_prompt_that_is_replaced_while_it_is_being_erased_leaves_nothing_in_the_history(
    wire: Wire, pool: Pool
) -> None:
    """The change puts the old words into the history in the moment in which the erasure looks for them."""
    await rest(wire, "POST", SUBJECTS, {"aepId": "sub_a"})
    agent = await wire.agent()
    knowing = "update agents set mutable_prompt = 'They like tea.', prompt_subject_ids = '{sub_a}'"
    await pool.execute(knowing)
    owner_id = await pool.fetchval("select owner_id from subjects")
    async with transaction(pool) as connection:
        begun = await begin_erasure(connection, owner_id, "sub_a", "redact")
    brief = ConstitutionChange(mutable_prompt="Be brief.")

    async def replace_it(connection: Connection) -> None:
        await change_constitution(connection, owner_id, uuid("agt", agent), brief, by="key_of_theirs")

    async def erase_all() -> None:
        more = True
        while more:  # bounded by what is tagged
            async with transaction(pool) as connection:
                more = await erase_a_part(connection, owner_id, begun.erasure)

    await meanwhile(pool, replace_it, erase_all)

    found = await wire.call("agent.get", agent_id=agent, include=["prompt_history"])
    assert found["constitution"]["mutable_prompt"] == "Be brief."
    assert "tea" not in json.dumps(found)


@pytest.mark.slow
async def test_what_an_erased_helper_did_not_use_comes_back_to_its_spawner(
    wire: Wire, pool: Pool, start: Start
) -> None:
    """Nobody has carried out the wake yet by which it would, and afterwards nobody could."""
    worker = start("worker", ESPALIER_MODELS_SCRIPTED="on")
    spawner = await wire.agent(toolset=[], ceilings=CEILINGS, budgets=BUDGETS)
    plan = [{"calls": [spawn([SLEEPS])]}, WAITS]
    run = await wire.run(spawner, inputs={"espalier.script": {"answers": plan}})
    assert (await asleep(pool, run, cycles=1))["cycles_granted"] == HELPER["max_cycles"]
    (child,) = await children(pool, run)
    await asleep(pool, to_wire("run", child["id"]), cycles=1)
    worker.kill()
    await rest(wire, "POST", SUBJECTS, {"aepId": "sub_a"})
    await pool.execute("update runs set subject_ids = '{sub_a}' where id = $1", child["id"])
    async with transaction(pool) as connection:
        await cancel_run(connection, child["owner_id"], child["id"], force=True)

    manifest = await wire.call("subject.erase", subject_id="sub_a", mode="hard_delete")

    assert ("deleted", "run", to_wire("run", child["id"])) in acts(manifest)
    assert await children(pool, run) == []
    assert (await row_of(pool, run))["cycles_granted"] == 1, "the one that it used"
