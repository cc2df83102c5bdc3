"""Agents with tools: the ledger server, runs that call it, and what is left of their calls."""

import json
import sys
from pathlib import Path
from typing import Any

import anyio

from espalier_client.client import AepClient
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.ids import from_wire
from espalier_protocol.run import Run, RunCreate
from espalier_store.pool import Pool

PROGRAM = Path(__file__).parents[1] / "support" / "mcp_servers" / "ledger.py"
POLL_S = 0.02
WAIT_S = 30.0


class Ledger:
    """The file in which the ledger server writes what it really did."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def server(self, *options: str) -> dict[str, Any]:
        """How the broker's list names it, served over standard input and output."""
        return {"command": sys.executable, "args": [str(PROGRAM), str(self.path), *options]}

    def raw_server(self) -> dict[str, Any]:
        """The server of odd answers, which notes its calls in the same file."""
        return {"command": sys.executable, "args": [str(RAW), str(self.path)]}

    def lines(self, event: str) -> list[Any]:
        """The arguments of all calls that came to `event`: called, done or cancelled."""
        if not self.path.exists():
            return []
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line["argument"] for line in lines if line["event"] == event]

    async def until(self, event: str, argument: str) -> None:
        with anyio.fail_after(WAIT_S):
            while argument not in self.lines(event):
                await anyio.sleep(POLL_S)


RAW = PROGRAM.with_name("raw.py")


def calls(*wanted: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """An answer that calls these tools."""
    return {"calls": [{"tool": tool, "args": args} for tool, args in wanted]}


def record(text: str, delay_s: float = 0.0) -> tuple[str, dict[str, Any]]:
    return "mcp.ledger.record", {"text": text, "delay_s": delay_s}


async def start_with_tools(
    client: AepClient, plan: list[dict[str, Any]], *toolset: str, **limits: int
) -> Run:
    ceilings = {"max_cycles": 20, "max_subagents": 0, "max_tool_calls_per_cycle": 50, "max_wall_seconds": 600}
    budgets = {"tokens_per_cycle": 500_000, "tool_calls_per_cycle": 50, "seconds_per_cycle": 120}
    agent = await client.agent_create(
        AgentCreate(
            name="handy",
            constitution=Constitution(
                immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"
            ),
            toolset=list(toolset or ("mcp.ledger.*",)),
            ceilings=Ceilings(**{name: limits.get(name, value) for name, value in ceilings.items()}),
            budgets=Budgets(**{name: limits.get(name, value) for name, value in budgets.items()}),
        )
    )
    inputs = {"espalier.script": {"answers": plan}}
    return await client.run_create(RunCreate(agent_id=agent.id, goal="work", inputs=inputs))


async def rows_of(pool: Pool, run_id: str) -> list[tuple[str, str]]:
    """(call id, state) of the run's calls, in their order."""
    query = "select call_id, state from tool_calls where run_id = $1 order by call_id"
    return [(row["call_id"], row["state"]) for row in await pool.fetch(query, from_wire("run", run_id))]


async def until_state(pool: Pool, run_id: str, state: str) -> None:
    with anyio.fail_after(WAIT_S):
        while state not in [each for _, each in await rows_of(pool, run_id)]:
            await anyio.sleep(POLL_S)


def returned(events: list[Any]) -> list[tuple[str, bool, str, bool]]:
    """(tool, ok, preview, in doubt) of every `tool.returned` among a run's events."""
    return [
        (event.payload["tool_name"], summary["ok"], summary["preview"], summary["in_doubt"])
        for event in events
        if event.type == "tool.returned" and (summary := event.payload["result_summary"])
    ]
