"""A run in the hands of one process: handing it over, losing sight of the lease, reading its log in pages."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import anyio
import pytest

from espalier_acts.agents import create_agent, update_agent
from espalier_acts.log import append_entries, load, write_entries
from espalier_acts.runs import RunOrder, cancel_run, create_run
from espalier_domain.errors import FenceReached, LeaseLost
from espalier_domain.journal import LimitReached, ModelAnswered, ToolCall, ToolReturned
from espalier_domain.progress import Progress, apply
from espalier_domain.run import CallModel
from espalier_eventlog import RedisSettings, open_streams
from espalier_eventlog.publisher import Publisher
from espalier_protocol.agent import (
    AgentCreate,
    AgentUpdate,
    Budgets,
    Ceilings,
    CeilingsChange,
    Constitution,
)
from espalier_protocol.ids import from_wire
from espalier_run_worker.draft import Draft
from espalier_run_worker.held import Held, claim
from espalier_store.events import events_after
from espalier_store.pool import Pool, reading, transaction
from espalier_store.runs import LockedRun, lock_run

pytestmark = pytest.mark.anyio

LEASE_TTL_S = 60.0
CROSSINGS = 100
ENTRIES_MAX = 200
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


async def log_of(pool: Pool, run_id: UUID) -> list[tuple[int, str]]:
    rows = await pool.fetch("select seq, type from events where run_id = $1 order by seq", run_id)
    return [(row["seq"], row["type"]) for row in rows]


async def test_an_answer_that_crosses_with_a_cancel_ends_the_run_cancelled(
    pool: Pool, publisher: Publisher, owner_id: UUID, run_id: UUID
) -> None:
    held = await taken(pool, publisher, run_id)
    async with transaction(pool) as connection:
        assert await cancel_run(connection, owner_id, run_id) is None, "the holder is to end it"
    await held.write(ModelAnswered(1, "done", (), 10))
    assert held.progress.final_state == "cancelled"


async def test_an_answer_of_a_holder_that_lost_its_run_writes_nothing(
    pool: Pool, publisher: Publisher, run_id: UUID
) -> None:
    held = await taken(pool, publisher, run_id)
    await pool.execute("update runs set lease_until = now() - interval '1 second' where id = $1", run_id)
    await taken(pool, publisher, run_id)
    before = await log_of(pool, run_id)
    with pytest.raises(LeaseLost):
        await held.write(ModelAnswered(1, "done", (), 10))
    assert await log_of(pool, run_id) == before


async def test_a_ceiling_that_shrinks_in_a_cycle_holds_for_its_next_step(
    pool: Pool, publisher: Publisher, owner_id: UUID, run_id: UUID
) -> None:
    held = await taken(pool, publisher, run_id)
    calls = tuple(ToolCall(f"c{n}", "artifact_create", {}) for n in (1, 2))
    await held.write(ModelAnswered(1, "", calls, 10))
    async with transaction(pool) as connection:
        run = await lock_run(connection, owner_id, run_id)
        assert run is not None
        smaller = CeilingsChange(max_tool_calls_per_cycle=1)
        await update_agent(connection, owner_id, run.agent_id, AgentUpdate(agent_id="", ceilings=smaller))

    async def look(draft: Draft) -> None:
        assert draft.facts.ceilings.max_tool_calls_per_cycle == 1

    await held.commit(look)


async def test_a_wall_that_moved_behind_an_answer_ends_the_run_and_runs_none_of_its_tools(
    pool: Pool, publisher: Publisher, owner_id: UUID, run_id: UUID
) -> None:
    held = await taken(pool, publisher, run_id)
    await pool.execute(
        "update runs set max_wall_seconds = 1, wall_at = now(), created_at = now() - interval '1 minute'"
    )
    await held.write(ModelAnswered(1, "", (ToolCall("c", "artifact_create", {}),), 10))
    assert (held.over, held.progress.final_state) == (True, "error")


async def test_a_claim_that_crosses_with_a_step_misses_none_of_its_entries(
    pool: Pool, publisher: Publisher, owner_id: UUID
) -> None:
    """The row is claimed as it is when it is free, the journal is read as it was when the claim began."""

    async def write_on(run: LockedRun, progress: Progress) -> None:
        """Entry after entry, until the run is taken."""
        told = LimitReached(None, "budget_exhausted", "x")
        async with reading(pool) as connection:
            for _ in range(ENTRIES_MAX):
                progress = apply(progress, told)
                written = await append_entries(
                    connection, run, (told,), after=progress, release=True, lease_ttl_s=0
                )
                if written is None:
                    return
                run = replace(run, lease_token=run.lease_token + 1)

    async def take(run_id: UUID) -> None:
        held = None
        while held is None:  # bounded by what is written
            held = await claim(pool, publisher, LEASE_TTL_S, run_id)
        written = await pool.fetchval("select count(*) from journal where run_id = $1", run_id)
        assert held.progress.entry_no == written

    many = ANYBODY.model_copy(update={"max_live_runs": CROSSINGS})
    async with transaction(pool) as connection:
        agent_id = from_wire("agt", (await create_agent(connection, owner_id, many)).id)
        assert agent_id is not None
        order = RunOrder(agent_id, "goal", {}, [])
        run_ids = [(await create_run(connection, owner_id, order))[1].run_id for _ in range(CROSSINGS)]
    for run_id in run_ids:
        async with transaction(pool) as connection:
            run = await lock_run(connection, owner_id, run_id)
            assert run is not None
            _, progress = await load(connection, owner_id, run_id)
        async with anyio.create_task_group() as group:
            group.start_soon(write_on, run, progress)
            group.start_soon(take, run_id)
