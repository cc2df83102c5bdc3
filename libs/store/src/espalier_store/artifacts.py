"""Artifacts and their bytes. Equal bytes of one owner are stored once, in chunks that can be streamed."""

import hashlib
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

import asyncpg

from espalier_protocol.artifact import Artifact, ArtifactOrigin
from espalier_protocol.ids import to_wire
from espalier_store.ids import new_id
from espalier_store.paging import PAGE_BYTES_MAX, Page, Place, read_page
from espalier_store.pool import Connection

CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class NewArtifact:
    artifact_id: UUID
    agent_id: UUID
    run_id: UUID
    name: str
    mime_type: str
    sha256: str
    size_bytes: int
    metadata: dict[str, Any]
    subject_id: str | None = None


INSERT_ARTIFACT = """
insert into artifacts
    (id, owner_id, agent_id, run_id, name, mime_type, size_bytes, sha256, metadata, subject_id)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
"""


async def insert_artifact(connection: Connection, owner_id: UUID, artifact: NewArtifact) -> None:
    await connection.execute(
        INSERT_ARTIFACT,
        artifact.artifact_id,
        owner_id,
        artifact.agent_id,
        artifact.run_id,
        artifact.name,
        artifact.mime_type,
        artifact.size_bytes,
        artifact.sha256,
        artifact.metadata,
        artifact.subject_id,
    )


TAKE_TURNS = "select pg_advisory_xact_lock(hashtextextended('blobs ' || $1::uuid::text, 0))"
INSERT_BLOB = """
insert into blobs (owner_id, sha256, size_bytes) values ($1, $2, $3) on conflict do nothing returning sha256
"""
INSERT_CHUNK = "insert into blob_chunks (owner_id, sha256, chunk_no, bytes) values ($1, $2, $3, $4)"


async def put_blob(connection: Connection, owner_id: UUID, sha256: str, content: bytes) -> None:
    """Store the bytes unless the owner has them already.

    Writers of one owner take turns until they commit: two that write the same bytes in opposite orders would
    wait for each other.
    """
    await connection.execute(TAKE_TURNS, owner_id)
    if await connection.fetchval(INSERT_BLOB, owner_id, sha256, len(content)) is None:
        return
    for number, start in enumerate(range(0, len(content), CHUNK_BYTES)):
        chunk = content[start : start + CHUNK_BYTES]
        await connection.execute(INSERT_CHUNK, owner_id, sha256, number, chunk)


MOVE_CHUNKS = "update blob_chunks set sha256 = $3 where owner_id = $1 and sha256 = $2"
DROP_CHUNKS = "delete from blob_chunks where owner_id = $1 and sha256 = $2"
DROP_BLOB = "delete from blobs where owner_id = $1 and sha256 = $2"


@dataclass(frozen=True, slots=True)
class Blob:
    """`sha256` in lower-case hex; `size_bytes` counts what it was taken over."""

    sha256: str
    size_bytes: int


async def put_stream(
    connection: Connection, owner_id: UUID, pieces: AsyncIterable[bytes], bytes_max: int
) -> Blob | None:
    """Store what comes, of any size of piece, unless the owner has it already; None if it is too much.

    At most a chunk and a piece are in memory. The chunks are written under a name of their own, since the
    hash is known last, and get their real one in the end; Postgres moves no bytes for that. Only then
    writers take turns. The pieces must not be waited for: a transaction that idles is ended, so that whoever
    reads from a network lays them down elsewhere first. After None the transaction has to be given up.
    """
    digest, size, number = hashlib.sha256(), 0, 0
    unnamed = f"incoming {new_id()}"
    chunks = _chunks(pieces)
    first = await anext(chunks, b"")
    second = await anext(chunks, None)
    if second is None:
        digest.update(first)
        blob = Blob(digest.hexdigest(), len(first))
        if len(first) > bytes_max:
            return None
        await put_blob(connection, owner_id, blob.sha256, first)
        return blob
    await connection.execute(INSERT_BLOB, owner_id, unnamed, 0)
    async for chunk in _chain(first, second, chunks):
        size += len(chunk)
        if size > bytes_max:
            return None
        digest.update(chunk)
        await connection.execute(INSERT_CHUNK, owner_id, unnamed, number, chunk)
        number += 1
    blob = Blob(digest.hexdigest(), size)
    await connection.execute(TAKE_TURNS, owner_id)
    is_new = await connection.fetchval(INSERT_BLOB, owner_id, blob.sha256, size) is not None
    if is_new:
        await connection.execute(MOVE_CHUNKS, owner_id, unnamed, blob.sha256)
    else:
        await connection.execute(DROP_CHUNKS, owner_id, unnamed)
    await connection.execute(DROP_BLOB, owner_id, unnamed)
    return blob


async def _chunks(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in chunks of CHUNK_BYTES, the last one shorter."""
    kept = bytearray()
    async for piece in pieces:
        for start in range(0, len(piece), CHUNK_BYTES):
            kept += piece[start : start + CHUNK_BYTES]
            while len(kept) >= CHUNK_BYTES:  # bounded by two chunks
                yield bytes(kept[:CHUNK_BYTES])
                del kept[:CHUNK_BYTES]
    if kept:
        yield bytes(kept)


async def _chain(first: bytes, second: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    yield second
    async for chunk in rest:
        yield chunk


GET_ARTIFACT = "select * from artifacts where owner_id = $1 and id = $2"


async def get_artifact(connection: Connection, owner_id: UUID, artifact_id: UUID) -> Artifact | None:
    row = await connection.fetchrow(GET_ARTIFACT, owner_id, artifact_id)
    return _artifact(row) if row else None


LIST_ARTIFACTS = """
select * from (
    select page.*, count(*) over () as reached,
        sum(bytes) over (order by created_at desc, id desc) - bytes as bytes_before
    from (
        select *, octet_length(name) + octet_length(metadata::text) as bytes
        from artifacts
        where owner_id = $1 {narrowed} and (created_at, id) < (
            coalesce(
                (select b.created_at from artifacts b where b.owner_id = $1 and b.id = $2), 'infinity'),
            coalesce($2::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
        order by created_at desc, id desc
        limit $3 + 1
    ) page
) sized
where bytes_before < $4
order by created_at desc, id desc
"""


@dataclass(frozen=True, slots=True)
class ArtifactFilter:
    """Columns and what they must hold; None asks for nothing."""

    run_id: UUID | None = None
    agent_id: UUID | None = None
    subject_id: str | None = None


async def list_artifacts(
    connection: Connection, owner_id: UUID, wanted: ArtifactFilter, place: Place
) -> Page[Artifact]:
    """Only the filters that are asked for are in the text, so that each finds its index.

    A cursor that is not there is read as none; whether it is there, ask afterwards: it may go meanwhile.
    """
    asked = {column: value for column, value in asdict(wanted).items() if value is not None}
    narrowed = " ".join(f"and {column} = ${number}" for number, column in enumerate(asked, start=5))
    statement = LIST_ARTIFACTS.format(narrowed=narrowed)
    rows = await connection.fetch(
        statement, owner_id, place.after, place.size, PAGE_BYTES_MAX, *asked.values()
    )
    return read_page(rows, place, _artifact)


DELETE_ARTIFACT = "delete from artifacts where owner_id = $1 and id = $2 returning sha256"
DELETE_CHUNKS = """
delete from blob_chunks where owner_id = $1 and sha256 = $2
    and not exists (select from artifacts where owner_id = $1 and sha256 = $2)
"""
DELETE_BLOB = """
delete from blobs where owner_id = $1 and sha256 = $2
    and not exists (select from artifacts where owner_id = $1 and sha256 = $2)
"""


async def remove_artifact(connection: Connection, owner_id: UUID, artifact_id: UUID) -> bool:
    """The record, and its bytes unless another artifact of the owner has the same. Whether it was there.

    Takes turns with `put_blob`: bytes that are there for a writer stay until its artifact stands beside them.
    """
    await connection.execute(TAKE_TURNS, owner_id)
    sha256 = await connection.fetchval(DELETE_ARTIFACT, owner_id, artifact_id)
    if sha256 is None:
        return False
    await connection.execute(DELETE_CHUNKS, owner_id, sha256)
    await connection.execute(DELETE_BLOB, owner_id, sha256)
    return True


GET_CHUNK = "select bytes from blob_chunks where owner_id = $1 and sha256 = $2 and chunk_no = $3"


async def blob_chunk(connection: Connection, owner_id: UUID, sha256: str, number: int) -> bytes | None:
    """Chunk `number` of a blob, or None behind its end."""
    chunk = await connection.fetchval(GET_CHUNK, owner_id, sha256, number)
    assert chunk is None or isinstance(chunk, bytes)
    return chunk


def _artifact(row: asyncpg.Record) -> Artifact:
    run_id, agent_id = to_wire("run", row["run_id"]), to_wire("agt", row["agent_id"])
    return Artifact(
        id=to_wire("art", row["id"]),
        name=row["name"],
        mime_type=row["mime_type"],
        size_bytes=row["size_bytes"],
        sha256=row["sha256"],
        created_at=row["created_at"],
        created_by=ArtifactOrigin(agent_id=agent_id, run_id=run_id),
        run_id=run_id,
        subject_id=row["subject_id"],
        metadata=row["metadata"],
    )
