"""The embedded servers for real: their data outlives them, they never outlive their launcher, and whatever is
wrong with a data folder is one sentence.
"""

import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import asyncpg
import psutil
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from espalier_local.errors import LocalError
from espalier_local.folder import running_servers, throwaway_folder
from espalier_local.ports import free_port
from espalier_local.servers import LocalServers, local_servers

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NOTHING_LEFT_S = 2.0
COMES_BACK_S = 15.0
POLL_S = 0.02
LAUNCHER = """
import sys, anyio
from pathlib import Path
from espalier_local.servers import local_servers

async def main():
    async with local_servers(Path(sys.argv[1])):
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with throwaway_folder() as path:
        yield path


@pytest.fixture(scope="module")
def lived_in_dir() -> Iterator[Path]:
    """One folder for many tests, since making a database takes longer than starting on it."""
    with throwaway_folder() as path:
        yield path


@pytest.fixture
async def servers(lived_in_dir: Path) -> AsyncIterator[LocalServers]:
    async with local_servers(lived_in_dir) as running:
        yield running


async def ask_postgres(url: str, statement: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def ask_redis(url: str, *command: str) -> Any:
    async with Redis.from_url(url, decode_responses=True) as redis:
        return await redis.execute_command(*command)


async def comes_true(question: Callable[[], Awaitable[object]], *errors: type[Exception]) -> None:
    with anyio.fail_after(COMES_BACK_S):
        while True:
            with suppress(*errors):
                if await question():
                    return
            await anyio.sleep(POLL_S)


def processes_of(port_in_url: str) -> psutil.Process:
    port = urlsplit(port_in_url).port
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(c.laddr.port == port and c.status == "LISTEN" for c in process.net_connections()):
                return process
    raise AssertionError(f"nobody listens on {port}")


def still_running(processes: list[psutil.Process], *, after_s: float) -> list[psutil.Process]:
    """Orphans that have ended but that nobody has reaped yet (containers often have no init) do not count."""
    _, left = psutil.wait_procs(processes, timeout=after_s)
    return [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


async def test_a_second_start_finds_the_data_and_the_password_of_the_first(data_dir: Path) -> None:
    async with local_servers(data_dir) as first:
        await ask_postgres(first.postgres_url, "create table kept as select 42 as answer")
    async with local_servers(data_dir) as second:
        assert await ask_postgres(second.postgres_url, "select answer from kept") == 42
    assert urlsplit(first.postgres_url).password == urlsplit(second.postgres_url).password


async def test_durability_stays_at_the_safe_defaults_unless_options_say_otherwise(lived_in_dir: Path) -> None:
    async with local_servers(lived_in_dir) as careful:
        assert await ask_postgres(careful.postgres_url, "show fsync") == "on"
        assert await ask_postgres(careful.postgres_url, "show synchronous_commit") == "on"
    async with local_servers(lived_in_dir, postgres_options={"fsync": "off"}) as quick:
        assert await ask_postgres(quick.postgres_url, "show fsync") == "off"


async def test_both_servers_listen_on_loopback_only_and_refuse_strangers(servers: LocalServers) -> None:
    for url in (servers.postgres_url, servers.redis_url):
        listening = [c.laddr.ip for c in processes_of(url).net_connections() if c.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
    wrong = servers.postgres_url.replace(str(urlsplit(servers.postgres_url).password), "wrong")
    with pytest.raises(asyncpg.InvalidPasswordError):
        await ask_postgres(wrong, "select 1")
    with pytest.raises(RedisError):
        await ask_redis(f"redis://127.0.0.1:{urlsplit(servers.redis_url).port}", "PING")


async def test_redis_never_evicts_and_keeps_nothing_on_disk(servers: LocalServers) -> None:
    assert await ask_redis(servers.redis_url, "CONFIG", "GET", "maxmemory-policy") == [
        "maxmemory-policy",
        "noeviction",
    ]
    assert await ask_redis(servers.redis_url, "CONFIG", "GET", "save") == ["save", ""]
    assert await ask_redis(servers.redis_url, "CONFIG", "GET", "appendonly") == ["appendonly", "no"]


async def test_passwords_are_in_private_files_and_in_no_command_line(servers: LocalServers) -> None:
    for name in ("secrets.json", "runtime.json"):
        assert stat.S_IMODE((servers.folder.path / name).stat().st_mode) == 0o600
    secrets = servers.folder.read("secrets.json").values()
    shown = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert len(secrets) == 2
    assert not [line for line in shown for secret in secrets if secret in line]


async def test_servers_run_without_the_rights_of_root(servers: LocalServers) -> None:
    assert 0 not in processes_of(servers.postgres_url).uids()
    assert 0 not in processes_of(servers.redis_url).uids()


async def test_other_commands_find_the_servers_only_while_they_run(lived_in_dir: Path) -> None:
    async with local_servers(lived_in_dir) as servers:
        found = running_servers(lived_in_dir)
        assert found == {"postgres_url": servers.postgres_url, "redis_url": servers.redis_url}
    with pytest.raises(LocalError, match="Nothing is running in"):
        running_servers(lived_in_dir)


async def test_a_killed_postgres_comes_back_with_its_data(servers: LocalServers) -> None:
    await ask_postgres(servers.postgres_url, "create table survived as select 42 as answer")
    processes_of(servers.postgres_url).kill()

    async def answers() -> bool:
        answer: int = await ask_postgres(servers.postgres_url, "select answer from survived")
        return answer == 42

    await comes_true(answers, OSError, asyncpg.PostgresError, asyncpg.InterfaceError)


async def test_a_killed_redis_comes_back_empty(servers: LocalServers) -> None:
    await ask_redis(servers.redis_url, "SET", "key", "value")
    processes_of(servers.redis_url).kill()

    async def is_empty() -> bool:
        keys: int = await ask_redis(servers.redis_url, "DBSIZE")
        return keys == 0

    await comes_true(is_empty, OSError, RedisError)


async def test_nothing_outlives_a_launcher_that_is_killed(lived_in_dir: Path) -> None:
    async with await anyio.open_process([sys.executable, "-c", LAUNCHER, str(lived_in_dir)]) as launcher:
        assert launcher.stdout is not None
        assert (await launcher.stdout.receive()).startswith(b"ready")
        started = psutil.Process(launcher.pid).children(recursive=True)
        names = {process.name() for process in started}
        launcher.kill()
        assert still_running(started, after_s=NOTHING_LEFT_S) == []
    assert {"postgres", "valkey-server"} <= names
    with pytest.raises(LocalError, match="Nothing is running in"):
        running_servers(lived_in_dir)  # although the dead launcher's file is still there
    async with local_servers(lived_in_dir) as servers:
        assert await ask_postgres(servers.postgres_url, "select 1") == 1


async def refusal(data_dir: Path) -> str:
    with pytest.raises(LocalError) as caught:
        async with local_servers(data_dir):
            pass
    assert "\n" not in caught.value.sentence
    return caught.value.sentence


async def test_a_folder_in_use_is_refused_with_the_process_that_uses_it(servers: LocalServers) -> None:
    path, user = servers.folder.path, os.getpid()
    assert await refusal(path) == f"The data folder {path} is in use by process {user}; stop that first."


async def test_a_database_of_another_major_version_is_refused(data_dir: Path) -> None:
    (data_dir / "postgres").mkdir()
    (data_dir / "postgres" / "PG_VERSION").write_text("17\n")
    assert await refusal(data_dir) == (
        f"The database in {data_dir}/postgres was made by Postgres 17 and this is Postgres 18;"
        " choose another data folder, or bring the data over with pg_dump."
    )


async def test_a_database_whose_password_is_lost_is_refused(data_dir: Path) -> None:
    async with local_servers(data_dir):
        pass
    (data_dir / "secrets.json").unlink()
    assert "has lost its password (secrets.json)" in await refusal(data_dir)


async def test_a_closed_folder_is_refused(data_dir: Path) -> None:
    closed = data_dir / "closed"
    closed.mkdir(mode=0o700 if os.geteuid() == 0 else 0o000)
    assert "closed/data " in await refusal(closed / "data")


async def test_a_folder_that_is_a_file_is_refused(data_dir: Path) -> None:
    path = data_dir / "file"
    path.write_text("")
    assert await refusal(path) == f"The data folder {path} is a file; choose a folder."


async def test_an_address_of_another_kind_is_refused_without_repeating_it(data_dir: Path) -> None:
    with pytest.raises(LocalError) as caught:
        async with local_servers(data_dir, postgres_url="mysql://root:hidden@db/x"):
            pass
    assert caught.value.sentence == (
        "The address given with --postgres-url must start with postgresql:// or postgres://."
    )


async def test_a_redis_that_does_not_answer_or_refuses_the_password_is_one_sentence(
    servers: LocalServers, data_dir: Path
) -> None:
    port = urlsplit(servers.redis_url).port
    free = free_port()
    for url, sentence in {
        f"redis://:hidden@127.0.0.1:{port}/0": f"port {port}, refuses this user or password.",
        f"redis://:hidden@127.0.0.1:{free}/0": f"port {free}, does not answer.",
    }.items():
        with pytest.raises(LocalError) as caught:
            async with local_servers(data_dir, redis_url=url):
                pass
        assert caught.value.sentence == f"The Redis on 127.0.0.1, {sentence}"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
async def test_a_database_folder_that_is_closed_is_one_sentence(data_dir: Path) -> None:
    room = data_dir / "postgres"
    room.mkdir(mode=0o000)
    assert await refusal(data_dir) == f"The data folder {data_dir} cannot be used: Permission denied."
