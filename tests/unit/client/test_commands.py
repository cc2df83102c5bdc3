"""The embedder's commands, against a scripted runtime: what they send, what they print, how they fail."""

import hashlib
import io
import json
import os
import sys
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
import anyio.to_thread
import pytest
from rich.console import Console
from tests.unit.client.conftest import KEY
from tests.unit.client.loopback import (
    RUN,
    Answer,
    Loopback,
    envelope,
    error,
    events,
    frame,
    open_loopback,
    refusal,
    reply,
    result,
)
from tests.unit.client.test_follow import run
from typer.testing import CliRunner, Result

from espalier_client.commands import app_groups
from espalier_client.commands import events as events_command
from espalier_client.commands.listing import LISTED_MAX, Listing

pytestmark = pytest.mark.anyio

EVENTS = f"GET /aep/v1/runs/{RUN}/events"
NOTES = b"# notes\n"
STORED = reply(200, NOTES, etag=f'"{hashlib.sha256(NOTES).hexdigest()}"')
LIMITS = {"max_cycles": 100, "max_subagents": 8, "max_tool_calls_per_cycle": 24, "max_wall_seconds": 604800}
ENDS_S = 30.0
QUIET_S = 0.2
BUDGETS = {"tokens_per_cycle": 100_000, "tool_calls_per_cycle": 12, "seconds_per_cycle": 300}


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder to stand in, and no variables of ours."""
    monkeypatch.chdir(tmp_path)
    for name in ("ESPALIER_BASE_URL", "ESPALIER_API_KEY", "ESPALIER_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def known(runtime: Loopback, tmp_path: Path) -> Loopback:
    """The runtime, with the profile that `up` would leave."""
    folder = tmp_path / ".espalier"
    folder.mkdir()
    (folder / "profile.json").write_text(json.dumps({"base_url": runtime.url, "api_key": KEY}))
    return runtime


async def invoke(*words: str, **env: str) -> Result:
    """The command runs its own event loop, so it gets a thread."""
    return await anyio.to_thread.run_sync(partial(CliRunner().invoke, app_groups(), list(words), env=env))


def agent(params: dict[str, Any]) -> dict[str, Any]:
    return {
        **params,
        "id": "agt_1",
        "root_agent_id": "agt_1",
        "parent_agent_id": None,
        "lifecycle_state": "active",
        "next_wake_at": None,
        "subject_ids": [],
        "external_mcp_servers": [],
        "metadata": {},
        "runner": None,
        "max_live_runs": 8,
        "created_at": "2026-01-01T00:00:00.000Z",
        "updated_at": "2026-01-01T00:00:00.000Z",
    }


SHOWN = agent(
    {
        "name": "x",
        "constitution": {"immutable_directives": "", "mutable_prompt": "", "mutable_prompt_policy": "auto"},
        "toolset": [],
        "ceilings": LIMITS,
        "budgets": BUDGETS,
    }
)


def agents_page(number: int, cursor: str | None) -> dict[str, Any]:
    items = [SHOWN] * number
    return {"items": items, "cursor": cursor, "agents": items, "next_cursor": cursor}


def agents(number: int, cursor: str | None) -> Answer:
    return result(agents_page(number, cursor))


async def echo_agent(request: Any, stream: Any) -> None:
    await result(agent(request.message["params"]))(request, stream)


# ---------------------------------------------------------------- agent


async def test_a_name_is_enough_for_an_agent(known: Loopback) -> None:
    known.on("POST agent.create", echo_agent)

    done = await invoke("agent", "create", "--name", "x")

    assert (done.exit_code, done.stdout, done.stderr) == (0, "agt_1\n", "")
    (asked,) = known.asked("POST agent.create")
    assert asked.message["params"]["ceilings"] == LIMITS
    assert asked.message["params"]["budgets"] == BUDGETS


async def test_flags_win_over_the_file_and_the_file_over_defaults(known: Loopback, tmp_path: Path) -> None:
    known.on("POST agent.create", echo_agent)
    (tmp_path / "a.yaml").write_text(
        "name: from file\nceilings: {max_cycles: 7, max_subagents: 1}\ntoolset: [t]\n"
    )

    done = await invoke(
        "agent", "create", "--file", "a.yaml", "--max-cycles", "3", "--metadata", '{"a": 1e3}', "--json"
    )

    assert json.loads(done.stdout)["name"] == "from file"
    params = known.asked("POST agent.create")[0].message["params"]
    assert params["ceilings"] == {**LIMITS, "max_cycles": 3, "max_subagents": 1}
    assert (params["toolset"], params["metadata"]) == (["t"], {"a": 1000.0})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["agent", "create"], "espalier: name does not fit: Field required.\n"),
        (
            ["agent", "create", "--file", "none.yaml"],
            "espalier: none.yaml cannot be read: No such file or directory.\n",
        ),
        (
            ["agent", "create", "--name", "x", "--metadata", "{"],
            "espalier: What was given is neither JSON nor YAML",
        ),
        (
            ["agent", "create", "--name", "x", "--max-cycles", "0"],
            "espalier: ceilings.max_cycles does not fit: ",
        ),
        (["run", "start", "agt_1", "--goal", "g", "--inputs", "[1]"], "espalier: [1] cannot be read: "),
        (["agent", "update", "agt_1"], "espalier: Nothing to change was given; "),
        (["agent", "update", "agt_1", "--metadata", "[]"], "espalier: [] cannot be read: "),
        (
            ["agent", "update", "agt_1", "--max-cycles", "0"],
            "espalier: ceilings.max_cycles does not fit: ",
        ),
    ],
)
async def test_what_cannot_be_sent_is_one_sentence(known: Loopback, words: list[str], sentence: str) -> None:
    done = await invoke(*words)

    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1
    assert known.requests == []


async def test_an_update_sends_what_was_given_and_no_more(known: Loopback) -> None:
    known.on("POST agent.update", result(SHOWN))

    named = await invoke("agent", "update", "agt_1", "--name", "y")
    limited = await invoke("agent", "update", "agt_1", "--max-tool-calls", "2", "--metadata", "{}")

    assert (named.exit_code, named.stdout, limited.exit_code) == (0, "agt_1 updated\n", 0)
    assert [asked.message["params"] for asked in known.asked("POST agent.update")] == [
        {"agent_id": "agt_1", "name": "y"},
        {"agent_id": "agt_1", "ceilings": {"max_tool_calls_per_cycle": 2}, "metadata": {}},
    ]


# ---------------------------------------------------------------- lists


async def test_a_list_asks_for_what_is_left_of_its_limit_and_says_that_there_is_more(known: Loopback) -> None:
    known.on("POST agent.list", agents(200, "c1"), agents(200, "c2"), agents(3, "c3"))

    done = await invoke("agent", "list", "--limit", "403", "--state", "active")

    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 1 + 403)
    assert done.stderr == "There are more than these 403; --limit or --all shows more.\n"
    assert [asked.message["params"] for asked in known.asked("POST agent.list")] == [
        {"lifecycle_state": "active", "limit": 200},
        {"lifecycle_state": "active", "limit": 200, "cursor": "c1"},
        {"lifecycle_state": "active", "limit": 3, "cursor": "c2"},
    ]


@pytest.mark.parametrize(
    ("pages", "shown", "said"),
    [
        ([agents_page(2, None)], 2, ""),
        ([agents_page(0, None)], 0, ""),
        ([agents_page(9, None)], 5, "There are more than these 5; --limit or --all shows more.\n"),
        ([agents_page(5, None)], 5, ""),
        (
            [agents_page(2, "c"), agents_page(0, "c")],
            2,
            "There are more than these 5; --limit or --all shows more.\n",
        ),
    ],
    ids=[
        "a short page",
        "nothing",
        "a page longer than asked for",
        "just enough",
        "pages that bring nothing",
    ],
)
async def test_a_list_ends_whatever_a_runtime_answers(
    known: Loopback, pages: list[dict[str, Any]], shown: int, said: str
) -> None:
    known.on("POST agent.list", *map(result, pages))

    done = await invoke("agent", "list", "--limit", "5", "--json")

    assert (done.exit_code, len(done.stdout.splitlines()), done.stderr) == (0, shown, said)
    assert len(known.asked("POST agent.list")) == len(pages)


@pytest.mark.parametrize("words", [["--json"], []], ids=["for machines", "for people"])
async def test_a_reader_that_leaves_ends_a_list_without_a_word(
    known: Loopback, tmp_path: Path, words: list[str]
) -> None:
    """As `| head -n 1` does: the pages after the one that it left on are not asked for."""
    known.on("POST agent.list", agents(200, "and so on"))
    main = "from espalier_client.commands import app_groups; app_groups()()"
    command = [sys.executable, "-c", main, "agent", "list", "--all", *words]

    reading, writing = os.pipe()

    with anyio.fail_after(ENDS_S):
        async with await anyio.open_process(command, stdout=writing, stderr=PIPE) as process:
            os.close(writing)
            await anyio.to_thread.run_sync(os.read, reading, 1)
            os.close(reading)
            assert process.stderr is not None
            said = [chunk async for chunk in process.stderr]
            code = await process.wait()

    assert (code, said) == (1, [])
    assert 0 < len(known.asked("POST agent.list")) < LISTED_MAX / 200


def test_on_a_narrow_terminal_names_are_cut_and_ids_are_not() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    listing = Listing(console, [("agent", 30), ("state", 9), ("created, UTC", 16)], "name")

    listing.row("agt_" + "0" * 26, "cancelled", "2026-01-01 00:00", "n" * 99)

    assert isinstance(console.file, io.StringIO)
    heading, row = console.file.getvalue().splitlines()
    assert heading.split() == ["agent", "state", "created,", "UTC", "name"]
    assert row == f"agt_{'0' * 26}  cancelled  2026-01-01 00:00  {'n' * 18}…"
    assert len(row) == 80


# ---------------------------------------------------------------- run


async def test_a_run_starts_with_its_inputs(known: Loopback, tmp_path: Path) -> None:
    known.on("POST run.create", result(run("running")))
    (tmp_path / "in.json").write_text('{"a": [1, null]}')

    done = await invoke("run", "start", "agt_1", "--goal", "g", "--inputs", "in.json")

    assert (done.exit_code, done.stdout) == (0, f"{RUN}\n")
    assert known.asked("POST run.create")[0].message["params"] == {
        "agent_id": "agt_1",
        "goal": "g",
        "inputs": {"a": [1, None]},
    }


@pytest.mark.parametrize(("state", "code"), [("complete", 0), ("error", 1), ("cancelled", 1)])
async def test_following_shows_the_run_and_tells_how_it_ended(known: Loopback, state: str, code: int) -> None:
    known.on("POST run.create", result(run("running")))
    known.on(EVENTS, events(frame(1, "run.started"), frame(2, "run.ended", final_state=state)))

    done = await invoke("run", "start", "agt_1", "--goal", "g", "--follow")

    assert done.exit_code == code
    assert len(done.stdout.splitlines()) == 2
    assert f"run ended, {state}" in done.stdout


async def test_for_machines_each_event_is_one_line_as_it_came(known: Loopback) -> None:
    known.on(EVENTS, events(frame(1, "run.started"), frame(2, "run.ended", final_state="complete")))

    done = await invoke("run", "follow", RUN, "--json")

    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        envelope(1, "run.started"),
        envelope(2, "run.ended", final_state="complete"),
    ]


@pytest.mark.parametrize(
    ("word", "method", "state"),
    [("cancel", "run.cancel", "cancelled"), ("continue", "run.continue", "running")],
)
async def test_a_run_is_cancelled_and_woken(known: Loopback, word: str, method: str, state: str) -> None:
    known.on(f"POST {method}", result(run(state)))

    done = await invoke("run", word, RUN)

    assert (done.exit_code, done.stdout) == (0, f"{RUN} {state}\n")


# ---------------------------------------------------------------- events


async def test_events_carry_the_numbers_that_since_takes(known: Loopback) -> None:
    known.on("POST run.get", result({**run("complete"), "ended_at": "2026-01-01T00:00:01.000Z"}))
    known.on(
        EVENTS,
        events(frame(12, "cycle.started", cycle_number=3), frame(13, "run.ended", final_state="error")),
    )

    done = await invoke("events", RUN, "--since", "11")

    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (
        "    12       0.0s  cycle 3   ▶ cycle 3 begins\n    13       0.0s  cycle 3   ✖ run ended, error\n"
    )
    assert known.asked(EVENTS)[0].query == {"since": "11"}


async def test_a_run_that_ends_in_a_silence_is_read_to_its_end(
    known: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_command, "QUIET_S", QUIET_S)
    ended = {**run("complete"), "ended_at": "2026-01-01T00:00:01.000Z"}
    known.on("POST run.get", result(run("running")), result(ended))
    known.on(EVENTS, events(frame(1, "run.started"), hold=True), events(frame(2, "run.ended")))

    done = await invoke("events", RUN, "--json")

    assert (done.exit_code, done.stderr) == (0, "")
    assert [json.loads(line)["event_id"] for line in done.stdout.splitlines()] == [f"{1:016d}", f"{2:016d}"]
    assert [asked.query for asked in known.asked(EVENTS)] == [{}, {"since": f"{1:016d}"}]


async def test_a_runtime_that_went_away_is_not_taken_for_a_silent_run(
    known: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_command, "QUIET_S", QUIET_S)
    known.on("POST run.get", result(run("running")), error(-32000, "who are you", 401))
    known.on(EVENTS, events(frame(1, "run.started"), hold=True))

    done = await invoke("events", RUN)

    assert (done.exit_code, len(done.stdout.splitlines())) == (2, 1)
    assert done.stderr == "espalier: who are you [authn_failed]\n"


async def test_events_take_a_runtime_and_a_key_like_the_groups_do(runtime: Loopback) -> None:
    runtime.on("POST run.get", error(-32008, "no run"))

    done = await invoke("events", RUN, "--base-url", runtime.url, "--key", "k1")

    assert (done.exit_code, done.stderr) == (2, "espalier: no run [tool_not_found]\n")
    assert runtime.asked("POST run.get")[0].headers["authorization"] == "Bearer k1"


# ---------------------------------------------------------------- artifact


async def test_an_artifact_is_written_to_a_file_or_poured_out(known: Loopback, tmp_path: Path) -> None:
    known.on("GET /aep/v1/artifacts/art_1/bytes", STORED)

    poured = await invoke("artifact", "get", "art_1")
    written = await invoke("artifact", "get", "art_1", "-o", "notes.md")

    assert poured.stdout_bytes == NOTES
    assert (written.exit_code, written.stdout) == (0, "")
    assert (tmp_path / "notes.md").read_bytes() == NOTES


async def test_a_damaged_artifact_leaves_no_file_and_spoils_none(known: Loopback, tmp_path: Path) -> None:
    known.on("GET /aep/v1/artifacts/art_1/bytes", reply(200, b"xx", etag=f'"{"0" * 64}"'))
    (tmp_path / "notes.md").write_bytes(NOTES)

    done = await invoke("artifact", "get", "art_1", "-o", "notes.md")

    assert done.exit_code == 2
    assert sorted(os.listdir(tmp_path)) == [".espalier", "notes.md"]  # noqa: PTH208 - pathlib is for sync code
    assert (tmp_path / "notes.md").read_bytes() == NOTES


# ---------------------------------------------------------------- memory and messages


def record(number: int, key: str = "k", value: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "id": f"mem_{number:026}",
        "tree_root_id": "agt_1",
        "namespace": "n",
        "key": key,
        "value": value,
        "created_by_agent_id": "agt_1",
        "created_at": "2026-01-01T00:00:00.000Z",
        "embedding": None,
        "subject_id": None,
        "ttl_seconds": None,
        **more,
    }


def message(number: int, sender: str, body: Any, read_at: str | None = None) -> dict[str, Any]:
    return {
        "id": f"msg_{number:026}",
        "from_agent_id": f"agt_{number:026}",
        "to_agent_id": "agt_1",
        "tree_root_id": "agt_1",
        "body": body,
        "sent_at": "2026-01-01T00:00:00.000Z",
        "delivered_at": read_at,
        "read_at": read_at,
        "sender": {"kind": sender},
    }


def whole_list(*items: dict[str, Any]) -> Answer:
    listed = list(items)
    return result(
        {"items": listed, "records": listed, "messages": listed, "cursor": None, "next_cursor": None}
    )


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("be brief", "be brief"),
        ('"be brief"', "be brief"),
        ('{"a": [1, null]}', {"a": [1, None]}),
        ("12.5", 12.5),
        ("true", True),
        ("007", "007"),
        ("NaN", "NaN"),
        ("", ""),
        ("ünï", "ünï"),
    ],
)
async def test_a_value_is_json_or_text_that_is_none(known: Loopback, given: str, value: Any) -> None:
    known.on("POST memory.write", result(record(1)))
    known.on("POST message.send", result(message(1, "embedder", None)))

    written = await invoke("memory", "write", "agt_1", "n", "k", given)
    sent = await invoke("message", "send", "agt_1", given)

    assert (written.exit_code, written.stdout) == (0, f"mem_{1:026}\n")
    assert (sent.exit_code, sent.stdout) == (0, f"msg_{1:026}\n")
    (asked,), (told,) = known.asked("POST memory.write"), known.asked("POST message.send")
    assert asked.message["params"] == {"tree_root_id": "agt_1", "namespace": "n", "key": "k", "value": value}
    assert told.message["params"] == {"to_agent_id": "agt_1", "body": value}


async def test_a_value_may_come_from_standard_input(known: Loopback) -> None:
    known.on("POST memory.write", result(record(1)))

    words = ["memory", "write", "agt_1", "n", "k", "-", "--subject", "s1", "--ttl", "60", "--json"]
    done = await anyio.to_thread.run_sync(partial(CliRunner().invoke, app_groups(), words, input='{"a": 1}'))

    assert json.loads(done.stdout) == record(1)
    assert known.asked("POST memory.write")[0].message["params"] == {
        "tree_root_id": "agt_1",
        "namespace": "n",
        "key": "k",
        "value": {"a": 1},
        "subject_id": "s1",
        "ttl_seconds": 60,
    }


NAME_ONE = "espalier: Name either a record, or --tree and what of it is to go.\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["memory", "write", "a", "n", "k", '{"a": 1'], "espalier: The value is no JSON: "),
        (["message", "send", "a", "[1,]"], "espalier: The value is no JSON: "),
        (["memory", "write", "a", "n", "k", "v", "--ttl", "0"], "espalier: ttl_seconds does not fit: "),
        (["memory", "write", "a", "", "k", "v"], "espalier: namespace does not fit: "),
        (["memory", "search", "a", "n", "q" * 5000], "espalier: query does not fit: "),
        (["memory", "read", "a", "n" * 500], "espalier: namespace does not fit: "),
        (["memory", "delete"], NAME_ONE),
        (["memory", "delete", "mem_1", "--tree", "agt_1"], NAME_ONE),
        (["memory", "delete", "mem_1", "--namespace", "n"], NAME_ONE),
        (["memory", "delete", "--namespace", "n"], NAME_ONE),
    ],
)
async def test_a_slip_in_a_word_about_memory_or_messages_sends_nothing(
    known: Loopback, words: list[str], sentence: str
) -> None:
    for method in ("memory.write", "memory.read", "memory.search", "memory.delete", "message.send"):
        known.on(f"POST {method}", error(-32602, "sent"))

    done = await invoke(*words)

    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1
    assert [asked.name for asked in known.requests if asked.name != "POST initialize"] == []


async def test_records_are_shown_one_a_line_and_obeyed_by_no_terminal(known: Loopback) -> None:
    records = [record(2, "tone", "be\nbrief\x1b[2J"), record(1, "[red]a\x07", {"b": [1]})]
    found = [{**records[0], "score": 2.25}]
    known.on("POST memory.read", whole_list(*records))
    known.on("POST memory.search", whole_list(*found))

    read = await invoke("memory", "read", "agt_1", "n")
    one = await invoke("memory", "read", "agt_1", "n", "tone", "--json")
    searched = await invoke("memory", "search", "agt_1", "n", "brief words", "--limit", "3")
    for_machines = await invoke("memory", "search", "agt_1", "n", "brief", "--json")

    assert (read.exit_code, read.stderr, searched.exit_code) == (0, "", 0)
    head = f"{'record':30}  {'created, UTC':16}  {'key':24}  value\n"
    rows = [
        f"mem_{2:026}  2026-01-01 00:00  {'tone':24}  be brief [2J\n",
        f'mem_{1:026}  2026-01-01 00:00  {"[red]a ":24}  {{"b":[1]}}\n',
    ]
    assert read.stdout == head + "".join(rows)
    assert searched.stdout == "score  " + head + " 2.25  ".lstrip().ljust(7) + rows[0]
    assert [json.loads(line) for line in one.stdout.splitlines()] == records
    assert [json.loads(line) for line in for_machines.stdout.splitlines()] == found
    assert [asked.message["params"] for asked in known.asked("POST memory.read")] == [
        {"tree_root_id": "agt_1", "namespace": "n", "limit": 50},
        {"tree_root_id": "agt_1", "namespace": "n", "key": "tone", "limit": 50},
    ]
    assert [asked.message["params"] for asked in known.asked("POST memory.search")] == [
        {"tree_root_id": "agt_1", "namespace": "n", "query": "brief words", "k": 3},
        {"tree_root_id": "agt_1", "namespace": "n", "query": "brief", "k": 10},
    ]


async def test_a_record_or_a_part_of_a_tree_is_deleted(known: Loopback) -> None:
    known.on("POST memory.delete", result({"deleted": 1}), result({"deleted": 7}))

    one = await invoke("memory", "delete", "mem_1")
    many = await invoke("memory", "delete", "--tree", "a", "--namespace", "n", "--subject", "s", "--json")

    assert (one.exit_code, one.stdout, many.stdout) == (0, "1 deleted\n", '{"deleted":7}\n')
    assert [asked.message["params"] for asked in known.asked("POST memory.delete")] == [
        {"id": "mem_1"},
        {"tree_root_id": "a", "namespace": "n", "subject_id": "s"},
    ]


async def test_messages_are_shown_with_who_sent_them_and_when_they_were_read(known: Loopback) -> None:
    told = message(2, "embedder", "go\x1b]0;owned\x07 on", "2026-01-02T00:00:00.000Z")
    said = message(1, "agent", {"b": 1})
    known.on("POST message.list", whole_list(told, said))
    known.on("POST message.inbox", whole_list(said))

    listed = await invoke("message", "list", "--agent", "agt_1", "--tree", "agt_2")
    unread = await invoke("message", "inbox", "agt_1")
    for_machines = await invoke("message", "inbox", "agt_1", "--json")

    assert (listed.exit_code, unread.exit_code) == (0, 0)
    assert listed.stdout.splitlines()[1:] == [
        f"msg_{2:026}  {'embedder':30}  {'agt_1':30}  2026-01-01 00:00  2026-01-02 00:00  go ]0;owned  on",
        f'msg_{1:026}  agt_{1:026}  {"agt_1":30}  2026-01-01 00:00  {"":16}  {{"b":1}}',
    ]
    assert unread.stdout.splitlines()[1:] == [f'msg_{1:026}  agt_{1:026}  2026-01-01 00:00  {{"b":1}}']
    assert json.loads(for_machines.stdout) == said
    asked = known.asked("POST message.list")[0].message["params"]
    assert asked == {"agent_id": "agt_1", "tree_root_id": "agt_2", "limit": 50}


# ---------------------------------------------------------------- where to, and with which key


async def test_several_gateways_are_named_with_commas(runtime: Loopback, tmp_path: Path) -> None:
    runtime.on("POST run.cancel", result(run("cancelled")))
    async with open_loopback() as gone:
        both = f" {gone.url} ,{runtime.url}/,"
    (tmp_path / ".espalier").mkdir()
    (tmp_path / ".espalier/profile.json").write_text(json.dumps({"base_url": both, "api_key": "k3"}))

    codes = [
        (await invoke("run", "--base-url", both, "--key", "k1", "cancel", RUN)).exit_code,
        (await invoke("run", "cancel", RUN, ESPALIER_BASE_URL=both, ESPALIER_API_KEY="k2")).exit_code,
        (await invoke("run", "cancel", RUN)).exit_code,
        (await invoke("run", "--base-url", runtime.url, "cancel", RUN)).exit_code,
    ]

    assert codes == [0, 0, 0, 0]
    keys = [asked.headers["authorization"] for asked in runtime.asked("POST run.cancel")]
    assert keys == ["Bearer k1", "Bearer k2", "Bearer k3", "Bearer k3"]


async def test_a_kept_key_is_sent_to_none_of_several_when_one_is_another_runtime(known: Loopback) -> None:
    known.on("POST run.cancel", result(run("cancelled")))

    done = await invoke("run", "--base-url", f"{known.url},http://127.0.0.1:9", "cancel", RUN)

    assert (done.exit_code, known.requests) == (2, [])
    assert done.stderr == (
        "espalier: No key is known for http://127.0.0.1:9; pass --key or set ESPALIER_API_KEY.\n"
    )


@pytest.mark.parametrize(
    "answer", [refusal(404, "tool_not_found", -32008), refusal(404, "t\x1b]0;owned\x07", -32008)]
)
async def test_a_refusal_is_one_printable_sentence(known: Loopback, answer: Answer) -> None:
    known.on(EVENTS, answer)

    done = await invoke("run", "follow", RUN)

    assert done.exit_code == 2
    assert done.stderr.rstrip("\n").isprintable()
    assert done.stderr.startswith("espalier: no [t")


async def test_options_and_variables_win_over_the_profile(runtime: Loopback) -> None:
    runtime.on("POST run.cancel", result(run("cancelled")))

    given = await invoke("run", "--base-url", runtime.url, "--key", "k1", "cancel", RUN)
    told = await invoke("run", "cancel", RUN, ESPALIER_BASE_URL=runtime.url, ESPALIER_API_KEY="k2")

    assert (given.exit_code, told.exit_code) == (0, 0)
    keys = [asked.headers["authorization"] for asked in runtime.asked("POST run.cancel")]
    assert keys == ["Bearer k1", "Bearer k2"]


async def test_the_profile_of_another_folder_is_used_when_it_is_named(
    runtime: Loopback, tmp_path: Path
) -> None:
    runtime.on("POST run.cancel", result(run("cancelled")))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/profile.json").write_text(json.dumps({"base_url": runtime.url, "api_key": "k3"}))

    assert (await invoke("run", "--data-dir", "other", "cancel", RUN)).exit_code == 0
    assert runtime.asked("POST run.cancel")[0].headers["authorization"] == "Bearer k3"


async def test_a_kept_key_is_not_sent_to_another_runtime(known: Loopback) -> None:
    done = await invoke("run", "--base-url", "http://127.0.0.1:9", "cancel", RUN)

    assert done.exit_code == 2
    assert done.stderr == (
        "espalier: No key is known for http://127.0.0.1:9; pass --key or set ESPALIER_API_KEY.\n"
    )


async def test_without_any_runtime_the_way_to_one_is_told() -> None:
    done = await invoke("run", "cancel", RUN)

    assert done.exit_code == 2
    assert done.stderr == (
        "espalier: No runtime is known; start one with `espalier up`, or pass --base-url and --key.\n"
    )


async def test_no_output_holds_the_key(known: Loopback) -> None:
    known.on("POST run.cancel", error(-32000, "wrong key", 401))

    done = await invoke("run", "cancel", RUN)

    assert done.exit_code == 2
    assert KEY not in done.output
