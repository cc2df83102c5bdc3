"""An artifact's bytes, streamed and checked: all of them arrived, and they are the ones that were stored.

HTTP itself refuses a body that is shorter than announced; the hash covers the rest. Nothing is buffered
beyond one piece. Below it stands the client's streaming read.
"""

import hashlib
import re
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from espalier_client.errors import Cause, TransportError

if TYPE_CHECKING:
    from espalier_client.client import AepClient

PATH = "/aep/v1/artifacts/{}/bytes"
_SHA256 = re.compile(r'"([0-9a-f]{64})"')


async def artifact_bytes(client: "AepClient", artifact_id: str) -> AsyncGenerator[bytes, None]:
    """Pieces of the body. Raises after the last one if they are not what the runtime said (`ETag`)."""
    digest = hashlib.sha256()
    async with client.get(PATH, artifact_id) as response:
        async for piece in response.aiter_raw():
            digest.update(piece)
            yield piece
        stored = _SHA256.fullmatch(response.headers.get("etag", ""))
    if stored is not None and stored[1] != digest.hexdigest():
        raise TransportError(
            "The artifact's bytes arrived damaged: their hash is not the stored one.", Cause.senseless
        )
