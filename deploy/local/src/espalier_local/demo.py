"""`espalier demo`: the whole runtime at work on a real repository, in one command.

It is an embedder like any other. It starts a runtime of its own in a folder that it throws away, with one MCP
server for git, and an agent that reads the history through it, keeps notes and sleeps; it watches, wakes the
agent with a message, and fetches what it made. The agent thinks with the scripted model and the plan beside
this file, which knows nothing of any repository, or with a real model that is named. Below it stand
`runtime.py`, `demo_agent.py`, `git_repository.py` and the client; above it `command.py`.
"""

import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final

import anyio
import typer
from rich.console import Console

from espalier_client import AepClient, ClientError
from espalier_client.commands.artifact import save
from espalier_client.timeline import Timeline, printable
from espalier_local.console import OnLine
from espalier_local.demo_agent import TOOLSET, WORD, git_server, release_notes_agent, run_inputs
from espalier_local.errors import LocalError
from espalier_local.folder import locate_folder, open_folder, plainly, throwaway_folder
from espalier_local.git_repository import Repository, find_repository
from espalier_local.options import RuntimeOptions
from espalier_local.preflight import read_settings
from espalier_local.runtime import LocalRuntime, local_runtime
from espalier_protocol.events import Event
from espalier_protocol.message import MessageSend
from espalier_protocol.run import RunCreate
from espalier_run_worker.models.endpoint import EndpointInvalid, endpoint
from espalier_run_worker.settings import WorkerSettings

PLAN: Final = "demo_plan.yaml"
SERVERS: Final = "mcp_servers.json"
NOTES: Final = Path("demo") / "release-notes.md"
SCRIPTED_TIMEOUT_S: Final = 180.0
MODEL_TIMEOUT_S: Final = 3600.0
LOG_LINES_MAX: Final = 30
SAID_CHARS_MAX: Final = 500
LEFT_OUT: Final = "they lie beyond what a part may hold, or their dates are out of order"


class RunFailed(LocalError):
    """The run came to nothing, and the runtime is not to blame."""


# --- the command -----------------------------------------------------------------------------------------


def demo(
    repo: Path, output: Path | None = None, data_dir: Path | None = None, model: str | None = None
) -> None:
    """Write release notes for the repository and say where they are. Raises LocalError if that fails.

    Without `output` they go below the data folder; without `model` the agent is scripted. Call it from the
    main thread.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            # As Ctrl-C, which unwinds everything: the runtime is stopped and its folder removed.
            signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    anyio.run(write_release_notes, repo, output, data_dir, model)


async def write_release_notes(
    repo: Path, output: Path | None, data_dir: Path | None, model: str | None
) -> None:
    repository = await find_repository(repo)
    if model:
        _require_endpoint(model)
    path = _writable(output or _usual_place(data_dir))
    _say(f"The repository {repository.name}, at {repository.path}.")
    _say("Starting a runtime of its own: Postgres, Redis, gateway, tool broker, worker.")
    log: deque[str] = deque(maxlen=LOG_LINES_MAX)
    try:
        size = await _in_own_runtime(repository, path, model, log)
    except RunFailed:
        raise
    except LocalError:
        for line in log:
            typer.echo(printable(line), err=True)
        raise
    _say(f"Release notes: {path} ({size} bytes)")
    if not model and (left_out := (repository.commits or 0) - _commits_told(path)) > 0:
        _say(f"{left_out} of {repository.commits} commits are not in them: {LEFT_OUT}.")


async def _in_own_runtime(repository: Repository, path: Path, model: str | None, log: deque[str]) -> int:
    async with (
        demo_runtime(repository, model, on_line=lambda name, line: log.append(f"{name}: {line}")) as runtime,
        AepClient(runtime.base_url, runtime.api_key) as client,
    ):
        timeout_s = MODEL_TIMEOUT_S if model else SCRIPTED_TIMEOUT_S
        try:
            with anyio.fail_after(timeout_s):
                artifact_id = await embed(client, repository, _timeline(), scripted=not model)
                return await save(client.artifact_bytes(artifact_id), path)
        except ClientError as err:
            raise LocalError(f"The demo failed: {err}") from err
        except TimeoutError as err:
            raise LocalError(f"The run did not end within {timeout_s:g} s.") from err


@asynccontextmanager
async def demo_runtime(
    repository: Repository, model: str | None, on_line: OnLine
) -> AsyncIterator[LocalRuntime]:
    """A runtime with a git server for the repository and nothing else, gone without a trace afterwards."""
    plan = resources.files(__package__).joinpath(PLAN)
    with resources.as_file(plan) as script, throwaway_folder() as folder:
        servers = folder / SERVERS
        servers.touch(mode=0o600)
        servers.write_text(json.dumps({"mcpServers": {"git": git_server(repository)}}))
        options = RuntimeOptions(
            port=0,
            data_dir=folder,
            script=None if model else script,
            mcp_servers=servers,
            model=model,
            env={} if model else {"ESPALIER_MODEL": ""},  # one that is set for other runtimes is not ours
        )
        async with local_runtime(options, on_line=on_line) as runtime:
            yield runtime


# --- the embedder ----------------------------------------------------------------------------------------


async def embed(client: AepClient, repository: Repository, timeline: Timeline, *, scripted: bool) -> str:
    """What an embedder does: an agent, a run, its events, a message. Returns the artifact's id.

    `scripted`: the agent goes on whatever a tool returns. Raises RunFailed, and ClientError when the runtime
    does not answer.
    """
    agent = await client.agent_create(release_notes_agent())
    goal = f"Write release notes for {repository.name} from its git history."
    run = await client.run_create(RunCreate(agent_id=agent.id, goal=goal, inputs=run_inputs(repository)))
    made: list[str] = []
    read = _Read()
    async with aclosing(client.follow(run.id)) as events:
        async for event in events:
            timeline.show(event)
            match event.type:
                case "cycle.ended" if event.payload["outcome"] == "slept":
                    _say("The agent sleeps; the demo wakes it with a message (message.send).")
                    await client.message_send(MessageSend(to_agent_id=agent.id, body=WORD))
                case "tool.returned" if scripted:
                    read.take_in(event.payload)
                case "artifact.created":
                    made.append(event.payload["artifact_id"])
                case "run.ended":
                    read.require_something()
                    return _outcome(event, made)
    raise AssertionError("a stream ends with run.ended or an error")


@dataclass
class _Read:
    """What a scripted agent got to read. It would pass an excuse off as history, so somebody has to look."""

    answers: int = 0
    excuses: list[str] = field(default_factory=list)

    def take_in(self, returned: Mapping[str, Any]) -> None:
        summary = returned["result_summary"]
        if not summary["ok"]:
            self.excuses.append(f"{returned['tool_name']} failed: {printable(summary['preview'])}")
        elif returned["tool_name"] in TOOLSET:
            self.answers += 1

    def require_something(self) -> None:
        """A part of the history that could not be read is told; of none that could, there are no notes."""
        if self.excuses and not self.answers:
            raise RunFailed(f"Nothing could be read: {self.excuses[0]}")
        for excuse in self.excuses:
            _say(f"Left out, as the release notes say in its place: {excuse}")


def _outcome(end: Event, made: list[str]) -> str:
    """The artifact that the run ended with: one that it made and named, else the last one that it made."""
    state, result = end.payload["final_state"], end.payload["result"]
    if state != "complete":
        raise RunFailed(f"The run ended as {state}: {_said(result)}")
    named = result.get("artifact_ids") if isinstance(result, Mapping) else None
    named = [each for each in made if isinstance(named, list) and each in named]
    if not made:
        raise RunFailed(f"The run ended without an artifact; it said: {_said(result)}")
    return (named or made)[-1]


def _commits_told(path: Path) -> int:
    """How many commits a scripted agent's notes tell of: git begins each with a line of its own."""
    with path.open("rb") as notes:
        return sum(line.startswith(b"Commit: ") for line in notes)


def _said(result: Any) -> str:
    said = result
    if isinstance(result, Mapping):
        said = result.get("final_message") or result.get("reason") or result
    text = printable(said if isinstance(said, str) else json.dumps(said, ensure_ascii=False))
    return text if len(text) <= SAID_CHARS_MAX else f"{text[:SAID_CHARS_MAX]}…"


# --- what is found out before the work -------------------------------------------------------------------


def _require_endpoint(model: str) -> None:
    settings = read_settings(WorkerSettings, model=model)
    try:
        endpoint(model, settings.openai_base_url.strip(), settings.openai_api_key.get_secret_value().strip())
    except EndpointInvalid as invalid:
        raise LocalError(str(invalid)) from invalid


def _writable(path: Path) -> Path:
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


def _timeline() -> Timeline:
    return Timeline(Console(file=sys.stdout, highlight=False, markup=False, emoji=False))


def _say(sentence: str) -> None:
    typer.echo(printable(sentence))
