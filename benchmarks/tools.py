"""What a warm tool call costs through worker and broker, beside the same call made directly.

Direct calls and runs take turns against the same server over HTTP; over standard input and output each side
has a server of its own. A call's time in a run is on the database's clock: from the moment at which
`tool.called` was written to that of `tool.returned`. The floor is the call over standard input and
output with the same commits and processes and none of our code between them.
"""

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, Final

import anyio
from benchmarks.floor import floor
from benchmarks.report import Taken
from benchmarks.runtime import ECHO_PORT, ROOT, Runtime
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

from espalier_client.client import AepClient
from espalier_local.children import guarded
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.ids import from_wire
from espalier_protocol.run import RunCreate

ROUNDS: Final = 3
WARM: Final = 20
CALLS: Final = 200
CYCLES: Final = 5
STARTING_S: Final = 15.0
LOOK_EVERY_S: Final = 0.5
"""Nobody follows the run: on two cores a reader would be what is measured."""

WANTED_MS: Final = "at most 3"
ECHO: Final = [sys.executable, "-m", "benchmarks.echo_server"]

CALL_TIMES = """
select
    extract(epoch from returned.emitted_at - called.emitted_at) * 1000 as total,
    extract(epoch from c.sent_at - called.emitted_at) * 1000 as to_sent,
    extract(epoch from c.settled_at - c.sent_at) * 1000 as in_broker,
    extract(epoch from returned.emitted_at - c.settled_at) * 1000 as to_returned,
    extract(epoch from lead(called.emitted_at, 1, called.emitted_at) over (order by called.seq)
        - returned.emitted_at) * 1000 as to_next
from tool_calls c
join events called on called.run_id = c.run_id and called.type = 'tool.called'
    and called.payload::json ->> 'call_id' = c.call_id
join events returned on returned.run_id = c.run_id and returned.type = 'tool.returned'
    and returned.payload::json ->> 'call_id' = c.call_id
where c.run_id = $1 and c.state = 'done'
order by called.seq offset $2
"""
PARTS: Final = {
    "called to sent": "to_sent",
    "sent to settled": "in_broker",
    "settled to returned": "to_returned",
    "returned to called": "to_next",
}


async def tools(runtime: Runtime, taken: Taken) -> None:
    async with (
        _http_server(runtime.ports[ECHO_PORT]) as url,
        Client(StdioServerParameters(command=ECHO[0], args=ECHO[1:], cwd=ROOT)) as over_stdio,
        Client(url) as over_http,
        AepClient(runtime.local.base_url, runtime.local.api_key) as client,
    ):
        for _ in range(ROUNDS):
            for server, direct in (("stdio", over_stdio), ("http", over_http)):
                alone = await _direct(direct)
                through = await _through(runtime, client, f"mcp.{server}.echo")
                taken.add(f"{server}: called directly p50", alone, "ms")
                taken.add(f"{server}: called to returned p50", through["total"], "ms")
                taken.add(f"{server}: dearer by, p50", through["total"] - alone, "ms", WANTED_MS)
                for what, column in PARTS.items():
                    taken.add(f"{server}: {what} p50", through[column], "ms")
                if server == "stdio":
                    for pauses, apart_s in (("", through["to_next"] / 1e3), (" back to back", 0.0)):
                        spent, around = await floor(runtime, WARM, CALLS, apart_s)
                        taken.add(f"floor{pauses}: dearer by, p50", spent - alone, "ms")
                        taken.add(f"floor{pauses}: all but the call p50", around, "ms")


async def _direct(direct: Client) -> float:
    """p50 in ms of a call by the SDK's own client."""
    spent = []
    for number in range(WARM + CALLS):
        began = time.perf_counter()
        await direct.call_tool("echo", {"text": str(number)})
        spent.append((time.perf_counter() - began) * 1e3)
    return median(spent[WARM:])


async def _through(runtime: Runtime, client: AepClient, tool: str) -> dict[str, float]:
    """p50 in ms of the calls of one run, each in an answer of its own."""
    agent = await client.agent_create(
        AgentCreate(
            name="caller",
            constitution=Constitution(
                immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"
            ),
            toolset=[tool],
            ceilings=Ceilings(
                max_cycles=100, max_subagents=0, max_tool_calls_per_cycle=1000, max_wall_seconds=600
            ),
            budgets=Budgets(tokens_per_cycle=100_000_000, tool_calls_per_cycle=1000, seconds_per_cycle=300),
        )
    )
    plan = {"answers": _answers(tool)}
    run = await client.run_create(RunCreate(agent_id=agent.id, goal="call", inputs={"espalier.script": plan}))
    while run.ended_at is None:
        await anyio.sleep(LOOK_EVERY_S)
        run = await client.run_get(run.id)
    if run.state != "complete":
        raise RuntimeError(f"the run ended as {run.state}: {run.result}")
    rows = await runtime.sql.fetch(CALL_TIMES, from_wire("run", run.id), WARM)
    if len(rows) != CALLS:
        raise RuntimeError(f"{len(rows)} of {CALLS} calls are done")
    return {column: median(float(row[column]) for row in rows) for column in ("total", *PARTS.values())}


def _answers(tool: str) -> list[dict[str, Any]]:
    """One call an answer; the cycle ends now and then, so that the prompt stays small."""
    answers: list[dict[str, Any]] = []
    for number in range(WARM + CALLS):
        answers.append({"calls": [{"tool": tool, "args": {"text": str(number)}}]})
        if number % ((WARM + CALLS) // CYCLES) == 0:
            answers.append({"calls": [{"tool": "continue_now"}]})
    return answers


@asynccontextmanager
async def _http_server(port: int) -> AsyncIterator[str]:
    async with await anyio.open_process(guarded([*ECHO, str(port)]), cwd=ROOT) as process:
        with anyio.fail_after(STARTING_S):
            while not await _listens(port):
                await anyio.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


async def _listens(port: int) -> bool:
    try:
        async with await anyio.connect_tcp("127.0.0.1", port):
            return True
    except OSError:
        return False
