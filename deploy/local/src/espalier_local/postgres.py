"""A real Postgres from a wheel: on loopback only, unprivileged, in the data folder.

No Unix socket, so that no path is too long; over TCP the password (kept with the other secrets) is what keeps
the machine's other users out. Durability stays at Postgres' own safe defaults unless a caller passes options,
as the tests do. Below it stand `children.py` and `binaries.py`, above it `runtime.py`.
"""

import os
import shutil
import signal
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import STDOUT

import anyio
import anyio.to_thread

from espalier_local.binaries import POSTGRES, postgres_major, runnable_program
from espalier_local.children import ChildPlan, guarded, running
from espalier_local.console import OnLine
from espalier_local.errors import LocalError
from espalier_local.folder import SECRETS, DataFolder, plainly
from espalier_local.ports import LOOPBACK, free_port

USER = DATABASE = "postgres"
ROOM = "postgres"
INIT_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0  # a start after a crash replays the log first
PREDECESSOR_WAIT_S = 10.0
PREDECESSOR_POLL_S = 0.05
PROBE_TIMEOUT_S = 1.0
GRACE_S = 1.5
ENVIRONMENT = {"LC_ALL": "C", "TZ": "UTC", "PATH": os.defpath}  # none of the caller's: it may hold secrets
SETTINGS = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "",
    "log_checkpoints": "off",
    "log_min_error_statement": "panic",  # whoever sent the statement logs its failure
    "log_error_verbosity": "terse",  # the detail of a failed statement quotes rows
}
PROTOCOL_VERSION = 3 << 16


@asynccontextmanager
async def run_postgres(
    folder: DataFolder, on_line: OnLine, *, options: Mapping[str, str] | None = None
) -> AsyncIterator[str]:
    """Start the server on the folder's database, making that on first use; gives its URL, password included.

    A crashed server is started again on the same port. On leaving, a fast shutdown.
    """
    programs = (await anyio.to_thread.run_sync(runnable_program, POSTGRES, folder.account)).parent
    with plainly(folder.path):
        password = await _prepare(folder, programs)
    await _predecessor_gone(folder.path / ROOM / "postmaster.pid")
    port = free_port()
    plan = ChildPlan(
        name="postgres",
        command=_command(programs, folder.path / ROOM, {**SETTINGS, **(options or {}), "port": str(port)}),
        env=ENVIRONMENT,
        grace_s=GRACE_S,
        stop_signal=signal.SIGINT,  # Postgres' fast shutdown: open sessions are ended, not waited for
        death_signal=signal.SIGINT,
        account=folder.account,
        quiet=True,
        cwd=Path("/"),  # the caller's own may be closed to the account
    )
    async with running([plan], on_line) as [child]:
        await child.become_ready(lambda: accepts_connections(port), within_s=START_TIMEOUT_S)
        # On loopback there is no TLS; saying so saves the probe for it at every connection.
        yield f"postgresql://{USER}:{password}@{LOOPBACK}:{port}/{DATABASE}?sslmode=disable"


async def accepts_connections(port: int) -> bool:
    """Whether a server on this port takes new sessions; ends the conversation before it would log in."""
    user = f"user\0{USER}\0database\0{DATABASE}\0\0".encode()
    hello = struct.pack("!ii", 8 + len(user), PROTOCOL_VERSION) + user
    with anyio.move_on_after(PROBE_TIMEOUT_S):
        try:
            async with await anyio.connect_tcp(LOOPBACK, port) as stream:
                await stream.send(hello)
                return await stream.receive(1) == b"R"  # asks for the password; E while it starts up
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            return False
    return False


async def _prepare(folder: DataFolder, programs: Path) -> str:
    """Make the database on first use, check it on later ones; gives the password."""
    room, kept = folder.path / ROOM, "postgres_password" in folder.read(SECRETS)
    if not room.exists():
        password = folder.password("postgres_password")
        await _initialise(folder, programs, password)
        return password
    _check_version(room)
    if not kept:
        raise LocalError(
            f"The database in {folder.path} has lost its password ({SECRETS}); restore that file."
        )
    return folder.password("postgres_password")


def _check_version(room: Path) -> None:
    try:
        found = (room / "PG_VERSION").read_text().strip()
    except FileNotFoundError as err:
        raise LocalError(f"The folder {room} holds no Postgres database; move it away.") from err
    if found != str(postgres_major()):
        raise LocalError(
            f"The database in {room} was made by Postgres {found} and this is Postgres {postgres_major()};"
            " choose another data folder, or bring the data over with pg_dump."
        )


async def _initialise(folder: DataFolder, programs: Path, password: str) -> None:
    """Build beside the final place and rename: a database that was cut short is never taken for one."""
    fresh = ROOM + ".new"
    shutil.rmtree(folder.path / fresh, ignore_errors=True)
    room = folder.make_room(fresh)
    password_file = folder.lend("initdb.password", password)
    try:
        await _initdb(folder, programs, room, password_file)
    finally:
        password_file.unlink(missing_ok=True)
    room.rename(folder.path / ROOM)


async def _initdb(folder: DataFolder, programs: Path, room: Path, password_file: Path) -> None:
    command = [
        str(programs / "initdb"),
        *("-D", str(room), "-U", USER, "--auth=scram-sha-256", f"--pwfile={password_file}"),
        *("--encoding=UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
    ]
    with anyio.move_on_after(INIT_TIMEOUT_S):
        done = await anyio.run_process(
            guarded(command, account=folder.account),
            stderr=STDOUT,
            check=False,
            cwd="/",
            env=ENVIRONMENT,
            start_new_session=True,
        )
        if done.returncode == 0:
            return
        said = done.stdout.decode("utf-8", "replace").strip().splitlines()
        raise LocalError(
            f"The database could not be made in {folder.path}: {said[-1] if said else 'no reason given'}"
        )
    raise LocalError(f"The database could not be made in {folder.path} within {INIT_TIMEOUT_S:g} s.")


async def _predecessor_gone(pid_file: Path) -> None:
    """A killed launcher's server may still be shutting down; past the bound Postgres itself decides."""
    with anyio.move_on_after(PREDECESSOR_WAIT_S):
        while _is_alive(pid_file):
            await anyio.sleep(PREDECESSOR_POLL_S)


def _is_alive(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text().split("\n", 1)[0]), 0)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _command(programs: Path, room: Path, settings: Mapping[str, str]) -> list[str]:
    assigned = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return [str(programs / "postgres"), "-D", str(room), *assigned]
