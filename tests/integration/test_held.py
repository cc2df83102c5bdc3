"""A run in the hands of one process: handing it over, losing sight of the lease, reading its log in pages."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import anyio
import pytest

from espalier_acts.agents import create_agent
from espalier_acts.log import load, write_entries
from espalier_acts.runs import RunOrder, create_run
from espalier_domain.errors import FenceReached
from espalier_domain.journal import LimitReached, ModelAnswered, ToolCall, ToolReturned
from espalier_domain.run import CallModel
from espalier_eventlog import RedisSettings, open_streams
from espalier_eventlog.publisher import Publisher
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.ids import from_wire
from espalier_run_worker.held import Held, claim
from espalier_store.events import events_after
from espalier_store.pool import Pool, transaction
from espalier_store.runs import lock_run

pytestmark = pytest.mark.anyio

LEASE_TTL_S = 60.0
WAIT_S = 10.0
ANYBODY = AgentCreate(
    name="anybody",
    constitution=Constitution(immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"),
    toolset=[],
    ceilings=Ceilings(max_cycles=9, max_subagents=0, max_tool_calls_per_cycle=9, max_wall_seconds=300),
    budgets=Budgets(tokens_per_cycle=4_000, tool_calls_per_cycle=9, seconds_per_cycle=60),
)


@pytest.fixture
async def publisher(stores: Any) -> AsyncIterator[Publisher]:
    """One that only queues: nothing here looks at Redis."""

    async def nobody(_: object) -> None: ...

    async with open_streams(RedisSettings(redis_url=stores.redis_url)) as streams:
        queueing = Publisher(streams, stores.redis_prefix, nobody)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await queueing.run()  # closes its queue; `publish` leaves everything to a sweeper
        yield queueing


@pytest.fixture
async def run_id(pool: Pool, owner_id: UUID) -> UUID:
    async with transaction(pool) as connection:
        agent_id = from_wire("agt", (await create_agent(connection, owner_id, ANYBODY)).id)
        assert agent_id is not None
        _, written = await create_run(connection, owner_id, RunOrder(agent_id, "goal", {}, []))
        return written.run_id


async def taken(pool: Pool, publisher: Publisher, run_id: UUID, lease_ttl_s: float = LEASE_TTL_S) -> Held:
    held = await claim(pool, publisher, lease_ttl_s, run_id)
    assert held is not None
    return held


async def test_a_run_that_is_handed_over_between_two_cycles_begins_nothing(
    pool: Pool, publisher: Publisher, run_id: UUID
) -> None:
    held = await taken(pool, publisher, run_id)
    call = ToolCall("c", "continue_now", {})
    await held.write(ModelAnswered(1, "", (call,), 10), ToolReturned(1, "c", "continue_now", True, "ok"))
    held.hand_over = True
    await held.write()

    assert (held.over, held.still_due, held.progress.cycle) == (True, True, None)
    again = await taken(pool, publisher, run_id)
    assert again.progress.cycles == 2
    assert isinstance(again.next_step(), CallModel), "the new cycle has its whole budget"


async def test_a_run_whose_fence_was_reached_is_given_back_and_counts_as_no_death(
    pool: Pool, publisher: Publisher, owner_id: UUID, run_id: UUID
) -> None:
    held = await taken(pool, publisher, run_id, lease_ttl_s=0.4)
    with anyio.fail_after(WAIT_S), pytest.raises(FenceReached), held.outside():
        await anyio.sleep_forever()
    await held.give_back()

    await taken(pool, publisher, run_id)
    async with transaction(pool) as connection:
        row = await lock_run(connection, owner_id, run_id)
    assert row is not None and row.expired_claims == 0


async def test_a_page_of_large_events_ends_early_and_no_event_is_missing(
    pool: Pool, owner_id: UUID, run_id: UUID
) -> None:
    async with transaction(pool) as connection:
        run = await lock_run(connection, owner_id, run_id)
        assert run is not None
        _, progress = await load(connection, owner_id, run_id)
        large = tuple(LimitReached(None, "budget_exhausted", "x" * 400_000) for _ in range(7))
        await write_entries(connection, run, progress, large, release=True, lease_ttl_s=0)

    seqs, pages = [0], 0
    async with transaction(pool) as connection:
        while page := await events_after(connection, owner_id, run_id, seqs[-1]):
            seqs += [event.seq for event in page]
            pages += 1
    assert seqs == list(range(9))
    assert pages == 3
