"""Artifacts for the wire's tests, kept by the act that workers use."""

from uuid import UUID

from espalier_acts.artifacts import Content, create_artifact
from espalier_protocol.ids import from_wire
from espalier_store.pool import Pool, transaction


async def keep_artifact(
    pool: Pool,
    run_id: str,
    content: bytes,
    *,
    name: str = "notes.md",
    mime_type: str = "text/markdown",
    subject_id: str | None = None,
) -> str:
    """An artifact of the run, as its worker would have made it. The wire id."""
    run = from_wire("run", run_id)
    assert isinstance(run, UUID)
    row = await pool.fetchrow("select owner_id, agent_id from runs where id = $1", run)
    assert row is not None
    async with transaction(pool) as connection:
        wanted = Content(name, mime_type, content, subject_id)
        kept = await create_artifact(connection, row["owner_id"], row["agent_id"], run, wanted)
    return kept.artifact_id
