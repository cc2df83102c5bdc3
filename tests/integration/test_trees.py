"""Trees under fire: what a tree may spend and spawn holds whoever is at work on it at the same moment."""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import reduce
from typing import Any
from uuid import UUID

import anyio
import pytest
from families import (
    BUDGETS,
    GOES_ON,
    READ,
    READS,
    SLEEPS,
    WAITS,
    asleep,
    children,
    ended,
    make_spawner,
    returned,
    spawn,
    troubles,
    unbalanced,
    until,
)
from forked import Service
from invariants import violations
from scripted_runs import DONE, Plan, entries_of, log_of, row_of, start_run
from tests.integration.conftest import Start, StartGateway, Stores
from tests.integration.wire_runs import uuid

from espalier_acts.log import append_entries, lines_of
from espalier_acts.messages import wake_for_message
from espalier_acts.runs import cancel_run
from espalier_acts.subjects import admit_subjects, begin_erasure, erase_a_part
from espalier_client.client import AepClient
from espalier_domain.journal import ModelAnswered, RunCreated, ToolCall
from espalier_domain.progress import Progress, apply
from espalier_domain.run import CallSelf, closing
from espalier_domain.trees import SpawnOrder
from espalier_eventlog import RedisSettings, open_streams
from espalier_eventlog.publisher import Publisher
from espalier_protocol.access import SUPPORTED
from espalier_protocol.agent import AgentUpdate, BudgetsChange, CeilingsChange
from espalier_protocol.ids import to_wire
from espalier_protocol.message import Message, MessageSend
from espalier_run_worker.held import Held, claim
from espalier_run_worker.self_tools import open_self_tools
from espalier_run_worker.tool_calls import run_calls
from espalier_store.ids import new_id
from espalier_store.pool import Pool, PostgresSettings, open_pool, transaction
from espalier_store.runs import lock_run
from espalier_store.subjects import tag_run
from espalier_store.trees import NewChild
from espalier_store.trees import spawn as spawn_row

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ON = {"ESPALIER_MODELS_SCRIPTED": "on"}
AT_ONCE = 16
WORKERS = 8
LEASE_TTL_S = 60.0


@pytest.fixture
async def client(start_gateway: StartGateway, api_key: str) -> AsyncIterator[AepClient]:
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as opened:
        yield opened


@pytest.fixture
def worker(start: Start) -> Service:
    return start("worker", **ON)


# ------------------------------------------------------------------ spawning at the same moment


async def test_of_sixteen_calls_in_one_answer_under_four_subagents_exactly_four_begin(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client, ceilings={"max_cycles": 100, "max_subagents": 4})
    run = await start_run(client, [{"calls": [spawn([DONE])] * AT_ONCE, "tokens": 10}, SLEEPS], agent.id)

    row = await asleep(pool, run.id, cycles=1)

    answers = await returned(pool, run.id, "spawn_subagent")
    helpers = await children(pool, run.id)
    assert [answer["child_run_id"] for answer in answers[:4]] == [
        to_wire("run", each["id"]) for each in helpers
    ]
    assert answers[4:] == ["ceiling_exceeded: max_subagents: 1 wanted, 0 left to give"] * 12
    assert await troubles(pool, run.id) == [("ceiling_exceeded", -32003)] * 12
    assert row["subagents_granted"] == 4
    assert await violations(pool) == {}


def new_child(**changes: Any) -> NewChild:
    order = SpawnOrder.model_validate({**spawn([], **changes)["args"], "metadata": {}})
    return NewChild(new_id(), new_id(), "", order)


async def race(stores: Stores, count: int, act: Callable[[Pool], Awaitable[Any]]) -> list[Any]:
    """What `count` of them answer, each on a connection of its own and all begun at the same moment."""
    settings = PostgresSettings(postgres_url=stores.postgres_url, postgres_connections_max=count)
    answers: list[Any] = []
    async with open_pool(settings) as own_pool:
        connections = [await own_pool.acquire() for _ in range(count)]
        for connection in connections:
            await own_pool.release(connection)

        async def one() -> None:
            answers.append(await act(own_pool))

        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(one)
    return answers


@pytest.mark.parametrize(
    ("room", "wanted", "begun"),
    [
        ({"max_subagents": 4, "max_cycles": 100}, {}, 4),
        ({"max_subagents": 11, "max_cycles": 100}, {"max_subagents": 2}, 3),
        ({"max_subagents": 100, "max_cycles": 10}, {"max_cycles": 3}, 3),
    ],
    ids=["under max_subagents", "with subagents of their own", "under max_cycles"],
)
async def test_sixteen_connections_that_spawn_from_one_run_get_no_more_than_it_has(
    client: AepClient, pool: Pool, owner_id: UUID, stores: Stores, room: Any, wanted: Any, begun: int
) -> None:
    """Nobody locks the row before: the statement alone decides, and the losers leave nothing."""
    agent = await make_spawner(client, ceilings=room)
    run = await start_run(client, [], agent.id)
    run_id = uuid("run", run.id)

    async def spawns(own_pool: Pool) -> bool:
        child = new_child(ceilings=wanted)
        lines = lines_of(child.run_id, (RunCreated(to_wire("agt", child.agent_id)),), Progress())
        async with transaction(own_pool) as connection:
            return await spawn_row(connection, owner_id, run_id, child, lines) is not None

    won = await race(stores, AT_ONCE, spawns)

    row = await row_of(pool, run.id)
    helpers = await children(pool, run.id)
    assert (sum(won), len(helpers)) == (begun, begun)
    assert await pool.fetchval("select count(*) from agents where parent_id is not null") == begun
    assert row["cycles_granted"] == sum(each["max_cycles"] for each in helpers) <= row["max_cycles"]
    assert row["subagents_granted"] == sum(1 + each["max_subagents"] for each in helpers)
    assert row["subagents_granted"] <= row["max_subagents"]
    assert await pool.fetchval("select count(*) from events") == 1 + begun
    assert await violations(pool) == {}


# ------------------------------------------------------------------ what a tree may spend


def spender(*, subagents: Plan, answers: int) -> Plan:
    """Spawns, and then spends all that a cycle has, cycle for cycle, until no cycle is left.

    Each answer says that it cost more than half of a budget, so that the second of a cycle is cut short.
    """
    costs = {"tokens": 700, "calls": [{"tool": "artifact_create", "args": {"name": "n", "content": "c"}}]}
    goes_on = {**GOES_ON, "tokens": 700}
    spends = [each for _ in range(answers) for each in (costs, goes_on)]
    return [{"calls": subagents, "tokens": 10}, *spends] if subagents else spends


async def test_eight_workers_on_one_tree_never_exceed_its_budget(
    client: AepClient, start: Start, pool: Pool
) -> None:
    """Everybody spends all that it has. The root waits, and then spends what is left or came back."""
    for _ in range(WORKERS):
        start("worker", **ON)
    limits = {"max_cycles": 60, "max_subagents": 12, "max_wall_seconds": 600}
    leaf = spawn(spender(subagents=[], answers=9), ceilings={"max_cycles": 4, "max_wall_seconds": 200})
    too_many = [leaf] * 4  # only three of them fit
    branch = spawn(
        spender(subagents=too_many, answers=20),
        ceilings={"max_cycles": 16, "max_subagents": 3, "max_wall_seconds": 400},
    )
    root_plan = [{"calls": [branch] * 4, "tokens": 10}, *[{"calls": [READ], "tokens": 10}, WAITS] * 20]
    agent = await make_spawner(client, ceilings=limits)
    await start_run(client, root_plan, agent.id)

    async def helpers_ended() -> bool:
        live = await pool.fetchval("select count(*) from runs where depth > 0 and ended_at is null")
        begun = await pool.fetchval("select count(*) from runs where depth > 0")
        return begun == 12 and not live

    await until(helpers_ended)
    await until_told(pool)

    runs = {row["id"]: row for row in await pool.fetch("select * from runs")}
    spent = await pool.fetch("""
        select run_id, (body ->> 'cycle')::int as cycle, (body ->> 'tokens_used')::int as tokens
        from journal where body ->> 'kind' = 'cycle_ended'
    """)
    of_cycle = [row["tokens"] for row in spent]
    budget, cycles_max = BUDGETS["tokens_per_cycle"], limits["max_cycles"]
    assert max(of_cycle) == budget, "cut short where the budget ends"
    assert sum(of_cycle) <= cycles_max * budget
    assert sum(row["cycle_count"] for row in runs.values()) <= cycles_max
    assert sum(of_cycle) > 30 * budget, "they really tried"
    for row in runs.values():
        used = row["cycle_count"] + row["cycles_granted"] + row["cycles_lost"]
        assert used <= row["max_cycles"]
        of_run = sum(each["tokens"] for each in spent if each["run_id"] == row["id"])
        assert of_run <= (row["max_cycles"] - row["cycles_granted"]) * budget
        assert row["subagents_granted"] <= row["max_subagents"]
    by_depth = [sum(row["depth"] == depth for row in runs.values()) for depth in range(3)]
    assert by_depth == [1, 3, 9]
    assert await unbalanced(pool) == []
    assert await violations(pool) == {}


async def until_told(pool: Pool) -> None:
    async def none() -> bool:
        return not await pool.fetchval("select count(*) from outbox where kind = 'wake'")

    await until(none)


async def test_budgets_of_a_helper_never_exceed_those_above_it_whatever_an_embedder_changes(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client)
    run = await start_run(client, [{"calls": [spawn([SLEEPS] * 5)]}, WAITS], agent.id)
    await asleep(pool, run.id, cycles=1)
    (child,) = await children(pool, run.id)
    child_agent, child_run = to_wire("agt", child["agent_id"]), to_wire("run", child["id"])
    await asleep(pool, child_run, cycles=1)

    await client.agent_update(
        AgentUpdate(agent_id=child_agent, budgets=BudgetsChange(tokens_per_cycle=9_000_000))
    )
    await continued(client, pool, child_run, cycles=2)
    await client.agent_update(AgentUpdate(agent_id=agent.id, budgets=BudgetsChange(tokens_per_cycle=300)))
    await continued(client, pool, child_run, cycles=3)

    snapshots = [
        payload["budget_snapshot"]
        for _, type_, payload in await log_of(pool, child_run)
        if type_ == "cycle.started"
    ]
    assert snapshots == [{**BUDGETS, "tokens_per_cycle": tokens} for tokens in (1_000, 1_000, 300)]


async def continued(client: AepClient, pool: Pool, run_id: str, *, cycles: int) -> None:
    await client.run_continue(run_id)
    await asleep(pool, run_id, cycles=cycles)


async def test_a_ceiling_that_shrinks_below_what_was_granted_stops_those_who_were_granted_it(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client, ceilings={"max_cycles": 10})
    helper = spawn([SLEEPS] * 9, ceilings={"max_cycles": 8})
    run = await start_run(client, [{"calls": [helper]}, WAITS, READS, SLEEPS], agent.id)
    await asleep(pool, run.id, cycles=1)
    (child,) = await children(pool, run.id)
    child_run = to_wire("run", child["id"])
    await asleep(pool, child_run, cycles=1)

    await client.agent_update(AgentUpdate(agent_id=agent.id, ceilings=CeilingsChange(max_cycles=5)))
    await client.run_continue(child_run)
    stopped = await ended(pool, child_run)
    row = await asleep(pool, run.id, cycles=2)

    assert (stopped["state"], stopped["cycle_count"]) == ("error", 1)
    assert stopped["result"] == {"reason": "ceiling_exceeded:max_cycles"}
    assert await troubles(pool, child_run) == [("ceiling_exceeded", -32003)]
    assert (row["max_cycles"], row["cycles_granted"]) == (5, 1), "what came back is enough to go on"
    assert await violations(pool) == {}


async def test_a_spawner_that_gave_everything_away_is_not_ended_by_a_message_but_waits_for_what_comes_back(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client, ceilings={"max_cycles": 5})
    helper = spawn([SLEEPS, DONE], ceilings={"max_cycles": 4})
    run = await start_run(client, [{"calls": [helper]}, WAITS, READS, DONE], agent.id)
    await asleep(pool, run.id, cycles=1)
    (child,) = await children(pool, run.id)
    child_run = to_wire("run", child["id"])
    await asleep(pool, child_run, cycles=1)

    await client.call("message.send", MessageSend(to_agent_id=agent.id, body="hurry"), Message)

    async def looked() -> bool:
        return bool(await entries_of(pool, run.id, "headroom_awaited"))

    await until(looked)
    waiting = await asleep(pool, run.id, cycles=1)
    assert (waiting["wait_reason"], waiting["due_at"]) == ("child", waiting["wall_at"])
    await client.run_continue(child_run)
    row = await ended(pool, run.id)

    assert (row["state"], row["cycle_count"], row["cycles_granted"]) == ("complete", 2, 2)
    read = [m["body"] for one in await returned(pool, run.id, "inbox_read") for m in one["messages"]]
    assert [body if isinstance(body, str) else body["state"] for body in read] == ["hurry", "complete"]
    assert await violations(pool) == {}


async def test_a_spawner_whose_helpers_used_up_all_that_it_had_ends_at_its_ceiling(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent = await make_spawner(client, ceilings={"max_cycles": 3})
    helper = spawn([GOES_ON, DONE], ceilings={"max_cycles": 2})
    run = await start_run(client, [{"calls": [helper]}, WAITS, READS], agent.id)

    row = await ended(pool, run.id)

    assert (row["state"], row["cycle_count"], row["cycles_granted"]) == ("error", 1, 2)
    assert row["result"] == {"reason": "ceiling_exceeded:max_cycles"}


# ------------------------------------------------------------------ answers that cost more than was reserved


@pytest.fixture
async def publisher(stores: Stores) -> AsyncIterator[Publisher]:
    """One that only queues: nothing here looks at Redis."""

    async def nobody(_: object) -> None: ...

    async with open_streams(RedisSettings(redis_url=stores.redis_url)) as streams:
        queueing = Publisher(streams, stores.redis_prefix, nobody)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await queueing.run()  # closes its queue
        yield queueing


async def answer(held: Held, tokens: int, tool: str = "continue_now") -> None:
    """The model's whole cycle: one answer that cost this much, whatever was reserved for it."""
    assert held.progress.cycle is not None
    call = ToolCall(f"c{held.progress.answers}", tool, {})
    await held.write(ModelAnswered(held.progress.cycle.number, "", (call,), tokens))


async def test_an_answer_beyond_its_reservation_uses_up_cycles_that_then_nobody_gets(
    client: AepClient, pool: Pool, owner_id: UUID, publisher: Publisher
) -> None:
    """Settling never fails: the overshoot is booked, and what it cost is neither run nor granted any more."""
    agent = await make_spawner(client, ceilings={"max_cycles": 6})
    run = await start_run(client, [], agent.id)
    held = await claim(pool, publisher, LEASE_TTL_S, uuid("run", run.id))
    assert held is not None

    await answer(held, 3_500)

    row = await row_of(pool, run.id)
    assert (row["cycle_count"], row["cycles_lost"]) == (1, 3), "2,500 beyond a budget of 1,000"
    for cycles, is_begun in ((3, False), (2, True)):
        child = new_child(ceilings={"max_cycles": cycles})
        lines = lines_of(child.run_id, (RunCreated(to_wire("agt", child.agent_id)),), Progress())
        async with transaction(pool) as connection:
            moved = await spawn_row(connection, owner_id, uuid("run", run.id), child, lines)
        assert (moved is not None) == is_begun


async def test_what_a_helper_spent_beyond_all_that_it_had_is_taken_from_its_spawner(
    client: AepClient, pool: Pool, owner_id: UUID, publisher: Publisher
) -> None:
    """No call starts in a tree that has spent what it may, whoever of the tree it was that spent it."""
    agent = await make_spawner(client, ceilings={"max_cycles": 4})
    run = await start_run(client, [], agent.id)
    spawner = await claim(pool, publisher, LEASE_TTL_S, uuid("run", run.id))
    assert spawner is not None
    child = new_child(ceilings={"max_cycles": 2})
    lines = lines_of(child.run_id, (RunCreated(to_wire("agt", child.agent_id)),), Progress())
    async with transaction(pool) as connection:
        assert await spawn_row(connection, owner_id, spawner.run_id, child, lines)
    helper = await claim(pool, publisher, LEASE_TTL_S, child.run_id)
    assert helper is not None and helper.progress.cycle is not None

    await helper.write(ModelAnswered(helper.progress.cycle.number, "done", (), 3_500))
    (wake_id,) = helper.promised_wakes()
    assert isinstance(wake_id, int)
    async with transaction(pool) as connection:
        await wake_for_message(connection, wake_id)

    row = await row_of(pool, run.id)
    assert (row["cycles_granted"], row["wake_seq"]) == (4, 1), "one used and three lost, of two that it had"
    await answer(spawner, 10)
    async with open_self_tools(SUPPORTED) as tools:
        await spawner.commit(lambda draft: run_calls(draft, tools))
    await spawner.write()
    assert (await row_of(pool, run.id))["result"] == {"reason": "ceiling_exceeded:max_cycles"}
    assert await unbalanced(pool) == []


# ------------------------------------------------------------------ deaths


async def test_a_tree_whose_workers_are_killed_ends_as_if_they_were_not(
    client: AepClient, start: Start, pool: Pool
) -> None:
    """Every helper is begun once, told once to its spawner, and paid for once. Three deaths may be poison."""
    workers = [start("worker", **ON) for _ in range(3)]
    enough = {"tokens_per_cycle": 50_000}  # what was reserved by the dead counts as spent
    leaf = spawn([GOES_ON, DONE], ceilings={"max_cycles": 3, "max_wall_seconds": 200}, budgets=enough)
    spawns = {"calls": [leaf]}
    branch = spawn(
        [spawns, WAITS, {"calls": [READ, *spawns["calls"]]}, WAITS, READS, DONE],
        ceilings={"max_cycles": 12, "max_subagents": 2, "max_wall_seconds": 400},
        budgets=enough,
    )
    agent = await make_spawner(client, ceilings={"max_cycles": 60, "max_subagents": 9}, budgets=enough)
    run = await start_run(client, [{"calls": [branch] * 3}, WAITS, *[READS, WAITS] * 9], agent.id)

    for killed in range(2):

        async def goes_on(after: int = 15 + 30 * killed) -> bool:
            return bool(await pool.fetchval("select count(*) > $1 from events", after))

        await until(goes_on)
        workers.pop(0).kill()
        workers.append(start("worker", **ON))

    async def helpers_ended() -> bool:
        live = await pool.fetchval("select count(*) from runs where depth > 0 and ended_at is null")
        begun = await pool.fetchval("select count(*) from runs where depth > 0")
        return begun == 9 and not live

    await until(helpers_ended)
    await until_told(pool)
    results = (
        "select body ->> 'child_run_id' as child from messages where body ->> 'type' = 'subagent_result'"
    )
    told = [row["child"] for row in await pool.fetch(results)]
    helpers = await pool.fetch("select id, state, result from runs where depth > 0")
    assert sorted(told) == sorted(to_wire("run", each["id"]) for each in helpers)
    assert [each["result"] for each in helpers if each["state"] != "complete"] == []
    assert await unbalanced(pool) == []

    async def has_heard_all() -> Any:
        row = await row_of(pool, run.id)
        unread = await pool.fetchval("select count(*) from messages where read_at is null")
        return row if row["state"] == "sleeping" and not unread else None

    row = await until(has_heard_all)
    assert 2 <= row["cycle_count"] <= 4, "three ends, of which several may be heard in one cycle"
    assert await violations(pool) == {}


async def test_a_helper_whose_worker_died_with_an_answer_in_hand_goes_on_from_it(
    client: AepClient, pool: Pool, owner_id: UUID, publisher: Publisher
) -> None:
    agent = await make_spawner(client)
    run = await start_run(client, [], agent.id)
    spawner = await claim(pool, publisher, LEASE_TTL_S, uuid("run", run.id))
    assert spawner is not None
    child = new_child()
    lines = lines_of(child.run_id, (RunCreated(to_wire("agt", child.agent_id)),), Progress())
    async with transaction(pool) as connection:
        assert await spawn_row(connection, owner_id, spawner.run_id, child, lines)
    dead = await claim(pool, publisher, LEASE_TTL_S, child.run_id)
    assert dead is not None
    await answer(dead, 10)
    await pool.execute("update runs set lease_until = now() where id = $1", child.run_id)

    helper = await claim(pool, publisher, LEASE_TTL_S, child.run_id)

    assert helper is not None
    assert isinstance(helper.next_step(), CallSelf)


async def test_a_run_of_a_tree_is_never_ended_by_a_statement_that_could_lose_what_its_end_means(
    client: AepClient, pool: Pool, owner_id: UUID, publisher: Publisher
) -> None:
    """Neither the helper, whose spawner is to hear of it, nor the spawner, whose helpers must be stopped."""
    agent = await make_spawner(client)
    run = await start_run(client, [], agent.id)
    spawner = await claim(pool, publisher, LEASE_TTL_S, uuid("run", run.id))
    assert spawner is not None
    child = new_child()
    lines = lines_of(child.run_id, (RunCreated(to_wire("agt", child.agent_id)),), Progress())
    async with transaction(pool) as connection:
        assert await spawn_row(connection, owner_id, spawner.run_id, child, lines)
    helper = await claim(pool, publisher, LEASE_TTL_S, child.run_id)
    assert helper is not None

    for held in (spawner, helper):
        end = closing(held.progress, "complete", None, open_calls="not run")
        async with transaction(pool) as connection:
            row = await lock_run(connection, owner_id, held.run_id)
            assert row is not None
            written = await append_entries(
                connection, row, end, after=reduce(apply, end, held.progress), release=True,
                lease_ttl_s=LEASE_TTL_S, unless_stopped=True,
            )  # fmt: skip
        assert written is None
    assert await pool.fetchval("select count(*) from runs where ended_at is null") == 2


async def test_a_spawner_that_read_the_end_before_the_wake_goes_on_when_its_cycles_are_back(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    """The wake finds nothing unread and wakes nobody: whoever waits for headroom looks again."""
    agent = await make_spawner(client, ceilings={"max_cycles": 5})
    helper = spawn([SLEEPS], ceilings={"max_cycles": 4})
    reads = {"calls": [READ, {"tool": "continue_now"}], "delay_s": 2.0}
    run = await start_run(client, [{"calls": [helper]}, reads, DONE], agent.id)

    (child,) = await until(lambda: children(pool, run.id))
    await asleep(pool, to_wire("run", child["id"]), cycles=1)
    async with transaction(pool) as connection:  # whoever does this dies right after, and a sweeper wakes
        assert await cancel_run(connection, child["owner_id"], child["id"])
    row = await ended(pool, run.id)

    assert row["state"] == "complete"
    assert len(await entries_of(pool, run.id, "inbox_read")) == 1


async def test_a_helper_whose_spawner_has_been_erased_is_ended_like_any_other(
    client: AepClient, worker: Service, pool: Pool, owner_id: UUID
) -> None:
    agent = await make_spawner(client)
    run = await start_run(client, [{"calls": [spawn([SLEEPS, DONE])]}, WAITS, DONE], agent.id)
    (child,) = await until(lambda: children(pool, run.id))
    await asleep(pool, to_wire("run", child["id"]), cycles=1)
    await asleep(pool, run.id, cycles=1)
    async with transaction(pool) as connection:
        await admit_subjects(connection, owner_id, ["S"])
        await tag_run(connection, owner_id, uuid("run", run.id), ["S"])
    async with transaction(pool) as connection:
        begun = await begin_erasure(connection, owner_id, "S", "hard_delete")
        await cancel_run(connection, owner_id, uuid("run", run.id))

    more = True
    while more:
        async with transaction(pool) as connection:
            more = await erase_a_part(connection, owner_id, begun.erasure)
    row = await ended(pool, to_wire("run", child["id"]))

    assert row["state"] == "cancelled"
    assert await pool.fetchval("select count(*) from runs where id = $1", uuid("run", run.id)) == 0
