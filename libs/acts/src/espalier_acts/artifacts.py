"""Acts on artifacts."""

import hashlib
from dataclasses import dataclass
from uuid import UUID

from espalier_domain.errors import NotFound
from espalier_domain.journal import ArtifactCreated
from espalier_protocol.ids import to_wire
from espalier_store.artifacts import NewArtifact, insert_artifact, put_blob, remove_artifact
from espalier_store.ids import new_id
from espalier_store.pool import Connection


@dataclass(frozen=True, slots=True)
class Content:
    name: str
    mime_type: str
    content: bytes


async def create_artifact(
    connection: Connection, owner_id: UUID, agent_id: UUID, run_id: UUID, wanted: Content
) -> ArtifactCreated:
    """Keep the bytes and the record; the entry that says so is the caller's to write."""
    sha256 = hashlib.sha256(wanted.content).hexdigest()
    artifact_id, size_bytes = new_id(), len(wanted.content)
    await put_blob(connection, owner_id, sha256, wanted.content)
    record = NewArtifact(
        artifact_id, agent_id, run_id, wanted.name, wanted.mime_type, sha256, size_bytes, metadata={}
    )
    await insert_artifact(connection, owner_id, record)
    return ArtifactCreated(to_wire("art", artifact_id), wanted.name, wanted.mime_type, size_bytes)


async def delete_artifact(connection: Connection, owner_id: UUID, artifact_id: UUID) -> None:
    """Forget the record, and the bytes if no other record of the owner needs them. Raises NotFound."""
    if not await remove_artifact(connection, owner_id, artifact_id):
        raise NotFound("artifact", to_wire("art", artifact_id))
