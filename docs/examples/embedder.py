"""A whole embedder: it makes an agent, starts a run, prints the run's events as they come, and its result.

Start a runtime with `.venv/bin/espalier up`, then in the same folder:
    .venv/bin/python docs/examples/embedder.py
"""

import asyncio
import json
from pathlib import Path

from espalier_client import AepClient
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.run import RunCreate

AGENT = AgentCreate(
    name="gardener",
    constitution=Constitution(
        immutable_directives="Be kind.", mutable_prompt="Pursue the goal.", mutable_prompt_policy="auto"
    ),
    toolset=[],
    ceilings=Ceilings(max_cycles=10, max_subagents=0, max_tool_calls_per_cycle=10, max_wall_seconds=600),
    budgets=Budgets(tokens_per_cycle=10_000, tool_calls_per_cycle=10, seconds_per_cycle=60),
)
PROFILE = json.loads(Path(".espalier/profile.json").read_text())  # `up` leaves it: where, and a key


async def main() -> None:
    async with AepClient(PROFILE["base_url"], PROFILE["api_key"]) as client:
        agent = await client.agent_create(AGENT)
        run = await client.run_create(RunCreate(agent_id=agent.id, goal="Say ok"))
        async for event in client.follow(run.id):  # reconnects and resumes by itself
            print(event.event_id, event.type, json.dumps(event.payload))
        print("result:", json.dumps((await client.run_result(run.id)).result))


asyncio.run(main())
