"""`espalier demo`: the whole runtime at work on real input, in one command.

It is an embedder like any other. It starts a runtime of its own in a folder that it throws away, hands a
repository's history to an agent, watches, wakes the agent when it sleeps, and fetches what it made. The agent
thinks with the scripted model and the plan beside this file, which knows nothing of any repository. Below it
stand `runtime.py`, `git_history.py` and the client; above it `command.py`.
"""

import os
import signal
import sys
from collections import deque
from contextlib import aclosing
from importlib import resources
from pathlib import Path
from typing import Any

import anyio
import typer
from rich.console import Console

from espalier_client import AepClient, ClientError
from espalier_client.commands.artifact import save
from espalier_client.timeline import Timeline, printable
from espalier_local.errors import LocalError
from espalier_local.folder import locate_folder, open_folder, plainly, throwaway_folder
from espalier_local.git_history import History, read_history
from espalier_local.options import RuntimeOptions
from espalier_local.runtime import local_runtime
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.events import Event
from espalier_protocol.run import RunCreate

PLAN = "demo_plan.yaml"
NOTES = Path("demo") / "release-notes.md"
RUN_TIMEOUT_S = 180.0
LOG_LINES_MAX = 30

DIRECTIVES = "Use only what the run's inputs hold. Leave no commit out."
PROMPT = "You write release notes: one part of the history in each cycle, then all of them together."
CEILINGS = Ceilings(max_cycles=8, max_subagents=0, max_tool_calls_per_cycle=4, max_wall_seconds=4 * 3600)
BUDGETS = Budgets(tokens_per_cycle=2_000_000, tool_calls_per_cycle=4, seconds_per_cycle=120)


def demo(repo: Path, output: Path | None = None, data_dir: Path | None = None) -> None:
    """Write release notes for the repository and say where they are. Raises LocalError if that fails.

    Without `output` they go below the data folder. Call it from the main thread.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            # As Ctrl-C, which unwinds everything: the runtime is stopped and its folder removed.
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    anyio.run(write_release_notes, repo, output, data_dir)


async def write_release_notes(repo: Path, output: Path | None, data_dir: Path | None) -> None:
    history = await read_history(repo)
    path = _writable(output or _usual_place(data_dir))
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    _say(_what_was_read(history))
    _say("Starting a runtime of its own: Postgres, Redis, gateway, worker.")
    log: deque[str] = deque(maxlen=LOG_LINES_MAX)
    try:
        size = await _in_own_runtime(history, path, Timeline(console), log)
    except LocalError:
        for line in log:
            typer.echo(printable(line), err=True)
        raise
    _say(f"Release notes: {path} ({size} bytes)")


async def _in_own_runtime(history: History, path: Path, timeline: Timeline, log: deque[str]) -> int:
    plan = resources.files(__package__).joinpath(PLAN)
    with resources.as_file(plan) as script, throwaway_folder() as folder:
        options = RuntimeOptions(port=0, data_dir=folder, script=script)
        async with (
            local_runtime(options, on_line=lambda name, line: log.append(f"{name}: {line}")) as runtime,
            AepClient(runtime.base_url, runtime.api_key) as client,
        ):
            try:
                with anyio.fail_after(RUN_TIMEOUT_S):
                    return await _embed(client, history, path, timeline)
            except ClientError as err:
                raise LocalError(f"The demo failed: {err}") from err
            except TimeoutError as err:
                raise LocalError(f"The run did not end within {RUN_TIMEOUT_S:g} s.") from err


async def _embed(client: AepClient, history: History, path: Path, timeline: Timeline) -> int:
    """What an embedder does: an agent, a run, its events, its result. Returns the artifact's size."""
    agent = await client.agent_create(
        AgentCreate(
            name="release-notes",
            constitution=Constitution(
                immutable_directives=DIRECTIVES, mutable_prompt=PROMPT, mutable_prompt_policy="locked"
            ),
            toolset=[],
            ceilings=CEILINGS,
            budgets=BUDGETS,
        )
    )
    goal = f"Write release notes for {history.repository} from its git history."
    run = await client.run_create(RunCreate(agent_id=agent.id, goal=goal, inputs=history.as_inputs()))
    result = await _watch(client, run.id, timeline)
    return await save(client.artifact_bytes(str(result["artifact_ids"][0])), path)


async def _watch(client: AepClient, run_id: str, timeline: Timeline) -> Any:
    """Show every event and wake the agent when it sleeps. Returns the result of the complete run."""
    async with aclosing(client.follow(run_id)) as events:
        async for event in events:
            timeline.show(event)
            if event.type == "cycle.ended" and event.payload["outcome"] == "slept":
                _say("The agent sleeps for an hour; the demo wakes it now (run.continue).")
                await client.run_continue(run_id)
            if event.type == "run.ended":
                return _result(event)
    raise AssertionError("a stream ends with run.ended or an error")


def _result(end: Event) -> Any:
    if end.payload["final_state"] != "complete":
        raise LocalError(f"The run ended as {end.payload['final_state']}: {end.payload['result']}.")
    return end.payload["result"]


def _what_was_read(history: History) -> str:
    read = history.total - history.left_out
    people = "1 author" if history.authors == 1 else f"{history.authors} authors"
    older = f"; {history.left_out} older ones do not fit into one run's inputs" if history.left_out else ""
    return f"Read {read} of {history.total} commits by {people} in {history.repository}{older}."


def _writable(path: Path) -> Path:
    """Found out before the work, not after it."""
    if path.is_dir():
        raise LocalError(f"{path} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise LocalError(f"There is no folder {path.parent} to write {path.name} to.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise LocalError(f"{path} cannot be written: its folder is closed to you.")
    return path


def _usual_place(data_dir: Path | None) -> Path:
    """Below the data folder, which keeps itself out of a person's repository."""
    folder = locate_folder(data_dir)
    path = folder / NOTES
    with plainly(folder):
        if not folder.exists():
            with open_folder(folder):
                pass  # making it is all
        path.parent.mkdir(exist_ok=True)
    return path


def _say(sentence: str) -> None:
    typer.echo(printable(sentence))
