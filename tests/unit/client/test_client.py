"""Calls: sessions that begin by themselves, what is sent twice and what is not, errors with their facts."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from tests.unit.client.conftest import KEY
from tests.unit.client.loopback import (
    Answer,
    Loopback,
    error,
    events,
    hang_up,
    open_loopback,
    reply,
    result,
    session,
)
from tests.unit.client.test_follow import run

from espalier_client import AepClient, AepError, TransportError
from espalier_client.transport import Transport
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.memory import MemoryDelete, MemoryRead, MemorySearch, MemoryWrite
from espalier_protocol.message import MessageSend
from espalier_protocol.run import RunCreate

pytestmark = pytest.mark.anyio

BYTES = "GET /aep/v1/artifacts/art_1/bytes"
START = RunCreate(agent_id="agt_1", goal="g")
EXPIRED = error(-32010, "gone", symbol="session_expired")
UNAVAILABLE = error(-32603, "busy", symbol="unavailable", retry_after_ms=1)
RATE_LIMITED = error(-32603, "slow down", 429, symbol="rate_limited", retry_after_ms=1)


async def test_the_first_calls_begin_one_session_between_them(runtime: Loopback, client: AepClient) -> None:
    runtime.on("POST run.get", result(run("running")))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(client.run_get, "run_01")

    (began,) = runtime.asked("POST initialize")
    assert "x-aep-session-id" not in began.headers
    assert began.message["params"]["requested_versions"] == ["aep-2026-04-24"]
    for asked in runtime.requests:
        assert asked.headers["authorization"] == f"Bearer {KEY}"
        assert asked.headers["agent-protocol-version"] == "aep-2026-04-24"
    assert {asked.headers["x-aep-session-id"] for asked in runtime.asked("POST run.get")} == {"ses_1"}


async def test_only_what_was_given_travels(runtime: Loopback, client: AepClient) -> None:
    runtime.on("POST agent.create", error(-32602, "no"))
    params = AgentCreate(
        name="a",
        constitution=Constitution(
            immutable_directives="", mutable_prompt="ü", mutable_prompt_policy="locked"
        ),
        toolset=[],
        ceilings=Ceilings(max_cycles=1, max_subagents=0, max_tool_calls_per_cycle=1, max_wall_seconds=1),
        budgets=Budgets(tokens_per_cycle=1, tool_calls_per_cycle=1, seconds_per_cycle=1),
    )

    with pytest.raises(AepError):
        await client.agent_create(params)

    (asked,) = runtime.asked("POST agent.create")
    assert asked.message["params"] == params.model_dump(exclude_unset=True)
    assert set(asked.message["params"]) == {"name", "constitution", "toolset", "ceilings", "budgets"}


async def test_a_forgotten_session_begins_again_once(runtime: Loopback, client: AepClient) -> None:
    runtime.on("POST initialize", result(session("ses_1")), result(session("ses_2")))
    runtime.on("POST run.create", EXPIRED, result(run("running")))

    assert (await client.run_create(START)).state == "running"
    assert [asked.headers["x-aep-session-id"] for asked in runtime.asked("POST run.create")] == [
        "ses_1",
        "ses_2",
    ]


async def test_a_session_that_is_forgotten_again_is_an_error(runtime: Loopback, client: AepClient) -> None:
    runtime.on("POST run.get", EXPIRED)

    with pytest.raises(AepError) as caught:
        await client.run_get("run_01")

    assert caught.value.symbol == "session_expired"
    assert len(runtime.asked("POST run.get")) == 2


@pytest.mark.parametrize("trouble", [hang_up, reply(502, b"<html>"), UNAVAILABLE, RATE_LIMITED])
async def test_a_read_is_sent_again(runtime: Loopback, client: AepClient, trouble: Answer) -> None:
    runtime.on("POST run.get", trouble, trouble, result(run("running")))

    assert (await client.run_get("run_01")).id == "run_01"


@pytest.mark.parametrize("trouble", [hang_up, reply(502, b"<html>"), UNAVAILABLE])
async def test_a_create_of_unknown_outcome_is_not(
    runtime: Loopback, client: AepClient, trouble: Answer
) -> None:
    runtime.on("POST run.create", trouble, result(run("running")))

    with pytest.raises((AepError, TransportError)):
        await client.run_create(START)
    assert len(runtime.asked("POST run.create")) == 1


async def test_a_create_that_was_certainly_refused_is_sent_again(
    runtime: Loopback, client: AepClient
) -> None:
    runtime.on("POST run.create", RATE_LIMITED, result(run("running")))

    assert (await client.run_create(START)).id == "run_01"


async def test_a_create_is_sent_again_when_something_before_the_runtime_turned_it_away(
    runtime: Loopback, client: AepClient
) -> None:
    runtime.on("POST run.create", reply(429, b"<html>slow down</html>"), result(run("running")))

    assert (await client.run_create(START)).id == "run_01"
    assert len(runtime.asked("POST run.create")) == 2


async def test_a_caller_at_its_limit_comes_again_when_the_runtime_said_and_not_before(
    runtime: Loopback, client: AepClient
) -> None:
    wait_ms = 400
    limited = error(-32603, "slow down", 429, symbol="rate_limited", retry_after_ms=wait_ms)
    runtime.on("POST run.create", limited, result(run("running")))
    await client.initialize()

    asked_at = anyio.current_time()
    assert (await client.run_create(START)).id == "run_01"
    assert anyio.current_time() - asked_at >= wait_ms / 1000


RECORD = {
    "id": "mem_1",
    "tree_root_id": "agt_1",
    "namespace": "n",
    "key": "k",
    "value": None,
    "created_by_agent_id": "agt_1",
    "created_at": "2026-01-01T00:00:00.000Z",
    "embedding": None,
    "subject_id": None,
    "ttl_seconds": None,
}
NOTHING: dict[str, Any] = {"items": [], "cursor": None, "next_cursor": None, "records": [], "messages": []}
MEMORY_AND_MESSAGES: dict[str, tuple[Callable[[AepClient], Awaitable[Any]], dict[str, Any]]] = {
    "memory.write": (
        lambda client: client.memory_write(
            MemoryWrite(tree_root_id="agt_1", namespace="n", key="k", value=None)
        ),
        RECORD,
    ),
    "memory.read": (lambda client: client.memory_read(MemoryRead(tree_root_id="a", namespace="n")), NOTHING),
    "memory.search": (
        lambda client: client.memory_search(MemorySearch(tree_root_id="a", namespace="n", query="q")),
        NOTHING,
    ),
    "message.inbox": (lambda client: client.message_inbox("agt_1"), NOTHING),
    "message.list": (lambda client: client.message_list(), NOTHING),
    "memory.delete": (lambda client: client.memory_delete(MemoryDelete(id="mem_1")), {"deleted": 1}),
    "message.send": (
        lambda client: client.message_send(MessageSend(to_agent_id="agt_1", body="b")),
        {**RECORD, "from_agent_id": "a", "to_agent_id": "b", "body": 1, "sent_at": RECORD["created_at"]}
        | {"delivered_at": None, "read_at": None, "sender": {"kind": "embedder"}},
    ),
}
SENT_ONCE = ("memory.delete", "message.send")


@pytest.mark.parametrize("method", sorted(MEMORY_AND_MESSAGES.keys() - SENT_ONCE))
async def test_what_may_be_done_twice_is_sent_again(
    runtime: Loopback, client: AepClient, method: str
) -> None:
    call, answer = MEMORY_AND_MESSAGES[method]
    runtime.on(f"POST {method}", hang_up, result(answer))

    assert (await call(client)).model_dump(exclude_unset=True).keys() == answer.keys()
    assert len(runtime.asked(f"POST {method}")) == 2


@pytest.mark.parametrize("method", SENT_ONCE)
async def test_a_message_and_a_delete_of_unknown_outcome_are_not(
    runtime: Loopback, client: AepClient, method: str
) -> None:
    """The one would be heard twice, the other would say that there was nothing to delete."""
    call, answer = MEMORY_AND_MESSAGES[method]
    runtime.on(f"POST {method}", hang_up, result(answer))

    with pytest.raises(TransportError):
        await call(client)
    assert len(runtime.asked(f"POST {method}")) == 1

    assert (await call(client)).model_dump(exclude_unset=True).keys() == answer.keys()


async def test_a_read_is_not_sent_for_ever(runtime: Loopback, client: AepClient) -> None:
    runtime.on("POST run.get", UNAVAILABLE)

    with pytest.raises(AepError, match="unavailable"):
        await client.run_get("run_01")
    assert len(runtime.asked("POST run.get")) == 5


async def test_an_error_keeps_its_facts(runtime: Loopback, client: AepClient) -> None:
    runtime.on("POST run.get", error(-32008, "There is no such run.", resource="run", id="run_01"))

    with pytest.raises(AepError) as caught:
        await client.run_get("run_01")

    refused = caught.value
    assert (refused.code, refused.symbol, refused.message) == (
        -32008,
        "tool_not_found",
        "There is no such run.",
    )
    assert refused.data == {"resource": "run", "id": "run_01"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply(200, b"<html>hello</html>"), "does not speak AEP"),
        (reply(302, b"", location="http://127.0.0.1:9/"), "does not speak AEP"),
        (reply(200, b'{"jsonrpc":"2.0","id":77,"result":{}}'), "another request"),
        (result({"id": "run_01"}), "shape of Run"),
    ],
)
async def test_what_is_no_answer_is_not_taken_for_one(
    runtime: Loopback, client: AepClient, answer: Answer, words: str
) -> None:
    runtime.on("POST run.get", answer)

    with pytest.raises(TransportError, match=words):
        await client.run_get("run_01")
    assert len(runtime.asked("POST run.get")) == 1


async def test_a_runtime_that_is_not_there_is_one_sentence_without_the_key() -> None:
    async with open_loopback() as gone:
        pass
    async with AepClient(gone.url, KEY) as client:
        with pytest.raises(TransportError) as caught:
            await client.run_get("run_01")
    assert str(caught.value) == f"The runtime at {gone.url} cannot be reached."


async def test_an_address_that_is_none_is_one_sentence() -> None:
    async with AepClient("localhost:8787", KEY) as client:
        with pytest.raises(TransportError, match="not the address of a runtime"):
            await client.run_get("run_01")


# ---------------------------------------------------------------- artifacts


def stored(content: bytes, sha256: str | None = None) -> Answer:
    return reply(200, content, etag=f'"{sha256 or hashlib.sha256(content).hexdigest()}"')


async def fetched(client: AepClient) -> bytes:
    return b"".join([piece async for piece in client.artifact_bytes("art_1")])


async def test_an_artifact_arrives_as_it_was_stored(runtime: Loopback, client: AepClient) -> None:
    content = bytes(range(256)) * 1000
    runtime.on(BYTES, stored(content))

    assert await fetched(client) == content


async def test_a_damaged_artifact_is_an_error(runtime: Loopback, client: AepClient) -> None:
    runtime.on(BYTES, stored(b"notes", sha256="0" * 64))

    with pytest.raises(TransportError, match="damaged"):
        await fetched(client)


async def test_half_an_artifact_is_an_error(runtime: Loopback, client: AepClient) -> None:
    runtime.on(BYTES, reply(200, b"not", content_length="5"))

    with pytest.raises(TransportError, match="broke"):
        await fetched(client)


async def test_an_id_cannot_leave_its_place_in_the_path(runtime: Loopback, client: AepClient) -> None:
    runtime.on("GET /aep/v1/artifacts/..%2F..%2Fx/bytes", stored(b"x"))

    assert b"".join([piece async for piece in client.artifact_bytes("../../x")]) == b"x"


async def test_an_answer_without_end_is_cut(
    runtime: Loopback, client: AepClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier_client.transport.ANSWER_BYTES_MAX", 1000)
    runtime.on("POST run.get", events(b" " * 4000))

    with pytest.raises(TransportError, match="more than 1000 bytes"):
        await client.run_get("run_01")


def test_the_key_is_in_no_repr() -> None:
    subject: Any = Transport("http://127.0.0.1:1", KEY, "v")
    assert KEY not in repr(subject)
    assert KEY not in repr(vars(subject))
