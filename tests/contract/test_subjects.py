"""Data subjects, as the published client and the published gdpr-smoke see them."""

from typing import Any

import pytest
from tests.contract.embedder import UNKNOWN, Embedder, refused
from tests.contract.requirements import requirement
from tests.integration.wire import AGENT

pytestmark = pytest.mark.anyio

RECORDS = {"agents", "runs", "artifacts", "memory", "messages"}
TOP = {"agents", "runs", "artifacts", "memory_records", "messages", "prompt_history"}


async def subject_of(embedder: Embedder) -> str:
    """A subject that was made by REST, with an agent and a memory record of the smoke."""
    response = await embedder.wire.http.post(
        "/api/me/subjects", json={}, headers={"Authorization": f"Bearer {embedder.wire.key}"}
    )
    subject_id = str(response.json()["subject_id"])
    agent = await embedder.client.agent.create(**AGENT, subject_ids=[subject_id])
    await embedder.client.memory.write(
        tree_root_id=agent["id"],
        namespace="gdpr.smoke",
        key="test-record",
        value={"a": 1},
        subject_id=subject_id,
    )
    return subject_id


@requirement("AEP-SUBJECT-01")
async def test_an_unknown_subject_is_not_found(embedder: Embedder) -> None:
    client = embedder.client.subject
    for call in (
        client.read("sub_" + UNKNOWN),
        client.export("sub_" + UNKNOWN),
        client.erase("sub_" + UNKNOWN, "redact"),
    ):
        assert (await refused(call)).symbol == "subject_not_found"


@requirement("AEP-SUBJECT-02")
async def test_rest_makes_a_subject_and_answers_it(embedder: Embedder) -> None:
    response = await embedder.wire.http.post(
        "/api/me/subjects",
        json={"metadata": {"a": 1}, "aepId": "sub_abc", "legalHold": False},
        headers={"Authorization": f"Bearer {embedder.wire.key}"},
    )
    made = response.json()
    assert response.status_code == 200
    assert (made["id"], made["subject_id"], made["metadata"], made["legal_hold"]) == (
        "sub_abc",
        "sub_abc",
        {"a": 1},
        False,
    )
    assert made["created_at"] == made["updated_at"]


@requirement("AEP-SUBJECT-03")
async def test_a_read_counts_and_shows_what_is_tagged(embedder: Embedder) -> None:
    read = await embedder.client.subject.read(await subject_of(embedder))
    assert (read["counts"]["agents"], read["counts"]["memory"], read["counts"]["runs"]) == (1, 1, 0)
    assert read["records"]["agents"][0]["name"] == AGENT["name"]
    assert read["records"]["memory"][0]["value"] == {"a": 1}


@requirement("AEP-SUBJECT-04")
async def test_an_export_is_of_portable_format_1(embedder: Embedder) -> None:
    export = await embedder.client.subject.export(await subject_of(embedder))
    assert export["portable_format_version"] == "1"
    assert export["records"].keys() >= RECORDS
    assert export["counts"].keys() >= RECORDS
    assert export["exported_at"]


@requirement("AEP-SUBJECT-05")
async def test_an_export_has_the_members_of_the_published_clients_too(embedder: Embedder) -> None:
    subject_id = await subject_of(embedder)
    export = await embedder.client.subject.export(subject_id)
    assert export.keys() >= TOP
    assert (export["subject_id"], export["legal_hold"], export["metadata"]) == (subject_id, False, {})
    assert export["memory_records"] == export["records"]["memory"]
    assert export["generated_at"]


def kinds(manifest: dict[str, Any], act: str) -> set[str]:
    return {entry["kind"] for entry in manifest[act]}


@requirement("AEP-SUBJECT-06")
async def test_a_redaction_lists_what_it_did_by_kind(embedder: Embedder) -> None:
    done = await embedder.client.subject.erase(await subject_of(embedder), "redact")
    assert kinds(done, "redacted") == {"agent", "memory"}
    assert (done["deleted"], done["stripped"], done["retained"]) == ([], [], [])


@requirement("AEP-SUBJECT-07")
async def test_the_manifest_speaks_both_dialects(embedder: Embedder) -> None:
    subject_id = await subject_of(embedder)
    done = await embedder.client.subject.erase(subject_id, "hard_delete")
    assert (done["subject_id"], done["mode"]) == (subject_id, "hard_delete")
    assert done["generated_at"] == done["performed_at"]
    (entry,) = done["deleted"]
    assert (entry["kind"], entry["id"]) == (entry["resource"], entry["aepId"])
    assert entry["id"].startswith("mem_")


@requirement("AEP-SUBJECT-08")
async def test_a_redacted_agent_has_lost_its_name_and_its_prompts(embedder: Embedder) -> None:
    done = await embedder.client.subject.erase(await subject_of(embedder), "redact")
    (entry,) = (each for each in done["redacted"] if each["kind"] == "agent")
    agent = await embedder.client.agent.get(entry["id"])
    assert agent["name"] == "[REDACTED]"
    assert agent["constitution"]["immutable_directives"] == "[REDACTED]"
    assert agent["constitution"]["mutable_prompt"] == "[REDACTED]"


@requirement("AEP-SMOKE-03")
async def test_the_published_gdpr_smoke_passes(embedder: Embedder) -> None:
    """Its steps and its assertions, through the published client."""
    assert embedder.capabilities["compliance.gdpr"] is True
    subject_id = await subject_of(embedder)
    subjects = embedder.client.subject
    read = await subjects.read(subject_id)
    assert (read["counts"]["agents"], read["counts"]["memory"]) == (1, 1)
    assert (await subjects.export(subject_id))["portable_format_version"] == "1"
    done = await subjects.erase(subject_id, "redact")
    assert {"agent", "memory"} <= kinds(done, "redacted")
    assert all(isinstance(done[act], list) for act in ("deleted", "redacted", "stripped", "retained"))
    agents = (await subjects.read(subject_id))["records"]["agents"]
    assert agents == [] or agents[0]["name"] == "[REDACTED]"
