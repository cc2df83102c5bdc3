"""`artifact.get`: the record. The bytes have an endpoint of their own."""

from espalier_domain.errors import NotFound
from espalier_gateway.methods.call import Call, named
from espalier_protocol.artifact import Artifact, ArtifactRef
from espalier_store.artifacts import get_artifact
from espalier_store.pool import reading


async def get(call: Call, params: ArtifactRef) -> Artifact:
    artifact_id = named("art", params.artifact_id)
    async with reading(call.pool) as connection:
        artifact = await get_artifact(connection, call.owner_id, artifact_id)
    if artifact is None:
        raise NotFound("artifact", params.artifact_id)
    return artifact
