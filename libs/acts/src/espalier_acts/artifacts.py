"""Acts on artifacts."""

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from espalier_acts.subjects import admit_subjects
from espalier_domain.errors import InvalidInput, NotFound
from espalier_domain.journal import ArtifactCreated
from espalier_protocol.ids import to_wire
from espalier_store.artifacts import CHUNK_BYTES, NewArtifact, insert_artifact, put_stream, remove_artifact
from espalier_store.ids import new_id
from espalier_store.pool import Connection

ARTIFACT_BYTES_MAX: Final = 50_000_000


@dataclass(frozen=True, slots=True)
class Content:
    """`content` is read once; pieces must not be waited for (`store.artifacts.put_stream` says why)."""

    name: str
    mime_type: str
    content: bytes | AsyncIterable[bytes]
    subject_id: str | None = None


async def create_artifact(
    connection: Connection, owner_id: UUID, agent_id: UUID, run_id: UUID, wanted: Content
) -> ArtifactCreated:
    """Keep the bytes and the record; the entry that says so is the caller's to write.

    Raises LifecycleConflict when the subject has been erased, InvalidInput for more than ARTIFACT_BYTES_MAX
    bytes; nothing else can be done in the transaction then.
    """
    if wanted.subject_id is not None:
        await admit_subjects(connection, owner_id, [wanted.subject_id])
    pieces = _pieces(wanted.content) if isinstance(wanted.content, bytes) else wanted.content
    blob = await put_stream(connection, owner_id, pieces, ARTIFACT_BYTES_MAX)
    if blob is None:
        raise InvalidInput("content", f"should have at most {ARTIFACT_BYTES_MAX} bytes")
    artifact_id = new_id()
    record = NewArtifact(
        artifact_id,
        agent_id,
        run_id,
        wanted.name,
        wanted.mime_type,
        blob.sha256,
        blob.size_bytes,
        metadata={},
        subject_id=wanted.subject_id,
    )
    await insert_artifact(connection, owner_id, record)
    return ArtifactCreated(to_wire("art", artifact_id), wanted.name, wanted.mime_type, blob.size_bytes)


async def delete_artifact(connection: Connection, owner_id: UUID, artifact_id: UUID) -> None:
    """Forget the record, and the bytes if no other record of the owner needs them. Raises NotFound."""
    if not await remove_artifact(connection, owner_id, artifact_id):
        raise NotFound("artifact", to_wire("art", artifact_id))


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]
