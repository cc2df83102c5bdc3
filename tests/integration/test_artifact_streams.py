"""Artifact bytes in parts: ranges over the wire, and streams that are kept without being held."""

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.integration.wire import Gateway, Wire
from tests.integration.wire_artifacts import keep_artifact
from tests.integration.wire_runs import uuid

from espalier_acts import artifacts as acts
from espalier_acts.artifacts import Content, create_artifact
from espalier_domain.errors import InvalidInput
from espalier_gateway.settings import GatewaySettings
from espalier_store.artifacts import CHUNK_BYTES
from espalier_store.pool import Pool, transaction

pytestmark = pytest.mark.anyio

CONTENT = bytes(n % 251 for n in range(2 * CHUNK_BYTES + 1000))
ROWS = "select sha256, (select count(*) from blob_chunks c where c.sha256 = b.sha256) as chunks from blobs b"


@pytest.fixture
def gateway_settings(gateway_settings: GatewaySettings) -> GatewaySettings:
    """Patient with callers that ask as much as these tests do."""
    return gateway_settings.model_copy(update={"rpc_burst": 10_000})


# ------------------------------------------------------------------ out


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (0, 0),
        (0, CHUNK_BYTES - 1),
        (CHUNK_BYTES - 1, CHUNK_BYTES),
        (CHUNK_BYTES, len(CONTENT) - 1),
        (100, 2 * CHUNK_BYTES + 100),
        (len(CONTENT) - 1, len(CONTENT) - 1),
    ],
)
async def test_a_range_is_that_part_of_the_bytes(wire: Wire, gateway: Gateway, start: int, end: int) -> None:
    artifact_id = await keep_artifact(gateway.pool, await wire.run(), CONTENT)
    path = f"/aep/v1/artifacts/{artifact_id}/bytes"
    response = await wire.get(path, {**wire.headers(), "Range": f"bytes={start}-{end}"})
    assert response.status_code == 206 and response.content == CONTENT[start : end + 1]
    assert response.headers["content-range"] == f"bytes {start}-{end}/{len(CONTENT)}"
    assert response.headers["content-length"] == str(end + 1 - start)
    whole = await wire.get(path)
    told = ("etag", "accept-ranges", "content-type", "content-disposition", "content-security-policy")
    assert [response.headers[name] for name in told] == [whole.headers[name] for name in told]
    assert (whole.status_code, "content-range" in whole.headers) == (200, False)


async def test_a_part_is_sent_only_where_it_is_asked_for_and_is_there(wire: Wire, gateway: Gateway) -> None:
    path = f"/aep/v1/artifacts/{await keep_artifact(gateway.pool, await wire.run(), b'content')}/bytes"
    etag = f'"{hashlib.sha256(b"content").hexdigest()}"'
    asked: dict[str, dict[str, str]] = {
        "behind the end": {"Range": "bytes=7-"},
        "several": {"Range": "bytes=0-1,3-4"},
        "of these bytes": {"Range": "bytes=0-1", "If-Range": etag},
        "of other bytes": {"Range": "bytes=0-1", "If-Range": '"other"'},
        "wanted bytes": {"If-Match": f'"other", {etag}'},
        "other bytes": {"If-Match": '"other"'},
        "known bytes": {"If-None-Match": f'"other", W/{etag}', "Range": "bytes=0-1"},
    }
    told: dict[str, tuple[int, bytes, str | None]] = {}
    for name, headers in asked.items():
        response = await wire.get(path, {**wire.headers(), **headers})
        told[name] = response.status_code, response.content, response.headers.get("content-range")
        assert response.headers["etag"] == etag and response.headers["x-content-type-options"] == "nosniff"
    assert told == {
        "behind the end": (416, b"", "bytes */7"),
        "several": (200, b"content", None),
        "of these bytes": (206, b"co", "bytes 0-1/7"),
        "of other bytes": (200, b"content", None),
        "wanted bytes": (200, b"content", None),
        "other bytes": (412, b"", None),
        "known bytes": (304, b"", None),
    }
    head = await wire.http.head(path, headers={**wire.headers(), "Range": "bytes=0-1"})
    assert (head.status_code, head.headers["content-length"]) == (200, "7")


async def test_a_part_is_no_way_around_a_scope_or_an_owner(wire: Wire, gateway: Gateway) -> None:
    path = f"/aep/v1/artifacts/{await keep_artifact(gateway.pool, await wire.run(), b'content')}/bytes"
    poor, stranger = await gateway.caller("one", ("agent.read",)), await gateway.caller("two")
    told = [
        (await each.get(path, {**each.headers(), "Range": "bytes=0-1"})).status_code
        for each in (poor, stranger)
    ]
    assert told == [403, 404]


# ------------------------------------------------------------------ in


async def pieces(content: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


async def kept(pool: Pool, run_id: str, content: AsyncIterator[bytes]) -> Any:
    row = await pool.fetchrow("select owner_id, agent_id, id from runs where id = $1", uuid("run", run_id))
    assert row is not None
    wanted = Content("n.bin", "application/octet-stream", content)
    async with transaction(pool) as connection:
        return await create_artifact(connection, row["owner_id"], row["agent_id"], row["id"], wanted)


@pytest.mark.parametrize("size", [CHUNK_BYTES // 3, CHUNK_BYTES, 5 * CHUNK_BYTES])
@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, len(CONTENT)])
async def test_a_stream_of_any_pieces_is_kept_in_whole_chunks(
    wire: Wire, gateway: Gateway, size: int, length: int
) -> None:
    content = CONTENT[:length]
    entry = await kept(gateway.pool, await wire.run(), pieces(content, size))
    record = await wire.call("artifact.get", artifact_id=entry.artifact_id)
    digest = hashlib.sha256(content).hexdigest()
    assert (record["sha256"], record["size_bytes"], entry.size_bytes) == (digest, length, length)
    assert (await wire.get(f"/aep/v1/artifacts/{entry.artifact_id}/bytes")).content == content
    assert [tuple(row) for row in await gateway.pool.fetch(ROWS)] == [(digest, -(-length // CHUNK_BYTES))]


async def test_a_stream_of_bytes_that_the_owner_has_is_kept_once(wire: Wire, gateway: Gateway) -> None:
    run_id, other = await wire.run(), await gateway.caller("two")
    first = await keep_artifact(gateway.pool, run_id, CONTENT)
    again = await kept(gateway.pool, run_id, pieces(CONTENT, 1000))
    await kept(gateway.pool, await other.run(), pieces(CONTENT, 1000))
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert [tuple(row) for row in await gateway.pool.fetch(ROWS + " order by owner_id")] == [
        (digest, 6)
    ] * 2, "one blob of three chunks for each owner"
    await wire.call("artifact.delete", artifact_id=first)
    assert (await wire.get(f"/aep/v1/artifacts/{again.artifact_id}/bytes")).content == CONTENT


async def test_a_stream_that_is_too_long_or_breaks_leaves_nothing(
    wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await wire.run()
    monkeypatch.setattr(acts, "ARTIFACT_BYTES_MAX", len(CONTENT) - 1)
    with pytest.raises(InvalidInput) as caught:
        await kept(gateway.pool, run_id, pieces(CONTENT, 1000))
    assert caught.value.field == "content"

    async def broken() -> AsyncIterator[bytes]:
        yield CONTENT[:-1]
        raise EOFError

    with pytest.raises(EOFError):
        await kept(gateway.pool, run_id, broken())
    assert await gateway.pool.fetch(ROWS) == []
    assert (await wire.call("artifact.list"))["items"] == []
    monkeypatch.setattr(acts, "ARTIFACT_BYTES_MAX", len(CONTENT))
    assert (await kept(gateway.pool, run_id, pieces(CONTENT, 1000))).size_bytes == len(CONTENT)
