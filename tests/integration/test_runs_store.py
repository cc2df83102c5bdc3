"""A run's way through the acts, on a real database."""

import pytest

from espalier_acts.agents import create_agent
from espalier_acts.runs import RunOrder, cancel_run, create_run
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.ids import from_wire
from espalier_store.events import events_after
from espalier_store.keys import find_key
from espalier_store.pool import Pool, transaction
from espalier_store.runs import get_run
from espalier_secrets import fingerprint

pytestmark = pytest.mark.anyio

ANYBODY = AgentCreate(
    name="anybody",
    constitution=Constitution(immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"),
    toolset=[],
    ceilings=Ceilings(max_cycles=5, max_subagents=0, max_tool_calls_per_cycle=4, max_wall_seconds=60),
    budgets=Budgets(tokens_per_cycle=1000, tool_calls_per_cycle=4, seconds_per_cycle=10),
)


async def test_a_cancelled_run_ends_its_log_with_run_ended(pool: Pool, api_key: str) -> None:
    async with transaction(pool) as connection:
        caller = await find_key(connection, fingerprint(api_key))
        assert caller is not None
        agent = await create_agent(connection, caller.owner_id, ANYBODY)
        agent_id = from_wire("agt", agent.id)
        assert agent_id is not None
        order = RunOrder(agent_id, "nothing", {}, [])
        written = await create_run(connection, caller.owner_id, order)

    async with transaction(pool) as connection:
        await cancel_run(connection, caller.owner_id, written.run_id)

    async with transaction(pool) as connection:
        run = await get_run(connection, caller.owner_id, written.run_id)
        log = await events_after(connection, caller.owner_id, written.run_id, 0)
    assert run is not None and run.state == "cancelled"
    assert [(event.seq, event.type) for event in log] == [(1, "run.started"), (2, "run.ended")]
