"""A caller of the runtime under test: bare HTTP, JSON-RPC by hand, streams byte by byte.

Deliberately not the client of this package: a check must see what was really sent. Whatever goes wrong with a
connection or an answer becomes one sentence about the runtime. Every answer has a bound in bytes and in time.
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final

import anyio
import httpx2

from espalier_client.conformance.expected import code_of, expected, symbol_of
from espalier_client.conformance.sse import Frame, Frames
from espalier_client.conformance.verdicts import Failed, brief, expect

RPC: Final = "/aep/v1/rpc"
ANSWER_WAIT_S: Final = 15.0
CONNECT_WAIT_S: Final = 5.0
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
CONNECTIONS_MAX: Final = 64
RATE_LIMITED: Final = 429
LATER_TRIES_MAX: Final = 60
LATER_WAIT_S_MAX: Final = 2.0
CLOSE_WAIT_S: Final = 5.0
"""How long after `run.ended` a stream may stay open."""


@dataclass
class Notes:
    """What was asked last, so that a check which runs out of time can say what it waited for."""

    last: str = "nothing"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Raises Failed for a body that is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError as err:
            start = self.body[:80].decode(errors="replace")
            raise Failed(f"expected JSON under HTTP {self.status}, got {start!r}.") from err

    def kind(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True, slots=True)
class Heard:
    """A stream, as far as it was read. `closed`: the runtime ended it."""

    status: int
    headers: Mapping[str, str]
    raw: bytes
    frames: tuple[Frame, ...]
    closed: bool

    def events(self) -> list[dict[str, Any]]:
        return [frame.event() for frame in self.frames]


def envelope(method: Any, params: Any = None, request_id: Any = 1) -> dict[str, Any]:
    given = {} if params is None else {"params": params}
    return {"jsonrpc": "2.0", "id": request_id, "method": method, **given}


@dataclass(frozen=True)
class Caller:
    """Somebody with a key and perhaps a session. All callers share the kit's connections."""

    http: httpx2.AsyncClient = field(repr=False)
    key: str = field(repr=False)
    session_id: str = ""
    capabilities: Mapping[str, bool] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    _ids: Iterable[int] = field(default_factory=count, repr=False)

    # ---------------------------------------------------------------- HTTP

    def headers(self, **changes: str | None) -> dict[str, str]:
        """The headers of an ordinary request; a change to None leaves one out."""
        usual: dict[str, str | None] = {
            "Authorization": f"Bearer {self.key}",
            "Agent-Protocol-Version": expected().version,
            "X-AEP-Session-Id": self.session_id or None,
            **{name.replace("_", "-"): value for name, value in changes.items()},
        }
        return {name: value for name, value in usual.items() if value is not None}

    async def send(
        self, verb: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request, and again while the runtime asks for patience. `body` is JSON, or bytes as such."""
        if path != RPC:
            self.notes.last = f"{verb} {path}"
        told = {"Accept": "*/*", **(self.headers() if headers is None else headers)}
        if body is not None:
            told.setdefault("Content-Type", "application/json")
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        for _ in range(LATER_TRIES_MAX):
            async with self._open(verb, path, content, told) as response:
                answer = Answer(response.status_code, _headers(response), await _whole(response))
            if answer.status != RATE_LIMITED:
                return answer
            await anyio.sleep(_patience_s(answer))
        raise Failed(f"{verb} {path} was rate limited {LATER_TRIES_MAX} times in a row.")

    async def get(self, path: str, **headers: str | None) -> Answer:
        return await self.send("GET", path, headers=self.headers(**headers))

    async def post(self, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """To the RPC endpoint."""
        named = isinstance(body, dict) and isinstance(body.get("method"), str)
        self.notes.last = body["method"] if named else f"POST {RPC}"
        return await self.send("POST", RPC, body, headers)

    @asynccontextmanager
    async def _open(
        self, verb: str, path: str, content: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[httpx2.Response]:
        try:
            async with self.http.stream(verb, path, content=content, headers=dict(headers)) as response:
                yield response
        except httpx2.TimeoutException as err:
            raise Failed(f"{self.notes.last}: no answer within {ANSWER_WAIT_S:g} s.") from err
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as err:
            why = str(err) or type(err).__name__
            raise Failed(f"{self.notes.last}: the connection broke or the answer was no HTTP: {why}") from err

    # ---------------------------------------------------------------- JSON-RPC

    async def answer(
        self, method: str, params: Any = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The whole response of one call, its envelope checked."""
        request_id = next(iter(self._ids))
        sent = await self.post(envelope(method, params, request_id), headers)
        expect(sent.status < 500, f"{method}: clients throw away an answer under HTTP {sent.status}.")
        return require_response(sent.json(), request_id, method)

    async def call(self, method: str, **params: Any) -> Any:
        """The result of a call that has to succeed."""
        answer = await self.answer(method, params)
        if "error" in answer:
            raise Failed(f"{method} should succeed, got {brief(answer['error'])}.")
        return answer["result"]

    async def refused(self, symbol: str, method: str, **params: Any) -> dict[str, Any]:
        """The error of a call that has to fail with this symbol's code."""
        return require_error(await self.answer(method, params), symbol, method)

    async def initialize(self, *, capabilities: Sequence[str] | Mapping[str, bool] | None = None) -> "Caller":
        """The same caller with a new session; without a wish it asks for everything."""
        result = await self.call("initialize", **hello(capabilities))
        if not isinstance(result, dict) or not isinstance(result.get("session_id"), str):
            raise Failed(f"initialize should answer an object with a session_id, got {brief(result)}.")
        agreed = result.get("capabilities")
        if not isinstance(agreed, dict):
            raise Failed(f"initialize should answer capabilities, got {brief(result)}.")
        return replace(self, session_id=result["session_id"], capabilities=agreed)

    # ---------------------------------------------------------------- streams

    async def listen(
        self,
        run_id: str,
        query: str = "",
        *,
        until_closed: bool = False,
        enough: int | None = None,
        **headers: str,
    ) -> Heard:
        """A run's stream, up to `run.ended`, to its own end, or to so many frames. Must be HTTP 200."""
        path = events_path(run_id) + query
        self.notes.last = f"GET {path}"
        told = {**self.headers(**headers), "Accept": "text/event-stream"}
        for _ in range(LATER_TRIES_MAX):
            async with self._open("GET", path, None, told) as response:
                if response.status_code == RATE_LIMITED:
                    later = Answer(RATE_LIMITED, _headers(response), await _whole(response))
                elif response.status_code != 200:
                    body = (await _whole(response))[:200].decode(errors="replace")
                    raise Failed(f"the stream should be HTTP 200, got {response.status_code}: {body}")
                else:
                    return await _read_frames(response, until_closed, enough)
            await anyio.sleep(_patience_s(later))
        raise Failed(f"GET {path} was rate limited {LATER_TRIES_MAX} times in a row.")

    async def events(self, run_id: str, since: str | None = None) -> list[dict[str, Any]]:
        """The envelopes of a run up to and with `run.ended`."""
        query = "" if since is None else f"?since={since}"
        return (await self.listen(run_id, query)).events()


def hello(capabilities: Sequence[str] | Mapping[str, bool] | None = None) -> dict[str, Any]:
    known = expected()
    wanted = [*known.capabilities, *known.extensions] if capabilities is None else capabilities
    asked = dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(wanted, True)
    return {
        "client_info": {"name": "espalier-conformance", "version": "1"},
        "requested_versions": [known.version],
        "requested_capabilities": asked,
    }


def events_path(run_id: str) -> str:
    return f"/aep/v1/runs/{run_id}/events"


def bytes_path(artifact_id: str) -> str:
    return f"/aep/v1/artifacts/{artifact_id}/bytes"


def require_response(answer: Any, request_id: Any, what: str) -> dict[str, Any]:
    """One response object of JSON-RPC 2.0. Raises Failed for anything else."""
    if not isinstance(answer, dict) or answer.get("jsonrpc") != "2.0":
        raise Failed(f"{what}: expected a JSON-RPC 2.0 response, got {brief(answer)}.")
    told = answer.get("id")
    if told != request_id or type(told) is not type(request_id):
        raise Failed(f"{what}: expected the id {request_id!r} again, got {told!r}.")
    if ("result" in answer) == (answer.get("error") is not None):
        raise Failed(f"{what}: expected either result or error, got {brief(answer)}.")
    error = answer.get("error")
    if error is not None and not (
        isinstance(error, dict)
        and isinstance(error.get("message"), str)
        and isinstance(error.get("code"), int)
        and not isinstance(error["code"], bool)
    ):
        raise Failed(f"{what}: expected an error with a code and a message, got {brief(error)}.")
    return answer if error is not None else {key: each for key, each in answer.items() if key != "error"}


def require_error(answer: dict[str, Any], symbol: str, what: str) -> dict[str, Any]:
    if "error" not in answer:
        raise Failed(f"{what} should be refused with {symbol}, got the result {brief(answer['result'])}.")
    error: dict[str, Any] = answer["error"]
    if error["code"] != code_of(symbol):
        got = symbol_of(error["code"])
        raise Failed(f"{what} should be refused with {symbol}, got {got}: {brief(error)}.")
    return error


def symbol_in(answer: dict[str, Any]) -> str:
    """The symbol of the error, or `result`."""
    return symbol_of(answer["error"]["code"]) if "error" in answer else "result"


async def _read_frames(response: httpx2.Response, until_closed: bool, enough: int | None) -> Heard:
    frames, raw, closed = Frames(), bytearray(), False
    with anyio.CancelScope() as scope:
        async for piece in response.aiter_raw():
            raw += piece
            expect(len(raw) <= ANSWER_BYTES_MAX, f"a stream of more than {ANSWER_BYTES_MAX} bytes.")
            frames.feed(piece)
            if enough is not None and len(frames.found) >= enough:
                break
            if frames.ended and not until_closed:
                break
            if frames.ended and scope.deadline == float("inf"):
                scope.deadline = anyio.current_time() + CLOSE_WAIT_S
        else:
            closed = True
    return Heard(response.status_code, _headers(response), bytes(raw), tuple(frames.found), closed)


async def _whole(response: httpx2.Response) -> bytes:
    body = bytearray()
    with anyio.move_on_after(ANSWER_WAIT_S) as limit:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > ANSWER_BYTES_MAX:
                raise Failed(f"an answer of more than {ANSWER_BYTES_MAX} bytes.")
    if limit.cancelled_caught:
        raise Failed(f"an answer that was not whole within {ANSWER_WAIT_S:g} s.")
    return bytes(body)


def _headers(response: httpx2.Response) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def _patience_s(answer: Answer) -> float:
    """What the refusal asks for, within reason."""
    try:
        told = json.loads(answer.body)
        one = told[0] if isinstance(told, list) else told
        data = one.get("error", {}).get("data", {}) if isinstance(one.get("error"), dict) else one
        wanted = float(data["retry_after_ms"]) / 1000
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        header = answer.headers.get("retry-after", "")
        wanted = float(header) if header.isdecimal() else 1.0
    return min(max(wanted, 0.05), LATER_WAIT_S_MAX)
