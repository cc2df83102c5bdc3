"""Artifacts: the records, and the bytes."""

import hashlib
from typing import Any, Final

from espalier_client.conformance.behaviour import calls, completes, tool
from espalier_client.conformance.checks.lists import require_both_dialects, require_pages
from espalier_client.conformance.expected import nobody, require_shape
from espalier_client.conformance.ground import Trial
from espalier_client.conformance.verdicts import expect, same
from espalier_client.conformance.wire import bytes_path

CONTENT: Final = "first line\nünïcode, and a tab\t.\n" * 50


async def _made(
    trial: Trial, count: int = 1, agent: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """A run that left files, and their ids, newest first."""
    files = [
        tool("artifact_create", name=f"ö{number}.md", mime_type="text/markdown", content=f"{number}{CONTENT}")
        for number in range(count)
    ]
    agent = agent or await trial.agent()
    run, _ = await trial.ended(*(calls(file) for file in files), completes(), agent=agent)
    page = await trial.me.call("artifact.list", run_id=run["id"])
    ids = [each["id"] for each in page.get("items", page.get("artifacts"))]
    same(len(ids), count, "the number of artifacts that the run left")
    return run, ids


async def artifact_01_record(trial: Trial) -> None:
    run, (artifact_id,) = await _made(trial)
    record = await trial.me.call("artifact.get", artifact_id=artifact_id)
    require_shape(record, "Artifact", "the artifact")
    origin = {"agent_id": run["agent_id"], "run_id": run["id"]}
    told = (record["created_by"], record["run_id"], record["name"], record["mime_type"])
    same(told, (origin, run["id"], "ö0.md", "text/markdown"), "origin, name and media type")


async def artifact_02_bytes(trial: Trial) -> None:
    _, (artifact_id,) = await _made(trial)
    record = await trial.me.call("artifact.get", artifact_id=artifact_id)
    answer = await trial.me.get(bytes_path(artifact_id))
    same(answer.status, 200, "the status of the bytes")
    same(answer.body.decode(), f"0{CONTENT}", "the bytes")
    same(answer.kind(), record["mime_type"], "the content type")
    told = (answer.headers.get("content-length"), record["size_bytes"])
    same(told, (str(len(answer.body)), len(answer.body)), "Content-Length and size_bytes")
    same(record["sha256"], hashlib.sha256(answer.body).hexdigest(), "sha256")


async def artifact_03_pages(trial: Trial) -> None:
    run, ids = await _made(trial, 5)
    await require_pages(trial.me, "artifact.list", ids, "artifacts", run_id=run["id"])


async def artifact_04_dialects(trial: Trial) -> None:
    run, _ = await _made(trial, 3)
    await require_both_dialects(trial.me, "artifact.list", "artifacts", run_id=run["id"])


async def artifact_05_filters(trial: Trial) -> None:
    agent = await trial.agent()
    one, (first,) = await _made(trial, agent=agent)
    other, (second,) = await _made(trial, agent=agent)
    stranger, _ = await _made(trial)
    for filters, wanted in (
        ({"agent_id": agent["id"]}, [second, first]),
        ({"agent_id": agent["id"], "run_id": one["id"]}, [first]),
        ({"agent_id": stranger["agent_id"], "run_id": other["id"]}, []),
        ({"run_id": nobody("run")}, []),
        ({"agent_id": agent["id"], "subject_id": trial.subject()}, []),
    ):
        page = await trial.me.call("artifact.list", **filters)
        found = [each["id"] for each in page.get("items", page.get("artifacts"))]
        same(found, wanted, f"artifact.list {filters}")


async def artifact_06_unknown(trial: Trial) -> None:
    for artifact_id in (nobody("art"), "nonsense"):
        for method in ("artifact.get", "artifact.delete"):
            await trial.me.refused("tool_not_found", method, artifact_id=artifact_id)
        same((await trial.me.get(bytes_path(artifact_id))).status, 404, "the status of its bytes")


async def artifact_07_delete(trial: Trial) -> None:
    _, (kept, gone) = await _made(trial, 2)
    told = await trial.me.call("artifact.delete", artifact_id=gone)
    same((told.get("deleted"), told.get("ok")), (True, True), "deleted and ok")
    await trial.me.refused("tool_not_found", "artifact.get", artifact_id=gone)
    same((await trial.me.get(bytes_path(gone))).status, 404, "the status of its bytes")
    same((await trial.me.get(bytes_path(kept))).status, 200, "the status of the other one's bytes")


async def artifact_08_download(trial: Trial) -> None:
    _, (artifact_id,) = await _made(trial)
    headers = (await trial.me.get(bytes_path(artifact_id))).headers
    same(headers.get("x-content-type-options"), "nosniff", "X-Content-Type-Options")
    disposition = headers.get("content-disposition", "")
    expect(disposition.startswith("attachment"), f"Content-Disposition says {disposition!r}.")
    policy = headers.get("content-security-policy", "")
    expect("sandbox" in policy, f"Content-Security-Policy says {policy!r}.")


async def artifact_09_etag(trial: Trial) -> None:
    _, (artifact_id,) = await _made(trial)
    record = await trial.me.call("artifact.get", artifact_id=artifact_id)
    etag = (await trial.me.get(bytes_path(artifact_id))).headers.get("etag", "")
    same(etag, f'"{record["sha256"]}"', "ETag")
    again = await trial.me.get(bytes_path(artifact_id), If_None_Match=etag)
    same((again.status, again.body), (304, b""), "status and body for whoever has it")
    other = await trial.me.get(bytes_path(artifact_id), If_None_Match='"other"')
    same(other.status, 200, "the status for whoever has something else")


async def artifact_10_range(trial: Trial) -> None:
    _, (artifact_id,) = await _made(trial)
    whole = (await trial.me.get(bytes_path(artifact_id))).body
    answer = await trial.me.get(bytes_path(artifact_id), Range="bytes=10-19")
    if answer.status == 206:
        same(answer.body, whole[10:20], "bytes 10 to 19")
        same(answer.headers.get("content-range"), f"bytes 10-19/{len(whole)}", "Content-Range")
    else:
        same((answer.status, answer.body), (200, whole), "status and bytes of a range")


async def artifact_11_head(trial: Trial) -> None:
    _, (artifact_id,) = await _made(trial)
    answer = await trial.me.send("HEAD", bytes_path(artifact_id))
    if answer.status != 405:
        length = (await trial.me.get(bytes_path(artifact_id))).headers.get("content-length")
        told = (answer.status, answer.body, answer.headers.get("content-length"))
        same(told, (200, b"", length), "status, body and Content-Length of HEAD")


async def artifact_12_event(trial: Trial) -> None:
    run, (artifact_id,) = await _made(trial)
    record = await trial.me.call("artifact.get", artifact_id=artifact_id)
    events = await trial.me.events(run["id"])
    told = [event["payload"] for event in events if event["type"] == "artifact.created"]
    wanted = {name: record[name] for name in ("name", "mime_type", "size_bytes")}
    same(told, [{"artifact_id": artifact_id, **wanted}], "artifact.created")
