"""Artifacts, as the published client lists, reads, downloads and deletes them."""

import hashlib
from typing import Any

import pytest
from tests.contract.embedder import MAKES_A_FILE, UNKNOWN, Embedder, bytes_path, refused
from tests.contract.pages import both_dialects_agree, walked
from tests.contract.requirements import requirement

pytestmark = pytest.mark.anyio

CONTENT = MAKES_A_FILE[0]["calls"][0]["args"]["content"].encode()


def files(count: int) -> list[dict[str, Any]]:
    """Answers of a model that leaves so many files behind and ends."""
    return [
        {"calls": [{"tool": "artifact_create", "args": {"name": f"{n}.md", "content": str(n)}}]}
        for n in range(count)
    ]


async def made_artifact(embedder: Embedder) -> dict[str, Any]:
    """The artifact of a run that made one, as the run's own events tell of it."""
    run = await embedder.ended_run(MAKES_A_FILE)
    record: dict[str, Any] = await embedder.client.artifact.get(run["result"]["artifact_ids"][0])
    return record


@requirement("AEP-ARTIFACT-01")
async def test_artifacts_are_found_page_by_page(embedder: Embedder) -> None:
    run = await embedder.ended_run(files(3))
    await embedder.ended_run(files(1))
    filters: dict[str, Any]
    for filters in ({"run_id": run["id"]}, {"agent_id": run["agent_id"]}):
        found = await walked(embedder.client.artifact.list, "items", "cursor", **filters)
        assert [artifact["name"] for artifact in found] == ["2.md", "1.md", "0.md"]


@requirement("AEP-ARTIFACT-02")
async def test_artifacts_are_listed_in_both_dialects(embedder: Embedder) -> None:
    run = await embedder.ended_run(files(3))
    assert await both_dialects_agree(embedder.client.artifact.list, "artifacts", run_id=run["id"])
    found = await walked(embedder.client.artifact.list, "artifacts", "next_cursor", run_id=run["id"])
    assert [artifact["name"] for artifact in found] == ["2.md", "1.md", "0.md"]


@requirement("AEP-ARTIFACT-03")
async def test_an_artifact_is_read_back_with_its_maker(embedder: Embedder) -> None:
    run = await embedder.ended_run(MAKES_A_FILE)
    artifact_id = run["result"]["artifact_ids"][0]
    record = await embedder.client.artifact.get(artifact_id)
    assert artifact_id.startswith("art_") and record["created_at"]
    assert record == {
        "id": artifact_id,
        "name": "ö.md",
        "mime_type": "text/markdown",
        "size_bytes": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "created_at": record["created_at"],
        "created_by": {"agent_id": run["agent_id"], "run_id": run["id"]},
        "run_id": run["id"],
        "subject_id": None,
        "metadata": {},
    }


@requirement("AEP-ARTIFACT-04")
async def test_an_artifacts_bytes_are_what_its_record_says(embedder: Embedder) -> None:
    record = await made_artifact(embedder)
    download = await embedder.client.artifact.bytes(record["id"])
    content = b"".join([piece async for piece in download.body])
    assert content == CONTENT
    assert (download.size, download.mime_type.split(";")[0]) == (record["size_bytes"], record["mime_type"])
    assert (len(content), hashlib.sha256(content).hexdigest()) == (record["size_bytes"], record["sha256"])


@requirement("AEP-ARTIFACT-05")
async def test_an_artifact_that_does_not_exist_has_no_bytes(embedder: Embedder) -> None:
    assert (await embedder.get(bytes_path("art_" + UNKNOWN))).status_code == 404


@requirement("AEP-ARTIFACT-06")
async def test_a_deleted_artifact_is_gone(embedder: Embedder) -> None:
    record = await made_artifact(embedder)
    assert await embedder.client.artifact.delete(record["id"]) == {"deleted": True, "ok": True}
    assert (await refused(embedder.client.artifact.get(record["id"]))).symbol == "tool_not_found"
    assert (await embedder.client.artifact.list(run_id=record["run_id"]))["items"] == []
    assert (await embedder.get(bytes_path(record["id"]))).status_code == 404
