"""Messages that wake runs: with real workers and scripted agents, and step by step in real transactions.

A wake is state: whatever dies or is away between a message and the cycle that reads it, there is one such
cycle, and none for a message that was read already.
"""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import anyio
import pytest
from forked import Service
from invariants import violations
from scripted_runs import DONE, Plan, entries_of, log_of, make_agent, row_of, spread, start_run
from tests.integration.conftest import Start, StartGateway, Stores
from tests.integration.wire_runs import put_to_sleep, uuid

from espalier_acts.messages import READ_MAX, MessageOrder, send_message, wake_for_message
from espalier_acts.runs import RunOrder, create_run
from espalier_client.client import AepClient
from espalier_client.errors import ClientError
from espalier_domain.journal import ModelAnswered, ToolCall
from espalier_eventlog import RedisSettings, open_streams
from espalier_eventlog.publisher import Publisher
from espalier_local.ports import free_port
from espalier_protocol.access import SUPPORTED
from espalier_protocol.agent import AgentUpdate, CeilingsChange
from espalier_protocol.ids import from_wire, to_wire
from espalier_protocol.message import Message, MessageSend
from espalier_run_worker.draft import Draft
from espalier_run_worker.held import Held, claim
from espalier_run_worker.self_tools import SelfTools, open_self_tools
from espalier_run_worker.tool_calls import run_calls
from espalier_store.ids import new_id
from espalier_store.messages import is_unread, lock_picked, raise_wake
from espalier_store.pool import Pool, transaction

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WAIT_S = 30.0
POLL_S = 0.01
WAKE_S = 2.0
SWEPT_S = 3.5
"""A second until a wake is taken for forgotten, a second between two sweeps, and one between two look-outs;
and half a second for a busy machine."""

LEASE_TTL_S = 60.0
FAR = timedelta(minutes=5)
ON = {"ESPALIER_MODELS_SCRIPTED": "on"}
LATENCIES = 10

READ: dict[str, Any] = {"tool": "inbox_read"}
NAP: dict[str, Any] = {"tool": "sleep", "args": {"duration_seconds": 3600}}
READS: dict[str, Any] = {"calls": [READ]}
SLEEPS: dict[str, Any] = {"calls": [NAP]}
READS_AND_SLEEPS: dict[str, Any] = {"calls": [READ, NAP]}

WOKEN = "select id, due_at < wall_at as due from runs where wake_seq = 1 and ended_at is null"

log = logging.getLogger(__name__)


@pytest.fixture
async def client(start_gateway: StartGateway, api_key: str) -> AsyncIterator[AepClient]:
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as opened:
        yield opened


@pytest.fixture
def worker(start: Start) -> Service:
    return start("worker", **ON)


async def say(client: AepClient, agent_id: str, body: Any = "hello") -> Message:
    return await client.call("message.send", MessageSend(to_agent_id=agent_id, body=body), Message)


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    with anyio.fail_after(WAIT_S):
        while not (found := await condition()):
            await anyio.sleep(POLL_S)
    return found


async def sleeps(pool: Pool, run_id: str, *, cycles: int) -> Any:
    """The run's row, once it sleeps after so many cycles with nothing that could still wake it."""

    async def rests() -> Any:
        row = await row_of(pool, run_id)
        at_rest = row["state"] == "sleeping" and row["due_at"] - row["created_at"] > FAR
        promised = await pool.fetchval("select count(*) from outbox where kind = 'wake'")
        return row if at_rest and row["cycle_count"] >= cycles and not promised else None

    row = await until(rests)
    assert row["cycle_count"] == cycles
    assert row["wake_seq"] == row["wake_seen"]
    return row


async def begins(pool: Pool, run_id: str, cycle: int) -> None:
    async def begun() -> bool:
        return bool((await row_of(pool, run_id))["cycle_count"] >= cycle)

    await until(begun)


async def ends(pool: Pool, run_id: str) -> Any:
    async def ended() -> Any:
        row = await row_of(pool, run_id)
        return row if row["ended_at"] else None

    return await until(ended)


async def no_wake_waits(pool: Pool) -> None:
    async def none() -> bool:
        return not await pool.fetchval("select count(*) from outbox where kind = 'wake'")

    await until(none)


async def bodies_read(pool: Pool, run_id: str) -> list[Any]:
    """What the run was shown of its inbox, in the order in which it was."""
    returned = await entries_of(pool, run_id, "tool_returned")
    shown = [json.loads(each["content"]) for each in returned if each["tool"] == "inbox_read"]
    return [message["body"] for one in shown for message in one["messages"]]


async def told_of(pool: Pool, run_id: str) -> list[tuple[int, bool]]:
    """The cycles of the run, and whether each was told that a message waits."""
    return [(each["cycle"], each["woken"]) for each in await entries_of(pool, run_id, "cycle_started")]


async def latencies_s(pool: Pool) -> list[float]:
    """From each message to the first cycle that began after it, on the database's clock."""
    query = """
        select extract(epoch from min(j.created_at) - m.created_at)::float8 as late_s
        from messages m join runs r on r.agent_id = m.to_agent_id
            join journal j on j.run_id = r.id and j.created_at > m.created_at
                and j.body ->> 'kind' = 'cycle_started'
        group by m.id, m.created_at
    """
    return [row["late_s"] for row in await pool.fetch(query)]


# ------------------------------------------------------------------ real workers


async def test_a_message_wakes_a_sleeper_at_once_and_is_shown_to_it_whole(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    plan: Plan = [SLEEPS, *[READS_AND_SLEEPS] * LATENCIES]
    run = await start_run(client, plan)
    sent = []
    for cycle in range(1, LATENCIES + 1):
        await sleeps(pool, run.id, cycles=cycle)
        sent.append(await say(client, run.agent_id, {"number": cycle}))
    await sleeps(pool, run.id, cycles=LATENCIES + 1)

    delays_s = await latencies_s(pool)
    log.info("a message wakes a sleeper after %s", spread(delays_s))
    print(f"a message wakes a sleeper after {spread(delays_s)}")  # noqa: T201 - a figure of the test
    assert len(delays_s) == LATENCIES and max(delays_s) <= WAKE_S
    assert await told_of(pool, run.id) == [(1, False), *[(n, True) for n in range(2, LATENCIES + 2)]]
    first = next(each for each in await entries_of(pool, run.id, "tool_returned") if each["cycle"] == 2)
    assert json.loads(first["content"]) == {
        "messages": [
            {
                "id": sent[0].id,
                "from_agent_id": run.agent_id,
                "body": {"number": 1},
                "sent_at": sent[0].model_dump(mode="json")["sent_at"],
            }
        ]
    }
    assert await bodies_read(pool, run.id) == [{"number": n} for n in range(1, LATENCIES + 1)]
    delivered = [payload for _, kind, payload in await log_of(pool, run.id) if kind == "message.delivered"]
    assert delivered == [{"from_agent_id": run.agent_id, "message_id": each.id} for each in sent]
    assert await violations(pool) == {}


async def test_several_messages_before_the_cycle_cause_one(
    client: AepClient, start: Start, worker: Service, pool: Pool
) -> None:
    run = await start_run(client, [SLEEPS, READS_AND_SLEEPS, SLEEPS])
    await sleeps(pool, run.id, cycles=1)
    worker.stop()
    for number in range(3):
        await say(client, run.agent_id, number)
    await no_wake_waits(pool)
    assert (await row_of(pool, run.id))["wake_seq"] == 3
    start("worker", **ON)

    await sleeps(pool, run.id, cycles=2)
    assert await bodies_read(pool, run.id) == [0, 1, 2]
    assert await violations(pool) == {}


@pytest.mark.parametrize("plan", [[READS_AND_SLEEPS], [READS, SLEEPS]], ids=["one answer", "two answers"])
async def test_a_message_that_is_read_in_the_cycle_in_which_it_came_causes_none(
    plan: Plan, client: AepClient, worker: Service, pool: Pool
) -> None:
    run = await start_run(client, [{**plan[0], "delay_s": 1}, *plan[1:], SLEEPS])
    await begins(pool, run.id, 1)
    await say(client, run.agent_id)
    await no_wake_waits(pool)
    row = await row_of(pool, run.id)
    assert (row["state"], row["wake_seq"], row["wake_seen"]) == ("running", 1, 0)

    await sleeps(pool, run.id, cycles=1)
    assert await bodies_read(pool, run.id) == ["hello"]


async def test_a_message_that_comes_after_the_inbox_was_read_causes_one_more_cycle_at_once(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    run = await start_run(client, [READS, {**SLEEPS, "delay_s": 1}, READS_AND_SLEEPS, SLEEPS])

    async def has_read() -> bool:
        return bool(await entries_of(pool, run.id, "inbox_read"))

    await until(has_read)
    await say(client, run.agent_id, "late")

    await sleeps(pool, run.id, cycles=2)
    assert await bodies_read(pool, run.id) == ["late"]
    assert await told_of(pool, run.id) == [(1, False), (2, True)]


async def test_what_an_agent_leaves_unread_wakes_it_again_until_all_is_read(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    run = await start_run(client, [SLEEPS, *[READS_AND_SLEEPS] * 9])
    await sleeps(pool, run.id, cycles=1)
    await pool.execute(
        """
            insert into messages (id, owner_id, root_id, from_agent_id, to_agent_id, sender, body)
            select gen_random_uuid(), owner_id, id, id, id, 'embedder', to_json(n)
            from agents, generate_series(1, $2) n where id = $1
        """,
        uuid("agt", run.agent_id),
        2 * READ_MAX,
    )
    await say(client, run.agent_id, "the last one")

    await sleeps(pool, run.id, cycles=4)
    assert await bodies_read(pool, run.id) == [*range(1, 2 * READ_MAX + 1), "the last one"]
    read = await entries_of(pool, run.id, "inbox_read")
    assert [len(each["messages"]) for each in read] == [READ_MAX, READ_MAX, 1]
    assert await violations(pool) == {}


@pytest.mark.slow
async def test_a_message_to_a_run_that_waits_in_mid_cycle_does_not_make_it_due(
    client: AepClient, start: Start, worker: Service, pool: Pool
) -> None:
    fault = {"reason": "overloaded", "times": 2, "retryable": True}
    run = await start_run(client, [{**SLEEPS, "fault": fault}, READS_AND_SLEEPS, SLEEPS])

    async def parked() -> Any:
        row = await row_of(pool, run.id)
        return row if row["wait_reason"] == "retry" else None

    await until(parked)
    worker.stop()
    before = await row_of(pool, run.id)
    assert before["wait_reason"] == "retry"
    await say(client, run.agent_id, "patience")
    await no_wake_waits(pool)
    changed = {"wake_seq": before["wake_seq"] + 1}
    assert dict(await row_of(pool, run.id)) == {**before, **changed}
    start("worker", **ON)

    await sleeps(pool, run.id, cycles=2)
    assert await bodies_read(pool, run.id) == ["patience"]
    assert await violations(pool) == {}


async def test_a_run_that_ends_without_reading_hands_its_messages_on(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent_id = (await make_agent(client)).id
    other = await start_run(client, [SLEEPS, READS_AND_SLEEPS, SLEEPS], agent_id)
    await sleeps(pool, other.id, cycles=1)
    chosen = await start_run(client, [SLEEPS, DONE], agent_id)
    await sleeps(pool, chosen.id, cycles=1)
    await say(client, agent_id, "for one of you")

    assert (await ends(pool, chosen.id))["state"] == "complete"
    await sleeps(pool, other.id, cycles=2)
    assert await bodies_read(pool, chosen.id) == []
    assert await bodies_read(pool, other.id) == ["for one of you"]
    assert await violations(pool) == {}


async def test_a_message_for_an_agent_without_a_run_is_read_by_its_next_run(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    agent_id = (await make_agent(client)).id
    await say(client, agent_id, "before")
    await no_wake_waits(pool)
    run = await start_run(client, [READS_AND_SLEEPS, SLEEPS], agent_id)

    await sleeps(pool, run.id, cycles=1)
    assert await bodies_read(pool, run.id) == ["before"]
    assert await told_of(pool, run.id) == [(1, True)]
    assert await violations(pool) == {}


async def test_a_message_wakes_while_redis_is_away(
    start: Start, start_gateway: StartGateway, api_key: str, pool: Pool
) -> None:
    nowhere = {"ESPALIER_REDIS_URL": f"redis://127.0.0.1:{free_port()}"}
    start("worker", **ON, **nowhere)
    gateway = await start_gateway(**nowhere)
    async with AepClient(gateway.base_url, api_key) as client:
        run = await start_run(client, [SLEEPS, READS_AND_SLEEPS, SLEEPS])
        await sleeps(pool, run.id, cycles=1)
        await say(client, run.agent_id)
        await sleeps(pool, run.id, cycles=2)
    delays_s = await latencies_s(pool)
    print(f"without Redis a message wakes a sleeper after {spread(delays_s)}")  # noqa: T201 - a figure
    assert max(delays_s) <= WAKE_S


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["wake.before:1", "wake.after:1"])
async def test_a_wake_whose_sender_was_killed_is_carried_out_once_by_a_sweeper(
    moment: str, start: Start, worker: Service, api_key: str, pool: Pool
) -> None:
    """`wake.after` is before the commit of the wake: what the gateway did of it is undone with it."""
    port = free_port()
    gateway = start("gateway", dies_at=moment, ESPALIER_PORT=str(port))
    async with AepClient(f"http://127.0.0.1:{port}", api_key) as client:
        run = await start_run(client, [SLEEPS, READS_AND_SLEEPS, SLEEPS])
        await sleeps(pool, run.id, cycles=1)
        try:
            with anyio.move_on_after(WAKE_S):
                await say(client, run.agent_id)
        except ClientError:
            pass  # it died before it could answer

    async def died() -> bool:
        return gateway.has_died()

    await until(died)
    await sleeps(pool, run.id, cycles=2)
    assert await bodies_read(pool, run.id) == ["hello"]
    delays_s = await latencies_s(pool)
    print(f"after the sender's death a sweeper wakes a sleeper after {spread(delays_s)}")  # noqa: T201
    assert max(delays_s) <= SWEPT_S
    assert await violations(pool) == {}


# ------------------------------------------------------------------ agents among themselves


async def sub_agent(pool: Pool, agent_id: str) -> str:
    """An agent below this one, as a spawn will make it."""
    made, columns = new_id(), "owner_id, name, immutable_directives, mutable_prompt, mutable_prompt_policy"
    columns += ", toolset, ceilings, budgets, max_live_runs, subject_ids, metadata"
    await pool.execute(
        f"insert into agents (id, root_id, parent_id, {columns}) "
        f"select $2, root_id, id, {columns} from agents where id = $1",
        uuid("agt", agent_id),
        made,
    )
    return to_wire("agt", made)


def tell(agent_id: str, body: Any) -> dict[str, Any]:
    return {"tool": "send_message", "args": {"to_agent_id": agent_id, "body": body}}


async def test_an_agent_wakes_another_of_its_tree_and_both_logs_tell_of_it(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    root = (await make_agent(client)).id
    child = await sub_agent(pool, root)
    sleeper = await start_run(client, [SLEEPS, READS_AND_SLEEPS, SLEEPS], root)
    await sleeps(pool, sleeper.id, cycles=1)
    speaker = await start_run(client, [{"calls": [tell(root, {"n": 1}), tell(root, {"n": 2}), NAP]}], child)

    await sleeps(pool, speaker.id, cycles=1)
    await until(lambda: heard(pool, sleeper.id, 2))
    assert await bodies_read(pool, sleeper.id) == [{"n": 1}, {"n": 2}]
    returned = await entries_of(pool, speaker.id, "tool_returned")
    ids = [json.loads(each["content"])["message_id"] for each in returned[:2]]
    log_of_speaker = await log_of(pool, speaker.id)
    assert [payload for _, kind, payload in log_of_speaker if kind == "message.sent"] == [
        {"to_agent_id": root, "message_id": id_} for id_ in ids
    ]
    log_of_sleeper = await log_of(pool, sleeper.id)
    assert [payload for _, kind, payload in log_of_sleeper if kind == "message.delivered"] == [
        {"from_agent_id": child, "message_id": id_} for id_ in ids
    ]
    await no_wake_waits(pool)
    assert await violations(pool) == {}


async def heard(pool: Pool, run_id: str, count: int) -> bool:
    return len(await bodies_read(pool, run_id)) >= count


async def test_the_tools_refuse_what_may_not_be_sent_and_the_run_goes_on(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    root, elsewhere = (await make_agent(client)).id, (await make_agent(client)).id
    child = await sub_agent(pool, root)
    await client.agent_cancel(child)
    nobody = f"agt_{'0' * 26}"
    calls = [
        tell(elsewhere, 1),
        tell(nobody, 1),
        tell("x", 1),
        tell(child, 1),
        tell(root, "x" * 70_000),
        {"tool": "send_message", "args": {"to_agent_id": root, "body": 1, "from_agent_id": child}},
        {"tool": "send_message", "args": {"to_agent_id": root}},
        {"tool": "inbox_read", "args": {"all": True}},
    ]
    run = await start_run(client, [{"calls": [*calls, NAP]}, SLEEPS], root)

    await sleeps(pool, run.id, cycles=1)
    returned = await entries_of(pool, run.id, "tool_returned")
    assert [each["ok"] for each in returned] == [*[False] * len(calls), True]
    assert [each["content"].split(":")[0].split(" takes")[0] for each in returned[:-1]] == [
        *["tree_boundary_violation", "tool_not_found", "tool_not_found", "lifecycle_conflict"],
        *["send_message", "send_message", "send_message", "inbox_read"],
    ]
    assert await pool.fetchval("select count(*) from messages") == 0


@pytest.mark.slow
async def test_two_agents_that_talk_for_ever_end_at_their_ceiling(
    client: AepClient, worker: Service, pool: Pool
) -> None:
    root = await make_agent(client)
    change = AgentUpdate(agent_id=root.id, ceilings=CeilingsChange(max_cycles=3))
    await client.agent_update(change)
    child = await sub_agent(pool, root.id)
    talk = {
        mine: [{"calls": [READ, tell(other, "and you?"), NAP]}] * 9
        for mine, other in ((root.id, child), (child, root.id))
    }
    runs = [await start_run(client, talk[agent_id], agent_id) for agent_id in (root.id, child)]

    async def one_ended() -> Any:
        rows = [await row_of(pool, run.id) for run in runs]
        return [row["result"] for row in rows if row["ended_at"]]

    assert (await until(one_ended))[0] == {"reason": "ceiling_exceeded:max_cycles"}
    await no_wake_waits(pool)
    assert max([(await row_of(pool, run.id))["cycle_count"] for run in runs]) == 3
    assert await pool.fetchval("select count(*) from messages") <= 6
    assert await violations(pool) == {}


# ------------------------------------------------------------------ step by step


class Hand:
    """A run in the hand of the test: it takes steps as a worker does, with something in between."""

    def __init__(self, pool: Pool, owner_id: UUID, tools: SelfTools, held: Held) -> None:
        self.pool, self.owner_id, self.tools, self.held = pool, owner_id, tools, held
        self._calls = 0

    async def answers(self, *tools: str) -> None:
        """The model wants these tools."""
        args: dict[str, dict[str, Any]] = {"sleep": {"duration_seconds": 3600}}
        self._calls += 1
        calls = tuple(ToolCall(f"c{self._calls}_{tool}", tool, args.get(tool, {})) for tool in tools)
        assert self.held.progress.cycle is not None
        await self.held.write(ModelAnswered(self.held.progress.cycle.number, "", calls, 10))

    async def acts(self, *, then: Callable[[], Awaitable[object]] | None = None) -> None:
        """Run them in one step, and something else before that is committed."""

        async def record(draft: Draft) -> None:
            await run_calls(draft, self.tools)
            if then:
                await then()

        await self.held.commit(record)

    async def send(self) -> int:
        """A message from outside, committed; its wake is still to be carried out."""
        agent_id = await self.pool.fetchval("select agent_id from runs where id = $1", self.held.run_id)
        async with transaction(self.pool) as connection:
            return (await send_message(connection, self.owner_id, MessageOrder(agent_id, "hello"))).wake_id

    async def wake(self, wake_id: int) -> UUID | None:
        async with transaction(self.pool) as connection:
            return await wake_for_message(connection, wake_id)

    async def row(self) -> Any:
        return await self.pool.fetchrow(
            "select *, due_at <= clock_timestamp() as due from runs where id = $1", self.held.run_id
        )

    async def read(self) -> list[int]:
        """How many messages each reading found."""
        found = await entries_of(self.pool, to_wire("run", self.held.run_id), "inbox_read")
        return [len(each["messages"]) for each in found]


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


Take = Callable[[str], Awaitable[Hand]]


@pytest.fixture
async def take(pool: Pool, owner_id: UUID, publisher: Publisher) -> AsyncIterator[Take]:
    async with open_self_tools(SUPPORTED) as tools:

        async def take_it(run_id: str) -> Hand:
            held = await claim(pool, publisher, LEASE_TTL_S, uuid("run", run_id))
            assert held is not None
            return Hand(pool, owner_id, tools, held)

        yield take_it


async def test_a_wake_between_the_reading_and_the_sleep_makes_the_sleep_end_at_once(
    client: AepClient, take: Take
) -> None:
    hand = await take((await start_run(client, [])).id)
    await hand.answers("inbox_read")
    await hand.acts()
    assert await hand.wake(await hand.send()) is None, "it is awake"
    await hand.answers("sleep")
    await hand.acts()

    row = await hand.row()
    assert (row["state"], row["due"], row["wake_seq"], row["wake_seen"]) == ("sleeping", True, 1, 0)
    assert await hand.read() == [0]


async def test_a_message_from_between_whose_wake_comes_after_the_sleep_ends_it(
    client: AepClient, take: Take
) -> None:
    hand = await take((await start_run(client, [])).id)
    await hand.answers("inbox_read", "sleep")
    promised: list[int] = []

    async def send() -> None:
        promised.append(await hand.send())

    await hand.acts(then=send)
    asleep = await hand.row()
    assert (asleep["state"], asleep["due"], await hand.read()) == ("sleeping", False, [0])

    assert await hand.wake(promised[0]) == hand.held.run_id
    row = await hand.row()
    assert (row["state"], row["due"], row["wake_seq"]) == ("sleeping", True, 1)
    assert row["lease_token"] == asleep["lease_token"] + 1


async def test_a_wake_that_begins_while_the_inbox_is_read_waits_and_is_not_lost(
    client: AepClient, take: Take
) -> None:
    hand = await take((await start_run(client, [])).id)
    await hand.answers("inbox_read")
    async with anyio.create_task_group() as group:

        async def begin_wake() -> None:
            group.start_soon(hand.wake, await hand.send())
            await until(lambda: waiting_for_a_lock(hand.pool))

        await hand.acts(then=begin_wake)
    await hand.answers("sleep")
    await hand.acts()
    assert (await hand.read(), (await hand.row())["due"]) == ([0], True)


async def test_a_wake_that_begins_before_the_reading_of_its_message_and_is_late_wakes_nobody(
    client: AepClient, take: Take
) -> None:
    hand = await take((await start_run(client, [])).id)
    wake_id = await hand.send()
    await hand.answers("inbox_read")
    async with anyio.create_task_group() as group:

        async def begin_wake() -> None:
            group.start_soon(hand.wake, wake_id)
            await until(lambda: waiting_for_a_lock(hand.pool))

        await hand.acts(then=begin_wake)
    await hand.answers("sleep")
    await hand.acts()

    row = await hand.row()
    assert (await hand.read(), row["wake_seq"], row["due"]) == ([1], 0, False)


async def waiting_for_a_lock(pool: Pool) -> bool:
    query = """
        select count(*) from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock'
    """
    return bool(await pool.fetchval(query))


async def test_a_wake_that_two_carry_out_at_once_counts_once(client: AepClient, take: Take) -> None:
    hand = await take((await start_run(client, [])).id)
    await hand.answers("sleep")
    await hand.acts()
    wake_id = await hand.send()
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(hand.wake, wake_id)
    assert (await hand.row())["wake_seq"] == 1
    assert await hand.pool.fetchval("select count(*) from outbox where kind = 'wake'") == 0


async def test_a_run_that_ends_just_as_a_wake_reaches_it_hands_the_message_on(
    client: AepClient, take: Take, pool: Pool, owner_id: UUID
) -> None:
    """The statement that ends the run began before the message was there, and waits for the wake's lock."""
    agent_id = (await make_agent(client)).id
    other = (await start_run(client, [], agent_id)).id
    await put_to_sleep(pool, other)
    hand = await take((await start_run(client, [], agent_id)).id)
    run_id = hand.held.run_id
    async with anyio.create_task_group() as group, transaction(pool) as connection:
        assert await lock_picked(connection, owner_id, run_id)
        group.start_soon(hand.held.write, ModelAnswered(1, "done", (), 10))
        await until(lambda: waiting_for_a_lock(pool))
        wake_id = await hand.send()
        await connection.execute("delete from outbox where id = $1", wake_id)
        assert await is_unread(connection, owner_id, uuid("agt", agent_id), run_id, None)
        assert not await raise_wake(connection, owner_id, run_id)
    assert (await hand.row())["state"] == "complete"
    (promise,) = await pool.fetch("select id, agent_id, message_id from outbox where kind = 'wake'")
    assert (promise["agent_id"], promise["message_id"]) == (uuid("agt", agent_id), None)

    assert await hand.wake(promise["id"]) == from_wire("run", other)


async def test_a_run_that_ends_with_an_empty_inbox_promises_no_wake(
    client: AepClient, take: Take, pool: Pool
) -> None:
    hand = await take((await start_run(client, [])).id)
    await hand.send()
    await pool.execute("delete from outbox")
    await hand.answers("inbox_read")
    await hand.acts()
    await hand.held.write(ModelAnswered(1, "done", (), 10))
    assert (await hand.row())["state"] == "complete"
    assert await pool.fetchval("select count(*) from outbox where kind = 'wake'") == 0


async def test_the_newest_run_that_waits_for_a_message_is_woken_then_for_a_child_then_for_a_time_then_any(
    client: AepClient, pool: Pool, owner_id: UUID
) -> None:
    """Each of them ends before the next message comes."""
    agent_id = (await make_agent(client)).id
    waits = ["approval", "retry", None, "timer", "child", "message", "message", "child"]
    runs: dict[UUID, int] = {}
    for place, reason in enumerate(waits):
        run_id = uuid("run", (await start_run(client, [], agent_id)).id)
        state = "sleeping" if reason else "running"
        await pool.execute(
            "update runs set state = $2, wait_reason = $3, due_at = wall_at where id = $1",
            run_id,
            state,
            reason,
        )
        runs[run_id] = place
    chosen = []
    for _ in waits:
        async with transaction(pool) as connection:
            sent = await send_message(connection, owner_id, MessageOrder(uuid("agt", agent_id), 1))
        async with transaction(pool) as connection:
            to_ring_for = await wake_for_message(connection, sent.wake_id)
        row = await pool.fetchrow(WOKEN)
        assert row is not None
        at_rest = waits[runs[row["id"]]] in ("message", "child", "timer")
        assert (row["due"], to_ring_for) == (at_rest, row["id"] if at_rest else None)
        chosen.append(runs[row["id"]])
        await pool.execute("update runs set state = 'complete', ended_at = now() where id = $1", row["id"])
    assert chosen == [6, 5, 7, 4, 3, 2, 1, 0]


async def test_a_message_finds_a_run_that_was_being_created_when_it_came(
    client: AepClient, pool: Pool, owner_id: UUID
) -> None:
    """The new run's transaction began before the message, and could not see it; nor could the wake see it."""
    agent_id = uuid("agt", (await make_agent(client)).id)
    woken: list[Any] = []

    async def wake(wake_id: int) -> None:
        async with transaction(pool) as connection:
            woken.append(await wake_for_message(connection, wake_id))

    async with anyio.create_task_group() as group, transaction(pool) as creating:
        _, written = await create_run(creating, owner_id, RunOrder(agent_id, "goal", {}, []))
        async with transaction(pool) as connection:
            sent = await send_message(connection, owner_id, MessageOrder(agent_id, 1))
        group.start_soon(wake, sent.wake_id)
        await until(lambda: waiting_for_a_lock(pool))
    assert await pool.fetchval("select wake_seq from runs where id = $1", written.run_id) == 1


async def test_inbox_read_tells_the_journal_the_counter_from_before_it_read(
    client: AepClient, take: Take
) -> None:
    hand = await take((await start_run(client, [])).id)
    for _ in range(2):
        await hand.wake(await hand.send())
    await hand.answers("inbox_read")
    await hand.acts()
    (entry,) = await entries_of(hand.pool, to_wire("run", hand.held.run_id), "inbox_read")
    assert (entry["wake_seen"], len(entry["messages"]), (await hand.row())["wake_seen"]) == (2, 2, 2)
