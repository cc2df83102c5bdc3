"""`espalier providers ...` against a real gateway: what a person brings, sees and removes."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.integration.person import Espalier, at_the_terminal
from tests.integration.wire import UNKNOWN_TAIL, Gateway, Wire

from espalier_gateway import providers_rest

pytestmark = pytest.mark.anyio

KEY = "sk-canary-0123456789-wxyz"
PLACE = ("--base-url", "https://api.example/v1", "--model", "small")
LOOK_S = 0.01
WAIT_S = 10.0


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
    monkeypatch.delenv("ESPALIER_PROVIDER_KEY", raising=False)
    return at_the_terminal(monkeypatch, capsys)


async def test_a_provider_is_added_with_a_key_from_the_environment_shown_listed_and_removed(
    espalier: Espalier, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_PROVIDER_KEY", KEY)
    added = await espalier("providers", "add", "mine", *PLACE)
    provider = added.stdout.strip()
    shown = await espalier("providers", "show", provider)
    as_json = await espalier("providers", "show", provider, "--json")
    listed = await espalier("providers", "list")
    listed_as_json = await espalier("providers", "list", "--json")
    agent_id = await wire.agent(runner={"provider_id": provider})
    in_use = await espalier("providers", "remove", provider)
    await wire.call("agent.update", agent_id=agent_id, runner=None)
    removed = await espalier("providers", "remove", provider)
    gone = await espalier("providers", "show", provider)

    whole: dict[str, Any] = json.loads(as_json.stdout)
    assert (added.code, whole["id"], whole["name"]) == (0, provider, "mine")
    assert (whole["kind"], whole["base_url"], whole["default_model"]) == (
        "openai_compat",
        "https://api.example/v1",
        "small",
    )
    lines = dict(line.split("  ", 1) for line in shown.stdout.splitlines())
    assert {name.strip(): text.strip() for name, text in lines.items()}["key"] == "••••wxyz"
    assert listed.stdout.splitlines()[1].split()[0] == provider
    assert json.loads(listed_as_json.stdout) == whole
    assert (in_use.code, in_use.stdout) == (2, "")
    assert in_use.stderr == (
        "espalier: Agents are bound to this provider; give them another runner first. [provider_in_use]\n"
    )
    assert (removed.code, removed.stdout, removed.stderr) == (0, "", "")
    assert (gone.code, gone.stderr) == (2, "espalier: There is no provider with this id. [not_found]\n")
    for done in (added, shown, as_json, listed, listed_as_json, in_use):
        assert "canary" not in done.stdout + done.stderr


async def test_a_key_comes_from_standard_input_and_without_one_nothing_is_brought(
    espalier: Espalier, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    without = await espalier("providers", "add", "mine", *PLACE)
    monkeypatch.setattr(sys, "stdin", io.StringIO(KEY + "\n"))
    added = await espalier("providers", "add", "mine", *PLACE, "--json")
    assert (without.code, without.stdout) == (2, "")
    assert "ESPALIER_PROVIDER_KEY" in without.stderr
    assert json.loads(added.stdout)["api_key_hint"] == "••••wxyz"
    assert len((await wire.call("provider.list"))["providers"]) == 1


async def test_what_does_not_fit_is_told_in_a_sentence(
    espalier: Espalier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPALIER_PROVIDER_KEY", KEY)
    nowhere = await espalier("providers", "add", "mine")
    strange = await espalier("providers", "add", "mine", "--base-url", "file:///etc/passwd")
    unknown = await espalier("providers", "test", "prv_" + UNKNOWN_TAIL)
    assert (nowhere.code, nowhere.stderr) == (
        2,
        "espalier: base_url is required for a provider of the kind openai_compat. [invalid_request]\n",
    )
    assert (strange.code, strange.stderr.count("\n")) == (2, 1)
    assert "base_url" in strange.stderr
    assert (unknown.code, unknown.stderr) == (2, "espalier: There is no provider with this id. [not_found]\n")
    assert "canary" not in nowhere.stderr + strange.stderr


async def test_a_test_says_how_it_went_and_a_failed_one_has_its_own_exit_code(
    espalier: Espalier, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of a worker somebody answers the probe in the database, as a worker would."""
    monkeypatch.setenv("ESPALIER_PROVIDER_KEY", KEY)
    provider = (await espalier("providers", "add", "mine", *PLACE)).stdout.strip()

    async def answer_one(outcome: str, message: str) -> None:
        with anyio.fail_after(WAIT_S):
            while True:  # bounded by the wait
                done = await gateway.pool.execute(
                    "update provider_probes set state = 'done', outcome = $1, message = $2", outcome, message
                )
                if done != "UPDATE 0":
                    return
                await anyio.sleep(LOOK_S)

    told = []
    for outcome, message in (("ok", ""), ("auth_failed", "unauthorized: 401")):
        async with anyio.create_task_group() as group:
            group.start_soon(answer_one, outcome, message)
            told.append(await espalier("providers", "test", provider))
    monkeypatch.setattr(providers_rest, "PROBE_LIFE_S", 0.2)
    told.append(await espalier("providers", "test", provider))
    assert [(done.code, done.stdout) for done in told] == [
        (0, "ok\n"),
        (1, "auth_failed: unauthorized: 401\n"),
        (1, "other: No worker took the test, or none ended it, in time.\n"),
    ]
