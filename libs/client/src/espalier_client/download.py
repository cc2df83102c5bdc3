"""An artifact's bytes, streamed and checked: all of them arrived, and they are the ones that were stored.

HTTP itself refuses a body that is shorter than announced; the hash covers the rest. A download that breaks
off begins again, at the next gateway if there is one, and what was handed out already is read past. Nothing
is buffered beyond one piece. Of a body that broke off only the rest is asked for, as a range, if the runtime
named its hash. Below it stands the client's streaming read.
"""

import hashlib
import re
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

import anyio
import httpx2

from espalier_client.backoff import Pauses
from espalier_client.errors import Cause, ClientError, TransportError, is_passing
from espalier_client.transport import PARTIAL

if TYPE_CHECKING:
    from espalier_client.client import AepClient

PATH = "/aep/v1/artifacts/{}/bytes"
ROUNDS_MAX: Final = 5
"""How often each gateway is asked for the rest of one artifact."""

_SHA256 = re.compile(r'"([0-9a-f]{64})"')


async def artifact_bytes(client: "AepClient", artifact_id: str) -> AsyncGenerator[bytes, None]:
    """Pieces of the body. Raises after the last one if they are not what the runtime said (`ETag`)."""
    taken = _Taken()
    pauses = Pauses(len(client.base_urls))
    for attempts_left in reversed(range(ROUNDS_MAX * len(client.base_urls))):
        try:
            async with client.get(PATH, artifact_id, part=taken.rest) as response:
                taken.begin(response)
                async for piece in response.aiter_raw():
                    if fresh := taken.fresh(piece):
                        yield fresh
            taken.check()
            return
        except ClientError as error:
            if not attempts_left or not is_passing(error) or not taken.may_begin_again:
                raise
            pause_s = pauses.after(error)
        await anyio.sleep(pause_s)


class _Taken:
    """What the reader has been given, and where the body that is read now stands."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._size = 0
        self._read = 0
        self._etag: str | None = None

    @property
    def may_begin_again(self) -> bool:
        """Without a hash nobody could tell whether the rest belongs to what was handed out."""
        return not self._size or _SHA256.fullmatch(self._etag or "") is not None

    @property
    def rest(self) -> dict[str, str]:
        """Headers that ask for what was not handed out yet, of the same bytes or else for all."""
        if not self._size or self._etag is None:
            return {}
        return {"Range": f"bytes={self._size}-", "If-Range": self._etag}

    def begin(self, response: httpx2.Response) -> None:
        etag = response.headers.get("etag")
        if self._size and etag != self._etag:
            raise TransportError("The artifact has changed while it was read.", Cause.senseless)
        self._etag, self._read = etag, 0
        if response.status_code == PARTIAL:
            if not response.headers.get("content-range", "").startswith(f"bytes {self._size}-"):
                raise TransportError("Another part was answered than was asked for.", Cause.senseless)
            self._read = self._size

    def fresh(self, piece: bytes) -> bytes:
        """The part of the piece that was not handed out before."""
        known = min(max(self._size - self._read, 0), len(piece))
        self._read += len(piece)
        fresh = piece[known:]
        self._digest.update(fresh)
        self._size += len(fresh)
        return fresh

    def check(self) -> None:
        stored = _SHA256.fullmatch(self._etag or "")
        if stored is not None and stored[1] != self._digest.hexdigest():
            raise TransportError(
                "The artifact's bytes arrived damaged: their hash is not the stored one.", Cause.senseless
            )
