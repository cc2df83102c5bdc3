"""A run's life in a real worker process: what a reader is told of it, from the first event to the last."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import anyio
import pytest

from espalier_acts.agents import create_agent, update_agent
from espalier_acts.runs import RunOrder, cancel_run, continue_run, create_run
from espalier_protocol.agent import AgentCreate, AgentUpdate, Budgets, Ceilings, CeilingsChange, Constitution
from espalier_protocol.events import NumberedEvent
from espalier_protocol.ids import from_wire
from espalier_protocol.run import Run
from espalier_protocol.strict_json import loads
from espalier_store.events import events_after
from espalier_store.pool import Pool, transaction
from espalier_store.runs import get_run

pytestmark = pytest.mark.anyio

WAIT_S = 15.0
POLL_S = 0.02
WORKER = "worker"
WIRE_PLANS = {"ESPALIER_MODELS_SCRIPTED": "on"}


def agent(**changes: Any) -> AgentCreate:
    limits = {"max_cycles": 9, "max_subagents": 0, "max_tool_calls_per_cycle": 4, "max_wall_seconds": 60}
    spend = {"tokens_per_cycle": 20_000, "tool_calls_per_cycle": 3, "seconds_per_cycle": 10}
    return AgentCreate(
        name="anybody",
        constitution=Constitution(immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"),
        toolset=[],
        ceilings=Ceilings(**{**limits, **changes.get("ceilings", {})}),
        budgets=Budgets(**{**spend, **changes.get("budgets", {})}),
    )


class Runs:
    """The runs of one owner, driven through the acts."""

    def __init__(self, pool: Pool, owner_id: UUID) -> None:
        self.pool, self.owner_id = pool, owner_id

    async def start(self, answers: list[dict[str, Any]], **changes: Any) -> UUID:
        async with transaction(self.pool) as connection:
            made = await create_agent(connection, self.owner_id, agent(**changes))
            agent_id = from_wire("agt", made.id)
            assert agent_id is not None
            order = RunOrder(agent_id, "the goal", {"espalier.script": {"answers": answers}}, [])
            _, written = await create_run(connection, self.owner_id, order)
            return written.run_id

    async def get(self, run_id: UUID) -> Run:
        async with transaction(self.pool) as connection:
            run = await get_run(connection, self.owner_id, run_id)
        assert run is not None
        return run

    async def until(self, run_id: UUID, condition: Callable[[Run], bool]) -> Run:
        with anyio.fail_after(WAIT_S):
            while not condition(run := await self.get(run_id)):
                await anyio.sleep(POLL_S)
        return run

    async def ended(self, run_id: UUID) -> Run:
        return await self.until(run_id, lambda run: run.ended_at is not None)

    async def log(self, run_id: UUID) -> list[NumberedEvent]:
        async with transaction(self.pool) as connection:
            return await events_after(connection, self.owner_id, run_id, 0)

    async def told(self, run_id: UUID) -> list[str]:
        events = await self.log(run_id)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        return [event.type for event in events]


@pytest.fixture
def runs(pool: Pool, owner_id: UUID) -> Runs:
    return Runs(pool, owner_id)


def call(tool: str, **args: Any) -> dict[str, Any]:
    return {"tool": tool, "args": args}


async def test_a_run_of_one_answer_completes_with_the_text_as_its_result(runs: Runs, start: Any) -> None:
    start(WORKER, **WIRE_PLANS)
    run_id = await runs.start([{"text": "done"}])

    run = await runs.ended(run_id)

    assert (run.state, run.cycle_count) == ("complete", 1)
    assert run.result == {"final_message": "done", "artifact_ids": []}
    assert await runs.told(run_id) == ["run.started", "cycle.started", "cycle.ended", "run.ended"]


async def test_a_run_that_writes_sleeps_and_continues_tells_all_of_it(runs: Runs, start: Any) -> None:
    start(WORKER, **WIRE_PLANS)
    run_id = await runs.start(
        [
            {"calls": [call("artifact_create", name="a.md", content="# A"), call("continue_now")]},
            {"calls": [call("sleep", duration_seconds=3600, reason="a while")]},
            {"calls": [call("complete", result={"id": "${/results/0/artifact_id}"})]},
        ]
    )
    asleep = await runs.until(run_id, lambda run: run.state == "sleeping")
    assert (asleep.wait_reason, asleep.cycle_count) == ("timer", 2)
    async with transaction(runs.pool) as connection:
        await continue_run(connection, runs.owner_id, run_id)

    run = await runs.ended(run_id)

    assert run.state == "complete" and run.result["id"].startswith("art_")
    one_call = ["tool.called", "tool.returned"]
    assert await runs.told(run_id) == [
        *["run.started", "cycle.started", "tool.called", *one_call, "artifact.created", "tool.returned"],
        *["cycle.ended", "cycle.started", *one_call, "cycle.ended", "cycle.started", *one_call],
        *["cycle.ended", "run.ended"],
    ]


async def test_a_short_sleep_ends_by_itself_and_never_early(runs: Runs, start: Any) -> None:
    start(WORKER, **WIRE_PLANS)
    run_id = await runs.start([{"calls": [call("sleep", duration_seconds=1)]}, {"text": "awake"}])

    await runs.ended(run_id)

    slept, woke = [
        event.emitted_at for event in await runs.log(run_id) if event.type in ("cycle.ended", "cycle.started")
    ][1:3]
    assert (woke - slept).total_seconds() >= 1


async def test_cancelling_a_run_that_a_worker_holds_ends_it_cancelled(runs: Runs, start: Any) -> None:
    start(WORKER, **WIRE_PLANS)
    run_id = await runs.start([{"text": "late", "delay_s": 600}], budgets={"seconds_per_cycle": 900})
    await runs.until(run_id, lambda run: run.cycle_count == 1)
    async with transaction(runs.pool) as connection:
        await cancel_run(connection, runs.owner_id, run_id)

    run = await runs.ended(run_id)

    assert (run.state, run.result) == ("cancelled", {"reason": "cancelled"})
    assert await runs.told(run_id) == ["run.started", "cycle.started", "cycle.ended", "run.ended"]


async def test_a_cycle_that_wants_too_many_tools_is_told_so_and_sleeps(runs: Runs, start: Any) -> None:
    start(WORKER, **WIRE_PLANS)
    note = call("artifact_create", name="n", content="n")
    run_id = await runs.start([{"calls": [note] * 4}, {"text": "ok"}])

    run = await runs.until(run_id, lambda run: run.state == "sleeping")

    assert run.wait_reason == "timer"
    events = await runs.log(run_id)
    errors = [loads(event.payload.encode()) for event in events if event.type == "error"]
    assert [error["symbol"] for error in errors if isinstance(error, dict)] == ["budget_exhausted"]
    assert '"outcome":"forced_sleep"' in events[-1].payload
    assert [event.type for event in events].count("artifact.created") == 3


async def test_a_run_that_reaches_max_cycles_ends_in_error(runs: Runs, start: Any) -> None:
    start(WORKER, **WIRE_PLANS)
    run_id = await runs.start([{"calls": [call("continue_now")]}] * 5, ceilings={"max_cycles": 3})

    run = await runs.ended(run_id)

    assert (run.state, run.cycle_count) == ("error", 3)
    assert run.result == {"reason": "ceiling_exceeded:max_cycles"}
    assert (await runs.told(run_id))[-2:] == ["error", "run.ended"]


@pytest.mark.slow
async def test_a_sleeping_run_that_nobody_wakes_meets_its_wall(runs: Runs, start: Any) -> None:
    start(WORKER, **WIRE_PLANS)
    run_id = await runs.start(
        [{"calls": [call("sleep", duration_seconds=3600)]}], ceilings={"max_wall_seconds": 2}
    )

    run = await runs.ended(run_id)

    assert (run.state, run.result) == ("error", {"reason": "ceiling_exceeded:max_wall_seconds"})


@pytest.mark.slow
async def test_a_model_that_is_overloaded_is_asked_again_in_the_same_cycle(runs: Runs, start: Any) -> None:
    start(WORKER, **WIRE_PLANS)
    run_id = await runs.start(
        [{"text": "at last", "fault": {"reason": "overloaded", "times": 2, "retryable": True}}]
    )

    run = await runs.ended(run_id)

    assert (run.state, run.cycle_count) == ("complete", 1)
    assert await runs.told(run_id) == [
        *["run.started", "cycle.started", "error", "error", "cycle.ended", "run.ended"]
    ]


@pytest.mark.slow
async def test_a_killed_workers_run_goes_on_in_another(runs: Runs, start: Any) -> None:
    first = start(WORKER, **WIRE_PLANS)
    run_id = await runs.start([{"calls": [call("continue_now")]}, {"text": "ok", "delay_s": 1.5}])
    await runs.until(run_id, lambda run: run.cycle_count == 2)
    first.kill()
    start(WORKER, **WIRE_PLANS)

    run = await runs.ended(run_id)

    assert (run.state, run.cycle_count) == ("complete", 2)
    assert (await runs.told(run_id)).count("cycle.started") == 2


@pytest.mark.slow
async def test_a_stopped_worker_gives_its_runs_back_at_once(runs: Runs, start: Any) -> None:
    first = start(WORKER, ESPALIER_WORKER_DRAIN_S="0.1", ESPALIER_LEASE_TTL_S="60", **WIRE_PLANS)
    run_id = await runs.start([{"text": "ok", "delay_s": 2}])
    await runs.until(run_id, lambda run: run.cycle_count == 1)
    assert first.stop() == 0
    start(WORKER, **WIRE_PLANS)

    assert (await runs.ended(run_id)).state == "complete"


@pytest.mark.slow
async def test_many_short_runs_at_once_all_complete_and_none_is_thought_lost(runs: Runs, start: Any) -> None:
    worker = start(WORKER, **WIRE_PLANS)
    started = [await runs.start([{"text": "ok", "delay_s": 0.05}]) for _ in range(120)]

    ended = [await runs.ended(run_id) for run_id in started]

    assert {run.state for run in ended} == {"complete"}
    assert "lease_lost" not in worker.output()


@pytest.mark.slow
async def test_a_wall_that_moves_under_a_long_answer_ends_the_run_without_waiting_for_it(
    runs: Runs, start: Any
) -> None:
    start(WORKER, **WIRE_PLANS)
    run_id = await runs.start([{"text": "too late", "delay_s": 300}], budgets={"seconds_per_cycle": 600})
    running = await runs.until(run_id, lambda run: run.cycle_count == 1)
    agent_id = from_wire("agt", running.agent_id)
    assert agent_id is not None
    change = AgentUpdate(agent_id=running.agent_id, ceilings=CeilingsChange(max_wall_seconds=1))
    async with transaction(runs.pool) as connection:
        await update_agent(connection, runs.owner_id, agent_id, change)

    run = await runs.ended(run_id)

    assert (run.state, run.result) == ("error", {"reason": "ceiling_exceeded:max_wall_seconds"})
