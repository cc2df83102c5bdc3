"""The embedders of docs/examples, run as a newcomer runs them: beside the profile that `up` leaves."""

import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
import pytest
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream
from forked import Service
from scripted_runs import DONE, POLL_S, log_of, note
from tests.integration.conftest import GatewayProcess

from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
UNBUFFERED = {**os.environ, "PYTHONUNBUFFERED": "1"}
WAIT_S = 40.0
CYCLES = 8
PLAN = [note(f"{number}.md", delay_s=0.25) for number in range(CYCLES)] + [DONE]

python = pytest.param([sys.executable, str(EXAMPLES / "embedder.py")], id="python")
javascript = pytest.param(
    ["node", str(EXAMPLES / "embedder.mjs")],
    id="javascript",
    marks=pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on the PATH"),
)


@dataclass
class Embedder:
    """A running example, and the lines that it has printed so far."""

    process: Process
    lines: list[str] = field(default_factory=list)

    async def listen(self) -> None:
        assert self.process.stdout is not None
        rest = ""
        async for text in TextReceiveStream(self.process.stdout):
            *whole, rest = (rest + text).split("\n")
            self.lines += whole

    async def prints(self, count: int) -> None:
        while len(self.lines) < count:
            assert self.process.returncode is None
            await anyio.sleep(POLL_S)

    async def ends(self) -> tuple[int, str]:
        assert self.process.stderr is not None
        complaints = "".join([text async for text in TextReceiveStream(self.process.stderr)])
        return await self.process.wait(), complaints

    @property
    def log(self) -> list[tuple[int, str, Any]]:
        events = [line.split(" ", 2) for line in self.lines[:-1]]
        return [(int(event_id), type_, json.loads(payload)) for event_id, type_, payload in events]


@asynccontextmanager
async def running(command: list[str], folder: Path) -> AsyncIterator[Embedder]:
    async with (
        await anyio.open_process(command, cwd=folder, env=UNBUFFERED, stdout=PIPE, stderr=PIPE) as process,
        anyio.create_task_group() as group,
    ):
        embedder = Embedder(process)
        group.start_soon(embedder.listen)
        yield embedder


@pytest.fixture
async def gateway(
    start: Callable[..., Service],
    start_gateway: Callable[..., Awaitable[GatewayProcess]],
    api_key: str,
    tmp_path: Path,
) -> GatewayProcess:
    """With a worker whose operator has a plan, and the profile in the folder to stand in."""
    plan, profile = tmp_path / "plan.yaml", tmp_path / ".espalier/profile.json"
    plan.write_text(json.dumps({"answers": PLAN}))
    process = await start_gateway()
    profile.parent.mkdir()
    profile.write_text(json.dumps({"base_url": process.base_url, "api_key": api_key}))
    start("worker", ESPALIER_SCRIPT=str(plan))
    return process


async def whole_log(pool: Pool, embedder: Embedder) -> list[tuple[int, str, Any]]:
    return await log_of(pool, embedder.log[0][2]["run_id"])


@pytest.mark.parametrize("command", [python, javascript])
async def test_an_embedder_prints_the_whole_run_although_its_gateway_dies_in_the_middle(
    command: list[str],
    gateway: GatewayProcess,
    start_gateway: Callable[..., Awaitable[GatewayProcess]],
    pool: Pool,
    tmp_path: Path,
) -> None:
    with anyio.fail_after(WAIT_S):
        async with running(command, tmp_path) as embedder:
            await embedder.prints(6)
            gateway.service.kill()
            seen = len(embedder.lines)
            await start_gateway(port=int(gateway.base_url.rsplit(":")[-1]))
            assert await embedder.ends() == (0, "")

    assert embedder.log == await whole_log(pool, embedder)
    assert seen < len(embedder.log)
    assert embedder.log[-1][1] == "run.ended"
    name, _, result = embedder.lines[-1].partition(": ")
    assert (name, json.loads(result)) == ("result", embedder.log[-1][2]["result"])


@pytest.mark.parametrize("command", [python, javascript])
async def test_an_embedder_that_is_refused_says_why_and_fails(
    command: list[str], gateway: GatewayProcess, tmp_path: Path
) -> None:
    profile = {"base_url": gateway.base_url, "api_key": "esp_of_nobody"}
    (tmp_path / ".espalier/profile.json").write_text(json.dumps(profile))

    with anyio.fail_after(WAIT_S):
        async with running(command, tmp_path) as embedder:
            code, complaints = await embedder.ends()

    assert (code, embedder.lines) == (1, [])
    assert "authn_failed" in complaints
