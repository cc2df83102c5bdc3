"""Who runs the servers: the caller, or `nobody` when the caller is root (Postgres refuses to run as root).

Nothing here creates a user or changes anybody's permissions; it only finds out what the account may do.
"""

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path

from espalier_local.errors import LocalError

UNPRIVILEGED = "nobody"
PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Account:
    """An unprivileged user that stands in for root."""

    name: str
    uid: int
    gid: int


def server_account() -> Account | None:
    """The account to change to, or None where the caller is unprivileged already."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(UNPRIVILEGED)
    except KeyError as err:
        raise LocalError(
            f"Postgres does not run as root and this machine has no user {UNPRIVILEGED!r};"
            " start espalier as an ordinary user or pass --postgres-url and --redis-url."
        ) from err
    return Account(UNPRIVILEGED, entry.pw_uid, entry.pw_gid)


def can_enter(account: Account | None, folder: Path) -> bool:
    """Whether the account reaches and may enter the folder; asked of the kernel, so ACLs count too."""
    return can_run(account, ["/bin/sh", "-c", 'test -x "$1"', "sh", str(folder)])


def can_run(account: Account | None, command: list[str]) -> bool:
    """Whether the command, run as the account, succeeds."""
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd="/",
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else (),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def own(account: Account | None, path: Path) -> None:
    """Hand a file or folder that we have just made to the account."""
    if account is not None:
        os.chown(path, account.uid, account.gid, follow_symlinks=False)
