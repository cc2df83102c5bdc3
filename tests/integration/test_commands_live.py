"""The embedder's commands against a real gateway: what they find and change is what the runtime holds."""

import json
import re
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.integration.person import Done, Espalier, at_the_terminal
from tests.integration.wire import AGENT, ANSWER_WAIT_S, UNKNOWN_TAIL, Gateway, Wire
from tests.integration.wire_artifacts import keep_artifact

from espalier_client.commands import agent, events, listing

pytestmark = pytest.mark.anyio

SMALL_PAGE = 2
FEW = 20
POLL_S = 0.02
QUIET_S = 0.5
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d"


@pytest.fixture
def espalier(
    wire: Wire,
    gateway: Gateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Espalier:
    """The command with the key of `wire`; its pages and its list of all are small, its patience is short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESPALIER_BASE_URL", gateway.base_url)
    monkeypatch.setenv("ESPALIER_API_KEY", wire.key)
    monkeypatch.setattr(listing, "PAGE_MAX", SMALL_PAGE)
    monkeypatch.setattr(agent, "LISTED_MAX", FEW)
    monkeypatch.setattr(events, "QUIET_S", QUIET_S)
    return at_the_terminal(monkeypatch, capsys)


def objects(done: Done) -> list[Any]:
    assert (done.code, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows(done: Done) -> list[list[str]]:
    """The cells of a list, its heading first."""
    assert done.code == 0
    return [re.split(r" {2,}", line) for line in done.stdout.splitlines()]


# ---------------------------------------------------------------- agent


async def test_agents_are_listed_over_as_many_pages_as_it_takes(espalier: Espalier, wire: Wire) -> None:
    ids = [await wire.agent(name=f"agent {number}", subject_ids=["s1"][number:]) for number in range(5)]
    newest_first = ids[::-1]

    plain = rows(await espalier("agent", "list"))
    found = {
        "all": objects(await espalier("agent", "list", "--all", "--json")),
        "tagged": objects(await espalier("agent", "list", "--subject", "s1", "--json")),
        "archived": objects(await espalier("agent", "list", "--state", "archived", "--json")),
    }
    cut = await espalier("agent", "list", "--limit", "3")

    assert plain[0] == ["agent", "state", "created, UTC", "name"]
    assert [(cells[0], cells[1], cells[3]) for cells in plain[1:]] == [
        (id_, "active", f"agent {ids.index(id_)}") for id_ in newest_first
    ]
    assert all(re.fullmatch(TIME, cells[2]) for cells in plain[1:])
    whole = [await wire.call("agent.get", agent_id=id_) for id_ in newest_first]
    assert found == {"all": whole, "tagged": whole[-1:], "archived": []}
    assert rows(cut) == plain[:4]
    assert cut.stderr == "There are more than these 3; --limit or --all shows more.\n"


async def test_an_agent_is_shown_in_full(espalier: Espalier, wire: Wire) -> None:
    constitution = {**AGENT["constitution"], "mutable_prompt": "first\nsecond\x1b[2J"}
    agent_id = await wire.agent(metadata={"team": "x"}, constitution=constitution)
    whole = await wire.call("agent.get", agent_id=agent_id)

    as_json, plain = (
        await espalier("agent", "get", agent_id, "--json"),
        await espalier("agent", "get", agent_id),
    )

    assert objects(as_json) == [whole]
    assert plain.code == 0
    assert re.sub(rf"{TIME}:\d\d UTC", "<time>", plain.stdout) == (
        f"agent          {agent_id}\n"
        "name           anybody\n"
        "state          active\n"
        "created        <time>\n"
        "updated        <time>\n"
        "ceilings       max_cycles 5\n"
        "               max_subagents 2\n"
        "               max_tool_calls_per_cycle 4\n"
        "               max_wall_seconds 300\n"
        "budgets        tokens_per_cycle 10000\n"
        "               tool_calls_per_cycle 4\n"
        "               seconds_per_cycle 60\n"
        "live runs      at most 8\n"
        "toolset        helix.web_search\n"
        'metadata       {"team":"x"}\n'
        "directives     Be brief.\n"
        "prompt         first\n"
        "               second [2J\n"
        "prompt policy  auto\n"
    )


async def test_an_update_changes_what_is_given_and_nothing_else(espalier: Espalier, wire: Wire) -> None:
    agent_id = await wire.agent(metadata={"old": 1})
    before = await wire.call("agent.get", agent_id=agent_id)

    named = await espalier("agent", "update", agent_id, "--name", "new")
    limited = await espalier(
        *("agent", "update", agent_id, "--metadata", '{"new": 2}', "--json"),
        *("--max-cycles", "1", "--max-subagents", "0", "--max-tool-calls", "2", "--max-wall-seconds", "3"),
        *("--tokens-per-cycle", "4", "--tool-calls-per-cycle", "5", "--seconds-per-cycle", "6"),
    )

    assert named == Done(0, f"{agent_id} updated\n")
    after = await wire.call("agent.get", agent_id=agent_id)
    assert objects(limited) == [after]
    assert after == {
        **before,
        "name": "new",
        "metadata": {"new": 2},
        "ceilings": {
            "max_cycles": 1,
            "max_subagents": 0,
            "max_tool_calls_per_cycle": 2,
            "max_wall_seconds": 3,
        },
        "budgets": {"tokens_per_cycle": 4, "tool_calls_per_cycle": 5, "seconds_per_cycle": 6},
        "updated_at": after["updated_at"],
    }


@pytest.mark.parametrize(("word", "state"), [("cancel", "cancelled"), ("archive", "archived")])
async def test_a_closed_agent_says_so_and_its_runs_have_ended(
    espalier: Espalier, wire: Wire, word: str, state: str
) -> None:
    agent_id = await wire.agent()
    run_id = await wire.run(agent_id)

    plain = await espalier("agent", word, agent_id)
    again = await espalier("agent", word, agent_id, "--json")

    assert plain == Done(0, f"{agent_id} {state}\n")
    assert objects(again) == [{**await wire.call("agent.get", agent_id=agent_id), "ok": True}]
    assert (await wire.call("run.get", run_id=run_id))["state"] == "cancelled"
    assert rows(await espalier("agent", "list", "--state", state))[1][:2] == [agent_id, state]


@pytest.mark.parametrize(
    "words",
    [
        ("agent", "get", "agt_"),
        ("agent", "update", "--name", "x", "agt_"),
        ("agent", "archive", "agt_"),
        ("agent", "cancel", "agt_"),
        ("run", "get", "run_"),
        ("run", "list", "agt_"),
        ("events", "run_"),
        ("artifact", "delete", "art_"),
        ("message", "inbox", "agt_"),
    ],
    ids=" ".join,
)
async def test_what_there_is_not_is_one_sentence(espalier: Espalier, words: tuple[str, ...]) -> None:
    done = await espalier(*words[:-1], words[-1] + UNKNOWN_TAIL)

    assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.endswith("[tool_not_found]\n")


# ---------------------------------------------------------------- run


async def test_runs_of_an_agent_are_listed_and_shown(espalier: Espalier, wire: Wire) -> None:
    agent_id = await wire.agent()
    goals = ["first", "second\nline\x1b[2J", "third"]
    ids = [await wire.run(agent_id, goal=goal, inputs={"number": 1}) for goal in goals]
    await wire.run()
    await wire.call("run.cancel", run_id=ids[0])

    plain = rows(await espalier("run", "list", agent_id))
    listed = objects(await espalier("run", "list", agent_id, "--json"))
    shown = objects(await espalier("run", "get", ids[0], "--json"))
    told = await espalier("run", "get", ids[0])

    assert plain[0] == ["run", "state", "started, UTC", "goal"]
    assert [(cells[0], cells[1], cells[3]) for cells in plain[1:]] == [
        (ids[2], "running", "third"),
        (ids[1], "running", "second line [2J"),
        (ids[0], "cancelled", "first"),
    ]
    held = [await wire.call("run.get", run_id=id_) for id_ in ids]
    assert (listed, shown) == (held[::-1], held[:1])
    assert re.sub(rf"{TIME}:\d\d UTC", "<time>", told.stdout) == (
        f"run           {ids[0]}\n"
        f"agent         {agent_id}\n"
        "state         cancelled\n"
        "cancel asked  <time>\n"
        "started       <time>\n"
        "ended         <time>\n"
        "cycles        0\n"
        'inputs        {"number":1}\n'
        "goal          first\n"
        f"result        {json.dumps(held[0]['result'], separators=(',', ':'))}\n"
    )


# ---------------------------------------------------------------- events


async def test_events_of_an_ended_run_are_printed_from_any_place(espalier: Espalier, wire: Wire) -> None:
    run_id = await wire.run()
    await wire.call("run.cancel", run_id=run_id)

    whole = await espalier("events", run_id)
    rest = objects(await espalier("events", run_id, "--since", "1", "--json"))
    nothing = await espalier("events", run_id, "--since", "2")

    agent_id = (await wire.call("run.get", run_id=run_id))["agent_id"]
    assert re.sub(r"\d\.\ds", "<span>", whole.stdout) == (
        f"     1       <span>            ● run {run_id} of {agent_id}\n"
        "     2       <span>            ✖ run ended, cancelled: cancelled\n"
    )
    assert [(each["event_id"], each["type"]) for each in rest] == [(f"{2:016d}", "run.ended")]
    assert nothing == Done(0, "")


async def test_events_of_a_run_that_lives_end_with_what_is_there(espalier: Espalier, wire: Wire) -> None:
    run_id = await wire.run()

    done = await espalier("events", run_id, "--json")
    later = await espalier("events", run_id, "--since", "1")

    assert [json.loads(line)["type"] for line in done.stdout.splitlines()] == ["run.started"]
    assert (later.code, later.stdout) == (0, "")
    assert (done.stderr, later.stderr) == (
        f"The run goes on; --since {1:016d} shows what comes after this.\n",
        "The run goes on; --since 1 shows what comes after this.\n",
    )


async def test_events_go_on_to_the_end_when_they_are_followed(
    espalier: Espalier, wire: Wire, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "QUIET_S", 0.0)  # whoever ends on a silence ends at once
    run_id = await wire.run()
    seen = []

    async def watch() -> None:
        seen.append(await espalier("events", run_id, "--follow", "--json"))

    with anyio.fail_after(ANSWER_WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            while not gateway.state.tails.followed:
                await anyio.sleep(POLL_S)
            await wire.call("run.cancel", run_id=run_id)

    assert [each["type"] for each in objects(seen[0])] == ["run.started", "run.ended"]


# ---------------------------------------------------------------- artifact


async def test_artifacts_are_listed_by_where_they_come_from_and_deleted(
    espalier: Espalier, wire: Wire, gateway: Gateway
) -> None:
    agents = [await wire.agent(), await wire.agent()]
    runs = [await wire.run(agents[0]), await wire.run(agents[0]), await wire.run(agents[1])]
    ids = [
        await keep_artifact(gateway.pool, run_id, b"x" * (number + 1), name=f"note {number}\x1b[2J.md")
        for number, run_id in enumerate(runs)
    ]
    records = [await wire.call("artifact.get", artifact_id=id_) for id_ in ids]

    plain = rows(await espalier("artifact", "list"))
    found = {
        "all": objects(await espalier("artifact", "list", "--json")),
        "of the run": objects(await espalier("artifact", "list", "--run", runs[1], "--json")),
        "of the agent": objects(await espalier("artifact", "list", "--agent", agents[0], "--json")),
        "of a subject": objects(await espalier("artifact", "list", "--subject", "s1", "--json")),
    }
    deleted = await espalier("artifact", "delete", ids[1])
    again = await espalier("artifact", "delete", ids[0], "--json")

    assert plain[0] == ["artifact", "bytes", "created, UTC", "name"]
    assert [(cells[0], cells[1], cells[3]) for cells in plain[1:]] == [
        (ids[number], str(number + 1), f"note {number} [2J.md") for number in (2, 1, 0)
    ]
    assert found == {
        "all": records[::-1],
        "of the run": [records[1]],
        "of the agent": [records[1], records[0]],
        "of a subject": [],
    }
    assert deleted == Done(0, f"{ids[1]} deleted\n")
    assert objects(again) == [{"deleted": True, "ok": True}]
    assert objects(await espalier("artifact", "list", "--json")) == [records[2]]
    assert (await espalier("artifact", "get", ids[1])).code == 2


# ---------------------------------------------------------------- memory


async def test_what_is_written_is_read_found_and_deleted(espalier: Espalier, wire: Wire) -> None:
    root = await wire.agent()
    tone = await espalier("memory", "write", root, "n", "tone", "be brief", "--ttl", "3600", "--json")
    fact = await espalier("memory", "write", root, "n", "fact\x1b[2J", '{"color": "dark red"}')
    more = [await espalier("memory", "write", root, "n", f"k{number}", str(number)) for number in range(3)]
    other = await espalier("memory", "write", root, "elsewhere", "tone", "be brief", "--subject", "s1")
    again = await espalier("memory", "write", root, "n", "tone", "be very brief", "--json")
    (first,), (second,) = objects(tone), objects(again)
    ids = [each.stdout.strip() for each in [*more[::-1], fact]] + [first["id"]]

    read = rows(await espalier("memory", "read", root, "n"))
    found = {
        "one": objects(await espalier("memory", "read", root, "n", "tone", "--json")),
        "words": objects(await espalier("memory", "search", root, "n", "very brief", "--json")),
        "none": objects(await espalier("memory", "search", root, "n", "purple", "--json")),
    }
    table = rows(await espalier("memory", "search", root, "n", "red"))
    cut = await espalier("memory", "read", root, "n", "--limit", "3")

    assert second == {**first, "value": "be very brief", "ttl_seconds": None}
    assert read[0] == ["record", "created, UTC", "key", "value"]
    assert [cells[0] for cells in read[1:]] == ids
    assert [cells[2:] for cells in read[1:]] == [
        *([f"k{number}", str(number)] for number in (2, 1, 0)),
        ["fact [2J", '{"color":"dark red"}'],
        ["tone", "be very brief"],
    ]
    assert found["one"] == [second]
    assert [{**each, "score": None} for each in found["words"]] == [{**second, "score": None}]
    assert found["none"] == []
    assert (table[0][0], [cells[1] for cells in table[1:]]) == ("score", [fact.stdout.strip()])
    assert cut.stderr == "There are more than these 3; --limit or --all shows more.\n"

    assert await espalier("memory", "delete", ids[0]) == Done(0, "1 deleted\n")
    assert await espalier("memory", "delete", ids[0]) == Done(0, "0 deleted\n")
    assert await espalier("memory", "delete", "--tree", root, "--subject", "s1") == Done(0, "1 deleted\n")
    assert objects(await espalier("memory", "read", root, "elsewhere", "--json")) == []
    assert objects(await espalier("memory", "delete", "--tree", root, "--json")) == [{"deleted": 4}]
    assert (await wire.call("memory.read", tree_root_id=root, namespace="n"))["items"] == []
    assert other.code == 0


async def test_a_memory_of_no_tree_is_one_sentence(espalier: Espalier) -> None:
    nobody = "agt_" + UNKNOWN_TAIL
    for words in (
        ["write", nobody, "n", "k", "v"],
        ["read", nobody, "n"],
        ["search", nobody, "n", "v"],
        ["delete", "--tree", nobody],
    ):
        done = await espalier("memory", *words)

        assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.endswith("[tree_boundary_violation]\n")


# ---------------------------------------------------------------- messages


async def test_what_is_said_to_an_agent_is_in_its_inbox_and_in_the_list(
    espalier: Espalier, wire: Wire
) -> None:
    agents = [await wire.agent(), await wire.agent()]
    sent = [
        await espalier("message", "send", agents[0], "go on\x1b[2J"),
        await espalier("message", "send", agents[1], '{"number": 1}'),
        await espalier("message", "send", agents[0], "[2]", "--json"),
    ]
    ids = [sent[0].stdout.strip(), sent[1].stdout.strip(), objects(sent[2])[0]["id"]]

    inbox = rows(await espalier("message", "inbox", agents[0]))
    unread = objects(await espalier("message", "inbox", agents[0], "--json"))
    listed = rows(await espalier("message", "list"))
    found = {
        "all": objects(await espalier("message", "list", "--all", "--json")),
        "to one": objects(await espalier("message", "list", "--agent", agents[0], "--json")),
        "in a tree": objects(await espalier("message", "list", "--tree", agents[1], "--json")),
    }

    assert inbox[0] == ["message", "from", "sent, UTC", "body"]
    assert [(cells[0], cells[1], cells[3]) for cells in inbox[1:]] == [
        (ids[0], "embedder", "go on [2J"),
        (ids[2], "embedder", "[2]"),
    ]
    assert all(re.fullmatch(TIME, cells[2]) for cells in inbox[1:])
    assert listed[0] == ["message", "from", "to", "sent, UTC", "read, UTC", "body"]
    assert [(cells[0], cells[2], cells[-1]) for cells in listed[1:]] == [
        (ids[2], agents[0], "[2]"),
        (ids[1], agents[1], '{"number":1}'),
        (ids[0], agents[0], "go on [2J"),
    ]
    held = (await wire.call("message.list"))["items"]
    assert [each["id"] for each in held] == ids[::-1]
    assert found == {"all": held, "to one": [held[0], held[2]], "in a tree": [held[1]]}
    assert unread == [held[2], held[0]]


async def test_a_message_to_nobody_is_one_sentence(espalier: Espalier) -> None:
    done = await espalier("message", "send", "agt_" + UNKNOWN_TAIL, "hello")

    assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.endswith("[tool_not_found]\n")
