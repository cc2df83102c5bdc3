"""A reader of one run's events that costs next to nothing, so that a thousand of them fit one process.

It writes down the seq and the arrival of every event that comes in, whatever it is, and judges nothing: what
is lost or repeated is counted afterwards from the whole record. Like any client it resumes after the last
event it got when a stream ends before the run does. `wire.Caller` makes the requests; nothing here calls.
"""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, cast

import orjson

FRAME: Final = re.compile(rb"id: (\d{16})\nevent: ([^\n]+)\ndata: ([^\n]*)\n\n")
END: Final = b"run.ended"
RESUMES_MAX: Final = 20
RESUME_PAUSE_S: Final = 0.1

Emitted = dict[int, float]
"""When each event of the run was written, by its own account; shared by all readers of the run."""


@dataclass
class Seen:
    """What one follower saw, in the order of arrival. Moments are of the wall clock, in seconds."""

    seqs: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    opened_at: float = 0.0
    ended: bool = False
    resumed: int = 0
    refusal: str = ""

    @property
    def last(self) -> int:
        return self.seqs[-1] if self.seqs else 0


class Stream(asyncio.Protocol):
    """One connection: sends one request and decodes the chunked answer as it comes."""

    def __init__(self, request: bytes, seen: Seen, emitted: Emitted) -> None:
        self.over = asyncio.Event()
        self._request = request
        self._seen = seen
        self._emitted = emitted
        self._in_body = False
        self._raw = b""
        self._text = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's own is no subclass of it

    def connection_lost(self, _exc: Exception | None) -> None:
        self.over.set()

    def data_received(self, data: bytes) -> None:
        moment = time.time()
        self._raw += data
        if not self._in_body and not self._read_head(moment):
            return
        while (piece := self._next_chunk()) is not None:
            if not piece:
                self.over.set()
                break
            self._text += piece
        self._take_frames(moment)

    def _read_head(self, moment: float) -> bool:
        head, gap, rest = self._raw.partition(b"\r\n\r\n")
        if not gap:
            return False
        self._seen.answered.set()
        if not head.startswith(b"HTTP/1.1 200 "):
            self._seen.refusal = f"{head.splitlines()[0].decode()} {rest.decode(errors='replace')}"
            self.over.set()
            return False
        self._in_body, self._raw = True, rest
        self._seen.opened_at = self._seen.opened_at or moment
        return True

    def _next_chunk(self) -> bytes | None:
        """The next whole piece of the body; empty at its end, None when it has not all come yet."""
        line_end = self._raw.find(b"\r\n")
        if line_end < 0:
            return None
        begin = line_end + 2
        end = begin + int(self._raw[:line_end], 16)
        if len(self._raw) < end + 2:
            return None
        piece, self._raw = self._raw[begin:end], self._raw[end + 2 :]
        return piece

    def _take_frames(self, moment: float) -> None:
        taken, seen = 0, self._seen
        for found in FRAME.finditer(self._text):
            seq, taken = int(found[1]), found.end()
            seen.seqs.append(seq)
            seen.moments.append(moment)
            seen.ended = seen.ended or found[2] == END
            if seq not in self._emitted:
                emitted_at = orjson.loads(found[3])["emitted_at"]
                self._emitted[seq] = datetime.fromisoformat(emitted_at).timestamp()
        if taken:
            self._text = self._text[taken:]


async def follow(
    address: tuple[str, int], request: Callable[[int], bytes], seen: Seen, emitted: Emitted
) -> None:
    """Read until `run.ended` came, or the server said no, or RESUMES_MAX streams ended before it.

    `request` gives the bytes that ask for the events after a seq.
    """
    loop = asyncio.get_running_loop()
    for attempt in range(1 + RESUMES_MAX):
        seen.resumed = attempt
        wanted = request(seen.last)
        transport, stream = await loop.create_connection(lambda: Stream(wanted, seen, emitted), *address)  # noqa: B023
        try:
            await stream.over.wait()
        finally:
            transport.abort()
        if seen.ended or seen.refusal:
            return
        await asyncio.sleep(RESUME_PAUSE_S)
