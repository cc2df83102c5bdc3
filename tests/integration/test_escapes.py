"""Agents that try to get out of their cage: each attempt gets the code that the protocol demands, the event
stream tells of it, and nothing of it has happened.
"""

from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
from families import SLEEPS, asleep, children, make_spawner, returned, spawn, troubles
from forked import Service
from invariants import violations
from scripted_runs import entries_of, log_of, start_run
from tests.integration.conftest import Start, StartBroker, StartGateway

from espalier_client.client import AepClient
from espalier_protocol.errors import ErrorCode
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ON = {"ESPALIER_MODELS_SCRIPTED": "on"}
TOOLSET: Final = ["espalier.time"]


@pytest.fixture
async def client(start_gateway: StartGateway, api_key: str) -> AsyncIterator[AepClient]:
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as opened:
        yield opened


@pytest.fixture
async def worker(start: Start, start_broker: StartBroker) -> Service:
    """With a broker, because the agents have one of its tools."""
    broker = await start_broker()
    return start("worker", **ON, **broker.worker_settings)


def call(tool: str, /, **args: Any) -> dict[str, Any]:
    return {"tool": tool, "args": args}


def told(*symbols: str) -> list[tuple[str, int]]:
    return [(symbol, ErrorCode[symbol].value) for symbol in symbols]


async def tries(client: AepClient, pool: Pool, *calls: dict[str, Any], **agent: Any) -> str:
    """The id of a run that has made these calls in one answer, and then gone to sleep."""
    made = await make_spawner(
        client, **{"toolset": TOOLSET, "budgets": {"tokens_per_cycle": 20_000}, **agent}
    )
    run = await start_run(client, [{"calls": [*calls, *SLEEPS["calls"]]}], made.id)
    await asleep(pool, run.id, cycles=1)
    return run.id


async def outcomes(pool: Pool, run_id: str) -> list[tuple[bool, str]]:
    """Of each call but the last, which goes to sleep: whether it was carried out, and its first word."""
    entries = await entries_of(pool, run_id, "tool_returned")
    return [(each["ok"], each["content"].partition(":")[0]) for each in entries[:-1]]


async def test_a_tool_outside_the_toolset_is_not_found_whoever_would_have_it(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    wanted = ["espalier.fetch", "helix.fetch", "mcp.git.push", "run_shell", "espalier.time"]

    run_id = await tries(client, pool, *(call(tool) for tool in wanted))

    outcome = await outcomes(pool, run_id)
    assert outcome[:4] == [(False, "tool_not_found")] * 4
    assert outcome[4][0], "the one that it has is still there"
    assert await troubles(pool, run_id) == told(*["tool_not_found"] * 4)
    assert await pool.fetchval("select count(*) from tool_calls where tool <> 'espalier.time'") == 0


async def test_there_is_no_tool_by_which_an_agent_could_widen_what_it_has(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    attempts = [
        call("add_tool", tool="espalier.fetch"),
        call("remove_tool", tool="espalier.time"),
        call("adjust_caps", max_cycles=1_000),
        call("agent.update", ceilings={"max_cycles": 1_000}),
        call("modify_own_ceilings", max_cycles=1_000),
        call("replicate"),
    ]
    run_id = await tries(client, pool, *attempts)

    assert await outcomes(pool, run_id) == [(False, "tool_not_found")] * len(attempts)
    assert await troubles(pool, run_id) == told(*["tool_not_found"] * len(attempts))
    agent = (await client.run_get(run_id)).agent_id
    made = await client.agent_get(agent)
    assert (made.toolset, made.ceilings.max_cycles) == (TOOLSET, 10)


async def test_a_helper_gets_no_tool_that_its_spawner_has_not(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    beyond = [["espalier.fetch"], ["espalier.*"], ["mcp.git.*"], ["espalier.time", "run_shell"], ["*"]]
    fitting = spawn(SLEEPS_FIRST, toolset_subset=["helix.time"])
    attempts = [spawn([], toolset_subset=subset) for subset in beyond]

    run_id = await tries(client, pool, *attempts, fitting)

    assert (await outcomes(pool, run_id))[:-1] == [(False, "tool_not_found")] * len(beyond)
    assert await troubles(pool, run_id) == told(*["tool_not_found"] * len(beyond))
    (child,) = await children(pool, run_id)
    toolset = "select toolset from agents where id = $1"
    assert await pool.fetchval(toolset, child["agent_id"]) == ["helix.time"]


SLEEPS_FIRST: Final = [SLEEPS]
BEYOND: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("max_cycles", {"ceilings": {"max_cycles": 10}}, "10 wanted, 9 left to give"),
    ("max_subagents", {"ceilings": {"max_subagents": 4}}, "5 wanted, 4 left to give"),
    (
        "max_tool_calls_per_cycle",
        {"ceilings": {"max_tool_calls_per_cycle": 51}},
        "51 wanted, 50 left to give",
    ),
    ("tokens_per_cycle", {"budgets": {"tokens_per_cycle": 20_001}}, "20001 wanted, 20000 left to give"),
    ("tool_calls_per_cycle", {"budgets": {"tool_calls_per_cycle": 51}}, "51 wanted, 50 left to give"),
    ("seconds_per_cycle", {"budgets": {"seconds_per_cycle": 121}}, "121 wanted, 120 left to give"),
]


async def test_spawning_above_the_headroom_is_refused_with_the_limit_what_was_wanted_and_what_is_left(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    """Just above is refused; all of it at once, to the last unit, is not."""
    attempts = [spawn([], **changes) for _, changes, _ in BEYOND]
    longest = spawn([], ceilings={"max_wall_seconds": 600})  # some of the 600 has passed
    everything = spawn(
        SLEEPS_FIRST,
        ceilings={"max_cycles": 9, "max_subagents": 3, "max_tool_calls_per_cycle": 50},
        budgets={"tokens_per_cycle": 20_000, "tool_calls_per_cycle": 50, "seconds_per_cycle": 120},
    )
    afterwards = spawn([], ceilings={"max_cycles": 1})

    run_id = await tries(client, pool, *attempts, longest, everything, afterwards)

    answers = await returned(pool, run_id, "spawn_subagent")
    assert answers[: len(BEYOND)] == [f"ceiling_exceeded: {limit}: {why}" for limit, _, why in BEYOND]
    assert answers[len(BEYOND)].startswith("ceiling_exceeded: max_wall_seconds: 600 wanted, 59")
    assert set(answers[-2]) == {"child_agent_id", "child_run_id"}
    assert answers[-1] == "ceiling_exceeded: max_cycles: 1 wanted, 0 left to give"
    refused = len(BEYOND) + 2
    assert await troubles(pool, run_id) == told(*["ceiling_exceeded"] * refused)
    assert len(await children(pool, run_id)) == 1
    assert await violations(pool) == {}


async def test_an_agent_without_subagents_spawns_nobody(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    run_id = await tries(client, pool, spawn([]), ceilings={"max_subagents": 0})

    assert await returned(pool, run_id, "spawn_subagent") == [
        "ceiling_exceeded: max_subagents: 1 wanted, 0 left to give"
    ]
    assert await troubles(pool, run_id) == told("ceiling_exceeded")
    assert await pool.fetchval("select count(*) from agents where parent_id is not null") == 0


async def test_an_impossible_order_is_refused_as_such_and_begins_nobody(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    whole = spawn([])["args"]
    impossible: list[dict[str, Any]] = [
        {},
        {**whole, "parent_agent_id": "agt_x"},
        {**whole, "ceilings": {**whole["ceilings"], "max_cycles": "9"}},
        {**whole, "ceilings": {**whole["ceilings"], "max_cycles": 0}},
        {**whole, "ceilings": {"max_cycles": 1}},
        {**whole, "constitution": {**whole["constitution"], "mutable_prompt_policy": "none"}},
        {**whole, "toolset_subset": ["x"] * 257},
        {**whole, "name": ""},
    ]
    run_id = await tries(client, pool, *(call("spawn_subagent", **args) for args in impossible))

    assert await outcomes(pool, run_id) == [(False, "invalid_params")] * len(impossible)
    assert await troubles(pool, run_id) == [], "a slip is no attempt at the cage"
    assert await children(pool, run_id) == []


async def test_a_message_into_another_tree_is_a_boundary_violation(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    elsewhere = await make_spawner(client)
    nobody = f"agt_{'0' * 26}"

    run_id = await tries(
        client,
        pool,
        call("send_message", to_agent_id=elsewhere.id, body="let me out"),
        call("send_message", to_agent_id=nobody, body="let me out"),
    )

    assert await outcomes(pool, run_id) == [(False, "tree_boundary_violation"), (False, "tool_not_found")]
    assert await troubles(pool, run_id) == told("tree_boundary_violation", "tool_not_found")
    assert await pool.fetchval("select count(*) from messages") == 0


async def test_memory_of_another_tree_can_neither_be_named_nor_deleted(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    """A record's own id is no way out: what an agent deletes is in its tree, or it is not there for it."""
    keep = call("learning_memory_write", namespace="n", key="k", value=1)
    other = await tries(client, pool, keep)
    record = (await returned(pool, other, "learning_memory_write"))[0]
    root = (await client.run_get(other)).agent_id

    run_id = await tries(
        client,
        pool,
        keep,
        call("learning_memory_delete", id=record["id"]),
        call("learning_memory_delete", namespace="n", tree_root_id=root),
        call("learning_memory_delete", namespace="n"),
    )

    assert await returned(pool, run_id, "learning_memory_delete") == [
        {"deleted": 0},
        "invalid_params: learning_memory_delete takes id or namespace (1 to 200 characters), or both.",
        {"deleted": 1},
    ]
    left = await pool.fetch("select root_id, namespace, key from memory_records")
    assert len(left) == 1 and left[0]["key"] == "k"


async def test_calls_beyond_a_limit_of_the_cycle_are_told_with_the_limits_own_code(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    knock = call("inbox_read")
    hard = await tries(client, pool, knock, knock, ceilings={"max_tool_calls_per_cycle": 1})
    soft = await tries(
        client, pool, knock, knock, budgets={"tool_calls_per_cycle": 1, "tokens_per_cycle": 999}
    )

    assert await troubles(pool, hard) == told("ceiling_exceeded")
    assert await troubles(pool, soft) == told("budget_exhausted")
    last = [payload for _, type_, payload in await log_of(pool, soft) if type_ == "cycle.ended"]
    assert [each["outcome"] for each in last] == ["slept"], "what ends a cycle counts against no limit"
