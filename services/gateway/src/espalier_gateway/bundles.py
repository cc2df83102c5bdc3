"""A subject's bundle on the wire: JSON lines, streamed out page by page, taken in whole or not at all.

Nothing of a bundle is held in memory but a line and the ids that it maps. What comes in is first written to a
file that has no name, because a sender may be slow and a transaction must not wait for it. What the lines
mean is known below, in `acts.bundles`.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final
from uuid import UUID

import anyio
from starlette.requests import ClientDisconnect, Request

from espalier_acts.bundles import (
    CHUNK_LINE_BYTES_MAX,
    BundleReader,
    bytes_line,
    end_line,
    head_line,
    record_line,
)
from espalier_acts.subject_records import KINDS, page_of
from espalier_domain.errors import InvalidInput
from espalier_protocol.artifact import Artifact
from espalier_protocol.shapes import PAGE_MAX
from espalier_protocol.subject import Subject, SubjectImported
from espalier_store.artifacts import blob_chunk
from espalier_store.pool import Pool, reading, transaction

NDJSON: Final = "application/x-ndjson"
IN_MEMORY_BYTES_MAX: Final = 1024 * 1024
SILENCE_S: Final = 30.0
"""A sender that sends nothing for this long is cut off."""


async def exported(pool: Pool, owner_id: UUID, subject: Subject) -> AsyncGenerator[bytes, None]:
    """The bundle's lines. One that has no last line was broken off."""
    counts = dict.fromkeys((kind for kind, _, _ in KINDS), 0)
    yield head_line(subject)
    for kind, _, _ in KINDS:
        after: str | None = None
        more = True
        while more:  # bounded by what is tagged
            async with reading(pool) as connection:
                page = await page_of(connection, owner_id, subject.id, kind, after, PAGE_MAX)
            for record in page.items:
                counts[kind] += 1
                yield record_line(kind, record)
                if isinstance(record, Artifact):
                    async for line in _contents(pool, owner_id, record):
                        yield line
            more = page.more
            after = page.items[-1].id if page.items else None
    yield end_line(counts)


async def _contents(pool: Pool, owner_id: UUID, artifact: Artifact) -> AsyncIterator[bytes]:
    number = 0
    while True:  # bounded by the size of an artifact
        async with reading(pool) as connection:
            piece = await blob_chunk(connection, owner_id, artifact.sha256, number)
        if piece is None:
            return
        yield bytes_line(piece)
        number += 1


async def imported(pool: Pool, owner_id: UUID, request: Request, bytes_max: int) -> SubjectImported:
    """Take a bundle in, in one transaction. Raises what is wrong with it, and then nothing of it is there."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != NDJSON:
        raise InvalidInput("Content-Type", f"should be {NDJSON}")
    async with anyio.SpooledTemporaryFile[bytes](max_size=IN_MEMORY_BYTES_MAX) as file:
        await _receive(request, file, bytes_max)
        await file.seek(0)
        async with transaction(pool) as connection:
            reader = BundleReader(connection, owner_id)
            async for line in file:
                await reader.take(line)
            return await reader.finish()


async def _receive(request: Request, file: "anyio.SpooledTemporaryFile[bytes]", bytes_max: int) -> None:
    size = line_bytes = 0
    stream = request.stream()
    try:
        while True:  # bounded by bytes_max
            with anyio.fail_after(SILENCE_S):
                piece = await anext(stream, None)
            if piece is None:
                return
            size += len(piece)
            head, newline, tail = piece.partition(b"\n")
            longest = max(line_bytes + len(head), *(len(part) for part in tail.split(b"\n")))
            line_bytes = len(piece.rpartition(b"\n")[2]) if newline else line_bytes + len(piece)
            if size > bytes_max or longest > CHUNK_LINE_BYTES_MAX:
                raise InvalidInput("bundle", f"should have at most {bytes_max} bytes, in lines that fit")
            await file.write(piece)
    except (TimeoutError, ClientDisconnect) as error:
        raise InvalidInput("bundle", "did not arrive whole") from error
