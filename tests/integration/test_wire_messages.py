"""Messages over the wire: sending to an agent, looking into its inbox, listing what was said.

No worker runs here: what a message does to a run that sleeps stands in `test_wakes.py`.
"""

import json
from contextlib import suppress
from typing import Any
from uuid import UUID

import anyio
import pytest
from tests.integration.wire import ANSWER_WAIT_S, POLL_S, UNKNOWN_TAIL, Gateway, Wire, symbol
from tests.integration.wire_runs import lease, put_to_sleep, run_rows, uuid

from espalier_acts.messages import READ_BYTES_MAX, UNREAD_MAX, MessageOrder, read_inbox, send_message
from espalier_domain.errors import InvalidInput, LifecycleConflict, NotFound, TreeBoundary
from espalier_gateway.settings import GatewaySettings
from espalier_protocol.ids import to_wire
from espalier_protocol.message import BODY_BYTES_MAX
from espalier_protocol.shapes import PAGE_MAX
from espalier_store.ids import new_id
from espalier_store.messages import MessageFilter, list_messages, list_unread
from espalier_store.paging import Place
from espalier_store.pool import Connection, Pool, transaction
from espalier_store.runs import lock_run

pytestmark = pytest.mark.anyio

UNKNOWN = f"agt_{UNKNOWN_TAIL}"
MANY = 20_000


@pytest.fixture
def gateway_settings(gateway_settings: GatewaySettings) -> GatewaySettings:
    """Patient with callers that ask as much as these tests do."""
    return gateway_settings.model_copy(update={"rpc_burst": 10_000})


async def send(wire: Wire, agent_id: str, body: Any = "hello", **params: Any) -> dict[str, Any]:
    sent: dict[str, Any] = await wire.call("message.send", to_agent_id=agent_id, body=body, **params)
    return sent


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


async def owner_of(pool: Pool, agent_id: str) -> UUID:
    found = await pool.fetchval("select owner_id from agents where id = $1", uuid("agt", agent_id))
    assert isinstance(found, UUID)
    return found


async def read(pool: Pool, run_id: str) -> list[Any]:
    """The bodies that the run reads, as its worker would."""
    async with transaction(pool) as connection:
        return await reading_of(connection, run_id)


async def reading_of(connection: Connection, run_id: str) -> list[Any]:
    owner = await connection.fetchval("select owner_id from runs where id = $1", uuid("run", run_id))
    run = await lock_run(connection, owner, uuid("run", run_id))
    assert run is not None
    _, taken = await read_inbox(connection, run)
    return [json.loads(each.body) for each in taken]


async def outbox_is_empty(pool: Pool) -> None:
    with anyio.fail_after(ANSWER_WAIT_S):
        while await pool.fetchval("select count(*) from outbox"):
            await anyio.sleep(POLL_S)


async def pages(wire: Wire, **params: Any) -> list[list[str]]:
    """All pages of a list, as ids."""
    found, cursor = [], None
    while True:  # bounded by the messages of the test
        page = await wire.call("message.list", **params, **({"cursor": cursor} if cursor else {}))
        assert page["items"] == page["messages"] and page["cursor"] == page["next_cursor"]
        found.append([item["id"] for item in page["items"]])
        if (cursor := page["cursor"]) is None:
            return found


# ------------------------------------------------------------------ message.send


async def test_a_message_is_answered_whole_and_comes_from_the_root_of_the_tree(
    wire: Wire, gateway: Gateway
) -> None:
    root = await wire.agent()
    child = await sub_agent(gateway.pool, root)
    body: dict[str, Any] = {
        "text": "hällo",
        "numbers": [1, 1.5, 1e300, -0.25],
        "nothing": None,
        "deep": [[{}]],
    }

    for agent_id in (root, child):
        sent = await send(wire, agent_id, body)
        assert sent == {
            "id": sent["id"],
            "from_agent_id": root,
            "to_agent_id": agent_id,
            "tree_root_id": root,
            "body": body,
            "sent_at": sent["sent_at"],
            "delivered_at": None,
            "read_at": None,
            "sender": {"kind": "embedder"},
        }
        assert sent["id"].startswith("msg_")
        assert (await wire.call("message.list", agent_id=agent_id))["items"] == [sent]


@pytest.mark.parametrize("body", ["", None, 0, False, [], {}, "\U0001f600", {"a": {"sender": "agent"}}])
async def test_every_json_value_is_a_body(wire: Wire, body: Any) -> None:
    agent_id = await wire.agent()
    assert (await send(wire, agent_id, body))["body"] == body
    assert (await wire.call("message.inbox", agent_id=agent_id))["messages"][0]["body"] == body


async def test_a_body_has_a_limit_in_bytes_of_compact_json(wire: Wire, gateway: Gateway) -> None:
    agent_id = await wire.agent()
    just = "x" * (BODY_BYTES_MAX - 2)
    assert (await send(wire, agent_id, just))["body"] == just
    assert len((await send(wire, agent_id, [1] * (BODY_BYTES_MAX // 2 - 1)))["body"]) > 30_000
    for large in (just + "x", "ö" * (BODY_BYTES_MAX // 2), ["x"] * BODY_BYTES_MAX):
        error = await wire.refused("message.send", to_agent_id=agent_id, body=large)
        assert error["data"] == {
            "symbol": "invalid_params",
            "field": "body",
            "reason": f"should be at most {BODY_BYTES_MAX} bytes of JSON",
        }
    assert await gateway.pool.fetchval("select count(*) from messages") == 2


async def test_a_sender_cannot_be_forged(wire: Wire) -> None:
    agent_id, other = await wire.agent(), await wire.agent()
    for forged in ({"from_agent_id": other}, {"sender": {"kind": "agent"}}):
        answer = await wire.answer("message.send", {"to_agent_id": agent_id, "body": "x", **forged})
        assert symbol(answer) == "invalid_params"


async def test_a_message_does_not_leave_the_tree_that_is_named(wire: Wire, gateway: Gateway) -> None:
    root, elsewhere = await wire.agent(), await wire.agent()
    child = await sub_agent(gateway.pool, root)
    foreign = await (await gateway.caller()).agent()
    before = await gateway.rows()
    for recipient in (root, child):
        for tree in (elsewhere, child, foreign, UNKNOWN, "x", ""):
            error = await wire.refused("message.send", to_agent_id=recipient, body=1, tree_root_id=tree)
            assert error["data"] == {"symbol": "tree_boundary_violation", "id": tree}
        assert (await send(wire, recipient, tree_root_id=root))["tree_root_id"] == root
    assert await gateway.rows() == {**before, "messages": 2}


async def test_only_an_agent_that_is_there_gets_a_message(wire: Wire, gateway: Gateway) -> None:
    foreign = await (await gateway.caller()).agent()
    for unknown in (foreign, UNKNOWN, "x"):
        for method, params in (
            ("message.send", {"to_agent_id": unknown, "body": 1}),
            ("message.send", {"to_agent_id": unknown, "body": 1, "tree_root_id": foreign}),
            ("message.inbox", {"agent_id": unknown}),
        ):
            error = await wire.refused(method, **params)
            assert error["data"] == {"symbol": "tool_not_found", "resource": "agent", "id": unknown}
    assert await gateway.pool.fetchval("select count(*) from messages") == 0


@pytest.mark.parametrize(("act", "state"), [("agent.cancel", "cancelled"), ("agent.archive", "archived")])
async def test_a_closed_agent_takes_no_message_and_its_inbox_can_still_be_seen(
    act: str, state: str, wire: Wire
) -> None:
    agent_id = await wire.agent()
    sent = await send(wire, agent_id)
    await wire.call(act, agent_id=agent_id)
    error = await wire.refused("message.send", to_agent_id=agent_id, body="late")
    assert error["data"] == {
        "symbol": "lifecycle_conflict",
        "reason": f"The agent is {state} and takes no message.",
    }
    assert (await wire.call("message.inbox", agent_id=agent_id))["messages"] == [sent]


async def test_an_inbox_is_full_until_its_agent_reads(wire: Wire, gateway: Gateway) -> None:
    agent_id, other = await wire.agent(), await wire.agent()
    await gateway.pool.execute(
        "insert into messages (id, owner_id, root_id, from_agent_id, to_agent_id, sender, body)"
        " select gen_random_uuid(), owner_id, id, id, id, 'embedder', to_json(n)"
        " from agents, generate_series(1, $2) n where id = $1",
        uuid("agt", agent_id),
        UNREAD_MAX - 1,
    )
    await send(wire, agent_id, "the last one")
    error = await wire.refused("message.send", to_agent_id=agent_id, body="one too many")
    assert error["data"] == {
        "symbol": "lifecycle_conflict",
        "reason": f"The agent has {UNREAD_MAX} unread messages, which is the limit.",
    }
    assert await gateway.pool.fetchval("select count(*) from messages") == UNREAD_MAX
    await send(wire, other)

    await read(gateway.pool, await wire.run(agent_id))
    await send(wire, agent_id, "there is room again")


async def test_messages_need_their_capability_and_scopes(gateway: Gateway) -> None:
    agent_id = await (await gateway.caller("one")).agent()
    calls = {
        "message.send": ({"to_agent_id": agent_id, "body": 1}, "run.create"),
        "message.inbox": ({"agent_id": agent_id}, "run.read"),
        "message.list": ({}, "run.read"),
    }
    without = await gateway.stranger("one")
    await without.begin(**{"streaming.sse": True})
    for method, (params, scope) in calls.items():
        assert symbol(await without.answer(method, params)) == "capability_not_supported"
        assert symbol(await (await gateway.caller("one", (scope,))).answer(method, params)) == "result"
        wrong = {"run.create": "run.read", "run.read": "run.create"}[scope]
        assert symbol(await (await gateway.caller("one", (wrong,))).answer(method, params)) == "authz_denied"


# ------------------------------------------------------------------ message.inbox


async def test_an_inbox_shows_what_is_unread_oldest_first_and_looking_changes_nothing(
    wire: Wire, gateway: Gateway
) -> None:
    agent_id, other = await wire.agent(), await wire.agent()
    assert await wire.call("message.inbox", agent_id=agent_id) == {"messages": []}
    run_id = await wire.run(agent_id)
    sent = [await send(wire, agent_id, n) for n in range(3)]
    await send(wire, other, "not here")
    for _ in range(2):
        assert await wire.call("message.inbox", agent_id=agent_id) == {"messages": sent}

    assert await read(gateway.pool, run_id) == [0, 1, 2]

    assert await wire.call("message.inbox", agent_id=agent_id) == {"messages": []}
    listed = (await wire.call("message.list", agent_id=agent_id))["items"]
    assert [item["id"] for item in listed] == [item["id"] for item in sent[::-1]]
    assert all(item["delivered_at"] and item["read_at"] >= item["sent_at"] for item in listed)
    assert await read(gateway.pool, run_id) == []


@pytest.mark.slow
async def test_a_large_inbox_is_shown_as_far_as_an_answer_goes(wire: Wire, gateway: Gateway) -> None:
    agent_id = await wire.agent()
    for n in range(PAGE_MAX + 1):
        await send(wire, agent_id, n)
    shown = (await wire.call("message.inbox", agent_id=agent_id))["messages"]
    assert [item["body"] for item in shown] == list(range(PAGE_MAX))

    await gateway.pool.execute("update messages set body = to_json(repeat('x', 60000))")
    shown = (await wire.call("message.inbox", agent_id=agent_id))["messages"]
    assert len(shown) == 18, "a megabyte of them, and the one that passes it"


# ------------------------------------------------------------------ what an agent reads


async def test_an_agent_reads_as_much_at_once_as_it_can_be_shown_and_no_half_message(
    wire: Wire, gateway: Gateway
) -> None:
    agent_id = await wire.agent()
    run_id = await wire.run(agent_id)
    bodies = [str(n) * (BODY_BYTES_MAX - 2) for n in range(9)]
    for body in bodies:
        await send(wire, agent_id, body)

    readings = [await read(gateway.pool, run_id) for _ in range(4)]

    assert [body for reading in readings for body in reading] == bodies
    assert [len(reading) for reading in readings] == [3, 3, 3, 0]
    assert all(sum(map(len, reading)) <= READ_BYTES_MAX for reading in readings)


async def test_two_runs_that_read_at_once_share_the_messages(wire: Wire, gateway: Gateway) -> None:
    """The second waits for the first; if that comes to nothing, the second has them all."""
    agent_id = await wire.agent()
    first, second = [await wire.run(agent_id) for _ in range(2)]
    for n in range(3):
        await send(wire, agent_id, n)
    found: list[Any] = []

    async def read_second() -> None:
        found.append(await read(gateway.pool, second))

    for comes_to_nothing in (True, False):
        async with anyio.create_task_group() as group:
            with suppress(ComesToNothing):
                async with transaction(gateway.pool) as connection:
                    assert await reading_of(connection, first) == [0, 1, 2]
                    group.start_soon(read_second)
                    await somebody_waits_for_a_lock(gateway.pool)
                    if comes_to_nothing:
                        raise ComesToNothing
        if comes_to_nothing:
            await gateway.pool.execute("update messages set delivered_at = null, read_at = null")

    assert found == [[0, 1, 2], []]


class ComesToNothing(Exception):
    pass


async def somebody_waits_for_a_lock(pool: Pool) -> None:
    query = """
        select count(*) from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock'
    """
    with anyio.fail_after(ANSWER_WAIT_S):
        while not await pool.fetchval(query):
            await anyio.sleep(POLL_S)


async def test_a_message_to_one_run_is_for_that_run_while_it_lives(wire: Wire, gateway: Gateway) -> None:
    agent_id = await wire.agent()
    addressed, other = await wire.run(agent_id), await wire.run(agent_id)
    for n in range(2):
        sent = await send(wire, agent_id, n)
        await gateway.pool.execute(
            "update messages set to_run_id = $1 where id = $2",
            uuid("run", addressed),
            uuid("msg", sent["id"]),
        )
        if n == 0:
            assert await read(gateway.pool, other) == []
            assert await read(gateway.pool, addressed) == [0]
    await wire.call("run.cancel", run_id=addressed)
    assert await read(gateway.pool, other) == [1]


# ------------------------------------------------------------------ what an agent sends (the act)


async def test_an_agent_sends_within_its_tree_as_itself(wire: Wire, gateway: Gateway) -> None:
    pool, root, stranger = gateway.pool, await wire.agent(), await wire.agent()
    child = await sub_agent(pool, root)
    owner = await owner_of(pool, root)

    async def say(to: str, body: Any = 1) -> None:
        order = MessageOrder(uuid("agt", to), body, root, from_agent_id=uuid("agt", child))
        async with transaction(pool) as connection:
            await send_message(connection, owner, order)

    await say(root, {"done": True})
    (sent,) = (await wire.call("message.inbox", agent_id=root))["messages"]
    assert (sent["from_agent_id"], sent["tree_root_id"], sent["sender"]) == (child, root, {"kind": "agent"})
    with pytest.raises(TreeBoundary):
        await say(stranger)
    with pytest.raises(NotFound):
        await say(await (await gateway.caller()).agent())
    for body in (float("nan"), "\x00", "\ud800", 2**60, nested(100), nested(100_000)):
        with pytest.raises(InvalidInput):
            await say(root, body)
    await wire.call("agent.archive", agent_id=root)
    with pytest.raises(LifecycleConflict):
        await say(root)
    assert await pool.fetchval("select count(*) from messages") == 1


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# ------------------------------------------------------------------ message.list


async def test_messages_are_listed_newest_first_by_recipient_and_tree(wire: Wire, gateway: Gateway) -> None:
    assert await pages(wire) == [[]]
    one, two = await wire.agent(), await wire.agent()
    child = await sub_agent(gateway.pool, one)
    sent = {agent: [(await send(wire, agent, n))["id"] for n in range(3)] for agent in (one, two, child)}
    everything = [*sent[child][::-1], *sent[two][::-1], *sent[one][::-1]]

    assert await pages(wire) == [everything]
    assert await pages(wire, limit=4) == [everything[:4], everything[4:8], everything[8:]]
    assert await pages(wire, limit=9) == [everything], "a page that is exactly full is the last"
    for agent in (one, two, child):
        assert await pages(wire, agent_id=agent, limit=2) == [sent[agent][:0:-1], sent[agent][:1]]
    of_the_tree = [*sent[child][::-1], *sent[one][::-1]]
    assert await pages(wire, tree_root_id=one) == [of_the_tree]
    assert await pages(wire, tree_root_id=one, agent_id=child) == [sent[child][::-1]]
    assert await pages(wire, tree_root_id=two, agent_id=child) == [[]]
    assert await pages(wire, tree_root_id=child) == [[]], "it is no root"
    assert symbol(await wire.answer("message.list", {"limit": 0})) == "invalid_params"


async def test_messages_of_one_moment_page_without_gaps(wire: Wire, gateway: Gateway) -> None:
    agent_id = await wire.agent()
    sent = [(await send(wire, agent_id, n))["id"] for n in range(5)]
    await gateway.pool.execute("update messages set created_at = now()")
    assert await pages(wire, limit=2) == [sent[:2:-1], sent[2:0:-1], sent[:1]]
    shown = (await wire.call("message.inbox", agent_id=agent_id))["messages"]
    assert [item["id"] for item in shown] == sent


async def test_a_page_of_large_messages_is_shorter_and_says_that_more_follow(wire: Wire) -> None:
    agent_id = await wire.agent()
    sent = [(await send(wire, agent_id, "x" * 60_000))["id"] for _ in range(20)]
    found = await pages(wire)
    assert [len(page) for page in found] == [18, 2]
    assert [id_ for page in found for id_ in page] == sent[::-1]


async def test_a_list_and_an_inbox_stay_quick_among_many_messages(wire: Wire, gateway: Gateway) -> None:
    """By an index each: none of them reads all rows of the owner."""
    pool, rare, busy = gateway.pool, await wire.agent(), await wire.agent()
    owner = await owner_of(pool, rare)
    await pool.execute(
        "insert into messages (id, owner_id, root_id, from_agent_id, to_agent_id, sender, body, created_at,"
        " read_at)"
        " select gen_random_uuid(), owner_id, id, id, id, 'embedder', '1', now() - n * interval '1 second',"
        " now() from agents, generate_series(1, $2::int) n where id = $1",
        uuid("agt", busy),
        MANY,
    )
    await send(wire, rare)
    await pool.execute("analyze messages")
    async with transaction(pool) as connection:
        await connection.execute("set local enable_seqscan = off")
        before = await rows_read(connection)
        agent_id = uuid("agt", rare)
        for wanted in (MessageFilter(), MessageFilter(agent_id), MessageFilter(None, agent_id)):
            await list_messages(connection, owner, wanted, Place(None, 10))
        await list_unread(connection, owner, agent_id, count_max=10)
        assert await rows_read(connection) - before < MANY // 10


async def rows_read(connection: Any) -> int:
    """By this transaction from the table, whichever way it found them."""
    query = (
        "select seq_tup_read + coalesce(idx_tup_fetch, 0) from pg_stat_xact_user_tables where relname = $1"
    )
    return int(await connection.fetchval(query, "messages") or 0)


# ------------------------------------------------------------------ what a message does to a run's row


async def test_a_sleeping_run_is_due_at_once_and_several_messages_find_the_same_run(
    wire: Wire, gateway: Gateway
) -> None:
    agent_id = await wire.agent()
    older, newer = await wire.run(agent_id), await wire.run(agent_id)
    for run_id in (older, newer):
        await put_to_sleep(gateway.pool, run_id)
    for n in range(3):
        await send(wire, agent_id, n)
    await outbox_is_empty(gateway.pool)

    rows = await gateway.pool.fetch(
        "select id, wake_seq, due_at <= now() as due, state from runs order by id"
    )
    assert [tuple(row) for row in rows] == [
        (uuid("run", older), 0, False, "sleeping"),
        (uuid("run", newer), 3, True, "sleeping"),
    ]


async def test_a_message_to_an_agent_without_a_live_run_wakes_nobody_and_the_next_run_is_told(
    wire: Wire, gateway: Gateway
) -> None:
    agent_id = await wire.agent()
    ended = await wire.run(agent_id)
    await wire.call("run.cancel", run_id=ended)
    before = await run_rows(gateway.pool)
    sent = await send(wire, agent_id, "for whoever comes")
    await outbox_is_empty(gateway.pool)
    assert await run_rows(gateway.pool) == before
    assert await wire.call("message.inbox", agent_id=agent_id) == {"messages": [sent]}

    following = await wire.run(agent_id)
    rows = await run_rows(gateway.pool)
    assert (rows[uuid("run", following)]["wake_seq"], rows[uuid("run", following)]["wake_seen"]) == (1, 0)
    assert await read(gateway.pool, following) == ["for whoever comes"]


async def test_a_run_that_is_cancelled_hands_its_messages_on(wire: Wire, gateway: Gateway) -> None:
    agent_id = await wire.agent()
    sleeper, chosen = await wire.run(agent_id), await wire.run(agent_id)
    for run_id in (sleeper, chosen):
        await put_to_sleep(gateway.pool, run_id)
    await send(wire, agent_id)
    await outbox_is_empty(gateway.pool)
    assert (await run_rows(gateway.pool))[uuid("run", sleeper)]["wake_seq"] == 0

    await wire.call("run.cancel", run_id=chosen)
    await outbox_is_empty(gateway.pool)

    row = (await run_rows(gateway.pool))[uuid("run", sleeper)]
    due = await gateway.pool.fetchval("select due_at <= now() from runs where id = $1", uuid("run", sleeper))
    assert (row["wake_seq"], row["state"], due) == (1, "sleeping", True)


async def test_a_run_that_somebody_holds_keeps_its_lease_when_a_message_comes(
    wire: Wire, gateway: Gateway
) -> None:
    agent_id = await wire.agent()
    run_id = await wire.run(agent_id)
    token = await lease(gateway.pool, run_id)
    await send(wire, agent_id)
    await outbox_is_empty(gateway.pool)
    row = (await run_rows(gateway.pool))[uuid("run", run_id)]
    assert (row["wake_seq"], row["lease_token"], row["state"]) == (1, token, "running")
