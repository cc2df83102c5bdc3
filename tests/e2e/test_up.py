"""`espalier up` as a person runs it: a terminal, a signal, a second start, and what can be in the way."""

import json
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, STDOUT

import anyio
import httpx2
import psutil
import pytest
from anyio.abc import Process

from espalier_local.folder import throwaway_folder
from espalier_local.ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]

READY_S = 60.0
STOPPED_S = 5.0
NOTHING_LEFT_S = 2.0
POLL_S = 0.05
ESPALIER = (sys.executable, "-c", "from espalier_local.command import main; main()")


@dataclass
class Up:
    """A running `espalier up`: what it has printed so far, and where it is."""

    process: Process
    port: int
    output: str = ""
    started: list[psutil.Process] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def read_until(self, words: str) -> None:
        assert self.process.stdout is not None
        with anyio.fail_after(READY_S):
            while words not in self.output:
                self.output += (await self.process.stdout.receive()).decode()
        self.started = psutil.Process(self.process.pid).children(recursive=True)

    async def ends(self, *, within_s: float) -> int:
        with anyio.fail_after(within_s):
            assert self.process.stdout is not None
            async for chunk in self.process.stdout:
                self.output += chunk.decode()
            return await self.process.wait()


@pytest.fixture(scope="module")
def data_dir() -> Iterator[Path]:
    with throwaway_folder() as path:
        yield path


@asynccontextmanager
async def up(data_dir: Path, *options: str) -> AsyncIterator[Up]:
    port = free_port()
    command = [*ESPALIER, "up", "--data-dir", str(data_dir), "--port", str(port), *options]
    async with await anyio.open_process(command, stdout=PIPE, stderr=STDOUT) as process:
        running = Up(process, port)
        try:
            await running.read_until("ready at")
            yield running
        finally:
            if process.returncode is None:
                process.terminate()
                await running.ends(within_s=READY_S)


async def complaint(*words: str, env: Mapping[str, str] | None = None) -> str:
    """What the command says when it refuses: one line on stderr, exit code 2, nothing else."""
    done = await anyio.run_process([*ESPALIER, *words], check=False, env={**os.environ, **(env or {})})
    assert done.returncode == 2, done.stderr.decode()
    said = done.stderr.decode()
    assert said.startswith("espalier: ")
    assert said.count("\n") == 1
    return said


def still_running(processes: list[psutil.Process], *, after_s: float) -> list[psutil.Process]:
    """Orphans that have ended but that nobody has reaped yet (containers often have no init) do not count."""
    _, left = psutil.wait_procs(processes, timeout=after_s)
    return [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


async def test_up_is_ready_with_a_key_and_ctrl_c_leaves_nothing_running(data_dir: Path) -> None:
    async with up(data_dir, "--workers", "2") as running:
        profile = json.loads((data_dir / "profile.json").read_text())
        assert profile == {"base_url": running.base_url, "api_key": profile["api_key"]}
        assert stat.S_IMODE((data_dir / "profile.json").stat().st_mode) == 0o600
        async with httpx2.AsyncClient(base_url=running.base_url) as client:
            assert (await client.get("/readyz")).status_code == 200
        commands = [" ".join(each.cmdline()) for each in running.started]
        assert len([words for words in commands if words.endswith("-m espalier_run_worker")]) == 2
        running.process.send_signal(signal.SIGINT)
        assert await running.ends(within_s=STOPPED_S) == 0
        assert still_running(running.started, after_s=0) == []
        assert {"espalier", "gateway"} <= {line.split()[0] for line in running.output.splitlines()}
        assert profile["api_key"] not in running.output


async def test_a_second_up_finds_the_database_and_keeps_the_key(data_dir: Path) -> None:
    async with up(data_dir):
        first = json.loads((data_dir / "profile.json").read_text())
    async with up(data_dir) as again:
        second = json.loads((data_dir / "profile.json").read_text())
    assert second == {"base_url": again.base_url, "api_key": first["api_key"]}


async def test_nothing_is_left_two_seconds_after_the_launcher_was_killed(data_dir: Path) -> None:
    async with up(data_dir) as running:
        names = {process.name() for process in running.started}
        running.process.kill()
        assert still_running(running.started, after_s=NOTHING_LEFT_S) == []
        assert {"postgres", "valkey-server"} <= names


async def test_a_killed_worker_and_a_killed_gateway_are_started_again(data_dir: Path) -> None:
    async with up(data_dir) as running:
        services = {"espalier_run_worker", "espalier_gateway"}
        victims = [each for each in running.started if services & set(each.cmdline())]
        assert len(victims) == len(services)
        for victim in victims:
            victim.kill()
        await running.read_until("gateway    | ended by SIGKILL; starting it again")
        await running.read_until("worker     | ended by SIGKILL; starting it again")
        async with httpx2.AsyncClient(base_url=running.base_url) as client:
            with anyio.fail_after(READY_S):
                while not await answers(client):
                    await anyio.sleep(POLL_S)


async def answers(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).is_success
    except httpx2.TransportError:
        return False


async def test_keys_are_made_while_it_runs_and_not_otherwise(data_dir: Path) -> None:
    words = ("keys", "create", "--owner", "acme", "--data-dir", str(data_dir))
    async with up(data_dir):
        done = await anyio.run_process([*ESPALIER, *words])
        assert done.stdout.decode().startswith("esp_")
        assert "There is no scope 'nonsense'" in await complaint(*words, "--scope", "nonsense")
    assert await complaint(*words) == (
        f"espalier: Nothing is running in {data_dir}; start it with `espalier up`, or pass --postgres-url.\n"
    )


async def test_a_second_up_on_the_same_folder_is_refused(data_dir: Path) -> None:
    async with up(data_dir) as running:
        said = await complaint("up", "--data-dir", str(data_dir), "--port", "0")
        user = running.process.pid
    assert said == f"espalier: The data folder {data_dir} is in use by process {user}; stop that first.\n"


async def test_a_taken_port_is_refused_before_anything_is_started(data_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        said = await complaint("up", "--data-dir", str(data_dir / "never-made"), "--port", str(port))
    assert said == (
        f"espalier: Port {port} on 127.0.0.1 is taken;"
        " stop what listens there or choose another with --port.\n"
    )
    assert not (data_dir / "never-made").exists()


async def test_a_database_that_cannot_be_reached_is_named_without_its_password(data_dir: Path) -> None:
    port = free_port()
    url = f"postgresql://me:hidden@127.0.0.1:{port}/mine"
    said = await complaint("migrate", "--postgres-url", url)
    assert said == (
        f"espalier: The database mine on 127.0.0.1, port {port}, cannot be used: nobody answers there.\n"
    )


async def test_a_wrong_plan_or_setting_is_refused_before_anything_is_started(
    data_dir: Path, tmp_path: Path
) -> None:
    never, script = data_dir / "never-made", tmp_path / "plan.yaml"
    script.write_text("answers: [{txt: a}]")
    words = ("up", "--data-dir", str(never), "--port", "0")
    assert "answers[0].txt: is not known here." in await complaint(*words, "--script", str(script))
    said = await complaint(*words, env={"ESPALIER_LEASE_TTL_S": "abc"})
    assert said.startswith("espalier: The setting ESPALIER_LEASE_TTL_S cannot be used: ")
    assert not never.exists()


async def test_the_folder_can_be_chosen_by_the_environment(data_dir: Path) -> None:
    said = await complaint("migrate", env={"ESPALIER_DATA_DIR": str(data_dir / "elsewhere")})
    assert f"Nothing is running in {data_dir}/elsewhere;" in said
