"""`GET` and `HEAD /aep/v1/artifacts/{artifact_id}/bytes`: the file itself, or a part, piece by piece.

What an agent wrote is hostile until shown otherwise: it is always a download, never a page of our origin. No
database connection is held between two pieces, so a slow reader costs memory for one piece only.
"""

import re
from collections.abc import AsyncGenerator
from typing import Final
from urllib.parse import quote
from uuid import UUID

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from espalier_domain.errors import NotFound
from espalier_gateway.byte_ranges import Mismatched, OutOfRange, Part, Unchanged, wanted_part
from espalier_gateway.http import context_of, plainly, state_of
from espalier_gateway.streaming import PiecewiseResponse
from espalier_protocol.artifact import Artifact
from espalier_protocol.ids import from_wire
from espalier_store.artifacts import CHUNK_BYTES, blob_chunk, get_artifact
from espalier_store.pool import Pool, reading

UNKNOWN_TYPE: Final = "application/octet-stream"
_NAME: Final = r"[\w.+-]{1,100}"
_MIME_TYPE: Final = re.compile(rf'{_NAME}/{_NAME}(?: ?; ?{_NAME}=(?:{_NAME}|"{_NAME}")){{0,4}}', re.ASCII)


async def download(request: Request) -> ASGIApp:
    return await plainly(_open(request), endpoint="bytes")


async def _open(request: Request) -> Response:
    state, text = state_of(request), request.path_params["artifact_id"]
    caller, _ = await state.gatekeeper.admit(context_of(request.headers), ["run.read"])
    artifact_id = from_wire("art", text)
    if artifact_id is None:
        raise NotFound("artifact", text)
    async with reading(state.pool) as connection:
        artifact = await get_artifact(connection, caller.owner_id, artifact_id)
    if artifact is None:
        raise NotFound("artifact", text)
    return _response(request, state.pool, caller.owner_id, artifact)


def _response(request: Request, pool: Pool, owner_id: UUID, artifact: Artifact) -> Response:
    headers, size = _headers(artifact), artifact.size_bytes
    getting = request.method == "GET"
    try:
        part = wanted_part(request.headers, headers["ETag"], size, may_be_part=getting)
    except Unchanged:
        return Response(status_code=304, headers=headers)
    except Mismatched:
        return Response(status_code=412, headers=headers)
    except OutOfRange:
        return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{size}"})
    shown = part or Part(0, size)
    headers["Content-Length"] = str(shown.size)
    headers["Content-Type"] = artifact.mime_type if _MIME_TYPE.fullmatch(artifact.mime_type) else UNKNOWN_TYPE
    if not getting:
        return Response(headers=headers)
    if part is not None:
        headers["Content-Range"] = f"bytes {part.start}-{part.end - 1}/{size}"
    pieces = _pieces(pool, owner_id, artifact.sha256, shown)
    return PiecewiseResponse(pieces, headers, status_code=206 if part else 200)


async def _pieces(pool: Pool, owner_id: UUID, sha256: str, part: Part) -> AsyncGenerator[bytes, None]:
    """The part's bytes, at most a chunk at a time; the next one is not read before the last was taken."""
    at = part.start
    while at < part.end:  # bounded by the chunks of an artifact
        number, offset = divmod(at, CHUNK_BYTES)
        async with reading(pool) as connection:
            chunk = await blob_chunk(connection, owner_id, sha256, number)
        if chunk is None:
            return  # the artifact has just been erased; the missing length tells the reader
        piece = chunk[offset : offset + part.end - at]
        assert piece, "a blob has as many bytes as its artifacts say"
        yield piece
        at += len(piece)


def _headers(artifact: Artifact) -> dict[str, str]:
    return {
        "ETag": f'"{artifact.sha256}"',
        "Accept-Ranges": "bytes",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(artifact.name, safe='')}",
        "Content-Security-Policy": "sandbox; default-src 'none'; frame-ancestors 'none'",
        "Cross-Origin-Resource-Policy": "same-site",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "private, no-store",
    }


def bytes_route() -> Route:
    return Route("/aep/v1/artifacts/{artifact_id}/bytes", download, methods=["GET"])
