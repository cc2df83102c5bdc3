"""Memory that is searched by meaning too: with the extra `embeddings`, which developers have installed."""

import json
from typing import Any

import anyio
import pytest
from scripted_runs import entries_of
from tests.integration.wire import ANSWER_WAIT_S, POLL_S, Gateway, Wire

from espalier_embeddings import DIMENSIONS, MODEL
from espalier_gateway.settings import GatewaySettings

pytestmark = pytest.mark.anyio

NOTES = {
    "login": "Credentials can be renewed in the account settings",
    "animal": "The puppy sleeps in its basket all day",
    "money": "The invoice for July was paid by bank transfer",
}
STORED = "select cardinality(embedding), embedding_model from memory_records where key = $1"
FORGET = "update memory_records set embedding = null, embedding_model = null where key = $1"


@pytest.fixture
def gateway_settings(gateway_settings: GatewaySettings) -> GatewaySettings:
    return gateway_settings.model_copy(update={"embeddings": "auto"})


async def noted(wire: Wire) -> dict[str, Any]:
    """A shelf with the notes."""
    shelf = {"tree_root_id": await wire.agent(), "namespace": "n"}
    for key, value in NOTES.items():
        record = await wire.call("memory.write", **shelf, key=key, value={"note": value})
        assert record["embedding"] is None
    return shelf


async def found(wire: Wire, shelf: dict[str, Any], query: str) -> list[str]:
    answer = await wire.call("memory.search", **shelf, query=query)
    assert answer["items"] == answer["records"] and answer["ranking"] == "semantic"
    assert all(record["embedding"] is None and 0 <= record["score"] <= 1 for record in answer["items"])
    return [record["key"] for record in answer["items"]]


async def test_a_record_that_means_the_like_is_found_without_a_word_in_common(wire: Wire) -> None:
    shelf = await noted(wire)
    assert (await found(wire, shelf, "passwords"))[:1] == ["login"]
    assert (await found(wire, shelf, "young dog"))[:1] == ["animal"]
    assert (await found(wire, shelf, "payment received"))[:1] == ["money"]
    assert await found(wire, shelf, "???") == []


async def test_words_still_count_where_meaning_does(wire: Wire) -> None:
    shelf = await noted(wire)
    await wire.call("memory.write", **shelf, key="ticket", value="ORD-00917 was sent back")
    assert (await found(wire, shelf, "00917"))[0] == "ticket"


async def test_a_record_without_a_vector_is_ranked_by_its_words_until_it_is_written_again(
    wire: Wire, gateway: Gateway
) -> None:
    shelf = await noted(wire)
    await gateway.pool.execute(FORGET, "login")
    assert "login" not in await found(wire, shelf, "passwords")
    assert (await found(wire, shelf, "credentials"))[0] == "login"
    await wire.call("memory.write", **shelf, key="login", value=NOTES["login"])
    assert (await found(wire, shelf, "passwords"))[0] == "login"


async def test_a_vector_of_another_model_is_not_compared(wire: Wire, gateway: Gateway) -> None:
    shelf = await noted(wire)
    await gateway.pool.execute("update memory_records set embedding_model = 'another' where key = 'login'")
    assert "login" not in await found(wire, shelf, "passwords")
    by_words = (await wire.call("memory.search", **shelf, query="credentials"))["items"][0]
    assert by_words["key"] == "login" and by_words["score"] >= 0.95, "as good as its words are"


async def test_an_agent_remembers_and_finds_by_meaning_too(wire: Wire, gateway: Gateway, start: Any) -> None:
    start("worker", ESPALIER_MODELS_SCRIPTED="on")
    agent_id = await wire.agent(toolset=[])
    note = {"namespace": "n", "key": "login", "value": NOTES["login"]}
    calls = [
        {"tool": "learning_memory_write", "args": note},
        {"tool": "learning_memory_search", "args": {"namespace": "n", "query": "passwords"}},
    ]
    script = {"answers": [{"calls": [*calls, {"tool": "continue_now", "args": {}}]}, {"text": "done"}]}
    run_id = await wire.run(agent_id, inputs={"espalier.script": script})
    with anyio.fail_after(ANSWER_WAIT_S):
        while (await wire.call("run.get", run_id=run_id))["ended_at"] is None:
            await anyio.sleep(POLL_S)
    stored = await gateway.pool.fetchrow(STORED, "login")
    assert stored is not None and tuple(stored) == (DIMENSIONS, MODEL)
    _, searched, *_ = await entries_of(gateway.pool, run_id, "tool_returned")
    answer = json.loads(searched["content"])
    assert ([item["key"] for item in answer["items"]], answer["ranking"]) == (["login"], "semantic")
