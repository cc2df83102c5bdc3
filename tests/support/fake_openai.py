"""A strict OpenAI-compatible server on loopback that says what a test tells it, and can misbehave in any way.

It refuses with 400 what the real API refuses: unknown and ill-typed members, names of tools that are not
accepted, schemas that are no objects, answers to calls that nobody made, calls that nobody answered. What it
refused is kept, so that a test can assert that it was nothing. It is no model: replies are given, in order.
"""

import json
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import anyio
from anyio.abc import SocketAttribute, SocketStream
from pydantic import BaseModel, ConfigDict, Field, ValidationError

HEAD_BYTES_MAX = 64 * 1024
BODY_BYTES_MAX = 8 * 1024 * 1024
PIECE_BYTES = 64 * 1024
CALL_ID_CHARS_MAX = 40
TOOLS_MAX = 128


# --- what it accepts -------------------------------------------------------------------------------------


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Strict):
    name: ToolName
    description: str = Field(default="", max_length=1024)
    parameters: dict[str, Any] = Field(default_factory=dict)


class Tool(Strict):
    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    name: ToolName
    arguments: str


class Call(Strict):
    id: str = Field(min_length=1, max_length=CALL_ID_CHARS_MAX)
    type: Literal["function"]
    function: CalledFunction


class Told(Strict):
    role: Literal["system", "user"]
    content: str


class Said(Strict):
    role: Literal["assistant"]
    content: str | None = None
    tool_calls: list[Call] | None = Field(default=None, min_length=1)


class Returned(Strict):
    role: Literal["tool"]
    content: str
    tool_call_id: str


class ChatRequest(Strict):
    model: str
    messages: list[Annotated[Told | Said | Returned, Field(discriminator="role")]] = Field(min_length=1)
    tools: list[Tool] | None = Field(default=None, min_length=1, max_length=TOOLS_MAX)
    tool_choice: Literal["auto"] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream: Literal[False] | None = None


class Refused(Exception):
    """Why a request is no good."""


def check(body: bytes) -> ChatRequest:
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as invalid:
        raise Refused(str(invalid)) from invalid
    if request.max_tokens and request.max_completion_tokens:
        raise Refused("max_tokens and max_completion_tokens at the same time")
    if request.tool_choice and not request.tools:
        raise Refused("tool_choice is only allowed when tools are specified")
    _check_tools(request.tools or [])
    _check_order(request)
    return request


def _check_tools(tools: list[Tool]) -> None:
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise Refused("tool names must be unique")
    for tool in tools:
        schema = tool.function.parameters
        if schema and (schema.get("type") != "object" or not isinstance(schema.get("properties"), dict)):
            raise Refused(f"schema of {tool.function.name} must be an object with properties")


def _check_order(request: ChatRequest) -> None:
    seen: set[str] = set()
    open_calls: set[str] = set()
    for message in request.messages:
        match message:
            case Returned(tool_call_id=call_id):
                if call_id not in open_calls:
                    raise Refused(f"a tool message must answer a call of the preceding message: {call_id}")
                open_calls.remove(call_id)
                continue
        if open_calls:
            raise Refused(f"calls without an answer: {sorted(open_calls)}")
        if isinstance(message, Said):
            calls = [call.id for call in message.tool_calls or []]
            if not calls and message.content is None:
                raise Refused("an assistant message needs content or tool_calls")
            if len(set(calls)) < len(calls) or seen & set(calls):
                raise Refused("ids of calls must be unique")
            for call in message.tool_calls or []:
                if not isinstance(json.loads(call.function.arguments), dict):
                    raise Refused("arguments must be an object")
            seen |= set(calls)
            open_calls = set(calls)
    if open_calls:
        raise Refused(f"calls without an answer: {sorted(open_calls)}")


# --- what it says ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """`body` is sent `times` over, and then the connection ends as `ending` says. Silence never begins."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = "application/json"
    times: int = 1
    missing: int = 0
    """Bytes that the length promises and that never come."""
    ending: Literal["close", "reset", "hang", "silence"] = "close"
    tokens: int = 0
    after_s: float = 0.0
    """How late the first byte is."""

    def head(self) -> bytes:
        length = len(self.body) * self.times + self.missing
        lines = [
            f"HTTP/1.1 {self.status} Whatever",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {length}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join([*lines, "", ""]).encode()


def value(body: Any, **changes: Any) -> Reply:
    """Any JSON, as a success unless the changes say otherwise."""
    return Reply(json.dumps(body).encode(), **changes)


def completion(
    text: str | None = None,
    *calls: tuple[str, Any],
    finish: str | None = None,
    usage: tuple[int, int] | None = (70, 30),
    **message: Any,
) -> dict[str, Any]:
    """A completion as the API words it. Arguments that are text go out as they are."""
    said: dict[str, Any] = {"role": "assistant", "content": text, **message}
    if calls:
        said["tool_calls"] = [_call(number, name, args) for number, (name, args) in enumerate(calls)]
    counted = {}
    if usage is not None:
        prompt, answer = usage
        counts = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        counted = {"usage": counts}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "whatever",
        "choices": [
            {"index": 0, "message": said, "finish_reason": finish or ("tool_calls" if calls else "stop")}
        ],
        **counted,
    }


def _call(number: int, name: str, args: Any) -> dict[str, Any]:
    arguments = args if isinstance(args, str) else json.dumps(args)
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(text: str | None = None, *calls: tuple[str, Any], **changes: Any) -> Reply:
    usage = changes.get("usage", (70, 30))
    return value(completion(text, *calls, **changes), tokens=sum(usage or ()))


def failure(status: int, message: str = "no", code: str | None = None, **headers: str) -> Reply:
    """An error as the API words it; `Retry_After="1"` is a header."""
    named = tuple((name.replace("_", "-"), text) for name, text in headers.items())
    return value({"error": {"message": message, "type": "error", "code": code}}, status=status, headers=named)


# --- the server ------------------------------------------------------------------------------------------


@dataclass
class FakeOpenAI:
    """Gives each good request the next reply; one reply too few is a failure that cannot be overlooked."""

    key: str
    model: str
    base_url: str
    replies: list[Reply]
    requests: list[dict[str, Any]] = field(default_factory=list)
    asked_at: list[float] = field(default_factory=list)
    """When each of them came, in seconds of the event loop's clock."""
    refusals: list[str] = field(default_factory=list)
    tokens: int = 0
    bytes_sent: int = 0
    left: int = 0
    """Connections whose caller went away before the answer was out."""

    async def serve(self, stream: SocketStream) -> None:
        async with stream:
            try:
                head, body = await _read(stream)
                await self._send(stream, self._reply(head, body))
            except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError):
                self.left += 1

    def _reply(self, head: str, body: bytes) -> Reply:
        lines = head.split("\r\n")
        headers = {
            name.lower(): text.strip() for name, _, text in (line.partition(":") for line in lines[1:])
        }
        if lines[0].split(" ")[:2] != ["POST", "/v1/chat/completions"]:
            self.refusals.append(lines[0])
            return failure(404, "Unknown request URL", "unknown_url")
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return failure(401, f"Incorrect API key provided: {self.key[:10]}***", "invalid_api_key")
        try:
            request = check(body)
        except Refused as refused:
            self.refusals.append(str(refused))
            return failure(400, str(refused), "invalid_request_error")
        if request.model != self.model:
            return failure(404, f"The model `{request.model}` does not exist", "model_not_found")
        self.requests.append(json.loads(body))
        self.asked_at.append(anyio.current_time())
        return self.reply_to(request)

    def reply_to(self, request: ChatRequest) -> Reply:  # noqa: ARG002 - a subclass answers what it was asked
        """The next reply, for a good request."""
        if not self.replies:
            self.refusals.append("a request that nobody expected")
            return failure(400, "nothing is left to say")
        reply = self.replies.pop(0)
        self.tokens += reply.tokens
        return reply

    async def _send(self, stream: SocketStream, reply: Reply) -> None:
        if reply.ending == "silence":
            await stream.receive()  # until the caller goes
        await anyio.sleep(reply.after_s)
        await stream.send(reply.head())
        for _ in range(reply.times):
            for start in range(0, len(reply.body), PIECE_BYTES):
                piece = reply.body[start : start + PIECE_BYTES]
                await stream.send(piece)
                self.bytes_sent += len(piece)
        if reply.ending == "hang":
            await stream.receive()
        if reply.ending == "reset":
            raw: socket.socket = stream.extra(SocketAttribute.raw_socket)  # noqa: S610
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


async def _read(stream: SocketStream) -> tuple[str, bytes]:
    taken = b""
    while b"\r\n\r\n" not in taken and len(taken) < HEAD_BYTES_MAX:
        taken += await stream.receive()
        if not taken[:1].isupper():
            raise anyio.BrokenResourceError  # whoever it is speaks TLS
    head, _, body = taken.partition(b"\r\n\r\n")
    (length,) = (
        int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length")
    )
    assert length <= BODY_BYTES_MAX
    while len(body) < length:
        body += await stream.receive()
    return head.decode(), body


@asynccontextmanager
async def fake_openai(
    replies: Iterable[Reply] = (),
    *,
    key: str = "sk-test-0123456789abcdef",
    model: str = "small",
    port: int = 0,
) -> AsyncIterator[FakeOpenAI]:
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port) as listener,
        anyio.create_task_group() as group,
    ):
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610
        fake = FakeOpenAI(key, model, f"http://127.0.0.1:{port}/v1", list(replies))
        group.start_soon(listener.serve, fake.serve)
        yield fake
        group.cancel_scope.cancel()
