"""A whole agent on the real model's adapter: a worker and a gateway process, and a strict server to ask."""

import json
from typing import Any

import pytest
from fake_openai import FakeOpenAI, answer, failure, fake_openai
from scripted_runs import Reader, make_agent
from tests.integration.conftest import GatewayProcess, Start, StartGateway

from espalier_client.client import AepClient
from espalier_protocol.run import RunCreate

# Each worker loads the SDK, which takes seconds.
pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EXIT_WAIT_S = 20
NOTE = {"name": "note.md", "content": "# Note", "mime_type": "text/markdown"}
DONE = ("complete", {"final_message": "done"})


def at(fake: FakeOpenAI, **changes: str) -> dict[str, str]:
    """The settings of a worker that asks this server."""
    place = {"ESPALIER_MODEL": fake.model, "OPENAI_BASE_URL": fake.base_url, "OPENAI_API_KEY": fake.key}
    return {**place, **changes}


async def lived(gateway: GatewayProcess, api_key: str) -> Reader:
    """What a reader saw of a run, from its first event to its last."""
    async with AepClient(gateway.base_url, api_key) as client:
        agent = await make_agent(client)
        run = await client.run_create(
            RunCreate(agent_id=agent.id, goal="Write a note.", inputs={"who": "me"})
        )
        reader = Reader(run.id)
        await reader.read(client)
    return reader


def told(reader: Reader, kind: str) -> list[Any]:
    return [payload for _, event, payload in reader.log if event == kind]


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> GatewayProcess:
    return await start_gateway()


async def test_an_agent_writes_an_artifact_and_completes_over_a_rate_limit(
    start: Start, gateway: GatewayProcess, api_key: str
) -> None:
    replies = [
        answer("I write it.", ("artifact_create", NOTE), usage=(500, 20)),
        failure(429, "slow down", "rate_limit_exceeded", Retry_After="0"),
        answer(None, DONE, usage=(600, 10)),
    ]
    async with fake_openai(replies) as fake:
        start("worker", **at(fake))
        reader = await lived(gateway, api_key)

    assert fake.refusals == []
    assert [event for _, event, _ in reader.log] == [
        "run.started",
        "cycle.started",
        "tool.called",
        "tool.returned",
        "artifact.created",
        "error",
        "tool.called",
        "tool.returned",
        "cycle.ended",
        "run.ended",
    ]
    (trouble,) = told(reader, "error")
    assert trouble["message"] == (
        "The model gave no answer: rate_limited: 429 rate_limit_exceeded, slow down."
    )
    (ended,) = told(reader, "cycle.ended")
    assert ended["tokens_used"] == fake.tokens == 1130
    (end,) = told(reader, "run.ended")
    assert (end["final_state"], end["result"]) == ("complete", {"final_message": "done", "artifact_ids": []})
    # The last request tells the model what it did, and what came of it.
    first, _, last = fake.requests
    assert last["messages"][: len(first["messages"])] == first["messages"]
    said, returned = last["messages"][len(first["messages"]) :]
    assert said["content"] == "I write it."
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == NOTE
    assert returned["tool_call_id"] == said["tool_calls"][0]["id"]
    assert (
        json.loads(returned["content"])["artifact_id"] == told(reader, "artifact.created")[0]["artifact_id"]
    )


async def test_a_call_that_nobody_can_read_costs_what_it_cost_and_is_asked_for_again(
    start: Start, gateway: GatewayProcess, api_key: str
) -> None:
    replies = [
        answer(None, ("complete", '{"final_message": "do'), usage=(300, 7)),
        answer(None, DONE, usage=(300, 9)),
    ]
    async with fake_openai(replies) as fake:
        start("worker", **at(fake))
        reader = await lived(gateway, api_key)

    assert told(reader, "error")[0]["message"].startswith("The model gave no answer: malformed_tool_call: ")
    assert told(reader, "cycle.ended")[0]["tokens_used"] == fake.tokens == 616
    assert told(reader, "run.ended")[0]["final_state"] == "complete"


async def test_a_pause_that_the_provider_asks_for_is_kept(
    start: Start, gateway: GatewayProcess, api_key: str
) -> None:
    replies = [failure(429, Retry_After="3"), answer(None, DONE)]
    async with fake_openai(replies) as fake:
        start("worker", **at(fake))
        reader = await lived(gateway, api_key)

    assert told(reader, "run.ended")[0]["final_state"] == "complete"
    first, second = fake.asked_at
    assert second - first >= 3


async def test_a_key_that_is_refused_ends_the_run_and_is_told_to_nobody(
    start: Start, gateway: GatewayProcess, api_key: str
) -> None:
    key = "sk-refused-0123456789"
    async with fake_openai(key="sk-refused-9876543210") as fake:
        worker = start("worker", **at(fake, OPENAI_API_KEY=key, ESPALIER_LOG_LEVEL="debug"))
        reader = await lived(gateway, api_key)
        worker.stop()

    assert fake.requests == []
    (end,) = told(reader, "run.ended")
    reason = "unauthorized: 401 invalid_api_key"
    assert (end["final_state"], end["result"]) == ("error", {"reason": f"model_failed:{reason}"})
    assert told(reader, "error")[0]["message"] == f"The model gave no answer: {reason}."
    everything = repr(reader.log) + worker.output() + gateway.service.output()
    assert "sk-" not in everything
    assert fake.base_url not in "".join(map(repr, reader.log))


async def test_a_model_that_cannot_be_asked_anywhere_ends_the_worker_with_a_sentence(start: Start) -> None:
    worker = start("worker", ESPALIER_MODEL="small", OPENAI_BASE_URL="", OPENAI_API_KEY="")
    worker.process.join(EXIT_WAIT_S)

    assert worker.process.exitcode == 1
    assert worker.output() == (
        "ESPALIER_MODEL names 'small', but neither OPENAI_BASE_URL nor OPENAI_API_KEY says where to ask it.\n"
    )
