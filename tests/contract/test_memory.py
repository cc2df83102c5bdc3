"""Memory, as the published client writes, reads, searches and deletes it."""

from functools import partial
from typing import Any

import anyio
import pytest
from tests.contract.conftest import Runtime
from tests.contract.embedder import UNKNOWN, WAIT_S, Embedder, refused
from tests.contract.pages import both_dialects_agree, walked
from tests.contract.requirements import requirement
from tests.integration.wire import POLL_S

pytestmark = pytest.mark.anyio

NAMESPACE = "contract"
REMEMBERS: list[dict[str, Any]] = [
    {
        "calls": [
            {
                "tool": "learning_memory_write",
                "args": {"namespace": NAMESPACE, "key": "k", "value": "CANARY", "subject_id": "sub_a"},
            }
        ]
    },
    {"text": "done"},
]


async def tree(embedder: Embedder) -> str:
    return str((await embedder.agent(toolset=[]))["id"])


async def filled(embedder: Embedder) -> str:
    """A tree that remembers three things."""
    root = await tree(embedder)
    for number, value in enumerate(("an apple", "a pear", "an apple and a pear")):
        await embedder.client.memory.write(root, NAMESPACE, f"k{number}", value)
    return root


@requirement("AEP-MEMORY-01")
async def test_a_record_is_answered_as_it_was_written_and_read_back(embedder: Embedder) -> None:
    root, memory = await tree(embedder), embedder.client.memory
    record = await memory.write(root, NAMESPACE, "k", {"v": 1}, subject_id="sub_a", ttl_seconds=60)
    assert record["id"].startswith("mem_") and len(record["id"]) <= 64 and record["created_at"]
    assert record == {
        "id": record["id"],
        "tree_root_id": root,
        "namespace": NAMESPACE,
        "key": "k",
        "value": {"v": 1},
        "created_by_agent_id": root,
        "created_at": record["created_at"],
        "embedding": None,
        "subject_id": "sub_a",
        "ttl_seconds": 60,
    }
    page = await memory.read(root, NAMESPACE, key="k")
    assert (page["items"], page["cursor"]) == ([record], None)


@requirement("AEP-MEMORY-02")
async def test_a_key_keeps_its_id(embedder: Embedder) -> None:
    root, memory = await tree(embedder), embedder.client.memory
    first = await memory.write(root, NAMESPACE, "k", 1, subject_id="sub_a")
    assert await memory.write(root, NAMESPACE, "k", 2) == {**first, "value": 2}
    assert len((await memory.read(root, NAMESPACE))["items"]) == 1


@requirement("AEP-MEMORY-03")
async def test_records_are_found_page_by_page(embedder: Embedder) -> None:
    read = partial(embedder.client.memory.read, await filled(embedder), NAMESPACE)
    assert [record["key"] for record in await walked(read, "items", "cursor")] == ["k2", "k1", "k0"]


@requirement("AEP-MEMORY-04")
async def test_a_search_finds_what_has_most_of_the_words_first(embedder: Embedder) -> None:
    root, memory = await filled(embedder), embedder.client.memory
    items = (await memory.search(root, NAMESPACE, "apple pear"))["items"]
    assert [record["key"] for record in items[:1]] == ["k2"]
    scores = [record.pop("score") for record in items]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[1]
    in_order = sorted(items, key=lambda record: record["key"], reverse=True)
    assert in_order == (await memory.read(root, NAMESPACE))["items"]
    assert len((await memory.search(root, NAMESPACE, "apple pear", k=1))["items"]) == 1


@requirement("AEP-MEMORY-05")
async def test_a_tree_of_somebody_else_is_out_of_bounds(embedder: Embedder, runtime: Runtime) -> None:
    theirs, memory = await filled(await runtime.embedder()), embedder.client.memory
    for root in (theirs, "agt_" + UNKNOWN):
        for call in (
            memory.write(root, NAMESPACE, "k0", "mine"),
            memory.read(root, NAMESPACE),
            memory.search(root, NAMESPACE, "apple"),
            memory.delete(tree_root_id=root),
        ):
            assert (await refused(call)).symbol == "tree_boundary_violation"


@requirement("AEP-MEMORY-06")
async def test_a_deletion_counts(embedder: Embedder) -> None:
    root, memory = await filled(embedder), embedder.client.memory
    (record,) = (await memory.read(root, NAMESPACE, key="k0"))["items"]
    told = [
        await memory.delete(id=record["id"]),
        await memory.delete(id=record["id"]),
        await memory.delete(tree_root_id=root, namespace=NAMESPACE),
        await memory.delete(tree_root_id=root),
    ]
    assert told == [{"deleted": 1}, {"deleted": 0}, {"deleted": 2}, {"deleted": 0}]


@requirement("AEP-MEMORY-07")
async def test_a_record_with_a_ttl_is_gone_after_it(embedder: Embedder) -> None:
    root, memory = await tree(embedder), embedder.client.memory
    await memory.write(root, NAMESPACE, "kept", 1)
    await memory.write(root, NAMESPACE, "short", 1, ttl_seconds=1)
    with anyio.fail_after(WAIT_S):
        while (await memory.read(root, NAMESPACE, key="short"))["items"]:
            await anyio.sleep(POLL_S)
    assert [record["key"] for record in (await memory.read(root, NAMESPACE))["items"]] == ["kept"]


@requirement("AEP-MEMORY-08")
async def test_records_are_answered_in_both_dialects(embedder: Embedder) -> None:
    root, memory = await filled(embedder), embedder.client.memory
    read = partial(memory.read, root, NAMESPACE)
    assert await both_dialects_agree(read, "records")
    assert [record["key"] for record in await walked(read, "records", "next_cursor")] == ["k2", "k1", "k0"]
    found = await memory.search(root, NAMESPACE, "apple")
    assert found == {"items": found["items"], "records": found["items"], "ranking": found["ranking"]}
    assert len(found["items"]) == 2 and found["ranking"] in ("text", "semantic")


@requirement("AEP-MEMORY-09")
async def test_what_an_agent_remembers_is_told_without_the_value(embedder: Embedder) -> None:
    root = await tree(embedder)
    run = await embedder.run(REMEMBERS, agent_id=root)
    events = await embedder.events(run["id"])
    (record,) = (await embedder.client.memory.read(root, NAMESPACE))["items"]
    assert record["value"] == "CANARY"
    told = [event.payload for event in events if event.type == "memory.written"]
    assert told == [{"memory_id": record["id"], "namespace": NAMESPACE, "key": "k", "subject_id": "sub_a"}]
