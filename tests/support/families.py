"""Scripted agents that spawn: their plans, agents with room for helpers, and what became of a tree."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from scripted_runs import Plan, row_of

from espalier_client.client import AepClient
from espalier_protocol.agent import Agent, AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.ids import from_wire
from espalier_store.pool import Pool

WAIT_S = 30.0
POLL_S = 0.01

CEILINGS = {"max_cycles": 10, "max_subagents": 4, "max_tool_calls_per_cycle": 50, "max_wall_seconds": 600}
BUDGETS = {"tokens_per_cycle": 1_000, "tool_calls_per_cycle": 50, "seconds_per_cycle": 120}
HELPER = {"max_cycles": 3, "max_subagents": 0, "max_tool_calls_per_cycle": 50, "max_wall_seconds": 300}


READ: dict[str, Any] = {"tool": "inbox_read"}
READS: dict[str, Any] = {"calls": [READ]}
WAITS: dict[str, Any] = {"text": ""}
SLEEPS: dict[str, Any] = {"calls": [{"tool": "sleep", "args": {"duration_seconds": 3600}}]}
GOES_ON: dict[str, Any] = {"calls": [{"tool": "continue_now"}]}


async def make_spawner(client: AepClient, **changes: Any) -> Agent:
    """An agent with room for helpers. `ceilings` and `budgets` are changed member by member."""
    return await client.agent_create(
        AgentCreate(
            name="spawner",
            constitution=Constitution(
                immutable_directives="Harm nobody.", mutable_prompt="Spawn.", mutable_prompt_policy="auto"
            ),
            toolset=changes.get("toolset", []),
            ceilings=Ceilings(**{**CEILINGS, **changes.get("ceilings", {})}),
            budgets=Budgets(**{**BUDGETS, **changes.get("budgets", {})}),
            subject_ids=changes.get("subject_ids", []),
        )
    )


def spawn(plan: Plan, **changes: Any) -> dict[str, Any]:
    """A call for a helper that follows the plan; `ceilings` and `budgets` are changed member by member."""
    args = {
        "name": "helper",
        "constitution": {"immutable_directives": "Be brief.", "mutable_prompt": "Help."},
        "toolset_subset": [],
        "initial_goal": "help",
        "metadata": {"espalier.script": {"answers": plan}},
        **changes,
        "ceilings": {**HELPER, **changes.get("ceilings", {})},
        "budgets": {**BUDGETS, **changes.get("budgets", {})},
    }
    return {"tool": "spawn_subagent", "args": args}


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    with anyio.fail_after(WAIT_S):
        while not (found := await condition()):
            await anyio.sleep(POLL_S)
    return found


async def ended(pool: Pool, run_id: str) -> Any:
    """The run's row, once it has ended."""

    async def found() -> Any:
        row = await row_of(pool, run_id)
        return row if row["ended_at"] else None

    return await until(found)


async def asleep(pool: Pool, run_id: str, *, cycles: int) -> Any:
    """The run's row, once it sleeps after so many cycles and no wake is on its way."""

    async def found() -> Any:
        row = await row_of(pool, run_id)
        waking = await pool.fetchval("select count(*) from outbox where kind = 'wake'")
        quiet = row["state"] == "sleeping" and row["wake_seq"] == row["wake_seen"] and not waking
        return row if quiet and row["cycle_count"] >= cycles else None

    row = await until(found)
    assert row["cycle_count"] == cycles
    return row


async def children(pool: Pool, run_id: str) -> list[Any]:
    """The rows of the runs that a run has spawned, oldest first."""
    query = "select * from runs where parent_id = $1 order by created_at, id"
    return await pool.fetch(query, from_wire("run", run_id))


async def all_ended(pool: Pool) -> None:
    """Wait until no run lives and no wake is on its way."""

    async def none() -> bool:
        live = await pool.fetchval("select count(*) from runs where ended_at is null")
        return not live and not await pool.fetchval("select count(*) from outbox where kind = 'wake'")

    await until(none)


async def returned(pool: Pool, run_id: str, tool: str) -> list[Any]:
    """What the calls of a tool returned, oldest first; JSON where it is."""
    query = """
        select body ->> 'content' as content from journal
        where run_id = $1 and body ->> 'kind' = 'tool_returned' and body ->> 'tool' = $2 order by entry_no
    """
    rows = await pool.fetch(query, from_wire("run", run_id), tool)
    return [json.loads(row["content"]) if row["content"][:1] == "{" else row["content"] for row in rows]


async def troubles(pool: Pool, run_id: str) -> list[tuple[str, int]]:
    """Symbol and code of the run's `error` events, oldest first."""
    query = "select payload::jsonb as payload from events where run_id = $1 and type = 'error' order by seq"
    payloads = [row["payload"] for row in await pool.fetch(query, from_wire("run", run_id))]
    return [(payload["symbol"], payload["code"]) for payload in payloads]


UNBALANCED = """
    select p.id, p.cycles_granted, p.subagents_granted from runs p
    cross join lateral (
        select coalesce(sum(1 + c.max_subagents), 0) as subagents, coalesce(sum(
            case when c.ended_at is null then c.cycles_given
                else c.cycle_count + c.cycles_granted + c.cycles_lost end), 0) as cycles
        from runs c where c.parent_id = p.id
    ) given
    where p.ended_at is null
        and (p.cycles_granted, p.subagents_granted) is distinct from (given.cycles, given.subagents)
    union all
    select c.id, 0, 0 from runs c
    where c.parent_id is not null and (c.ended_at is not null)::int <> (
        select count(*) from messages m where m.to_run_id = c.parent_id and m.from_agent_id = c.agent_id
            and m.body ->> 'type' = 'subagent_result')
"""


async def unbalanced(pool: Pool) -> list[tuple[Any, ...]]:
    """Live runs that did not grant what their children have or used, and runs whose end was not told once.

    Asked when no wake is on its way.
    """
    return [tuple(row) for row in await pool.fetch(UNBALANCED)]
