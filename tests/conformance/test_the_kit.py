"""The kit is what it says: list and checks are one thing, it owes nothing to our runtime, and it stays
on its feet whatever one does to it.
"""

import ast
import io
import json
import tokenize
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import anyio
import pytest
from anyio.abc import SocketStream
from typer.testing import CliRunner, Result

from espalier_client.commands import app_groups
from espalier_client.conformance import runner
from espalier_client.conformance.expected import allowed_skips, expected, requirements
from espalier_client.conformance.ground import Keys, lay, minting, scope_sets
from espalier_client.conformance.report import as_document, as_junit
from espalier_client.conformance.verdicts import Requirement, Verdict
from espalier_local.ports import free_port

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
KIT = ROOT / "libs/client/src/espalier_client/conformance"
MINIMAL = ROOT / "tests/minimal_runtime"
LINES_MAX = 400
CHECK_S = 2.0
KNOWN_NEEDS = {"script", "second_key", "limited_keys", "websocket", "subjects", "providers"}
Behaviour = Callable[[SocketStream], Awaitable[None]]


def imported(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                yield node.module or ""
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)


def lines_of_code(path: Path) -> int:
    """Without blank lines, comments and docstrings."""
    text = path.read_text()
    prose = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        line
        for token in tokens
        if token.type not in nothing | {tokenize.ENDMARKER}
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - prose)


def test_every_requirement_has_exactly_one_check_and_every_check_one_requirement() -> None:
    ids = [each.id for each in requirements()]
    checks = runner.all_checks()
    assert sorted(ids) == sorted(checks)
    assert [name for name, found in checks.items() if len(found) != 1] == []
    assert len(set(ids)) == len(ids), "two requirements have one id"


def test_every_requirement_says_where_it_comes_from_and_what_it_takes() -> None:
    capabilities = {"core", *expected().capabilities, *expected().extensions}
    assert {each.capability for each in requirements()} == capabilities - {"espalier.events"}
    assert {each.level for each in requirements()} <= {"MUST", "SHOULD", "MAY"}
    assert {need for each in requirements() for need in each.needs} == KNOWN_NEEDS
    assert all(each.source and each.sentence.endswith(".") for each in requirements())
    assert set(allowed_skips("full")) <= {each.id for each in requirements()}


def test_the_kit_uses_nothing_that_the_runtime_answers_with() -> None:
    ours = {name for name in imported(KIT) if name.startswith("espalier_")}
    assert {name for name in ours if not name.startswith("espalier_client.conformance")} == {
        "espalier_client.timeline"  # escapes what a terminal would obey
    }


def test_the_second_runtime_is_small_and_owes_nothing_to_espalier() -> None:
    names = set(imported(MINIMAL))
    assert {name for name in names if "espalier" in name or name.startswith("tests")} == set()
    assert sum(lines_of_code(path) for path in MINIMAL.glob("*.py")) <= LINES_MAX


def test_few_keys_tell_every_two_scopes_apart() -> None:
    sets = scope_sets()
    members = [tuple(scope in each for each in sets) for scope in expected().scopes]
    assert len(set(members)) == len(members)
    assert all(any(each) and not all(each) for each in members)


# -------------------------------------------------------------------- what a runtime may do to it


async def silent(stream: SocketStream) -> None:
    await anyio.sleep_forever()


async def closing(stream: SocketStream) -> None:
    await stream.receive()


async def garbage(stream: SocketStream) -> None:
    await stream.receive()
    await stream.send(b"\x00\xffnonsense, and no HTTP\r\n\r\n")


async def unlike_json(stream: SocketStream) -> None:
    await stream.receive()
    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: application/json\r\n\r\n<htm>")


async def of_another_shape(stream: SocketStream) -> None:
    """A JSON-RPC result to whatever is asked, with members of kinds that nobody expects."""
    request = await stream.receive()
    body = request.partition(b"\r\n\r\n")[2] or b"{}"
    asked = json.loads(body) if body.startswith(b"{") else {}
    result = {"id": 5, "session_id": "ses_x", "capabilities": {"streaming.sse": "perhaps"}, "items": 7}
    told = json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": result}).encode()
    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(told)}\r\n\r\n"
    await stream.send(head.encode() + told)


@asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[str]:
    async def serve(stream: SocketStream) -> None:
        async with stream:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError, ValueError, RecursionError):
                await behaviour(stream)

    port = free_port()
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{port}"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("behaviour", [closing, garbage, unlike_json, of_another_shape])
async def test_a_runtime_that_answers_nonsense_fails_everything_in_words(behaviour: Behaviour) -> None:
    async with serving(behaviour) as base_url, lay(base_url, Keys("key")) as ground:
        verdicts = await runner.conduct(ground, requirements(), profile="minimal", jobs=8, check_s=CHECK_S)
    assert len(verdicts) == len(requirements())
    assert not runner.is_passed(verdicts)
    assert [each.requirement.id for each in verdicts if each.outcome == "failed" and not each.reason] == []
    tried = [each for each in verdicts if each.requirement.id in ("VERSION-01", "SESSION-01", "AUTH-01")]
    assert {each.outcome for each in tried} == {"failed"}


async def test_a_runtime_that_hangs_costs_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier_client.conformance.ground.PROBE_S", 0.5)
    wanted = [each for each in requirements() if each.id in ("SESSION-01", "RUN-01")]
    with anyio.fail_after(10):
        async with serving(silent) as base_url, lay(base_url, Keys("key")) as ground:
            verdicts = await runner.conduct(ground, wanted, profile="minimal", jobs=1, check_s=0.5)
    (session, run) = verdicts
    assert session.outcome == run.outcome == "failed"
    assert session.reason == "not done within 0.5 s; it waited for initialize."
    assert run.reason == (
        "not tried, for no session could be had: not done within 0.5 s; it waited for initialize."
    )


async def test_a_broken_check_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: object) -> None:
        raise ZeroDivisionError

    checks = {**runner.all_checks(), "SESSION-01": [broken]}
    monkeypatch.setattr(runner, "all_checks", lambda: checks)
    wanted = [each for each in requirements() if each.id in ("SESSION-01", "SESSION-02")]
    async with serving(closing) as base_url, lay(base_url, Keys("key")) as ground:
        first, second = await runner.conduct(ground, wanted, profile="minimal", jobs=1)
    assert "ZeroDivisionError" in first.reason
    assert second.outcome == "failed" and "connection" in second.reason


# -------------------------------------------------------------------- what it makes of verdicts


def verdict(outcome: Any, level: Any = "MUST", requirement: str = "RUN-01", **more: Any) -> Verdict:
    wanted = Requirement(requirement, level, "core", "5.2", "A sentence.")
    return Verdict(wanted, outcome, "a\x00reason" if outcome != "passed" else "", 0.5, **more)


@pytest.mark.parametrize(
    ("found", "passes"),
    [
        (verdict("passed"), True),
        (verdict("failed"), False),
        (verdict("failed", "SHOULD"), False),
        (verdict("failed", "MAY"), True),
        (verdict("skipped"), False),
        (verdict("skipped", excused="allowed"), True),
    ],
)
def test_what_counts_against_a_runtime(found: Verdict, passes: bool) -> None:
    assert runner.is_passed([verdict("passed"), found]) is passes


def test_a_skip_is_excused_by_the_list_of_its_profile_alone() -> None:
    skipped, allowed = verdict("skipped"), verdict("skipped", requirement="OAUTH-01")
    assert [bool(runner.excused(each, "full").excused) for each in (skipped, allowed)] == [False, True]
    assert [bool(runner.excused(each, "minimal").excused) for each in (skipped, allowed)] == [True, True]


def parsed(junit: str) -> ElementTree.Element:
    return ElementTree.fromstring(junit)  # noqa: S314 - we wrote it


def test_the_reports_tell_the_same() -> None:
    verdicts = [
        verdict("passed"),
        verdict("failed", requirement="RUN-02"),
        verdict("failed", "MAY", requirement="RUN-03"),
        verdict("skipped", requirement="RUN-04", excused="allowed"),
    ]
    document = as_document("http://x", "full", {"name": "x"}, verdicts)
    assert document["passed"] is False
    (score,) = document["scores"]
    assert score == {"capability": "core", "passed": 1, "failed": 2, "skipped": 1, "score": 0.3333}
    (suite,) = parsed(as_junit(verdicts))
    counted = {name: suite.attrib[name] for name in ("name", "tests", "failures", "skipped")}
    assert counted == {"name": "core", "tests": "4", "failures": "1", "skipped": "2"}
    assert [[each.tag for each in case] for case in suite] == [[], ["failure"], ["skipped"], ["skipped"]]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app_groups(), ["conformance", *arguments])


def test_the_command_says_what_it_cannot_use() -> None:
    where = ("--base-url", "http://127.0.0.1:1", "--key", "key")
    for arguments, sentence in (
        ((*where, "--only", "NONSENSE"), "No requirement, group or capability is called NONSENSE."),
        ((*where, "--limited-key", "agent.read"), "--limited-key takes SCOPE,SCOPE=KEY."),
    ):
        result = run(*arguments)
        assert (result.exit_code, sentence in result.stderr) == (2, True), result.stderr


def test_the_command_fails_where_nothing_answers(tmp_path: Path) -> None:
    report, junit = tmp_path / "report.json", tmp_path / "junit.xml"
    where = ("--base-url", "http://127.0.0.1:1", "--key", "key", "--only", "SESSION")
    result = run(*where, "--json", str(report), "--junit", str(junit))
    assert result.exit_code == 1
    assert "SESSION-01 MUST FAILED" in result.stdout
    document = json.loads(report.read_text())
    assert {each["outcome"] for each in document["requirements"]} == {"failed"}
    assert parsed(junit.read_text())[0].attrib["failures"] == str(len(document["requirements"]))


def test_a_minting_command_is_filled_in() -> None:
    words = minting("espalier keys create --owner {owner} --scope {scope}", "kit", ["a", "b"])
    assert words == ["espalier", "keys", "create", "--owner", "kit", "--scope", "a", "--scope", "b"]
    assert minting("mint {owner} {scopes}", "kit", ["a", "b"]) == ["mint", "kit", "a,b"]
