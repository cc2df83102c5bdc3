"""Models of providers of each kind: whose wire they speak, what they are told, and what they are not."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from fake_openai import Reply, _read, value
from pydantic import SecretStr

from espalier_domain.history import Assistant, System, ToolResult, User
from espalier_domain.journal import ToolCall
from espalier_domain.run import BoundProvider
from espalier_egress import EgressSettings, open_egress
from espalier_protocol.provider import ProviderKind
from espalier_run_worker.models.bound import BASE_URLS, CREDENTIALS, Providers
from espalier_run_worker.models.model import ModelAnswer, ModelFault, Question, ToolDefinition, WantedCall
from espalier_secrets.sealing import new_sealing_key, place_of, sealer

pytestmark = pytest.mark.anyio

KEY = "sk-own-0123456789"
BOX = sealer(SecretStr(new_sealing_key()))
OWNER, PROVIDER = UUID(int=1), uuid4()
LOG = ToolDefinition(
    "mcp.git.git_log", "The log.", {"type": "object", "properties": {"n": {"type": "integer"}}}
)
QUESTION = Question(
    (
        System("Be brief."),
        User("Goal: look"),
        Assistant("Looking.", (ToolCall("call_1_1", "mcp.git.git_log", {"n": 1}),)),
        ToolResult("call_1_1", "mcp.git.git_log", "[]"),
    ),
    (LOG,),
    tokens_max=1000,
)
OF_THE_OPERATOR = {
    "OPENAI_API_KEY": "canary-1",
    "OPENAI_ORG_ID": "canary-2",
    "OPENAI_PROJECT_ID": "canary-3",
    "OPENAI_ADMIN_KEY": "canary-4",
    "OPENAI_CUSTOM_HEADERS": "X-Op: canary-5\nAuthorization: Bearer canary-6",
    "ANTHROPIC_API_KEY": "canary-7",
    "ANTHROPIC_AUTH_TOKEN": "canary-8",
    "ANTHROPIC_CUSTOM_HEADERS": "X-Op: canary-9\nx-api-key: canary-10",
    "HTTP_PROXY": "http://127.0.0.1:1",
    "ALL_PROXY": "http://127.0.0.1:1",
}


@dataclass
class Server:
    """Keeps what it is told, and gives each request the next reply."""

    replies: list[Reply]
    base_url: str = ""
    heads: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)

    async def serve(self, stream: SocketStream) -> None:
        async with stream:
            head, body = await _read(stream)
            self.heads.append(head)
            self.bodies.append(json.loads(body))
            reply = self.replies.pop(0)
            await stream.send(reply.head() + reply.body)

    def headers(self) -> dict[str, str]:
        pairs = (line.partition(": ") for line in self.heads[-1].split("\r\n")[1:])
        return {name.lower(): text for name, _, text in pairs}


@asynccontextmanager
async def serving(*replies: Reply) -> AsyncIterator[Server]:
    server = Server(list(replies))
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0) as listener,
        anyio.create_task_group() as group,
    ):
        server.base_url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"  # noqa: S610
        group.start_soon(listener.serve, server.serve)
        yield server
        group.cancel_scope.cancel()


def bound(kind: ProviderKind, base_url: str | None) -> BoundProvider:
    sealed = BOX.seal(KEY.encode(), place_of(OWNER, "providers", PROVIDER, "key"))
    return BoundProvider(OWNER, PROVIDER, kind, base_url, sealed)


async def asked(kind: ProviderKind, server: Server) -> ModelAnswer:
    allowed = server.base_url.removeprefix("http://")
    async with open_egress(EgressSettings(egress_allow=(allowed,))) as egress:
        providers = Providers(egress, BOX)
        async with providers.open(bound(kind, server.base_url), "small") as model:
            return await model.ask(QUESTION)


async def fault(kind: ProviderKind, reply: Reply) -> tuple[str, bool, int]:
    async with serving(reply) as server:
        with pytest.raises(ModelFault) as caught:
            await asked(kind, server)
    return caught.value.reason, caught.value.retryable, caught.value.tokens


def message(*content: dict[str, Any], stop: str = "end_turn") -> Reply:
    """An answer as Anthropic words it."""
    return value(
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "small",
            "content": list(content),
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": {"input_tokens": 70, "output_tokens": 30},
        }
    )


def completion(text: str) -> Reply:
    said = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 70, "completion_tokens": 30, "total_tokens": 100}
    return value(
        {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "small",
            "choices": [said],
            "usage": usage,
        }
    )


SAID = {"type": "text", "text": "hello"}
CALLED = {"type": "tool_use", "id": "t1", "name": "mcp__git__git_log", "input": {"n": 2}}


async def test_anthropic_is_asked_on_its_own_wire_and_understood() -> None:
    async with serving(message(SAID, CALLED, stop="tool_use")) as server:
        answer = await asked("anthropic", server)

    assert answer == ModelAnswer("hello", (WantedCall("mcp.git.git_log", {"n": 2}),), 100)
    assert server.heads[0].startswith("POST /v1/messages")
    assert (server.headers()["x-api-key"], "authorization" in server.headers()) == (KEY, False)
    assert server.headers()["anthropic-version"]
    (told,) = server.bodies
    assert (told["model"], told["max_tokens"] > 0) == ("small", True)
    assert "Be brief." in json.dumps(told["system"])
    assert [each["role"] for each in told["messages"]] == ["user", "assistant", "user"]
    (use,) = [part for part in told["messages"][1]["content"] if part["type"] == "tool_use"]
    (result,) = [part for part in told["messages"][2]["content"] if part["type"] == "tool_result"]
    assert (use["name"], use["input"], use["id"]) == ("mcp__git__git_log", {"n": 1}, result["tool_use_id"])
    assert [tool["name"] for tool in told["tools"]] == ["mcp__git__git_log"]


@pytest.mark.parametrize(
    ("status", "kind", "word", "retryable"),
    [
        (401, "authentication_error", "unauthorized", False),
        (404, "not_found_error", "not_found", False),
        (429, "rate_limit_error", "rate_limited", True),
        (529, "overloaded_error", "overloaded", True),
        (500, "api_error", "provider_error", True),
    ],
)
async def test_trouble_with_anthropic_is_told_in_the_same_words(
    status: int, kind: str, word: str, retryable: bool
) -> None:
    body = {"type": "error", "error": {"type": kind, "message": f"no, {KEY}"}}
    reason, again, tokens = await fault("anthropic", value(body, status=status))
    assert (reason.partition(":")[0], again, tokens) == (word, retryable, 0)
    assert KEY not in reason


async def test_an_answer_of_anthropic_that_was_cut_is_none() -> None:
    reason, again, tokens = await fault("anthropic", message(SAID, stop="max_tokens"))
    assert (reason.partition(":")[0], again, tokens) == ("answer_cut", True, 100)


async def test_an_answer_that_is_nothing_readable_is_a_fault_of_each_kind() -> None:
    for kind in BASE_URLS:
        reason, again, _ = await fault(kind, Reply(b"<html>", content_type="text/html"))
        assert (reason, again) == ("unreadable_answer", True)


async def test_gemini_is_asked_on_the_wire_that_google_has_for_clients_of_openai() -> None:
    async with serving(completion("hello")) as server:
        answer = await asked("gemini", server)
    assert answer == ModelAnswer("hello", (), 100)
    assert server.heads[0].startswith("POST /chat/completions")
    assert server.headers()["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("kind", list(BASE_URLS))
async def test_nothing_of_the_operators_environment_reaches_a_provider(
    kind: ProviderKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in OF_THE_OPERATOR.items():
        monkeypatch.setenv(name, text)
    async with serving(message(SAID) if kind == "anthropic" else completion("hello")) as server:
        answer = await asked(kind, server)
    assert answer.text == "hello"
    name, value = CREDENTIALS[kind](KEY)
    assert server.headers()[name] == value
    assert "canary" not in "".join(server.heads) + json.dumps(server.bodies)
    assert len(server.heads) == 1


async def test_a_key_that_was_sealed_for_another_owner_is_not_opened() -> None:
    theirs = BOX.seal(KEY.encode(), place_of(UUID(int=2), "providers", PROVIDER, "key"))
    async with open_egress(EgressSettings()) as egress:
        with pytest.raises(ModelFault) as caught:
            async with Providers(egress, BOX).open(
                BoundProvider(OWNER, PROVIDER, "openai_compat", None, theirs), "small"
            ):
                raise AssertionError("it was opened")
    assert (caught.value.reason.partition(":")[0], caught.value.retryable) == ("decrypt_failed", True)
    assert "sealed" not in repr(BoundProvider(OWNER, PROVIDER, "openai_compat", None, theirs))
