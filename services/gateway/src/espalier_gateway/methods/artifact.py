"""`artifact.get`, `artifact.list`, `artifact.delete`: records. Bytes have their own endpoint."""

from typing import Final
from uuid import UUID

from espalier_acts.artifacts import delete_artifact
from espalier_domain.errors import NotFound
from espalier_gateway.methods.call import Call, named, place, unknown_cursor
from espalier_protocol.artifact import Artifact, ArtifactDeleted, ArtifactList, ArtifactPage, ArtifactRef
from espalier_protocol.ids import IdPrefix, from_wire
from espalier_store.artifacts import ArtifactFilter, get_artifact, list_artifacts
from espalier_store.paging import Page
from espalier_store.pool import reading, transaction

NOTHING: Final[Page[Artifact]] = Page([], more=False)


async def get(call: Call, params: ArtifactRef) -> Artifact:
    artifact_id = named("art", params.artifact_id)
    async with reading(call.pool) as connection:
        artifact = await get_artifact(connection, call.owner_id, artifact_id)
    if artifact is None:
        raise NotFound("artifact", params.artifact_id)
    return artifact


async def list_(call: Call, params: ArtifactList) -> ArtifactPage:
    where = place("art", params)
    wanted = _filter(params)
    async with reading(call.pool) as connection:
        page = await list_artifacts(connection, call.owner_id, wanted, where) if wanted else NOTHING
        # Asked afterwards: a cursor that is still there was there for the page too.
        if where.after is not None and await get_artifact(connection, call.owner_id, where.after) is None:
            raise unknown_cursor()
    cursor = page.items[-1].id if page.more else None
    return ArtifactPage(items=page.items, cursor=cursor, artifacts=page.items, next_cursor=cursor)


async def delete(call: Call, params: ArtifactRef) -> ArtifactDeleted:
    artifact_id = named("art", params.artifact_id)
    async with transaction(call.pool) as connection:
        await delete_artifact(connection, call.owner_id, artifact_id)
    return ArtifactDeleted()


def _filter(params: ArtifactList) -> ArtifactFilter | None:
    """None when an id is one that nothing can have, so that nothing matches."""
    asked: tuple[tuple[IdPrefix, str | None], ...] = (("run", params.run_id), ("agt", params.agent_id))
    ids: list[UUID | None] = []
    for prefix, text in asked:
        ids.append(None if text is None else from_wire(prefix, text))
        if text is not None and ids[-1] is None:
            return None
    return ArtifactFilter(ids[0], ids[1], params.subject_id)
