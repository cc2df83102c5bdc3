"""`espalier agent create --mcp-server`: what is sent, and that a bearer comes from the environment alone."""

from typing import Any

import pytest
from tests.unit.client.conftest import KEY
from tests.unit.client.loopback import Loopback
from tests.unit.client.test_commands import echo_agent, invoke

pytestmark = pytest.mark.anyio

SECRET = "hunter2-canary"
URL = "https://tools.example/mcp?a=b"
NOT_A_URL = " does not fit: should be an absolute http or https URL without user, password and fragment."
NOT_A_BEARER = " does not fit: should be visible ASCII characters without blanks."
NAMED = ("--mcp-server", f"git={URL}")


async def create(runtime: Loopback, *words: str, **env: str) -> Any:
    runtime.on("POST agent.create", echo_agent)
    target = {"ESPALIER_BASE_URL": runtime.url, "ESPALIER_API_KEY": KEY}
    return await invoke("agent", "create", "--name", "x", *words, **target, **env)


async def servers_sent(runtime: Loopback, *words: str, **env: str) -> Any:
    done = await create(runtime, *words, **env)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "agt_1\n", "")
    return runtime.asked("POST agent.create")[-1].message["params"].get("external_mcp_servers")


async def test_a_server_has_a_name_or_only_a_url(runtime: Loopback) -> None:
    assert await servers_sent(runtime) is None
    assert await servers_sent(runtime, *NAMED, "--mcp-server", URL) == [
        {"name": "git", "url": URL},
        {"url": URL},
    ]


async def test_a_bearer_comes_from_the_variable_that_is_named(runtime: Loopback) -> None:
    words = (*NAMED, "--mcp-server", f"other={URL}", "--mcp-bearer-env", "git=GIT_TOKEN")
    assert await servers_sent(runtime, *words, GIT_TOKEN=SECRET) == [
        {"name": "git", "url": URL, "auth": {"bearer": SECRET}},
        {"name": "other", "url": URL},
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            (*NAMED, "--mcp-bearer-env", "github=GIT_TOKEN"),
            "--mcp-bearer-env names 'github', but no --mcp-server has that name.",
        ),
        (
            (*NAMED, "--mcp-bearer-env", "git=NO_TOKEN"),
            "The variable 'NO_TOKEN' of --mcp-bearer-env is not set.",
        ),
        ((*NAMED, "--mcp-bearer-env", "git"), "The variable '' of --mcp-bearer-env is not set."),
        (
            ("--mcp-server", "git=ftp://x"),
            f"external_mcp_servers.0.url{NOT_A_URL}",
        ),
        (
            (*NAMED, "--mcp-bearer-env", "git=BLANK"),
            f"external_mcp_servers.0.auth.bearer{NOT_A_BEARER}",
        ),
    ],
)
async def test_what_cannot_be_used_is_said_without_the_secret(
    runtime: Loopback, words: tuple[str, ...], sentence: str
) -> None:
    done = await create(runtime, *words, GIT_TOKEN=SECRET, BLANK=f"{SECRET} {SECRET}")
    assert (done.exit_code, done.stderr) == (2, f"espalier: {sentence}\n")
    assert runtime.asked("POST agent.create") == []
