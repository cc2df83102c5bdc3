"""The agent's own memory: what `learning_memory_*` does in a real worker, and what others see of it."""

import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from invariants import violations
from scripted_runs import entries_of
from tests.integration.wire import ANSWER_WAIT_S, POLL_S, Gateway, Wire
from tests.integration.wire_runs import event_types, uuid

from espalier_acts.memory import RECORDS_MAX, VALUE_BYTES_MAX
from espalier_run_worker.self_tools.memory import SHOWN_BYTES_MAX
from espalier_store.pool import transaction

pytestmark = pytest.mark.anyio

WIRE_PLANS = {"ESPALIER_MODELS_SCRIPTED": "on", "ESPALIER_EMBEDDINGS": "off"}
DEATH_WAIT_S = 45.0
ROOMY: dict[str, Any] = {
    "toolset": [],
    "ceilings": {
        "max_cycles": 20,
        "max_subagents": 0,
        "max_tool_calls_per_cycle": 50,
        "max_wall_seconds": 300,
    },
    "budgets": {"tokens_per_cycle": 1_000_000, "tool_calls_per_cycle": 50, "seconds_per_cycle": 60},
}
GO_ON = {"tool": "continue_now", "args": {}}

Start = Callable[..., Any]
Plan = list[dict[str, Any]]


def call(act: str, **args: Any) -> dict[str, Any]:
    return {"tool": f"learning_memory_{act}", "args": args}


def write(key: str, value: Any, **more: Any) -> dict[str, Any]:
    return call("write", namespace="n", key=key, value=value, **more)


async def ended(wire: Wire, run_id: str, wait_s: float = ANSWER_WAIT_S) -> dict[str, Any]:
    with anyio.fail_after(wait_s):
        while (run := await wire.call("run.get", run_id=run_id))["ended_at"] is None:
            await anyio.sleep(POLL_S)
    assert run["state"] == "complete", run
    return dict(run)


async def lived(wire: Wire, agent_id: str, answers: Plan) -> str:
    """The id of a run of the agent that has followed the plan to its end."""
    run_id = await wire.run(agent_id, inputs={"espalier.script": {"answers": answers}})
    await ended(wire, run_id)
    return run_id


async def told(gateway: Gateway, run_id: str) -> list[tuple[bool, Any]]:
    """What the calls of memory answered: whether it was done, and the JSON or the sentence."""
    returned = [
        (entry["ok"], entry["content"])
        for entry in await entries_of(gateway.pool, run_id, "tool_returned")
        if entry["tool"].startswith("learning_memory_")
    ]
    return [(ok, json.loads(content) if ok else content) for ok, content in returned]


async def written(gateway: Gateway, run_id: str) -> list[dict[str, Any]]:
    """The payloads of the run's `memory.written`."""
    query = "select payload from events where run_id = $1 and type = 'memory.written' order by seq"
    return [json.loads(row["payload"]) for row in await gateway.pool.fetch(query, uuid("run", run_id))]


async def test_an_agent_reads_in_a_later_cycle_what_it_wrote_and_finds_and_forgets_it(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**ROOMY)
    run_id = await lived(
        wire,
        agent_id,
        [
            {"calls": [write("a", {"fruit": "apple"}), write("b", "pear", subject_id="sub_b"), GO_ON]},
            {"calls": [call("read", namespace="n", key="a"), call("read", namespace="n"), GO_ON]},
            {"calls": [call("search", namespace="n", query="apple b"), GO_ON]},
            {"calls": [call("delete", id="${/results/0/id}"), call("read", namespace="n")]},
            {"text": "done"},
        ],
    )
    a, b, one, both, found, deleted, left = await told(gateway, run_id)
    kept = await wire.call("memory.read", tree_root_id=agent_id, namespace="n")
    assert kept["items"] == [b[1]]
    assert (a[1]["value"], a[1]["created_by_agent_id"], a[1]["tree_root_id"]) == (
        {"fruit": "apple"},
        agent_id,
        agent_id,
    )
    assert [one, both, left] == [
        (True, {"items": [a[1]], "cursor": None}),
        (True, {"items": [b[1], a[1]], "cursor": None}),
        (True, {"items": [b[1]], "cursor": None}),
    ]
    assert deleted == (True, {"deleted": 1})
    assert found[1].keys() == {"items", "ranking"} and found[1]["ranking"] == "text"
    assert [record["key"] for record in found[1]["items"]] == ["b", "a"]
    assert [{**record, "score": 1} for record in found[1]["items"]] == [
        {**b[1], "score": 1},
        {**a[1], "score": 1},
    ]


async def test_each_write_is_an_event_without_the_value(wire: Wire, gateway: Gateway, start: Start) -> None:
    start("worker", **WIRE_PLANS)
    run_id = await lived(
        wire,
        await wire.agent(**ROOMY),
        [
            {
                "calls": [
                    write("k", "CANARY", subject_id="sub_a"),
                    write("k", "CANARY 2"),
                    write("", "CANARY"),
                ]
            },
            {"text": "done"},
        ],
    )
    (_, record), (_, again), (ok, _) = await told(gateway, run_id)
    assert (record["id"], again["subject_id"], ok) == (again["id"], "sub_a", False)
    payload = {"memory_id": record["id"], "namespace": "n", "key": "k", "subject_id": "sub_a"}
    assert await written(gateway, run_id) == [payload, payload]
    assert await event_types(gateway.pool, run_id) == [
        *["run.started", "cycle.started", *["tool.called"] * 3, "tool.returned", "memory.written"],
        *["tool.returned", "memory.written", "tool.returned", "cycle.ended", "run.ended"],
    ]


async def test_what_one_run_of_the_tree_learns_the_embedder_and_other_agents_know_and_strangers_do_not(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    start("worker", **WIRE_PLANS)
    root, child, stranger = [await wire.agent(**ROOMY) for _ in range(3)]
    await gateway.pool.execute(
        "update agents set root_id = $1, parent_id = $1 where id = $2", uuid("agt", root), uuid("agt", child)
    )
    await wire.call("memory.write", tree_root_id=root, namespace="n", key="embedder", value=1)
    await lived(wire, child, [{"calls": [write("child", 2), write("embedder", 3)]}, {"text": "done"}])
    read: Plan = [{"calls": [call("read", namespace="n")]}, {"text": "done"}]
    ((_, by_root),) = await told(gateway, await lived(wire, root, read))
    ((_, by_stranger),) = await told(gateway, await lived(wire, stranger, read))
    items = (await wire.call("memory.read", tree_root_id=root, namespace="n"))["items"]
    assert by_root == {"items": items, "cursor": None}
    assert by_stranger == {"items": [], "cursor": None}
    assert [(each["key"], each["value"], each["created_by_agent_id"]) for each in items] == [
        ("child", 2, child),
        ("embedder", 3, child),
    ], "whoever wrote the value that stands there"


LONG = "x" * 201
REFUSED: dict[str, dict[str, Any]] = {
    "no key": call("write", namespace="n", value=1),
    "no value": call("write", namespace="n", key="k"),
    "an empty namespace": call("write", namespace="", key="k", value=1),
    "a key too long": call("write", namespace="n", key=LONG, value=1),
    "no time": write("k", 1, ttl_seconds=0),
    "a time too long": write("k", 1, ttl_seconds=2**52),
    "another tree": write("k", 1, tree_root_id="agt_" + "0" * 26),
    "an unknown argument": write("k", 1, embedding=[1]),
    "a cursor nobody answered": call("read", namespace="n", cursor="mem_" + "0" * 26),
    "a tree to read": call("read", namespace="n", tree_root_id="agt_" + "0" * 26),
    "no query": call("search", namespace="n"),
    "a query too long": call("search", namespace="n", query=LONG * 5),
    "too many": call("search", namespace="n", query="a", k=51),
    "everything": call("delete"),
    "a subject": call("delete", subject_id=5),
}


async def test_a_call_that_does_not_fit_is_told_so_in_a_sentence_and_does_nothing(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**ROOMY)
    before = await wire.call("memory.write", tree_root_id=agent_id, namespace="n", key="kept", value=1)
    run_id = await lived(wire, agent_id, [{"calls": list(REFUSED.values())}, {"text": "done"}])
    answers = dict(zip(REFUSED, await told(gateway, run_id), strict=True))
    assert [name for name, (ok, _) in answers.items() if ok] == []
    assert [name for name, (_, text) in answers.items() if not text.startswith("invalid_params: ")] == []
    assert (await wire.call("memory.read", tree_root_id=agent_id, namespace="n"))["items"] == [before]
    assert await written(gateway, run_id) == []


async def test_a_refused_write_leaves_the_rest_of_its_step_done(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**ROOMY)
    fill = """
    insert into memory_records (id, owner_id, root_id, namespace, key, value, created_by_id)
    select gen_random_uuid(), owner_id, id, 'm', 'k' || n, '0', id
    from agents, generate_series(1, $2) n where id = $1
    """
    await gateway.pool.execute(fill, uuid("agt", agent_id), RECORDS_MAX - 1)
    large = "x" * (VALUE_BYTES_MAX - 1)
    run_id = await lived(
        wire,
        agent_id,
        [
            {"calls": [write("a", large), write("b", 1), write("c", 1), write("b", 2)]},
            {"text": "done"},
        ],
    )
    too_large, first, full, second = await told(gateway, run_id)
    assert too_large == (False, "invalid_params: value should have at most 262144 bytes as JSON.")
    assert full == (
        False,
        "lifecycle_conflict: The tree has 10000 memory records, which is the most it may have.",
    )
    assert (first[0], second[0]) == (True, True)
    kept = (await wire.call("memory.read", tree_root_id=agent_id, namespace="n"))["items"]
    assert kept == [second[1]] and second[1]["value"] == 2
    assert len(await written(gateway, run_id)) == 2


async def test_what_the_model_is_shown_is_bounded_and_a_cursor_leads_on(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**ROOMY)
    shelf = {"tree_root_id": agent_id, "namespace": "n"}
    sizes = {"a": 100_000, "b": 100_000, "c": 100_000, "d": VALUE_BYTES_MAX - 2}
    for key, size in sizes.items():
        await wire.call("memory.write", **shelf, key=key, value="x" * size)
    run_id = await lived(
        wire,
        agent_id,
        [
            {"calls": [call("read", namespace="n")]},
            {"calls": [call("read", namespace="n", cursor="${/results/0/cursor}")]},
            {"calls": [call("read", namespace="n", cursor="${/results/1/cursor}")]},
            {
                "calls": [
                    call("search", namespace="n", query="a b c"),
                    write("d", "y" * (VALUE_BYTES_MAX - 2)),
                ]
            },
            {"text": "done"},
        ],
    )
    entries = await entries_of(gateway.pool, run_id, "tool_returned")
    assert max(len(entry["content"].encode()) for entry in entries) <= SHOWN_BYTES_MAX
    *pages, (_, found), (_, record) = await told(gateway, run_id)
    shown = [[(each["key"], len(each["value"] or "")) for each in page["items"]] for _, page in pages]
    assert shown == [[("d", 0)], [("c", 100_000), ("b", 100_000)], [("a", 100_000)]]
    assert [page["cursor"] is None for _, page in pages] == [False, False, True]
    assert pages[0][1]["items"][0]["value_left_out"] == "It is too large to be shown."
    assert [each["key"] for each in found["items"]] == ["c", "b"]
    assert (record["value"], record["value_left_out"]) == (None, "It is too large to be shown.")


@pytest.mark.slow
async def test_a_search_that_takes_too_long_is_told_and_the_rest_of_its_step_is_done(
    wire: Wire, gateway: Gateway, start: Start
) -> None:
    """The table is locked, so that every search of it takes too long."""
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**ROOMY)
    note = {"tool": "artifact_create", "args": {"name": "a.md", "content": "kept"}}
    plan = [
        {"calls": [note, call("search", namespace="n", query="word")]},
        {"calls": [write("k", 1)]},
        {"text": "ok"},
    ]
    async with transaction(gateway.pool) as connection:
        await connection.execute("lock table memory_records in access exclusive mode")
        run_id = await wire.run(agent_id, inputs={"espalier.script": {"answers": plan}})
        with anyio.fail_after(ANSWER_WAIT_S):
            while not await told(gateway, run_id):
                # Also so that the transaction is not taken for one that idles.
                await connection.execute("select")
                await anyio.sleep(POLL_S)
    await ended(wire, run_id)
    (searched, why), (wrote, _) = await told(gateway, run_id)
    assert (searched, why) == (False, "unavailable: it took too long; ask for rarer words, or later.")
    assert wrote and len(await written(gateway, run_id)) == 1
    assert [each["name"] for each in (await wire.call("artifact.list", run_id=run_id))["items"]] == ["a.md"]


@pytest.mark.slow
async def test_a_worker_deletes_what_has_expired(wire: Wire, gateway: Gateway, start: Start) -> None:
    agent_id = await wire.agent()
    shelf = {"tree_root_id": agent_id, "namespace": "n"}
    for key, ttl in (("expired", {"ttl_seconds": 1}), ("later", {"ttl_seconds": 600}), ("kept", {})):
        await wire.call("memory.write", **shelf, key=key, value=0, **ttl)
    start("worker")
    stored = "select array_agg(key order by key) from memory_records"
    with anyio.fail_after(ANSWER_WAIT_S):
        while "expired" in (left := await gateway.pool.fetchval(stored)):
            await anyio.sleep(POLL_S)
    assert left == ["kept", "later"]


# A worker dies in the step that writes, or between its commit and the publishing of its event.
MOMENTS = [
    f"{place}.{side}:{count}"
    for place in ("commit", "publish")
    for side in ("before", "after")
    for count in (3, 4)
]
BEFORE_THE_WRITE = "commit.before:3"


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_worker_killed_around_a_write_leaves_one_record_and_one_event(
    moment: str, wire: Wire, gateway: Gateway, start: Start
) -> None:
    first = start("worker", dies_at=moment, ESPALIER_LEASE_TTL_S="1", **WIRE_PLANS)
    agent_id = await wire.agent(**ROOMY)
    script = {"answers": [{"calls": [write("k", "v"), GO_ON]}, {"calls": [GO_ON]}, {"text": "done"}]}
    run_id = await wire.run(agent_id, inputs={"espalier.script": script})
    with anyio.fail_after(DEATH_WAIT_S):
        while not first.has_died():
            await anyio.sleep(POLL_S)
    written_first = await gateway.pool.fetchval("select count(*) from memory_records")
    assert written_first == (moment != BEFORE_THE_WRITE), "the moment is where it is meant to be"
    start("worker", ESPALIER_LEASE_TTL_S="1", **WIRE_PLANS)
    await ended(wire, run_id, DEATH_WAIT_S)
    (record,) = (await wire.call("memory.read", tree_root_id=agent_id, namespace="n"))["items"]
    assert [payload["memory_id"] for payload in await written(gateway, run_id)] == [record["id"]]
    response = await wire.get(f"/aep/v1/runs/{run_id}/events")
    assert response.text.count("event: memory.written\n") == 1
    assert await violations(gateway.pool) == {}
