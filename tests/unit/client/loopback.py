"""A runtime made of bytes: an HTTP server on a real socket that answers what a test wrote down.

It is no twin of the gateway and knows nothing of AEP beyond the envelope; it exists for what a real gateway
cannot be told to do, such as stopping in the middle of a frame.
"""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

HEAD_BYTES_MAX = 64 * 1024
RUN = "run_01"
SESSION = "ses_1"


@dataclass(frozen=True)
class Request:
    name: str
    """`POST <rpc method>` or `GET <path>`."""

    headers: dict[str, str]
    query: dict[str, str]
    message: dict[str, Any]


Answer = Callable[[Request, SocketStream], Awaitable[None]]


@dataclass
class Loopback:
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    answers: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on(self, name: str, *answers: Answer) -> None:
        """Answers in the order of the requests; the last one is repeated. Without any, it is no runtime."""
        self.answers[name] = list(answers)

    def asked(self, name: str) -> list[Request]:
        return [request for request in self.requests if request.name == name]

    async def serve(self, stream: SocketStream) -> None:
        async with stream:
            request = await _read(stream)
            if request is None:
                return
            self.requests.append(request)
            waiting = self.answers[request.name] or [reply(404, b"")]
            answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):  # it left
                await answer(request, stream)


@asynccontextmanager
async def open_loopback(port: int = 0) -> AsyncIterator[Loopback]:
    server = Loopback()
    server.on("POST initialize", result(session()))
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port) as listener,
        anyio.create_task_group() as tasks,
    ):
        server.port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - not Django
        tasks.start_soon(listener.serve, server.serve)
        yield server
        tasks.cancel_scope.cancel()


async def _read(stream: SocketStream) -> Request | None:
    buffered = BufferedByteReceiveStream(stream)
    try:
        head = await buffered.receive_until(b"\r\n\r\n", HEAD_BYTES_MAX)
        line, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
        body = await buffered.receive_exactly(int(headers.get("content-length", 0)))
    except (anyio.IncompleteRead, anyio.BrokenResourceError):
        return None
    verb, target, _ = line.split(" ")
    place = urlsplit(target)
    message = json.loads(body) if body else {}
    name = f"{verb} {message['method'] if message else place.path}"
    query = {key: values[0] for key, values in parse_qs(place.query).items()}
    return Request(name, headers, query, message)


# ---------------------------------------------------------------- answers


def session(session_id: str = SESSION, *, keeps_keys: bool = False, **capabilities: bool) -> dict[str, Any]:
    named = {name.replace("_", "."): value for name, value in capabilities.items()}
    kept = {"idempotency_ttl_seconds": 86_400} if keeps_keys else {}
    return {
        "server_info": {"name": "loopback", "version": "1"},
        "protocol_version": "aep-2026-04-24",
        "capabilities": {"streaming.sse": True, **named},
        "session_id": session_id,
        "session_ttl_seconds": 60,
        **kept,
    }


def reply(status: int, body: bytes, **headers: str) -> Answer:
    async def answer(_: Request, stream: SocketStream) -> None:
        await stream.send(_head(status, {"content_length": str(len(body)), **headers}) + body)

    return answer


def result(value: Any) -> Answer:
    async def answer(request: Request, stream: SocketStream) -> None:
        message = {"jsonrpc": "2.0", "id": request.message["id"], "result": value}
        await reply(200, json.dumps(message).encode())(request, stream)

    return answer


def error(code: int, message: str, status: int = 200, **data: Any) -> Answer:
    async def answer(request: Request, stream: SocketStream) -> None:
        fault = {"code": code, "message": message, "data": data}
        body = {"jsonrpc": "2.0", "id": request.message["id"], "error": fault}
        await reply(status, json.dumps(body).encode())(request, stream)

    return answer


def refusal(status: int, symbol: str, code: int, **more: Any) -> Answer:
    """The error body of the endpoints beside RPC."""
    return reply(status, json.dumps({"error": symbol, "message": "no", "code": code, **more}).encode())


async def hang_up(_: Request, stream: SocketStream) -> None:
    """The connection ends without one byte of an answer."""
    await stream.aclose()


def events(*pieces: bytes, hold: bool = False, kind: str = "text/event-stream") -> Answer:
    """A stream of these bytes, which then ends, or stays open and silent (`hold`)."""

    async def answer(_: Request, stream: SocketStream) -> None:
        await stream.send(_head(200, {"content-type": kind}))
        for piece in pieces:
            await stream.send(piece)
        if hold:
            await stream.receive()  # returns when the client leaves

    return answer


def torn(body: bytes, **headers: str) -> Answer:
    """A body that breaks off: more of it was announced."""
    return reply(200, body, content_length=str(len(body) + 1), **headers)


async def silence(_: Request, stream: SocketStream) -> None:
    """No byte of an answer, as long as the client waits for one."""
    await stream.receive()


def envelope(seq: int, type: str = "error", run_id: str = RUN, **payload: Any) -> dict[str, Any]:  # noqa: A002
    return {
        "event_id": f"{seq:016d}",
        "run_id": run_id,
        "type": type,
        "emitted_at": "2026-01-01T00:00:00.000Z",
        "payload": payload,
    }


def frame(seq: int, type: str = "error", **more: Any) -> bytes:  # noqa: A002
    event = envelope(seq, type, **more)
    return f"id: {event['event_id']}\nevent: {type}\ndata: {json.dumps(event)}\n\n".encode()


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
