"""`AepClient`: one runtime, one key, typed calls.

The session is the client's own business: it begins with the first call and begins again by itself when the
runtime has forgotten it. What is safe to send twice is sent again after passing trouble, to the next gateway
if there are several. A create is, if the runtime keeps idempotency keys: each create has one. Below stand
`gateways`, `transport` and `replies`, beside it `follow`, `download` and `lists`.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote
from uuid import uuid4

import anyio
import httpx2
from pydantic import BaseModel, SecretStr, ValidationError

from espalier_client import download, follow
from espalier_client.backoff import Pauses
from espalier_client.bundle import BundleWriter, stream_of
from espalier_client.errors import AepError, Cause, ClientError, TransportError, is_passing, is_unheard
from espalier_client.gateways import Gateways
from espalier_client.replies import read_reply, request_body
from espalier_protocol import agent, approval, memory, message, provider, run, subject
from espalier_protocol.access import CAPABILITIES
from espalier_protocol.artifact import Artifact, ArtifactDeleted, ArtifactList, ArtifactPage, ArtifactRef
from espalier_protocol.errors import ErrorCode
from espalier_protocol.events import Event
from espalier_protocol.methods import METHODS
from espalier_protocol.session import InitializeParams, InitializeResult
from espalier_protocol.shapes import NoParams, Params
from espalier_protocol.strict_json import dumps
from espalier_protocol.versions import SERVED_VERSIONS

ROUNDS_MAX: Final = 5
"""How often each gateway is asked for one answer."""

CLIENT_INFO = {"name": "espalier-client", "version": "0.1.0"}
REPEATABLE = frozenset(
    {
        "initialize",
        "rpc.discover",
        "run.cancel",
        "agent.cancel",
        "agent.archive",
        "memory.write",
        "subject.export",
        "subject.erase",
    }
)
"""What was cancelled stays cancelled, and a record that is written twice is one record. No delete, whose
second answer would say that there was nothing. An erasure that was broken off goes on when it is asked for.
"""

PROVIDERS: Final = "/api/me/llm-providers"
REPEATABLE_ENDINGS = (".get", ".list", ".read", ".search", ".inbox")
"""Reading twice is reading. An embedder's look into an inbox marks nothing as read."""

Result = TypeVar("Result", bound=BaseModel)


class AepClient:
    """Use it as an async context manager. Calls and streams may run concurrently.

    `base_url` is where the runtime is, such as `http://127.0.0.1:8787`. Several gateways of one runtime are
    given as a sequence: the one that answered last is asked, and if it cannot be reached, is silent or
    answers `unavailable`, the next one is. Streams and downloads go on there by themselves; a call is sent
    once more only if that can do no harm. Creates and messages are, where the runtime keeps idempotency keys
    (Espalier does, for a day); where it does not, only those that surely were not heard.

    They take a `key`: whoever calls again with the same one, be it after a restart, gets the first answer
    again and nothing is done twice.

    Every call raises `AepError` or `TransportError`; both are `ClientError`s with one sentence. An answer may
    take 30 s, and a call has up to five attempts at each gateway; `anyio.fail_after` bounds it more tightly.
    `capabilities` are what the session asks for; what it got is in `initialize()`'s result.
    """

    def __init__(
        self, base_url: str | Sequence[str], api_key: str, *, capabilities: Collection[str] = CAPABILITIES
    ) -> None:
        self._gateways = Gateways(base_url, api_key, SERVED_VERSIONS[0])
        self._capabilities = dict.fromkeys(capabilities, True)
        self._session: InitializeResult | None = None
        self._beginning = anyio.Lock()
        self._requests = 0

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The gateways, each once."""
        return self._gateways.base_urls

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._gateways.aclose()

    # ---------------------------------------------------------------- typed calls

    async def agent_create(self, params: agent.AgentCreate, *, key: str | None = None) -> agent.Agent:
        """Make an agent. After a TransportError it may be there: with the same key it is made once."""
        return await self.call("agent.create", params, agent.Agent, key=key)

    async def agent_get(self, agent_id: str) -> agent.Agent:
        return await self.call("agent.get", agent.AgentGet(agent_id=agent_id), agent.Agent)

    async def agent_list(self, params: agent.AgentList | None = None) -> agent.AgentPage:
        return await self.call("agent.list", params or agent.AgentList(), agent.AgentPage)

    async def agent_in_full(self, params: agent.AgentGet) -> agent.AgentInFull:
        """With its prompt's history, page by page, or with the changes of it that wait for a person."""
        return await self.call("agent.get", params, agent.AgentInFull)

    async def agent_approve_prompt_change(
        self, params: agent.ApprovePromptChange
    ) -> agent.PromptChangeResult:
        """Apply or reject a change that waits; a stale one, or one resolved, is a `lifecycle_conflict`."""
        return await self.call("agent.approve_prompt_change", params, agent.PromptChangeResult)

    async def approval_list(self, params: approval.ApprovalList | None = None) -> approval.ApprovalPage:
        """What waits for a person, newest first; with a `state` also what does not any more."""
        return await self.call("approval.list", params or approval.ApprovalList(), approval.ApprovalPage)

    async def approval_get(self, approval_id: str) -> approval.Approval:
        return await self.call(
            "approval.get", approval.ApprovalRef(approval_id=approval_id), approval.Approval
        )

    async def approval_resolve(self, params: approval.ApprovalResolve) -> approval.Approval:
        """Answer it. If the answer is lost, look before answering again: a second one is a conflict."""
        return await self.call("approval.resolve", params, approval.Approval)

    async def agent_update(self, params: agent.AgentUpdate) -> agent.Agent:
        """Change what is given. A ceiling that would grow while a run lives is a `lifecycle_conflict`."""
        return await self.call("agent.update", params, agent.Agent)

    async def agent_archive(self, agent_id: str) -> agent.AgentDone:
        """Put it away for good. Like a cancel it ends the live runs; a busy one may end a little later."""
        return await self.call("agent.archive", agent.AgentRef(agent_id=agent_id), agent.AgentDone)

    async def agent_cancel(self, agent_id: str) -> agent.AgentDone:
        """End its live runs and take no new one, for good."""
        return await self.call("agent.cancel", agent.AgentRef(agent_id=agent_id), agent.AgentDone)

    async def run_create(self, params: run.RunCreate, *, key: str | None = None) -> run.Run:
        """Start a run. After a TransportError it may live: with the same key it is started once."""
        return await self.call("run.create", params, run.Run, key=key)

    async def run_get(self, run_id: str) -> run.Run:
        return await self.call("run.get", run.RunRef(run_id=run_id), run.Run)

    async def run_list(self, params: run.RunList) -> run.RunPage:
        return await self.call("run.list", params, run.RunPage)

    async def run_cancel(self, run_id: str) -> run.Run:
        """Ask it to end. A busy run may end a little later; `cancel_requested_at` says so."""
        return await self.call("run.cancel", run.RunRef(run_id=run_id), run.Run)

    async def run_continue(self, run_id: str) -> run.Run:
        """Wake a sleeping run now; any other is a `lifecycle_conflict`."""
        return await self.call("run.continue", run.RunRef(run_id=run_id), run.Run)

    async def run_result(self, run_id: str) -> run.Run:
        """The run once it has ended, however long that takes: `state` says how, `result` what came of it."""
        found = await self.run_get(run_id)
        if found.ended_at is not None:
            return found
        async with aclosing(self.follow(run_id)) as events:
            async for _ in events:
                pass
        return await self.run_get(run_id)

    async def artifact_get(self, artifact_id: str) -> Artifact:
        return await self.call("artifact.get", ArtifactRef(artifact_id=artifact_id), Artifact)

    async def artifact_list(self, params: ArtifactList | None = None) -> ArtifactPage:
        return await self.call("artifact.list", params or ArtifactList(), ArtifactPage)

    async def artifact_delete(self, artifact_id: str) -> ArtifactDeleted:
        return await self.call("artifact.delete", ArtifactRef(artifact_id=artifact_id), ArtifactDeleted)

    async def memory_write(self, params: memory.MemoryWrite) -> memory.MemoryRecord:
        """Keep a value under (tree, namespace, key). What was there is replaced and keeps its id."""
        return await self.call("memory.write", params, memory.MemoryRecord)

    async def memory_read(self, params: memory.MemoryRead) -> memory.MemoryPage:
        """A namespace's records, newest first; with a key that one, or none."""
        return await self.call("memory.read", params, memory.MemoryPage)

    async def memory_search(self, params: memory.MemorySearch) -> memory.MemoryFound:
        """The records of a namespace that fit the words best, at most `k`, best first."""
        return await self.call("memory.search", params, memory.MemoryFound)

    async def memory_delete(self, params: memory.MemoryDelete) -> memory.MemoryDeleted:
        """Delete one record by its id, or those of a tree. Deleting what is not there deletes 0."""
        return await self.call("memory.delete", params, memory.MemoryDeleted)

    async def message_send(self, params: message.MessageSend, *, key: str | None = None) -> message.Message:
        """Tell an agent something; one that sleeps wakes. After a TransportError it may have been heard."""
        return await self.call("message.send", params, message.Message, key=key)

    async def message_inbox(self, agent_id: str) -> message.Inbox:
        """What an agent has not read yet, oldest first. Looking does not mark it as read."""
        return await self.call("message.inbox", message.MessageInbox(agent_id=agent_id), message.Inbox)

    async def message_list(self, params: message.MessageList | None = None) -> message.MessagePage:
        """Messages, newest first, read or not."""
        return await self.call("message.list", params or message.MessageList(), message.MessagePage)

    async def subject_read(self, subject_id: str) -> subject.SubjectRecords:
        """What is held about a person: the newest of each kind of record, and how many there are."""
        params = subject.SubjectRef(subject_id=subject_id)
        return await self.call("subject.read", params, subject.SubjectRecords)

    async def subject_export_to(self, subject_id: str, folder: Path) -> dict[str, int]:
        """Write all of it into a new folder; how many records of each kind there are.

        Raises BadBundle if the folder cannot be made. After any error what is in it is of no use.
        """
        async with self.get("/api/me/subjects/{}/export", subject_id) as response:
            with BundleWriter(folder) as writer:
                async for line in response.aiter_lines():
                    writer.take(line.encode())
                return writer.finish()

    async def subject_erase(self, subject_id: str, mode: subject.ErasureMode) -> subject.ErasureManifest:
        """Erase a person's data. A large erasure is asked for again until it is done."""
        params = subject.SubjectErase(subject_id=subject_id, mode=mode)
        return await self.call("subject.erase", params, subject.ErasureManifest)

    async def subject_import(self, folder: Path) -> subject.SubjectImported:
        """Take in a bundle that `subject_export_to` wrote, all of it or nothing. It is sent once."""
        with self._gateways.asking() as gateway:
            body = await gateway.send("/api/me/subjects/import", stream_of(folder), "application/x-ndjson")
        return _shaped("import", body, subject.SubjectImported)

    async def provider_list(self) -> provider.Providers:
        """The model providers that the owner brought, newest first, without their keys."""
        return await self.call("provider.list", NoParams(), provider.Providers)

    async def provider_get(self, provider_id: str) -> provider.Provider:
        found = await self._beside("GET", f"{PROVIDERS}/{quote(provider_id, safe='')}", repeatable=True)
        return _shaped("provider", found, provider.Provider)

    async def provider_create(self, params: provider.ProviderCreate) -> provider.Provider:
        """Bring a provider. If the answer is lost, look before bringing it again: a name is given once."""
        return _shaped("provider", await self._beside("POST", PROVIDERS, params), provider.Provider)

    async def provider_change(self, provider_id: str, params: provider.ProviderChange) -> provider.Provider:
        """Change what is given. A key does not go to another server unless it is given along."""
        place = f"{PROVIDERS}/{quote(provider_id, safe='')}"
        return _shaped("provider", await self._beside("PATCH", place, params), provider.Provider)

    async def provider_delete(self, provider_id: str) -> None:
        """Raises AepError `provider_in_use` while an agent is bound to it."""
        await self._beside("DELETE", f"{PROVIDERS}/{quote(provider_id, safe='')}")

    async def provider_test(self, provider_id: str) -> provider.ProbePassed | provider.ProbeFailed:
        """Let a worker ask the provider one small thing, which costs a few tokens. May take 20 s."""
        told = await self._beside("POST", f"{PROVIDERS}/{quote(provider_id, safe='')}/test")
        if isinstance(told, dict) and told.get("ok") is True:
            return provider.ProbePassed()
        return _shaped("test", told, provider.ProbeFailed)

    def artifact_bytes(self, artifact_id: str) -> AsyncGenerator[bytes, None]:
        """The bytes in pieces; raises in the end if they are not all of them, or not the right ones."""
        return download.artifact_bytes(self, artifact_id)

    def follow(self, run_id: str, since: str | None = None) -> AsyncGenerator[Event, None]:
        """The run's events after the one with the id `since`, each once and in order, until `run.ended`.

        Reconnects and resumes by itself. Close it (`contextlib.aclosing`) when leaving early. Raises AepError
        when the runtime refuses, and TransportError after two minutes without a sign of life.
        """
        return follow.follow(self, run_id, since)

    # ---------------------------------------------------------------- any call

    async def call(
        self, method: str, params: Params, result_type: type[Result], *, key: str | None = None
    ) -> Result:
        """One method of the protocol. Begins the session if there is none.

        A create without a `key` gets one of its own, if the runtime keeps keys.
        """
        session = await self.initialize()
        kept = session.idempotency_ttl_seconds is not None and _is_create(method)
        if kept and key is None:
            key = str(uuid4())
        result = await self._persistently(
            kept or _repeatable(method), lambda: self._in_session(method, params, session.session_id, key)
        )
        return _shaped(method, result, result_type)

    async def initialize(self, *, instead_of: str | None = None) -> InitializeResult:
        """The session: the one that there is, unless it is the one with the id `instead_of`."""
        async with self._beginning:
            if self._session is None or self._session.session_id == instead_of:
                self._session = await self._begin()
            return self._session

    @asynccontextmanager
    async def get(
        self,
        path: str,
        *names: str,
        accept: str = "*/*",
        query: Mapping[str, str] | None = None,
        part: Mapping[str, str] | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        """A streaming read outside RPC: `path` with the ids in `names` filled in. One attempt.

        `part` are headers that ask for a part of it, which may be answered with the whole.
        """
        asked: dict[str, Any] = {"accept": accept, "query": query or {}, "part": part or {}}
        place = path.format(*(quote(name, safe="") for name in names))
        session = await self.initialize()
        async with AsyncExitStack() as stack:
            gateway = stack.enter_context(self._gateways.asking())
            try:
                opening = gateway.get(place, session.session_id, **asked)
                response = await stack.enter_async_context(opening)
            except AepError as error:
                if error.code != ErrorCode.session_expired:
                    raise
                session = await self.initialize(instead_of=session.session_id)
                opening = gateway.get(place, session.session_id, **asked)
                response = await stack.enter_async_context(opening)
            yield response

    # ---------------------------------------------------------------- below the surface

    async def _beside(
        self, verb: str, path: str, params: Params | None = None, *, repeatable: bool = False
    ) -> Any:
        """What an endpoint beside AEP answers; those need a key and no session."""

        async def send() -> Any:
            with self._gateways.asking() as gateway:
                return await gateway.ask(verb, path, None if params is None else dumps(_told(params)))

        return await self._persistently(repeatable, send)

    async def _begin(self) -> InitializeResult:
        params = InitializeParams(
            client_info=dict(CLIENT_INFO),
            requested_versions=list(SERVED_VERSIONS),
            requested_capabilities=self._capabilities,
        )
        result = await self._persistently(True, lambda: self._post("initialize", params, None))
        return _shaped("initialize", result, InitializeResult)

    async def _in_session(self, method: str, params: Params, session_id: str, key: str | None) -> Any:
        try:
            return await self._post(method, params, session_id, key)
        except AepError as error:
            if error.code != ErrorCode.session_expired:
                raise
        session = await self.initialize(instead_of=session_id)
        return await self._post(method, params, session.session_id, key)

    async def _persistently(self, repeatable: bool, send: Callable[[], Awaitable[Any]]) -> Any:
        """Send, and after passing trouble send again if that can do no harm."""
        pauses = Pauses(len(self.base_urls))
        for attempts_left in reversed(range(ROUNDS_MAX * len(self.base_urls))):
            try:
                return await send()
            except ClientError as error:
                if not (is_unheard(error) or (is_passing(error) and repeatable)):
                    raise
                if not attempts_left:
                    raise self._gateways.after_all(error) from error
                pause_s = pauses.after(error)
            await anyio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, method: str, params: Params, session_id: str | None, key: str | None = None) -> Any:
        """To one gateway, once."""
        self._requests += 1
        request_id = self._requests
        with self._gateways.asking() as gateway:
            status, body = await gateway.post(request_body(request_id, method, params), session_id, key)
            return read_reply(status, body, request_id)


def _is_create(method: str) -> bool:
    known = METHODS.get(method)
    return known is not None and known.keyed


def _repeatable(method: str) -> bool:
    return method in REPEATABLE or method.endswith(REPEATABLE_ENDINGS)


def _shaped(method: str, result: Any, result_type: type[Result]) -> Result:
    try:
        return result_type.model_validate(result)
    except ValidationError as err:
        sentence = f"The runtime's answer to {method} does not have the shape of {result_type.__name__}."
        raise TransportError(sentence, Cause.senseless) from err


def _told(params: Params) -> dict[str, Any]:
    """The members that were given, secrets among them as they are: they print as stars everywhere else."""
    given = params.model_dump(exclude_unset=True)
    return {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value
        for name, value in given.items()
    }
