"""What is a subject's, as `subject.read` and `subject.export` show it: the newest of each kind.

Everything of a subject, however much, comes by the pages of `page_of`, for whoever can stream it.
"""

from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from espalier_acts.subjects import find_subject
from espalier_protocol.artifact import Artifact
from espalier_protocol.ids import IdPrefix, from_wire
from espalier_protocol.shapes import JsonObject, Resource
from espalier_protocol.subject import (
    PREVIEW_CHARS_MAX,
    SubjectCounts,
    SubjectRecords,
    SubjectRecordSet,
)
from espalier_store.agents import AgentFilter, list_agents
from espalier_store.artifacts import ArtifactFilter, blob_chunk, list_artifacts
from espalier_store.paging import Page, Place
from espalier_store.pool import Connection
from espalier_store.subjects import (
    count_records,
    first_bytes,
    memory_of_subject,
    messages_of_subject,
    prompt_history_of_subject,
    runs_of_subject,
)

SHOWN_MAX: Final = 100
"""Records of each kind that one answer shows."""

CONTENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of artifacts that one export has room for; the others have none there."""

UTF8_BYTES_MAX: Final = 4
HEAD_BYTES: Final = UTF8_BYTES_MAX * PREVIEW_CHARS_MAX

Lister = Callable[[Connection, UUID, str, Place], Awaitable[Page[Any]]]


async def _agents(connection: Connection, owner_id: UUID, subject_id: str, place: Place) -> Page[Any]:
    return await list_agents(connection, owner_id, AgentFilter(subject_id=subject_id), place)


async def _artifacts(connection: Connection, owner_id: UUID, subject_id: str, place: Place) -> Page[Any]:
    return await list_artifacts(connection, owner_id, ArtifactFilter(subject_id=subject_id), place)


KINDS: Final[tuple[tuple[str, IdPrefix, Lister], ...]] = (
    ("agents", "agt", _agents),
    ("runs", "run", runs_of_subject),
    ("artifacts", "art", _artifacts),
    ("memory", "mem", memory_of_subject),
    ("messages", "msg", messages_of_subject),
    ("prompt_history", "phe", prompt_history_of_subject),
)
"""The kinds of records in the order in which a bundle has them: what others point at comes first."""


async def read_subject(
    connection: Connection, owner_id: UUID, subject_id: str, *, whole_contents: bool
) -> SubjectRecords:
    """The subject and its records; artifacts with a preview, or with their contents as far as these fit.

    Nothing is changed. Raises SubjectNotFound.
    """
    subject = await find_subject(connection, owner_id, subject_id)
    counts = await count_records(connection, owner_id, subject_id)
    found: dict[str, list[JsonObject]] = {}
    for kind, _, lister in KINDS:
        page = await lister(connection, owner_id, subject_id, Place(None, SHOWN_MAX))
        shown = [shown_record(each) for each in page.items]
        if kind == "artifacts":
            shown = await _with_contents(connection, owner_id, page.items, whole=whole_contents)
        found[kind] = shown
    now = datetime.now(UTC)
    left_out = {kind: max(0, getattr(counts, kind) - len(records)) for kind, records in found.items()}
    top = {("memory_records" if kind == "memory" else kind): records for kind, records in found.items()}
    return SubjectRecords(
        subject_id=subject_id,
        metadata=subject.metadata,
        legal_hold=subject.legal_hold,
        portable_format_version="1",
        generated_at=now,
        fetched_at=now,
        exported_at=now,
        counts=counts,
        left_out=SubjectCounts(**left_out),
        records=SubjectRecordSet(**found),
        **top,
    )


def shown_record(record: Resource) -> JsonObject:
    """The wire's resource, with its id again under the name by which one published dialect knows it."""
    members: JsonObject = record.model_dump(mode="json")
    return {**members, "aepId": members["id"]}


async def page_of(
    connection: Connection, owner_id: UUID, subject_id: str, kind: str, after: str | None, size: int
) -> Page[Any]:
    """A page of one kind, after the record with this wire id."""
    prefix, lister = next((prefix, lister) for name, prefix, lister in KINDS if name == kind)
    place = Place(None if after is None else from_wire(prefix, after), size)
    return await lister(connection, owner_id, subject_id, place)


async def _with_contents(
    connection: Connection, owner_id: UUID, artifacts: Sequence[Artifact], *, whole: bool
) -> list[JsonObject]:
    heads = await first_bytes(connection, owner_id, [each.sha256 for each in artifacts], HEAD_BYTES)
    room = CONTENT_BYTES_MAX
    shown = []
    for artifact in artifacts:
        preview = _preview(heads.get(artifact.sha256, b""))
        members = {
            **shown_record(artifact),
            "content_preview": preview,
            "has_binary_bytes": preview is None,
        }
        if whole:
            fits = artifact.size_bytes <= room
            content = await _content(connection, owner_id, artifact) if fits else None
            room -= artifact.size_bytes if fits else 0
            members |= {
                "content": None if content is None else _text(content),
                "bytes_base64": None if content is None else b64encode(content).decode(),
            }
        shown.append(members)
    return shown


async def _content(connection: Connection, owner_id: UUID, artifact: Artifact) -> bytes:
    return b"".join([piece async for piece in pieces_of(connection, owner_id, artifact)])


async def pieces_of(connection: Connection, owner_id: UUID, artifact: Artifact) -> AsyncIterator[bytes]:
    """The artifact's bytes, a chunk at a time."""
    number = 0
    while (piece := await blob_chunk(connection, owner_id, artifact.sha256, number)) is not None:
        yield piece  # bounded by the size of an artifact
        number += 1


def _preview(head: bytes) -> str | None:
    """The beginning as text; None if it is no text. The last character may have been cut apart."""
    for cut in range(UTF8_BYTES_MAX if len(head) == HEAD_BYTES else 1):
        text = _text(head[: len(head) - cut])
        if text is not None:
            return text[:PREVIEW_CHARS_MAX]
    return None


def _text(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
