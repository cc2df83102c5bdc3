"""The git repository that a path means, or one sentence why there is none to read.

Git is asked in its own process, without a shell and within a time, and nothing in the repository's
configuration may make it run another program or reach a network. The history itself is not read here: that is
an agent's work. Above it stands `demo.py`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE

import anyio

from espalier_local.errors import LocalError

GIT_TIMEOUT_S = 30.0

# What git finds its own configuration by. It says which folders are safe; CI says it in nothing but these.
_CONFIGURED_BY = ("GIT_CONFIG_", "XDG_CONFIG_HOME")
_NEEDED = ("PATH", "HOME", "TMPDIR")
# A repository may name a program to fetch objects that it lacks; it then lacks them.
_NO_FETCHING = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}


@dataclass(frozen=True, slots=True)
class Repository:
    """One with at least one commit. `path` is its top folder, or of a bare one the repository itself.

    `commits` is how many lead up to HEAD, None if not all of them are there (a partial clone).
    """

    path: Path
    name: str
    commits: int | None


def git_environment() -> dict[str, str]:
    """What git is told by the environment, here and below a tool server, beyond what every program is told.

    Not GIT_DIR and its like: they would mean another repository than the one that was named.
    """
    ours = {name: value for name, value in os.environ.items() if name.startswith(_CONFIGURED_BY)}
    return {**ours, **_NO_FETCHING}


async def find_repository(path: Path) -> Repository:
    """Raises LocalError with one sentence when there is no history to read."""
    folder = _existing(path)
    code, said, complaint = await _git(folder, "rev-parse", "--absolute-git-dir")
    if code != 0:
        raise LocalError(f"{folder} cannot be read as a git repository: {_reason(complaint)}.")
    code, _, _ = await _git(folder, "rev-parse", "--quiet", "--verify", "HEAD^{commit}")
    if code != 0:
        raise LocalError(f"The git repository {folder} has no commits yet.")
    git_folder = _as_path(said)
    code, said, _ = await _git(folder, "rev-parse", "--show-toplevel")
    top = _as_path(said) if code == 0 else git_folder
    # A top folder that only the configuration names holds no repository for others to open.
    where = top if (top / ".git").exists() else git_folder
    code, counted, _ = await _git(folder, "rev-list", "--count", "HEAD", "--")
    return Repository(_spellable(where), _name(where), int(counted) if code == 0 else None)


def _existing(path: Path) -> Path:
    folder = path.expanduser().resolve()
    if not folder.is_dir():
        raise LocalError(f"There is no folder {folder}.")
    return folder


def _as_path(said: bytes) -> Path:
    return Path(os.fsdecode(said.removesuffix(b"\n")))


def _name(where: Path) -> str:
    named = where.parent if where.name == ".git" else where
    return named.name.removesuffix(".git") or "repository"


def _spellable(path: Path) -> Path:
    """The path has to travel as text."""
    try:
        str(path).encode()
    except UnicodeEncodeError as err:
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise LocalError(f"The path {shown} is not UTF-8, so no tool can be told of it.") from err
    return path


def _reason(complaint: bytes) -> str:
    lines = complaint.decode("utf-8", "replace").strip().splitlines() or ["git gave no reason"]
    return lines[0].removeprefix("fatal: ").rstrip(".")


async def _git(folder: Path, *arguments: str) -> tuple[int, bytes, bytes]:
    """Exit code, output (a path or an id, so a line) and complaints."""
    command = ["git", "--no-pager", "-C", str(folder), *arguments]
    try:
        with anyio.fail_after(GIT_TIMEOUT_S):
            done = await anyio.run_process(
                command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, check=False, env=_environment()
            )
    except FileNotFoundError as err:
        raise LocalError("The demo reads a history with git, which is not on the PATH here.") from err
    except TimeoutError as err:
        raise LocalError(f"Git did not open {folder} within {GIT_TIMEOUT_S:g} s.") from err
    return done.returncode, done.stdout, done.stderr


def _environment() -> Mapping[str, str]:
    """As narrow as a tool server's, so that what works here works there."""
    return {name: os.environ[name] for name in _NEEDED if name in os.environ} | git_environment()
