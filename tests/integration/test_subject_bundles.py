"""Bundles: what one runtime exports another one takes in, with every relation, under whoever imports it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.wire import AGENT, Gateway, Wire, symbol
from tests.integration.wire_artifacts import keep_artifact
from tests.integration.wire_runs import put_to_sleep

from espalier_client.bundle import BadBundle, BundleWriter, lines_of, stream_of
from espalier_client.client import AepClient
from espalier_client.errors import AepError, TransportError
from espalier_protocol.ids import to_wire
from espalier_store.ids import new_id
from espalier_store.pool import Pool

pytestmark = pytest.mark.anyio

SUBJECT = "sub_traveller"
IMPORT = "/api/me/subjects/import"
BIG = bytes(range(256)) * 2500
KINDS = ("agents", "runs", "artifacts", "memory", "messages", "prompt_history")
END_OF_ONE_AGENT = {"kind": "end", "counts": {**dict.fromkeys(KINDS, 0), "agents": 1}}


async def filled(wire: Wire, pool: Pool) -> dict[str, str]:
    """A subject with one of everything, and with a memory record in a tree of somebody else. Ids by what."""
    agent = await wire.agent(subject_ids=[SUBJECT], name="ours", metadata={"a": [1, 2]})
    run = await wire.run(agent, goal="go", inputs={"i": 1})
    await put_to_sleep(pool, run)
    artifacts = [
        await keep_artifact(pool, run, content, name=name, subject_id=SUBJECT)
        for name, content in (("big", BIG), ("same", BIG), ("empty", b""))
    ]
    shared = await wire.agent(name="shared")
    for root in (agent, shared):
        await wire.call(
            "memory.write", tree_root_id=root, namespace="n", key="k", value={"x": root}, subject_id=SUBJECT
        )
    message = await wire.call("message.send", to_agent_id=agent, body=["hello"])
    constitution = {**AGENT["constitution"], "mutable_prompt": "Say hello."}
    await wire.call("agent.update", agent_id=agent, constitution=constitution)
    return {"agent": agent, "run": run, "shared": shared, "message": message["id"], "artifact": artifacts[0]}


def client_of(wire: Wire, gateway: Gateway) -> AepClient:
    return AepClient(gateway.base_url, wire.key)


async def sent(wire: Wire, lines: list[bytes]) -> tuple[int, Any]:
    response = await wire.http.post(
        IMPORT,
        content=b"".join(lines),
        headers={"Authorization": f"Bearer {wire.key}", "Content-Type": "application/x-ndjson"},
    )
    return response.status_code, response.json()


@pytest.fixture
async def lines(wire: Wire, pool: Pool, gateway: Gateway, tmp_path: Path) -> list[bytes]:
    """The bundle of a filled subject, as it travels."""
    await filled(wire, pool)
    async with client_of(wire, gateway) as client:
        await client.subject_export_to(SUBJECT, tmp_path / "out")
    return [line async for line in stream_of(tmp_path / "out")]


async def test_what_was_exported_is_imported_with_all_relations(
    wire: Wire, pool: Pool, gateway: Gateway, tmp_path: Path
) -> None:
    ids = await filled(wire, pool)
    before = await wire.call("subject.export", subject_id=SUBJECT)
    async with client_of(wire, gateway) as client:
        counts = await client.subject_export_to(SUBJECT, tmp_path / "out")
    other = await gateway.caller("elsewhere")
    async with client_of(other, gateway) as client:
        done = await client.subject_import(tmp_path / "out")
    assert done.counts.model_dump() == counts == before["counts"]
    after = await other.call("subject.export", subject_id=SUBJECT)

    def mapped(value: Any) -> Any:
        match value:
            case str():
                return done.ids.get(value, value)
            case list():
                return [mapped(each) for each in value]
            case dict():
                return {name: mapped(each) for name, each in value.items()}
        return value

    own = {
        "updated_at",
        "state",
        "ended_at",
        "next_wake_at",
        "wait_reason",
        "lifecycle_state",
        "delivered_at",
    }
    own |= {"read_at", "cancel_requested_at", "approved_by", "created_at"}
    for kind, records in before["records"].items():
        expected = sorted(
            (json.dumps({n: mapped(v) for n, v in each.items() if n not in own}, sort_keys=True))
            for each in records
        )
        found = sorted(
            (json.dumps({n: v for n, v in each.items() if n not in own}, sort_keys=True))
            for each in after["records"][kind]
        )
        # A memory's value names an agent's old id, which is the embedder's own word and stays.
        if kind != "memory":
            assert found == expected, kind
    values = [sorted(str(each["value"]) for each in side["memory_records"]) for side in (before, after)]
    assert values[0] == values[1]
    run = await other.call("run.get", run_id=done.ids[ids["run"]])
    assert (run["state"], run["goal"], run["metadata"]) == ("cancelled", "go", {"i": 1})
    husk = await other.call("agent.get", agent_id=done.ids[ids["shared"]])
    assert (husk["name"], husk["lifecycle_state"], husk["subject_ids"]) == (
        "[not in the bundle]",
        "archived",
        [],
    )
    assert (await other.call("message.inbox", agent_id=done.ids[ids["agent"]]))["messages"] == []
    content = await other.get(f"/aep/v1/artifacts/{done.ids[ids['artifact']]}/bytes")
    assert content.content == BIG
    assert (await other.get(f"/aep/v1/runs/{done.ids[ids['run']]}/events")).status_code == 410


async def test_a_root_that_the_bundle_does_not_have_becomes_a_husk_that_takes_no_run(
    wire: Wire, lines: list[bytes], gateway: Gateway
) -> None:
    """The subject's agent is somebody's helper: of the tree above it nothing was exported."""
    root = to_wire("agt", new_id())
    record = {**json.loads(lines[1])["record"], "root_agent_id": root}
    other = await gateway.caller("elsewhere")
    alone = [lines[0], changed(lines[1], record=record), json.dumps(END_OF_ONE_AGENT).encode() + b"\n"]
    status, done = await sent(other, alone)
    assert status == 200
    helper = await other.call("agent.get", agent_id=done["ids"][record["id"]])
    assert helper["root_agent_id"] == done["ids"][root]
    husk = await other.call("agent.get", agent_id=done["ids"][root])
    assert (husk["name"], husk["root_agent_id"], husk["subject_ids"]) == (
        "[not in the bundle]",
        husk["id"],
        [],
    )
    assert symbol(await other.answer("run.create", {"agent_id": husk["id"], "goal": "go"})) == (
        "lifecycle_conflict"
    )


async def test_an_import_believes_nobody_who_is_said_to_have_approved_a_prompt(
    wire: Wire, lines: list[bytes], gateway: Gateway
) -> None:
    """A key of the runtime that exported it, or a forged word: it would read like a key of this owner."""
    at = next(place for place, line in enumerate(lines) if kind_of(line) == "prompt_history")
    record = {**json.loads(lines[at])["record"], "approved_by": "key_of_somebody"}
    other = await gateway.caller("elsewhere")
    status, done = await sent(other, [*lines[:at], changed(lines[at], record=record), *lines[at + 1 :]])
    assert status == 200
    agent_id = done["ids"][record["agent_id"]]
    (entry,) = (await other.call("agent.get", agent_id=agent_id, include=["prompt_history"]))[
        "prompt_history"
    ]
    assert (entry["id"], entry["diff"], entry["approved_by"]) == (
        done["ids"][record["id"]],
        record["diff"],
        None,
    )


async def test_importing_twice_makes_two_of_each(wire: Wire, lines: list[bytes], gateway: Gateway) -> None:
    other = await gateway.caller("elsewhere")
    first, second = await sent(other, lines), await sent(other, lines)
    assert (first[0], second[0]) == (200, 200)
    assert not set(first[1]["ids"].values()) & set(second[1]["ids"].values())
    assert (await other.call("subject.read", subject_id=SUBJECT))["counts"]["runs"] == 2


def changed(line: bytes, **members: Any) -> bytes:
    return json.dumps({**json.loads(line), **members}).encode() + b"\n"


def kind_of(line: bytes) -> str:
    return str(json.loads(line).get("kind"))


def damage(lines: list[bytes], how: str) -> list[bytes]:
    """The bundle with one thing wrong."""
    bytes_at = next(place for place, line in enumerate(lines) if kind_of(line) == "bytes")
    run_at = next(place for place, line in enumerate(lines) if kind_of(line) == "runs")
    match how:
        case "foreign":
            return [changed(lines[0], bundle="something.else"), *lines[1:]]
        case "later version":
            return [changed(lines[0], portable_format_version="2"), *lines[1:]]
        case "broken off":
            return lines[:-1]
        case "a record less":
            return [*lines[:run_at], *lines[run_at + 1 :]]
        case "flipped byte":
            line = lines[bytes_at].replace(b"AAEC", b"AAED", 1)
            return [*lines[:bytes_at], line, *lines[bytes_at + 1 :]]
        case "bytes missing":
            return [*lines[:bytes_at], *lines[bytes_at + 1 :]]
        case "out of order":
            return [lines[0], lines[run_at], lines[1], *lines[2:run_at], *lines[run_at + 1 :]]
        case "no JSON":
            return [*lines[:2], b"{nonsense\n", *lines[2:]]
        case "beyond a limit":
            record = json.loads(lines[1])["record"]
            return [lines[0], changed(lines[1], record={**record, "name": "n" * 201}), *lines[2:]]
        case "twice the same id":
            return [*lines[:2], *lines[1:]]
        case "memory of no tree":
            at = next(place for place, line in enumerate(lines) if kind_of(line) == "memory")
            record = json.loads(lines[1])["record"]
            helper = changed(lines[1], record={**record, "root_agent_id": to_wire("agt", new_id())})
            memory = changed(
                lines[at], record={**json.loads(lines[at])["record"], "tree_root_id": record["id"]}
            )
            return [lines[0], helper, *lines[2:at], memory, *lines[at + 1 :]]
        case "after the end":
            return [*lines, lines[1]]
    raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("foreign", "bundle is no bundle of a subject."),
        ("later version", "bundle has the format version 2; this runtime reads 1."),
        ("broken off", "bundle ends in the middle: its last line is missing."),
        ("a record less", "bundle does not have as many records as its last line says."),
        ("flipped byte", "bundle has an artifact whose bytes are not those that its hash names."),
        ("bytes missing", "bundle has an artifact whose bytes are not those that its hash names."),
        ("out of order", "bundle has a line that does not belong there."),
        ("no JSON", None),
        ("beyond a limit", "bundle has a record of agents that is damaged or beyond a limit."),
        ("twice the same id", "bundle has a record of agents that is damaged or beyond a limit."),
        ("memory of no tree", "bundle has a record of memory that is damaged or beyond a limit."),
        ("after the end", "bundle goes on after its last line."),
    ],
)
async def test_a_bundle_with_something_wrong_is_refused_in_one_sentence_and_leaves_nothing(
    gateway: Gateway, lines: list[bytes], how: str, told: str | None
) -> None:
    other = await gateway.caller("elsewhere")
    before = await gateway.rows()
    status, refused = await sent(other, damage(lines, how))
    assert (status, refused["error"]) == (400, "invalid_request")
    assert (
        refused["message"] == told
        if told
        else refused["message"].startswith("bundle has a line that is no JSON")
    )
    assert await gateway.rows() == before
    assert (await other.refused("subject.read", subject_id=SUBJECT))["data"]["symbol"] == "subject_not_found"


async def test_an_erased_subject_comes_back_only_when_it_was_made_anew(
    wire: Wire, gateway: Gateway, tmp_path: Path, lines: list[bytes]
) -> None:
    await wire.call("subject.erase", subject_id=SUBJECT, mode="hard_delete")
    status, refused = await sent(wire, lines)
    assert (status, refused["error"]) == (409, "conflict")
    await wire.http.post(
        "/api/me/subjects", json={"aepId": SUBJECT}, headers={"Authorization": f"Bearer {wire.key}"}
    )
    assert (await sent(wire, lines))[0] == 200


async def test_an_import_needs_the_scopes_of_what_it_writes(gateway: Gateway, lines: list[bytes]) -> None:
    weak = await gateway.stranger("elsewhere", ("agent.write",))
    status, refused = await sent(weak, lines)
    assert (status, refused["error"]) == (403, "forbidden")


async def test_a_folder_that_is_there_already_is_not_written_over(
    wire: Wire, pool: Pool, gateway: Gateway, tmp_path: Path
) -> None:
    await filled(wire, pool)
    (tmp_path / "out" / "artifacts").mkdir(parents=True)
    async with client_of(wire, gateway) as client:
        with pytest.raises(BadBundle):
            await client.subject_export_to(SUBJECT, tmp_path / "out")


async def test_a_subject_that_is_not_known_leaves_no_folder(
    wire: Wire, gateway: Gateway, tmp_path: Path
) -> None:
    async with client_of(wire, gateway) as client:
        with pytest.raises(AepError) as refused:
            await client.subject_export_to("sub_nobody", tmp_path / "out")
    assert refused.value.symbol == "not_found"
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_bundle_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(BadBundle):
        list(lines_of(tmp_path))


def test_a_hash_that_is_no_hash_never_becomes_a_path(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"kind":"artifacts","record":{"sha256":"../../etc/passwd"}}\n')
    with pytest.raises(BadBundle):
        list(lines_of(tmp_path))
    with BundleWriter(tmp_path / "out") as writer, pytest.raises(TransportError):
        writer.take(b'{"kind":"artifacts","record":{"sha256":"../x"}}')


@pytest.mark.parametrize(
    "line",
    [
        b"{nonsense",
        b"[]",
        b"7",
        b'{"kind":"artifacts"}',
        b'{"kind":"artifacts","record":{"sha256":7}}',
        b'{"kind":"end"}',
    ],
)
def test_a_line_that_is_damaged_is_told_of_as_the_runtimes(tmp_path: Path, line: bytes) -> None:
    with BundleWriter(tmp_path / "out") as writer, pytest.raises(TransportError):
        writer.take(line)
