"""What trees remember, for their embedder and their agents."""

from typing import Any, Final

import anyio

from espalier_client.conformance.behaviour import calls, completes, tool
from espalier_client.conformance.checks.lists import (
    require_both_dialects,
    require_pages,
    require_unknown_cursors,
)
from espalier_client.conformance.expected import nobody, require_payload, require_shape
from espalier_client.conformance.ground import Trial
from espalier_client.conformance.verdicts import expect, same
from espalier_client.conformance.wire import Caller

SPACE: Final = "kit"
OTHER_SPACE: Final = "kit.other"
AFTER_TTL_S: Final = 1.2


async def _tree(trial: Trial) -> str:
    return str((await trial.agent())["id"])


async def _write(caller: Caller, root: str, key: str, value: Any, **more: Any) -> dict[str, Any]:
    record = await caller.call(
        "memory.write", **{"tree_root_id": root, "namespace": SPACE, "key": key, "value": value, **more}
    )
    assert isinstance(record, dict)
    return record


async def _read(caller: Caller, root: str, **more: Any) -> list[dict[str, Any]]:
    page = await caller.call("memory.read", **{"tree_root_id": root, "namespace": SPACE, **more})
    found = page["items"] if "items" in page else page["records"]
    assert isinstance(found, list)
    return found


async def _search(caller: Caller, root: str, query: str, **more: Any) -> list[dict[str, Any]]:
    found = await caller.call("memory.search", tree_root_id=root, namespace=SPACE, query=query, **more)
    assert isinstance(found["items"], list)
    return found["items"]


async def memory_01_written(trial: Trial) -> None:
    root = await _tree(trial)
    subject = trial.subject()
    record = await _write(trial.me, root, "k", {"v": 1}, subject_id=subject, ttl_seconds=600)
    require_shape(record, "MemoryRecord", "the record")
    wanted = {
        "tree_root_id": root,
        "namespace": SPACE,
        "key": "k",
        "value": {"v": 1},
        "created_by_agent_id": root,
        "subject_id": subject,
        "ttl_seconds": 600,
    }
    same({name: record[name] for name in wanted}, wanted, "what was written")
    page = await trial.me.call("memory.read", tree_root_id=root, namespace=SPACE, key="k")
    same((page["items"], page["cursor"]), ([record], None), "a read of its key")
    same(await _read(trial.me, root, key="other"), [], "a read of another key")


async def memory_02_again(trial: Trial) -> None:
    root = await _tree(trial)
    first = await _write(trial.me, root, "k", 1)
    second = await _write(trial.me, root, "k", 2)
    same(second, {**first, "value": 2}, "the second write")
    same(await _read(trial.me, root), [second], "what is there")


async def _three(trial: Trial) -> tuple[str, list[str]]:
    """A tree that remembers three things, newest first."""
    root = await _tree(trial)
    values = ("an apple", "a pear", "an apple and a pear")
    made = [(await _write(trial.me, root, f"k{number}", value))["id"] for number, value in enumerate(values)]
    return root, made[::-1]


async def memory_03_pages(trial: Trial) -> None:
    root, made = await _three(trial)
    await require_pages(trial.me, "memory.read", made, "records", tree_root_id=root, namespace=SPACE)


async def memory_04_dialects(trial: Trial) -> None:
    root, _ = await _three(trial)
    await require_both_dialects(trial.me, "memory.read", "records", tree_root_id=root, namespace=SPACE)
    found = await trial.me.call("memory.search", tree_root_id=root, namespace=SPACE, query="apple")
    same(found.get("items"), found.get("records"), "items and records of a search")


async def memory_05_search(trial: Trial) -> None:
    root, made = await _three(trial)
    found = await _search(trial.me, root, "apple pear")
    for record in found:
        require_shape(record, "MemoryRecord", "a record that was found")
    scores = [record.get("score") for record in found]
    expect(all(isinstance(score, int | float) for score in scores), f"the scores are {scores}.")
    same(scores, sorted(scores, reverse=True), "the scores in order")
    same(found[0]["id"], made[0], "the best match of 'apple pear'")
    same(len(await _search(trial.me, root, "apple pear", k=1)), 1, "matches with k 1")
    same(len(await _search(trial.me, root, "apple")), 2, "matches of 'apple'")


async def memory_06_boundary(trial: Trial) -> None:
    for root in (nobody("agt"), "nonsense"):
        where = {"tree_root_id": root, "namespace": SPACE}
        await trial.me.refused("tree_boundary_violation", "memory.write", **where, key="k", value=1)
        await trial.me.refused("tree_boundary_violation", "memory.read", **where)
        await trial.me.refused("tree_boundary_violation", "memory.search", **where, query="x")
        await trial.me.refused("tree_boundary_violation", "memory.delete", **where)


async def memory_07_delete(trial: Trial) -> None:
    root, (newest, *_) = await _three(trial)
    told = [
        await trial.me.call("memory.delete", id=newest),
        await trial.me.call("memory.delete", id=newest),
        await trial.me.call("memory.delete", id=nobody("mem")),
        await trial.me.call("memory.delete", tree_root_id=root, namespace=OTHER_SPACE),
        await trial.me.call("memory.delete", tree_root_id=root, namespace=SPACE),
    ]
    same([each.get("deleted") for each in told], [1, 0, 0, 0, 2], "what the deletions counted")
    same(await _read(trial.me, root), [], "what is left")


async def memory_08_delete_nothing(trial: Trial) -> None:
    for params in ({}, {"namespace": SPACE}):
        await trial.me.refused("invalid_params", "memory.delete", **params)


async def memory_09_ttl(trial: Trial) -> None:
    root = await _tree(trial)
    await _write(trial.me, root, "kept", "an apple")
    await _write(trial.me, root, "short", "an apple", ttl_seconds=1)
    await anyio.sleep(AFTER_TTL_S)
    same([each["key"] for each in await _read(trial.me, root)], ["kept"], "what is read after the ttl")
    same(
        [each["key"] for each in await _search(trial.me, root, "apple")],
        ["kept"],
        "what is found after the ttl",
    )


async def memory_10_bounds(trial: Trial) -> None:
    root = await _tree(trial)
    where = {"tree_root_id": root, "namespace": SPACE}
    for ttl in (0, -1, 1.5):
        await trial.me.refused("invalid_params", "memory.write", **where, key="k", value=1, ttl_seconds=ttl)
    for k in (0, 51):
        await trial.me.refused("invalid_params", "memory.search", **where, query="x", k=k)


async def memory_11_keeps_the_tag(trial: Trial) -> None:
    root, subject = await _tree(trial), trial.subject()
    await _write(trial.me, root, "k", 1, subject_id=subject)
    same((await _write(trial.me, root, "k", 2))["subject_id"], subject, "the subject after another write")


async def memory_12_cursor(trial: Trial) -> None:
    root, _ = await _three(trial)
    unknown = ["nonsense", nobody("mem")]
    await require_unknown_cursors(trial.me, "memory.read", unknown, tree_root_id=root, namespace=SPACE)


async def memory_13_apart(trial: Trial) -> None:
    one, other = await _tree(trial), await _tree(trial)
    await _write(trial.me, one, "k", "an apple")
    await _write(trial.me, one, "k", "a pear", namespace=OTHER_SPACE)
    await _write(trial.me, other, "k", "a plum")
    same([each["value"] for each in await _read(trial.me, one)], ["an apple"], "a namespace of one tree")
    same([each["value"] for each in await _read(trial.me, other)], ["a plum"], "the same one of another tree")
    found = await _search(trial.me, one, "pear plum")
    same([each["value"] for each in found if each["value"] != "an apple"], [], "a search in one namespace")
    await trial.me.call("memory.delete", tree_root_id=one, namespace=SPACE)
    same(len(await _read(trial.me, other)), 1, "records of the other tree after a deletion")


async def memory_14_agents(trial: Trial) -> None:
    agent, word = await trial.agent(), trial.word()
    await _write(trial.me, agent["id"], "from-embedder", word)
    run, _ = await trial.ended(
        calls(tool("learning_memory_write", namespace=SPACE, key="from-agent", value={"by": "agent"})),
        calls(tool("learning_memory_read", namespace=SPACE, key="from-embedder")),
        calls(tool("complete", result="${/results/1/items/0/value}")),
        agent=agent,
    )
    same((run["state"], run["result"]), ("complete", word), "what the agent read")
    (record,) = await _read(trial.me, agent["id"], key="from-agent")
    told = (record["value"], record["tree_root_id"], record["created_by_agent_id"])
    same(told, ({"by": "agent"}, agent["id"], agent["id"]), "what the agent wrote")


async def memory_15_event(trial: Trial) -> None:
    agent, word, subject = await trial.agent(), trial.word(), trial.subject()
    write = tool("learning_memory_write", namespace=SPACE, key="k", value=word, subject_id=subject)
    _, events = await trial.ended(calls(write), completes(), agent=agent)
    if not events:
        trial.require("streaming.sse")
    (record,) = await _read(trial.me, agent["id"])
    told = [event["payload"] for event in events if event["type"] == "memory.written"]
    for payload in told:
        require_payload(payload, "memory.written")
        expect(word not in str(payload), "memory.written tells the value.")
    same([each["memory_id"] for each in told], [record["id"]], "the records that memory.written tells of")


async def memory_16_agent_deletes(trial: Trial) -> None:
    agent, other = await trial.agent(), await _tree(trial)
    mine = await _write(trial.me, agent["id"], "k", 1)
    theirs = await _write(trial.me, other, "k", 1)
    run, _ = await trial.ended(
        calls(*(tool("learning_memory_delete", id=each["id"]) for each in (mine, theirs))),
        calls(tool("complete", result=["${/results/0/deleted}", "${/results/1/deleted}"])),
        agent=agent,
    )
    same(run["result"], [1, 0], "what an agent's deletions count, in its tree and in another")
    same(len(await _read(trial.me, other)), 1, "records of the other tree")


async def memory_17_values(trial: Trial) -> None:
    root = await _tree(trial)
    values: tuple[Any, ...] = (None, True, 0, -1.5, "", "ünïcode \u2028", [], {"a": [{}]}, [[1]])
    for number, value in enumerate(values):
        await _write(trial.me, root, f"k{number}", value)
        (record,) = await _read(trial.me, root, key=f"k{number}")
        same(record["value"], value, "the value as it was read")
