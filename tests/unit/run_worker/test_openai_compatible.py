"""A real model's adapter against a strict server on loopback: what is asked, what comes of every answer."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from time import time
from typing import Any

import anyio
import pytest
from fake_openai import FakeOpenAI, Reply, answer, completion, failure, fake_openai, value

from espalier_domain.history import Assistant, ModelMessage, System, ToolResult, User, prompt_tokens
from espalier_domain.journal import CycleStarted, RunCreated, ToolCall
from espalier_domain.progress import Progress, apply
from espalier_domain.run import RunFacts
from espalier_local.ports import free_port
from espalier_protocol.agent import Budgets, Ceilings, Constitution
from espalier_run_worker.models.bounded_http import ANSWER_BYTES_MAX
from espalier_run_worker.models.endpoint import Endpoint, EndpointInvalid, endpoint
from espalier_run_worker.models.model import (
    Model,
    ModelAnswer,
    ModelFault,
    ModelRequest,
    ToolDefinition,
    WantedCall,
)
from espalier_run_worker.models.openai_compatible import open_openai_compatible
from espalier_run_worker.models.sdk_model import ANSWER_TOKENS_MIN, DESCRIPTION_CHARS_MAX

pytestmark = pytest.mark.anyio

TOKENS_MAX = 1000
READ_TIMEOUT_S = 0.3
WAIT_S = 10.0
BUDGETS = Budgets(tokens_per_cycle=5000, tool_calls_per_cycle=3, seconds_per_cycle=300)
RUN = RunFacts(
    run_id="run_x",
    agent_id="agt_x",
    root_agent_id="agt_x",
    toolset=(),
    constitution=Constitution(immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"),
    goal="goal",
    inputs={},
    agent_metadata={},
    ceilings=Ceilings(max_cycles=4, max_subagents=0, max_tool_calls_per_cycle=4, max_wall_seconds=100),
    budgets=BUDGETS,
)
PROGRESS = apply(apply(Progress(), RunCreated("agt_x")), CycleStarted(1, 0.0, 0, BUDGETS))
GOAL = (System("Be brief."), User("Goal: greet"))
GIT_LOG = ToolDefinition(
    "mcp.git.git_log",
    "The log.",
    {"type": "object", "properties": {"repo": {"type": "string"}}, "required": ["repo"]},
)


def asked(
    *messages: ModelMessage, tools: tuple[ToolDefinition, ...] = (), tokens_max: int = TOKENS_MAX
) -> ModelRequest:
    return ModelRequest(RUN, PROGRESS, messages or GOAL, tools, tokens_max, attempt=1)


@asynccontextmanager
async def model_on(fake: FakeOpenAI, **changes: str) -> AsyncIterator[Model]:
    place = {"model": fake.model, "base_url": fake.base_url, "api_key": fake.key, **changes}
    async with open_openai_compatible(Endpoint(**place), read_timeout_s=READ_TIMEOUT_S) as model:
        yield model


async def answered(reply: Reply, request: ModelRequest | None = None) -> tuple[ModelAnswer, dict[str, Any]]:
    """The answer that a reply becomes, and the one request that it was given to."""
    async with fake_openai([reply]) as fake, model_on(fake) as model:
        given = await model.answer(request or asked())
    assert fake.refusals == []
    (sent,) = fake.requests
    return given, sent


async def fault_of(reply: Reply, **changes: str) -> tuple[str, bool, int]:
    """Reason, whether to ask again, and cost of what a reply becomes, after exactly one request."""
    async with fake_openai([reply]) as fake, model_on(fake, **changes) as model:
        with pytest.raises(ModelFault) as caught:
            await model.answer(asked())
    assert len(fake.requests) == 1
    return caught.value.reason, caught.value.retryable, caught.value.tokens


# --- what is asked ---------------------------------------------------------------------------------------


async def test_a_goal_is_asked_and_its_answer_costs_what_the_provider_says() -> None:
    given, sent = await answered(answer("Hello.", usage=(11, 2)))

    assert given == ModelAnswer("Hello.", (), 13)
    assert sent == {
        "model": "small",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Goal: greet"},
        ],
        "max_tokens": TOKENS_MAX - prompt_tokens(GOAL),
        "stream": False,
    }


async def test_a_long_conversation_is_told_as_it_was_with_names_that_providers_accept() -> None:
    long_name = "mcp.server." + "x" * 70
    calls = (
        ToolCall("call_1_1", "mcp.git.git_log", {"repo": "/a", "n": 2}),
        ToolCall("call_1_2", long_name, {}),
        ToolCall("call_1_3", "no such tool!", {}),
    )
    request = asked(
        *GOAL,
        Assistant("Looking.", calls),
        ToolResult("call_1_1", "mcp.git.git_log", '{"log":[]}'),
        ToolResult("call_1_2", long_name, ""),
        ToolResult("call_1_3", "no such tool!", "tool_not_found"),
        User("(Cycle 1 ended; a new one begins.)"),
        Assistant("", (ToolCall("call_2_1", "sleep", {"duration_seconds": 60}),)),
        ToolResult("call_2_1", "sleep", "ok"),
        User("(Cycle 2 ended: you slept. You are awake again.)"),
        tools=(GIT_LOG,),
    )
    given, sent = await answered(answer(None, ("mcp__git__git_log", {"repo": "/b"})), request)

    assert given == ModelAnswer("", (WantedCall("mcp.git.git_log", {"repo": "/b"}),), 100)
    spelled = [call["function"]["name"] for call in sent["messages"][2]["tool_calls"]]
    assert spelled[0] == "mcp__git__git_log"
    assert [name[:20] for name in spelled[1:]] == ["mcp__server__xxxxxxx", "no_such_tool__7c14a9"]
    assert [tuple(message.values()) for message in sent["messages"][3:6]] == [
        ("tool", "call_1_1", '{"log":[]}'),
        ("tool", "call_1_2", ""),
        ("tool", "call_1_3", "tool_not_found"),
    ]
    assert sent["messages"][7:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_2_1",
                    "type": "function",
                    "function": {"name": "sleep", "arguments": '{"duration_seconds":60}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_2_1", "content": "ok"},
        {"role": "user", "content": "(Cycle 2 ended: you slept. You are awake again.)"},
    ]


async def test_what_says_nothing_is_left_out_and_neighbours_of_one_role_become_one() -> None:
    request = asked(System("\n\n"), User("Goal"), Assistant(" ", ()), User("Again"), User(""))
    _, sent = await answered(answer("ok"), request)
    assert sent["messages"] == [{"role": "user", "content": "Goal\n\nAgain"}]


async def test_tools_are_offered_as_objects_with_short_descriptions() -> None:
    tools = (
        GIT_LOG,
        ToolDefinition("complete", "x" * 5000, {"type": "object"}),
        ToolDefinition("espalier.time", "", {}),
    )
    _, sent = await answered(answer("ok"), asked(tools=tools))

    assert sent["tool_choice"] == "auto"
    assert [tool["function"] for tool in sent["tools"]] == [
        {
            "name": "mcp__git__git_log",
            "description": "The log.",
            "parameters": GIT_LOG.input_schema,
        },
        {
            "name": "complete",
            "description": "x" * DESCRIPTION_CHARS_MAX,
            "parameters": {"type": "object", "properties": {}},
        },
        {
            "name": "espalier__time",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    ]


async def test_an_answer_may_have_what_the_reservation_leaves_and_never_less_than_a_little() -> None:
    long = asked(User("x" * 3 * TOKENS_MAX))
    _, sent = await answered(answer("ok"), long)
    assert sent["max_tokens"] == ANSWER_TOKENS_MIN


async def test_no_key_is_needed_where_the_server_wants_none() -> None:
    async with fake_openai([answer("ok")], key="") as fake, model_on(fake) as model:
        assert (await model.answer(asked())).text == "ok"


# --- what is answered ------------------------------------------------------------------------------------


async def test_all_calls_of_an_answer_are_taken_in_order_under_their_own_names() -> None:
    calls = [("mcp__git__git_log", {"repo": str(number)}) for number in range(99)]
    reply = answer("Let me see.", *calls, ("git_log", {}), ("complete", ""))
    given, _ = await answered(reply, asked(tools=(GIT_LOG,)))

    wanted = [WantedCall("mcp.git.git_log", args) for _, args in calls]
    assert given == ModelAnswer(
        "Let me see.", (*wanted, WantedCall("git_log", {}), WantedCall("complete", {})), 100
    )


async def test_an_empty_answer_is_an_answer() -> None:
    given, _ = await answered(answer(None))
    assert given == ModelAnswer("", (), 100)


async def test_a_completion_counts_under_whatever_content_type() -> None:
    given, _ = await answered(Reply(answer("ok").body, content_type="text/plain"))
    assert given == ModelAnswer("ok", (), 100)


@pytest.mark.parametrize("usage", [None, (0, 0)])
async def test_tokens_are_estimated_where_the_provider_counts_none(usage: tuple[int, int] | None) -> None:
    given, _ = await answered(answer("xxxxxxxx", usage=usage))
    assert given.tokens == prompt_tokens(GOAL) + 3


async def test_a_count_that_nobody_believes_is_cut() -> None:
    given, _ = await answered(answer("x", usage=(10**15, 1)))
    assert given.tokens == 2**31 - 1


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (
            answer("cut in the mid", finish="length"),
            ("answer_cut: it did not fit into the tokens that were left", True, 100),
        ),
        (
            answer("cut in the mid", finish="MAX_TOKENS"),
            ("answer_cut: it did not fit into the tokens that were left", True, 100),
        ),
        (answer(None, finish="content_filter"), ("content_filter", True, 100)),
        (answer(None, finish="SAFETY"), ("content_filter", True, 100)),
        (answer(None, refusal="I must not."), ("content_filter", True, 100)),
        (answer(None, ("complete", '{"result": ')), ("malformed_tool_call: ", True, 100)),
        (answer(None, ("complete", "[1]")), ("malformed_tool_call: the arguments are no object", True, 100)),
        (answer(None, ("complete", '{"a":1,"a":2}')), ("malformed_tool_call: ", True, 100)),
        (answer(None, ("complete", "{" * 5000), usage=None), ("malformed_tool_call: ", True, 1674)),
    ],
)
async def test_an_answer_that_cannot_be_used_costs_what_it_cost_and_may_be_asked_again(
    reply: Reply, fault: tuple[str, bool, int]
) -> None:
    reason, *rest = await fault_of(reply)
    assert reason.startswith(fault[0])
    assert tuple(rest) == fault[1:]


# --- trouble ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "reason", "retryable"),
    [
        (400, "invalid_request", "refused: 400 invalid_request, no", False),
        (400, "context_length_exceeded", "prompt_too_long: 400 context_length_exceeded, no", False),
        (401, "invalid_api_key", "unauthorized: 401 invalid_api_key", False),
        (402, None, "quota_exhausted: 402 error, no", False),
        (403, None, "unauthorized: 403 error", False),
        (404, "model_not_found", "not_found: 404 model_not_found, no", False),
        (408, None, "timeout: 408 error, no", True),
        (409, None, "conflict: 409 error, no", True),
        (413, None, "refused: 413 error, no", False),
        (418, None, "refused: 418 error, no", False),
        (422, None, "refused: 422 error, no", False),
        (429, None, "rate_limited: 429 error, no", True),
        (429, "insufficient_quota", "quota_exhausted: 429 insufficient_quota, no", False),
        (500, None, "provider_error: 500 error, no", True),
        (502, None, "provider_error: 502 error, no", True),
        (503, None, "unavailable: 503 error, no", True),
        (504, None, "provider_error: 504 error, no", True),
        (529, None, "overloaded: 529 error, no", True),
    ],
)
async def test_a_refused_request_costs_nothing_and_its_status_says_whether_to_ask_again(
    status: int, code: str | None, reason: str, retryable: bool
) -> None:
    assert await fault_of(failure(status, code=code)) == (reason, retryable, 0)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry_After": "7"}, 7.0),
        ({"Retry_After": "0"}, 0.0),
        ({"retry_after_ms": "1500"}, 1.5),
        ({"Retry_After": "-3"}, None),
        ({"Retry_After": "soon"}, None),
        ({"Retry_After": "9" * 400}, None),
        ({"Retry_After": "1e9"}, None),
        ({"Retry_After": formatdate(0, usegmt=True)}, 0.0),
    ],
)
async def test_how_long_to_wait_is_what_the_provider_says(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert await retry_after(headers) == seconds


async def test_a_date_to_wait_for_is_understood() -> None:
    seconds = await retry_after({"Retry_After": formatdate(time() + 100, usegmt=True)})
    assert seconds is not None
    assert 90 < seconds <= 100


async def retry_after(headers: dict[str, str]) -> float | None:
    async with fake_openai([failure(429, **headers)]) as fake, model_on(fake) as model:
        with pytest.raises(ModelFault) as caught:
            await model.answer(asked())
    return caught.value.retry_after_s


UNREADABLE = ("unreadable_answer", True, TOKENS_MAX)
WHOLE = answer("ok").body
HTML = b"<!doctype html><title>502 Bad Gateway</title>"


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (Reply(WHOLE[:40]), UNREADABLE),
        (Reply(b""), UNREADABLE),
        (Reply(b"\xff\xfe"), UNREADABLE),
        (Reply(HTML, content_type="text/html"), UNREADABLE),
        (Reply(HTML), UNREADABLE),
        (Reply(b"[" * 100_000), UNREADABLE),
        (value([1]), UNREADABLE),
        (value({}), UNREADABLE),
        (value({"choices": []}), UNREADABLE),
        (value({"choices": [None]}), UNREADABLE),
        (value({"choices": {"0": 1}}), UNREADABLE),
        (value({**completion("ok"), "created": 1e300}), ("unreadable_answer", True, 100)),
        (
            value(completion("ok", tool_calls=[{"id": "c", "type": "custom"}])),
            ("unreadable_answer", True, 100),
        ),
        (value(completion({"not": "text"})), ("unreadable_answer", True, 100)),  # type: ignore[arg-type]
        (value({"error": {"message": "no", "code": 429}}), ("rate_limited: 429, no", True, 0)),
        (value({"error": {"message": "no", "code": 401}}), ("unauthorized: 401, no", False, 0)),
        (value({"error": "no"}), ("provider_error: 500", True, 0)),
        (value(completion("half", finish="error")), ("provider_error", True, 100)),
        (
            Reply(status=302, headers=(("Location", "http://127.0.0.1:9/"),)),
            ("redirected", False, 0),
        ),
        (Reply(WHOLE, missing=1), ("unreachable: at read", True, TOKENS_MAX)),
        (Reply(WHOLE, missing=1, ending="reset"), ("unreachable: at read", True, TOKENS_MAX)),
        (Reply(WHOLE, missing=1, ending="hang"), ("timeout: at read", True, TOKENS_MAX)),
        (Reply(ending="silence"), ("timeout: at read", True, TOKENS_MAX)),
        (
            Reply(WHOLE, headers=(("Content-Encoding", "gzip"),)),
            (f"answer_too_large: more than {ANSWER_BYTES_MAX} bytes", True, TOKENS_MAX),
        ),
    ],
)
async def test_what_comes_of_a_server_that_misbehaves(reply: Reply, fault: tuple[str, bool, int]) -> None:
    assert await fault_of(reply) == fault


async def test_of_a_huge_answer_only_a_little_is_taken() -> None:
    whole = 50 * 1024 * 1024
    async with fake_openai([Reply(b" " * 1024 * 1024, times=50)]) as fake, model_on(fake) as model:
        with pytest.raises(ModelFault) as caught:
            await model.answer(asked())
    assert caught.value.reason == f"answer_too_large: more than {ANSWER_BYTES_MAX} bytes"
    # What our side took, and what was on its way in the buffers of two sockets.
    assert ANSWER_BYTES_MAX < fake.bytes_sent < whole / 3


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:{free}/v1", "https://127.0.0.1:{fake}/v1", "https://nobody.invalid/v1"]
)
async def test_a_server_that_cannot_be_reached_costs_nothing(address: str) -> None:
    async with fake_openai() as fake:
        base_url = address.format(free=free_port(), fake=fake.base_url.split(":")[2].split("/")[0])
        async with model_on(fake, base_url=base_url) as model:
            with pytest.raises(ModelFault) as caught:
                await model.answer(asked())
    fault = caught.value
    assert (fault.reason, fault.retryable, fault.tokens) == ("unreachable: at connect", True, 0)


async def test_giving_up_on_an_answer_closes_the_connection() -> None:
    async with fake_openai([Reply(ending="silence")]) as fake, model_on(fake) as model:
        with anyio.move_on_after(READ_TIMEOUT_S / 3) as gave_up:
            await model.answer(asked())
        assert gave_up.cancelled_caught
        with anyio.fail_after(WAIT_S):
            while not fake.left:
                await anyio.sleep(0.01)


# --- what nobody is told ---------------------------------------------------------------------------------


async def test_no_reason_repeats_the_key_or_the_address() -> None:
    key = "sk-test-0123456789abcdef"
    async with fake_openai(key=key) as fake, model_on(fake, api_key="sk-other-98765") as model:
        with pytest.raises(ModelFault) as caught:
            await model.answer(asked())
        assert caught.value.reason == "unauthorized: 401 invalid_api_key"

    telling = [f"your key {key[4:14]} is bad", f"call http://{fake.base_url[7:]} instead", "of no use"]
    replies = [failure(400, text, code=f"code_{key}") for text in telling]
    async with fake_openai(replies, key=key) as same, model_on(same) as model:
        same.replies[1] = failure(400, f"call {same.base_url} instead")
        reasons = [await _reason(model) for _ in replies]
    assert reasons == ["refused: 400", "refused: 400 error", "refused: 400, of no use"]


async def _reason(model: Model) -> str:
    with pytest.raises(ModelFault) as caught:
        await model.answer(asked())
    return caught.value.reason


async def test_a_providers_text_is_one_short_line() -> None:
    reason, _, _ = await fault_of(failure(400, "a\n\n\x1b[31mb" + "c" * 5000))
    assert reason == "refused: 400 error, a [31mb" + "c" * (200 - len("400 error, a [31mb"))


def test_an_endpoint_does_not_show_its_key() -> None:
    assert "sk-" not in repr(endpoint("small", "http://127.0.0.1/v1", "sk-secret"))


# --- settings --------------------------------------------------------------------------------------------


def test_a_key_alone_means_openai_itself() -> None:
    assert endpoint("gpt", "", "sk-1").base_url == "https://api.openai.com/v1"


@pytest.mark.parametrize(
    ("base_url", "key", "sentence"),
    [
        (
            "",
            "",
            "ESPALIER_MODEL names 'm', but neither OPENAI_BASE_URL nor OPENAI_API_KEY says where to ask it.",
        ),
        ("127.0.0.1:80", "k", "OPENAI_BASE_URL has to be http(s)://host[:port][/path], and nothing else."),
        (
            "http://u:pw@h/v1",
            "k",
            "OPENAI_BASE_URL has to be http(s)://host[:port][/path], and nothing else.",
        ),
        ("http://h:99999/", "k", "OPENAI_BASE_URL has to be http(s)://host[:port][/path], and nothing else."),
        ("http://h/v1", "sk-\u00e9", "OPENAI_API_KEY holds characters that no key has."),
        ("http://h/v1", "sk-\n1", "OPENAI_API_KEY holds characters that no key has."),
    ],
)
def test_settings_that_name_no_place_are_told_in_a_sentence(base_url: str, key: str, sentence: str) -> None:
    with pytest.raises(EndpointInvalid) as caught:
        endpoint("m", base_url, key)
    assert str(caught.value) == sentence


@pytest.mark.slow
def test_a_worker_without_a_real_model_does_not_load_the_sdk() -> None:
    look = "import json, sys, espalier_run_worker.main; print(json.dumps([*sys.modules]))"
    loaded = subprocess.run([sys.executable, "-c", look], capture_output=True, check=True).stdout
    assert not {"pydantic_ai", "openai"} & set(json.loads(loaded))
