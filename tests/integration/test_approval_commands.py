"""`espalier agent prompt` and `espalier approvals` against a real gateway and a real worker."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Start
from tests.integration.person import Done, Espalier, at_the_terminal
from tests.integration.wire import Gateway, Wire
from tests.integration.wire_prompts import (
    NAP,
    WIRE_PLANS,
    history_of,
    key_of,
    lived,
    modify,
    pending_of,
    prompt_of,
    written,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

A, B, C = "Say ok.\nBe kind.", "Say ok.\nBe brief.", "Say no.\nBe kind."
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d UTC)?"


@pytest.fixture
def espalier(
    wire: Wire,
    gateway: Gateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Espalier:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ESPALIER_BASE_URL", gateway.base_url)
    monkeypatch.setenv("ESPALIER_API_KEY", wire.key)
    return at_the_terminal(monkeypatch, capsys)


def objects(done: Done) -> list[Any]:
    assert (done.code, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def plain(done: Done) -> str:
    assert (done.code, done.stderr) == (0, "")
    return re.sub(TIME, "<time>", done.stdout)


async def asked(wire: Wire, start: Start) -> tuple[str, str, list[dict[str, Any]]]:
    """An agent whose live run wants two changes, that run, and the changes."""
    start("worker", **WIRE_PLANS)
    agent_id = await wire.agent(**written(A, "approval_required"))
    calls = [modify(B, "shorter\x1b[2J"), modify(C, "stricter"), NAP]
    run_id = await lived(wire, agent_id, [{"calls": calls}], "sleeping")
    return agent_id, run_id, await pending_of(wire, agent_id)


async def test_a_person_sees_what_waits_approves_one_rejects_the_other_and_sees_the_history(
    espalier: Espalier, wire: Wire, gateway: Gateway, start: Start
) -> None:
    agent_id, run_id, (first, second) = await asked(wire, start)
    by = await key_of(gateway, wire)

    assert objects(await espalier("agent", "prompt", "pending", agent_id, "--json")) == [first, second]
    shown = plain(await espalier("agent", "prompt", "pending", agent_id))
    assert shown.startswith(
        f"change    {first['id']}\n"
        f"approval  {first['approval_id']}\n"
        "asked     <time>\n"
        f"run       {run_id}\n"
        "reason    shorter [2J\n"
        "diff      --- before\n"
        "          +++ after\n"
        "          @@ -1,2 +1,2 @@\n"
        "           Say ok.\n"
        "          -Be kind.\n"
    )
    approved = await espalier("agent", "prompt", "approve", agent_id, first["id"], "--comment", "well")
    assert plain(approved) == f"{first['id']} applied\n"
    stale = await espalier("agent", "prompt", "approve", agent_id, second["id"])
    assert (stale.code, stale.stdout) == (2, "") and "can only be rejected" in stale.stderr
    assert "stale     yes: the prompt was changed since\n" in plain(
        await espalier("agent", "prompt", "pending", agent_id)
    )
    rejected = await espalier("agent", "prompt", "reject", agent_id, second["id"], "--json")
    assert objects(rejected) == [{"applied": False}]
    assert await prompt_of(wire, agent_id) == B

    (entry,) = await history_of(wire, agent_id)
    assert objects(await espalier("agent", "prompt", "history", agent_id, "--json")) == [entry]
    assert plain(await espalier("agent", "prompt", "history", agent_id)).startswith(
        f"entry        {entry['id']}\n"
        "applied      <time>\n"
        f"approved by  {by}\n"
        "reason       shorter [2J\n"
        "diff         --- before\n"
    )


async def test_a_person_works_off_the_queue(
    espalier: Espalier, wire: Wire, gateway: Gateway, start: Start
) -> None:
    agent_id, run_id, (first, second) = await asked(wire, start)
    queue = (await wire.call("approval.list"))["items"]
    assert [each["id"] for each in queue] == [second["approval_id"], first["approval_id"]]

    assert objects(await espalier("approvals", "list", "--agent", agent_id, "--json")) == queue
    listed = plain(await espalier("approvals", "list", "--limit", "5")).splitlines()
    assert [re.split(r" {2,}", line) for line in listed] == [
        ["approval", "kind", "state", "asked, UTC", "about"],
        [queue[0]["id"], "prompt_change", "open", "<time>", f"{agent_id}: stricter"],
        [queue[1]["id"], "prompt_change", "open", "<time>", f"{agent_id}: shorter [2J"],
    ]
    resolve = ("approvals", "resolve", queue[0]["id"])
    assert plain(await espalier(*resolve, "deny", "--comment", "no")) == f"{queue[0]['id']} deny\n"
    again = await espalier(*resolve, "deny")
    assert (again.code, again.stdout) == (2, "") and "rejected already" in again.stderr
    wrong = await espalier("approvals", "resolve", queue[1]["id"], "done")
    assert (wrong.code, wrong.stdout) == (2, "") and "approve or deny" in wrong.stderr

    assert objects(await espalier("approvals", "list", "--json")) == queue[1:]
    assert [
        each["id"] for each in objects(await espalier("approvals", "list", "--state", "all", "--json"))
    ] == [each["id"] for each in queue]
    shown = plain(await espalier("approvals", "get", queue[0]["id"]))
    assert shown.startswith(
        f"approval    {queue[0]['id']}\n"
        "kind        prompt_change\n"
        "state       resolved\n"
        f"agent       {agent_id}\n"
        f"run         {run_id}\n"
        "asked       <time>\n"
        f"change      {second['id']}\n"
        "reason      stricter\n"
        "diff        --- before\n"
    )
    assert shown.endswith(
        f"resolution  deny\nresolved    <time>\nby          {await key_of(gateway, wire)}\ncomment     no\n"
    )


async def test_a_person_changes_the_constitution(espalier: Espalier, wire: Wire) -> None:
    agent_id = await wire.agent(**written(A))
    words = ("--directives", "Obey.", "--prompt", B, "--policy", "locked")
    (changed,) = objects(await espalier("agent", "update", agent_id, *words, "--json"))
    assert changed["constitution"] == {
        "immutable_directives": "Obey.",
        "mutable_prompt": B,
        "mutable_prompt_policy": "locked",
    }
    assert await wire.call("agent.get", agent_id=agent_id) == changed
