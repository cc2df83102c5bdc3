"""Artifact bytes: what was kept comes back, and is never a page of this origin."""

import hashlib
from typing import Any

import pytest
from tests.integration.wire import Gateway, Wire
from tests.integration.wire_artifacts import keep_artifact

from espalier_store.artifacts import CHUNK_BYTES

pytestmark = pytest.mark.anyio

SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES)


async def test_bytes_of_every_size_come_back_as_they_were(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    for size in SIZES:
        content = bytes(n % 251 for n in range(size))
        artifact_id = await keep_artifact(gateway.pool, run_id, content)
        record = await wire.call("artifact.get", artifact_id=artifact_id)
        response = await wire.get(f"/aep/v1/artifacts/{artifact_id}/bytes")
        digest = hashlib.sha256(content).hexdigest()
        assert response.status_code == 200 and response.content == content
        assert (record["size_bytes"], record["sha256"]) == (size, digest)
        assert (response.headers["content-length"], response.headers["etag"]) == (str(size), f'"{digest}"')


async def test_an_artifact_is_a_download_that_no_browser_runs(wire: Wire, gateway: Gateway) -> None:
    artifact_id = await keep_artifact(
        gateway.pool, await wire.run(), b"<script>", name='a/"\r\n\u202eä.html', mime_type="text/html"
    )
    response = await wire.get(f"/aep/v1/artifacts/{artifact_id}/bytes")
    assert {name: response.headers[name] for name in ("content-type", "content-disposition")} == {
        "content-type": "text/html",
        "content-disposition": "attachment; filename*=UTF-8''a%2F%22%0D%0A%E2%80%AE%C3%A4.html",
    }
    assert (
        response.headers["content-security-policy"] == "sandbox; default-src 'none'; frame-ancestors 'none'"
    )
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "no-store" in response.headers["cache-control"]


@pytest.mark.parametrize(
    "mime_type", ["", "text", "text/html\r\nX-Evil: 1", "a/b; c", "text/plain;" + "x" * 5_000, "täxt/plain"]
)
async def test_a_strange_media_type_becomes_plain_bytes(wire: Wire, gateway: Gateway, mime_type: str) -> None:
    artifact_id = await keep_artifact(gateway.pool, await wire.run(), b"x", mime_type=mime_type)
    response = await wire.get(f"/aep/v1/artifacts/{artifact_id}/bytes")
    assert (response.headers["content-type"], response.content) == ("application/octet-stream", b"x")
    assert "x-evil" not in response.headers


async def test_head_and_conditional_requests_keep_the_headers_and_send_no_bytes(
    wire: Wire, gateway: Gateway
) -> None:
    path = f"/aep/v1/artifacts/{await keep_artifact(gateway.pool, await wire.run(), b'content')}/bytes"
    whole = await wire.get(path)
    head = await wire.http.head(path, headers=wire.headers())
    same = await wire.get(path, {**wire.headers(), "If-None-Match": whole.headers["etag"]})

    def told(response: Any) -> tuple[int, bytes, str]:
        return response.status_code, response.content, response.headers["content-security-policy"]

    policy = whole.headers["content-security-policy"]
    assert [told(whole), told(head), told(same)] == [
        (200, b"content", policy),
        (200, b"", policy),
        (304, b"", policy),
    ]
    assert head.headers["content-length"] == "7"


async def test_bytes_need_the_scope_to_read_runs(wire: Wire, gateway: Gateway) -> None:
    artifact_id = await keep_artifact(gateway.pool, await wire.run(), b"content")
    poor = await gateway.caller("one", ("agent.read",))
    response = await poor.get(f"/aep/v1/artifacts/{artifact_id}/bytes")
    assert (response.status_code, response.json()["error"]) == (403, "authz_denied")


async def test_a_download_holds_no_connection_while_its_reader_pauses(wire: Wire, gateway: Gateway) -> None:
    artifact_id = await keep_artifact(gateway.pool, await wire.run(), b"x" * (40 * CHUNK_BYTES))
    path = f"/aep/v1/artifacts/{artifact_id}/bytes"
    readers = gateway.state.settings.postgres_connections_max + 5
    responses = [
        await wire.http.send(wire.http.build_request("GET", path, headers=wire.headers()), stream=True)
        for _ in range(readers)
    ]
    try:
        assert (await wire.call("artifact.get", artifact_id=artifact_id))["id"] == artifact_id
    finally:
        for response in responses:
            await response.aclose()
