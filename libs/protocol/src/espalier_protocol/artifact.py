"""Artifacts: files that agents leave behind, and the parameters of `artifact.*` (AEP 5.3, 6)."""

from typing import Literal

from espalier_protocol.shapes import Id, JsonObject, PageParams, Params, Resource, Timestamp


class ArtifactOrigin(Resource):
    agent_id: str
    run_id: str


class Artifact(Resource):
    """`sha256` is lower-case hex over the served bytes; `size_bytes` counts them."""

    id: str
    name: str
    mime_type: str
    size_bytes: int
    sha256: str
    created_at: Timestamp
    created_by: ArtifactOrigin
    run_id: str
    subject_id: str | None
    metadata: JsonObject


class ArtifactPage(Resource):
    items: list[Artifact]
    cursor: str | None
    artifacts: list[Artifact]
    next_cursor: str | None


class ArtifactDeleted(Resource):
    deleted: Literal[True] = True
    ok: Literal[True] = True


class ArtifactRef(Params):
    artifact_id: Id


class ArtifactList(PageParams):
    run_id: Id | None = None
    agent_id: Id | None = None
    subject_id: Id | None = None
