"""The main job as a person runs it: a repository of random history, one command, and a file that tells it."""

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.resources import as_file, files
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import anyio
import asyncpg
import psutil
import pytest
from fake_openai import answer, fake_openai
from rich.console import Console

from espalier_client import AepClient
from espalier_client.timeline import Timeline
from espalier_local.console import quiet
from espalier_local.demo import PLAN, demo_runtime, embed
from espalier_local.demo_agent import TOOLSET, WORD
from espalier_local.git_repository import find_repository
from espalier_mcp_broker.outcomes import RESULT_BYTES_MAX as ANSWER_BYTES_MAX
from espalier_run_worker.models.plan import load_plan
from espalier_run_worker.models.scripted import CUT, EXCERPT_BYTES_MAX

pytestmark = pytest.mark.anyio

COMMITS = 30
DAY_S = 86_400
AGES_DAYS = (1, 100, 500)
WAIT_S = 150
INTERRUPTED = 130
MARKS = [
    "",
    " <b>&amp;</b>",
    ' "quoted"',
    " ${/goal}",
    " émoji 🌱",
    " | a | table |",
    " \\back`tick`",
    " ]]>",
]
SELF_TOOLS = {
    "artifact_create",
    "complete",
    "continue_now",
    "inbox_read",
    "learning_memory_read",
    "learning_memory_write",
    "sleep",
}
Test = TypeVar("Test", bound=Callable[..., Awaitable[None]])
ESPALIER = str(Path(sys.executable).parent / "espalier")


def slow(test: Test) -> Test:
    """It starts a whole runtime, or the command several times."""
    bounded: Test = pytest.mark.timeout(WAIT_S + 30)(test)
    marked: Test = pytest.mark.slow(bounded)
    return marked


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, list[str]]:
    """A git repository whose commits lie in all three parts that a run reads, and their subjects."""
    folder = tmp_path / "some project"
    folder.mkdir()
    subjects = [f"Change {secrets.token_hex(8)}{MARKS[number % len(MARKS)]}" for number in range(COMMITS)]
    git(folder, "init", "--quiet")
    for number, subject in enumerate(subjects):
        age_s = AGES_DAYS[::-1][number * len(AGES_DAYS) // COMMITS] * DAY_S
        when = {"GIT_COMMITTER_DATE": f"{int(time.time()) - age_s + number} +0000"}
        git(folder, "commit", "--quiet", "--allow-empty", "--message", subject, environment=when)
    return folder, subjects


@pytest.fixture
def room() -> Iterator[Path]:
    """A place for temporary files that the servers' own user can enter."""
    path = Path(tempfile.mkdtemp(prefix="demo-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def git(
    folder: Path, *command: str, stdin: bytes | None = None, environment: Mapping[str, str] | None = None
) -> None:
    nobody = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(
        ["git", *nobody, *command],
        cwd=folder,
        check=True,
        capture_output=True,
        input=stdin,
        env={**os.environ, **(environment or {})},
    )


def commit_all(folder: Path, messages: list[tuple[float, str]]) -> None:
    """A repository of commits, given by their age in days and message, oldest first."""
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    stream = b""
    for age_days, message in messages:
        data, when = message.encode(), int(time.time() - age_days * DAY_S)
        stream += b"commit refs/heads/main\ncommitter nobody <n@example.org> %d +0000\n" % when
        stream += b"data %d\n%s\n" % (len(data), data)
    git(folder, "fast-import", "--quiet", stdin=stream)


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def espalier(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "NO_COLOR": "1", **environment}
    with anyio.fail_after(WAIT_S):
        done = await anyio.run_process([ESPALIER, *command], check=False, cwd=folder, env=env)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


async def query(postgres_url: str, statement: str, *values: object) -> list[Any]:
    connection = await asyncpg.connect(postgres_url)
    try:
        return list(await connection.fetch(statement, *values))
    finally:
        await connection.close()


# Answers of MCP servers, journalled before the artifact's entry and settled before its row was made.
ANSWERS = """
    select told.body ->> 'content' as shown, call.result -> 'content' -> 0 ->> 'text' as whole
    from journal told
    join journal made on made.run_id = told.run_id
        and made.body ->> 'kind' = 'artifact_created' and made.body ->> 'artifact_id' = $1
    join artifacts on artifacts.run_id = told.run_id
    join tool_calls call on call.run_id = told.run_id and call.call_id = told.body ->> 'call_id'
    where told.body ->> 'kind' = 'tool_returned' and told.entry_no < made.entry_no
        and call.tool = any($2) and call.state = 'done' and call.settled_at < artifacts.created_at
    order by told.entry_no
"""


@slow
async def test_every_subject_is_in_an_answer_of_mcp_that_was_journalled_before_the_artifact(
    repository: tuple[Path, list[str]],
) -> None:
    folder, subjects = repository
    found = await find_repository(folder)
    timeline = Timeline(Console(file=StringIO()))
    async with (
        demo_runtime(found, None, quiet) as runtime,
        AepClient(runtime.base_url, runtime.api_key) as client,
    ):
        artifact_id = await embed(client, found, timeline, scripted=True)
        notes = b"".join([piece async for piece in client.artifact_bytes(artifact_id)]).decode()
        rows = await query(runtime.servers.postgres_url, ANSWERS, artifact_id, TOOLSET)
        (message,) = (await client.message_list()).items
        (run,) = await query(runtime.servers.postgres_url, "select inputs::text from runs")

    for place in ("shown", "whole"):
        parts = [[subject for subject in subjects if subject in row[place]] for row in rows]
        assert parts == [subjects[20:], subjects[10:20], subjects[:10]]
    assert [subject for subject in subjects if subject not in notes] == []
    assert (message.body, message.sender.kind) == (WORD, "embedder")
    assert message.read_at is not None and WORD["text"] in notes
    assert str(folder) in run["inputs"]
    assert [subject for subject in subjects if subject.split()[1] in run["inputs"]] == []


@slow
async def test_the_command_shows_the_course_of_the_run_and_where_the_notes_are(
    repository: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, subjects = repository
    notes = tmp_path / "notes.md"

    run = await espalier(tmp_path, "demo", "--repo", str(folder), "--output", str(notes))

    assert run.returncode == 0, run.stderr
    text = notes.read_text()
    assert [subject for subject in subjects if subject not in text] == []
    course = [
        "← mcp.git.git_log Commit history: Commit: ",
        "✎ memory record release-notes/past-month",
        "☾ cycle ended, asleep",
        "message.send",
        "✉ message msg_",
        "◆ artifact release-notes.md",
        "✔ run ended, complete",
        f"Release notes: {notes} ({len(text.encode())} bytes)",
    ]
    assert [words for words in course if words not in run.stdout] == []
    places = [run.stdout.index(words) for words in course]
    assert places == sorted(places)


@slow
async def test_of_a_history_that_is_too_long_the_notes_say_what_is_left_out(tmp_path: Path) -> None:
    folder, notes = tmp_path / "long", tmp_path / "notes.md"
    long = "and one more thing, which takes a line\n" * 20
    messages = [(300 - number / 10, f"Old {number}\n\n{long}") for number in range(1200)]
    messages += [(2, "Huge\n\n" + "x" * ANSWER_BYTES_MAX)]
    commit_all(folder, messages)

    run = await espalier(tmp_path, "demo", "--repo", str(folder), "--output", str(notes))

    assert run.returncode == 0, run.stderr
    recent, year, older = re.findall(
        r"^~{32}text\n(.*?)\n~{32}$", notes.read_text(), re.DOTALL | re.MULTILINE
    )
    assert f"more than {ANSWER_BYTES_MAX} bytes" in recent
    assert f"Left out, as the release notes say in its place: mcp.git.git_log failed: {recent}" in run.stdout
    assert "Old 1199\n" in year and year.endswith(CUT) and len(year) > EXCERPT_BYTES_MAX * 0.9
    assert older == "Commit history:\n"
    told = notes.read_text().count("\nCommit: ")
    assert f"{len(messages) - told} of {len(messages)} commits are not in them" in run.stdout


@slow
async def test_commits_that_git_hides_behind_an_older_one_are_said_to_be_missing(tmp_path: Path) -> None:
    folder, notes = tmp_path / "clocks", tmp_path / "notes.md"
    commit_all(folder, [(3, "Hidden"), (800, "By a wrong clock"), (1, "Newest")])

    run = await espalier(tmp_path, "demo", "--repo", str(folder), "--output", str(notes))

    assert run.returncode == 0, run.stderr
    told = [subject in notes.read_text() for subject in ("Hidden", "By a wrong clock", "Newest")]
    assert told == [False, True, True]
    assert "1 of 3 commits are not in them" in run.stdout


def test_the_plan_uses_the_tools_of_a_reader_and_nothing_else() -> None:
    with as_file(files("espalier_local").joinpath(PLAN)) as path:
        tools = {call.tool for planned in load_plan(path).answers for call in planned.calls}
    assert tools == {"mcp.git.git_log", *SELF_TOOLS}
    assert {tool for tool in tools if "." in tool} <= set(TOOLSET)


# --- with a model ----------------------------------------------------------------------------------------

MEMORY = {"namespace": "release-notes"}


@slow
async def test_the_same_agent_runs_on_a_model(repository: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, subjects = repository
    notes = tmp_path / "notes.md"
    replies = [
        answer(None, ("mcp__git__git_log", {"repo_path": str(folder), "max_count": 50})),
        answer(None, ("learning_memory_write", {**MEMORY, "key": "all", "value": "It changed a lot."})),
        answer(None, ("sleep", {"duration_seconds": 3600})),
        answer(None, ("inbox_read", {}), ("learning_memory_read", MEMORY)),
        answer(None, ("artifact_create", {"name": "release-notes.md", "content": "# It changed a lot."})),
        answer("The notes are written."),
    ]
    async with fake_openai(replies) as server:
        where = {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": server.key}
        command = ["demo", "--repo", str(folder), "--output", str(notes), "--model", server.model]
        run = await espalier(tmp_path, *command, **where)

    assert (run.returncode, server.refusals, server.replies) == (0, [], []), run.stderr
    assert notes.read_text() == "# It changed a lot."
    offered = {tool["function"]["name"] for tool in server.requests[0]["tools"]}
    assert {name for name in offered if name.startswith("mcp__")} == {
        tool.replace(".", "__") for tool in TOOLSET
    }
    told = ["\n".join(message["content"] or "" for message in each["messages"]) for each in server.requests]
    assert "release-notes.md" in told[0] and str(folder) in told[0]
    assert [subject for subject in subjects if subject not in told[1]] == []
    assert "It changed a lot." in told[4] and WORD["text"] in told[4]


@slow
async def test_a_model_that_makes_no_artifact_is_told_of_in_one_sentence(
    repository: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, _ = repository
    notes = tmp_path / "notes.md"
    async with fake_openai([answer("I would rather\nnot.")]) as server:
        where = {"OPENAI_BASE_URL": server.base_url, "OPENAI_API_KEY": server.key}
        command = ["demo", "--repo", str(folder), "--output", str(notes), "--model", server.model]
        run = await espalier(tmp_path, *command, **where)

    assert (run.returncode, notes.exists()) == (2, False)
    assert run.stderr == "espalier: The run ended without an artifact; it said: I would rather not.\n"


# --- what is in the way ----------------------------------------------------------------------------------


@slow
async def test_what_is_in_the_way_is_one_sentence_before_anything_is_started(
    repository: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, _ = repository
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init")
    refused = {
        ("--repo", f"{tmp_path}/none"): f"There is no folder {tmp_path}/none.",
        ("--repo", f"{tmp_path}/empty"): f"The git repository {tmp_path}/empty has no commits yet.",
        ("--repo", str(tmp_path)): f"{tmp_path} cannot be read as a git repository: not a git repository",
        ("--repo", str(folder), "--output", f"{tmp_path}/none/n.md"): (
            f"There is no folder {tmp_path}/none to write n.md to."
        ),
        ("--repo", str(folder), "--model", "gpt"): "neither OPENAI_BASE_URL nor OPENAI_API_KEY says where",
    }
    unset = {"OPENAI_BASE_URL": "", "OPENAI_API_KEY": ""}
    for command, sentence in refused.items():
        run = await espalier(tmp_path, "demo", *command, **unset)
        assert (run.returncode, run.stdout) == (2, "")
        assert run.stderr.startswith("espalier: ") and run.stderr.count("\n") == 1
        assert sentence in run.stderr


@slow
async def test_a_terminated_demo_leaves_no_folder_and_no_process_behind(
    repository: tuple[Path, list[str]], tmp_path: Path, room: Path
) -> None:
    folder, _ = repository
    environment = {**os.environ, "TMPDIR": str(room), "ESPALIER_DATA_DIR": str(room / "data")}
    command = [ESPALIER, "demo", "--repo", str(folder)]
    with anyio.fail_after(WAIT_S):
        async with await anyio.open_process(command, cwd=tmp_path, env=environment) as demo:
            assert demo.stdout is not None
            said = b""
            while b"mcp.git.git_log" not in said:
                said += await demo.stdout.receive()
            started = psutil.Process(demo.pid).children(recursive=True)
            demo.terminate()
            async for _ in demo.stdout:
                pass
            assert await demo.wait() == INTERRUPTED
    assert names_in(room) == ["data"]
    assert [
        each.name() for each in started if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
    ] == []
