"""`AepClient`: one runtime, one key, typed calls.

The session is the client's own business: it begins with the first call and begins again by itself when the
runtime has forgotten it. What is safe to send twice is sent again after passing trouble; a create is not,
because nobody could tell one run from two. Below it stand `transport` and `replies`, beside it `follow`.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self, TypeVar
from urllib.parse import quote

import anyio
import httpx2
from pydantic import BaseModel, ValidationError

from espalier_client import download, follow
from espalier_client.backoff import Pauses
from espalier_client.errors import AepError, Cause, ClientError, TransportError, is_passing, is_unheard
from espalier_client.replies import read_reply, request_body
from espalier_client.transport import Transport
from espalier_protocol import agent, run
from espalier_protocol.access import CAPABILITIES
from espalier_protocol.artifact import Artifact, ArtifactDeleted, ArtifactList, ArtifactPage, ArtifactRef
from espalier_protocol.errors import ErrorCode
from espalier_protocol.events import Event
from espalier_protocol.session import InitializeParams, InitializeResult
from espalier_protocol.shapes import Params
from espalier_protocol.versions import SERVED_VERSIONS

CALL_ATTEMPTS_MAX = 5
CLIENT_INFO = {"name": "espalier-client", "version": "0.1.0"}
# Reading twice is reading, and what was cancelled stays cancelled.
REPEATABLE = frozenset({"initialize", "rpc.discover", "run.cancel", "agent.cancel", "agent.archive"})
REPEATABLE_ENDINGS = (".get", ".list", ".read", ".search")

Result = TypeVar("Result", bound=BaseModel)


class AepClient:
    """Use it as an async context manager. Calls and streams may run concurrently.

    Every call raises `AepError` or `TransportError`; both are `ClientError`s with one sentence.
    `capabilities` are what the session asks for; what it got is in `initialize()`'s result.
    """

    def __init__(self, base_url: str, api_key: str, *, capabilities: Collection[str] = CAPABILITIES) -> None:
        self._transport = Transport(base_url, api_key, SERVED_VERSIONS[0])
        self._capabilities = dict.fromkeys(capabilities, True)
        self._session: InitializeResult | None = None
        self._beginning = anyio.Lock()
        self._requests = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._transport.aclose()

    # ---------------------------------------------------------------- typed calls

    async def agent_create(self, params: agent.AgentCreate) -> agent.Agent:
        return await self.call("agent.create", params, agent.Agent)

    async def agent_get(self, agent_id: str) -> agent.Agent:
        return await self.call("agent.get", agent.AgentGet(agent_id=agent_id), agent.Agent)

    async def agent_list(self, params: agent.AgentList | None = None) -> agent.AgentPage:
        return await self.call("agent.list", params or agent.AgentList(), agent.AgentPage)

    async def agent_update(self, params: agent.AgentUpdate) -> agent.Agent:
        """Change what is given. A ceiling that would grow while a run lives is a `lifecycle_conflict`."""
        return await self.call("agent.update", params, agent.Agent)

    async def agent_archive(self, agent_id: str) -> agent.AgentDone:
        """Put it away for good. Like a cancel it ends the live runs; a busy one may end a little later."""
        return await self.call("agent.archive", agent.AgentRef(agent_id=agent_id), agent.AgentDone)

    async def agent_cancel(self, agent_id: str) -> agent.AgentDone:
        return await self.call("agent.cancel", agent.AgentRef(agent_id=agent_id), agent.AgentDone)

    async def run_create(self, params: run.RunCreate) -> run.Run:
        return await self.call("run.create", params, run.Run)

    async def run_get(self, run_id: str) -> run.Run:
        return await self.call("run.get", run.RunRef(run_id=run_id), run.Run)

    async def run_list(self, params: run.RunList) -> run.RunPage:
        return await self.call("run.list", params, run.RunPage)

    async def run_cancel(self, run_id: str) -> run.Run:
        return await self.call("run.cancel", run.RunRef(run_id=run_id), run.Run)

    async def run_continue(self, run_id: str) -> run.Run:
        """Wake a sleeping run now; any other is a `lifecycle_conflict`."""
        return await self.call("run.continue", run.RunRef(run_id=run_id), run.Run)

    async def artifact_get(self, artifact_id: str) -> Artifact:
        return await self.call("artifact.get", ArtifactRef(artifact_id=artifact_id), Artifact)

    async def artifact_list(self, params: ArtifactList | None = None) -> ArtifactPage:
        return await self.call("artifact.list", params or ArtifactList(), ArtifactPage)

    async def artifact_delete(self, artifact_id: str) -> ArtifactDeleted:
        return await self.call("artifact.delete", ArtifactRef(artifact_id=artifact_id), ArtifactDeleted)

    def artifact_bytes(self, artifact_id: str) -> AsyncGenerator[bytes, None]:
        """The bytes in pieces; raises in the end if they are not all of them, or not the right ones."""
        return download.artifact_bytes(self, artifact_id)

    def follow(self, run_id: str, since: str | None = None) -> AsyncGenerator[Event, None]:
        """The run's events after `since`, each once and in order, until `run.ended`. See `follow.py`."""
        return follow.follow(self, run_id, since)

    # ---------------------------------------------------------------- any call

    async def call(self, method: str, params: Params, result_type: type[Result]) -> Result:
        """One method of the protocol. Begins the session if there is none."""
        session = await self.initialize()
        result = await _persistently(method, lambda: self._in_session(method, params, session.session_id))
        return _shaped(method, result, result_type)

    async def initialize(self, *, instead_of: str | None = None) -> InitializeResult:
        """The session: the one that there is, unless it is the one with the id `instead_of`."""
        async with self._beginning:
            if self._session is None or self._session.session_id == instead_of:
                self._session = await self._begin()
            return self._session

    @asynccontextmanager
    async def get(
        self, path: str, *names: str, accept: str = "*/*", query: Mapping[str, str] | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """A streaming read outside RPC: `path` with the ids in `names` filled in. One attempt."""
        place = path.format(*(quote(name, safe="") for name in names))
        session = await self.initialize()
        async with AsyncExitStack() as stack:
            try:
                opening = self._transport.get(place, session.session_id, accept=accept, query=query or {})
                response = await stack.enter_async_context(opening)
            except AepError as error:
                if error.code != ErrorCode.session_expired:
                    raise
                session = await self.initialize(instead_of=session.session_id)
                opening = self._transport.get(place, session.session_id, accept=accept, query=query or {})
                response = await stack.enter_async_context(opening)
            yield response

    # ---------------------------------------------------------------- below the surface

    async def _begin(self) -> InitializeResult:
        params = InitializeParams(
            client_info=dict(CLIENT_INFO),
            requested_versions=list(SERVED_VERSIONS),
            requested_capabilities=self._capabilities,
        )
        result = await _persistently("initialize", lambda: self._post("initialize", params, None))
        return _shaped("initialize", result, InitializeResult)

    async def _in_session(self, method: str, params: Params, session_id: str) -> Any:
        try:
            return await self._post(method, params, session_id)
        except AepError as error:
            if error.code != ErrorCode.session_expired:
                raise
        session = await self.initialize(instead_of=session_id)
        return await self._post(method, params, session.session_id)

    async def _post(self, method: str, params: Params, session_id: str | None) -> Any:
        self._requests += 1
        request_id = self._requests
        status, body = await self._transport.post(request_body(request_id, method, params), session_id)
        return read_reply(status, body, request_id)


async def _persistently(method: str, send: Callable[[], Awaitable[Any]]) -> Any:
    """Send, and after passing trouble send again if that can do no harm."""
    pauses = Pauses()
    for _ in range(CALL_ATTEMPTS_MAX - 1):
        try:
            return await send()
        except ClientError as error:
            if not (is_unheard(error) or (is_passing(error) and _repeatable(method))):
                raise
            pause_s = pauses.next_s(error.retry_after_s if isinstance(error, AepError) else 0.0)
        await anyio.sleep(pause_s)
    return await send()


def _repeatable(method: str) -> bool:
    return method in REPEATABLE or method.endswith(REPEATABLE_ENDINGS)


def _shaped(method: str, result: Any, result_type: type[Result]) -> Result:
    try:
        return result_type.model_validate(result)
    except ValidationError as err:
        sentence = f"The runtime's answer to {method} does not have the shape of {result_type.__name__}."
        raise TransportError(sentence, Cause.senseless) from err
