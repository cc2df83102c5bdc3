"""Runs whose course is known, and readers who write down what they saw of them, over the wire."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Any

import anyio
from anyio.abc import TaskGroup

from espalier_client.client import AepClient
from espalier_protocol.agent import Agent, AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.events import LAST_EVENT, Event
from espalier_protocol.ids import from_wire
from espalier_protocol.run import Run, RunCreate
from espalier_store.pool import Pool

POLL_S = 0.02
CYCLES_MAX = 500
CALLS_MAX = 50

Plan = list[dict[str, Any]]

# Steps of a plan.
SLEEP: dict[str, Any] = {"calls": [{"tool": "sleep", "args": {"duration_seconds": 1}}]}
DONE: dict[str, Any] = {"text": "done"}


def note(name: str, *, delay_s: float = 0.0) -> dict[str, Any]:
    """An answer that makes an artifact and goes on."""
    make = {"tool": "artifact_create", "args": {"name": name, "content": name}}
    return {"calls": [make, {"tool": "continue_now", "args": {}}], "delay_s": delay_s}


async def make_agent(client: AepClient) -> Agent:
    return await client.agent_create(
        AgentCreate(
            name="survivor",
            constitution=Constitution(
                immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"
            ),
            toolset=[],
            ceilings=Ceilings(
                max_cycles=CYCLES_MAX,
                max_subagents=0,
                max_tool_calls_per_cycle=CALLS_MAX,
                max_wall_seconds=600,
            ),
            budgets=Budgets(tokens_per_cycle=50_000, tool_calls_per_cycle=CALLS_MAX, seconds_per_cycle=120),
        )
    )


async def start_run(client: AepClient, plan: Plan, agent_id: str | None = None) -> Run:
    """A run that follows the plan, of an agent of its own unless one is named."""
    agent_id = agent_id or (await make_agent(client)).id
    inputs = {"espalier.script": {"answers": plan}}
    return await client.run_create(RunCreate(agent_id=agent_id, goal="survive", inputs=inputs))


@dataclass
class Reader:
    """What one follower saw of a run, and how long after its writing each event reached it."""

    run_id: str
    since: str | None = None
    events: list[Event] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)

    async def read(self, client: AepClient) -> None:
        async for event in client.follow(self.run_id, self.since):
            self.events.append(event)
            self.delays_s.append(time.time() - datetime.fromisoformat(event.emitted_at).timestamp())

    async def reaches(self, count: int) -> None:
        """Wait until it has seen `count` events; bounded by the test."""
        while len(self.events) < count:
            await anyio.sleep(POLL_S)

    async def ends(self) -> None:
        """Wait until it has seen the end; bounded by the test."""
        while not (self.events and self.events[-1].type == LAST_EVENT):
            await anyio.sleep(POLL_S)

    @property
    def log(self) -> list[tuple[int, str, Any]]:
        return [(int(event.event_id), event.type, event.payload) for event in self.events]


def follow(group: TaskGroup, client: AepClient, run_ids: Iterable[str]) -> list[Reader]:
    """A reader for each id, reading in the group."""
    readers = [Reader(run_id) for run_id in run_ids]
    for reader in readers:
        group.start_soon(reader.read, client)
    return readers


def spread(delays_s: list[float]) -> str:
    return f"p50 {median(delays_s):.3f} s, max {max(delays_s):.3f} s of {len(delays_s)}"


async def log_of(pool: Pool, run_id: str, since: int = 0) -> list[tuple[int, str, Any]]:
    """A run's log as it is in Postgres: what a reader that started after `since` has to have seen."""
    query = "select seq, type, payload from events where run_id = $1 and seq > $2 order by seq"
    rows = await pool.fetch(query, from_wire("run", run_id), since)
    return [(row["seq"], row["type"], json.loads(row["payload"])) for row in rows]


async def row_of(pool: Pool, run_id: str) -> Any:
    return await pool.fetchrow("select * from runs where id = $1", from_wire("run", run_id))


async def entries_of(pool: Pool, run_id: str, kind: str) -> list[dict[str, Any]]:
    """The journal's entries of one kind, oldest first."""
    query = "select body from journal where run_id = $1 and body ->> 'kind' = $2 order by entry_no"
    return [json.loads(row["body"]) for row in await pool.fetch(query, from_wire("run", run_id), kind)]
