"""A caller that costs next to nothing: AEP over one keep-alive connection, written by hand.

The published clients spend more per call than the gateway does, and on a small machine a load generator that
is heavier than what it measures measures itself. This one knows only what the benches need: calls that
succeed, and event streams to their end. It is no client library; `espalier_client` is.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import orjson

VERSION: Final = "aep-2026-04-24"
ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024


class Caller:
    """One connection: a call or a stream at a time. Raises RuntimeError for every answer but success."""

    def __init__(self, base_url: str, key: str) -> None:
        self._address = address_of(base_url)
        self._key = key
        self._session = ""
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(*self._address, limit=ANSWER_BYTES_MAX)
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._writer.close()

    async def begin(self) -> Self:
        """Open a session."""
        params = {
            "client_info": {"name": "bench", "version": "0"},
            "requested_versions": [VERSION],
            "requested_capabilities": {"streaming.sse": True},
        }
        self._session = (await self.call("initialize", params))["session_id"]
        return self

    async def call(self, method: str, params: dict[str, Any]) -> Any:
        body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        headers = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        self._writer.write(self._request("POST", "/aep/v1/rpc", headers, body))
        head = await self._head()
        answer = orjson.loads(await self._reader.readexactly(_length(head)))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    async def events(self, run_id: str) -> AsyncIterator[tuple[float, list[int], bool]]:
        """What arrives together: when, the seqs of its events, and whether `run.ended` is the last of them.

        To be read to its end: what is left of an answer would be taken for the next one.
        """
        self._writer.write(self.events_request(run_id))
        await self._head()
        kept = b""
        while chunk := await self._chunk():
            moment = time.monotonic()
            *frames, kept = (kept + chunk).split(b"\n\n")
            seqs = [int(frame[4:20]) for frame in frames if frame.startswith(b"id: ")]
            if seqs:
                yield moment, seqs, b"event: run.ended" in frames[-1]

    def events_request(self, run_id: str, since: int = 0) -> bytes:
        """What asks for a run's events after a seq, for whoever reads them over a connection of its own."""
        query = f"?since={since:016d}" if since else ""
        path = f"/aep/v1/runs/{run_id}/events{query}"
        return self._request("GET", path, b"Accept: text/event-stream\r\n")

    def _request(self, verb: str, path: str, headers: bytes, body: bytes = b"") -> bytes:
        session = f"X-AEP-Session-Id: {self._session}\r\n" if self._session else ""
        return (
            f"{verb} {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {self._key}\r\n"
            f"Agent-Protocol-Version: {VERSION}\r\n{session}"
        ).encode() + b"%b\r\n%b" % (headers, body)

    async def _head(self) -> bytes:
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            body = await self._reader.readexactly(_length(head)) if b"content-length" in head.lower() else b""
            raise RuntimeError(f"{head.splitlines()[0].decode()}: {body.decode()}")
        return head

    async def _chunk(self) -> bytes:
        """A piece of a chunked body; empty at its end."""
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        chunk = await self._reader.readexactly(size + 2)
        return chunk[:-2]


def address_of(base_url: str) -> tuple[str, int]:
    place = urlsplit(base_url)
    assert place.hostname is not None
    assert place.port is not None
    return (place.hostname, place.port)


def _length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"content-length:")
    return int(rest.split(b"\r\n", 1)[0])
