"""The data folder: where it lies, who may use it, and the small private files in it.

It holds the database (`postgres/`), the passwords of the servers (`secrets.json`), the first key
(`profile.json`) and, while something runs, where to reach it (`runtime.json`). Servers are started by the
files above this one; this one only makes sure that one launcher at a time uses one folder.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from espalier_local.account import Account, can_enter, own, server_account
from espalier_local.errors import LocalError

DEFAULT_NAME = ".espalier"
SHARED_HOME = Path("/var/lib/espalier")
PASSWORD_BYTES = 24
RUNTIME = "runtime.json"
PROFILE = "profile.json"
SECRETS = "secrets.json"
PRIVATE_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class DataFolder:
    """A usable data folder and the account that runs the servers in it."""

    path: Path
    account: Account | None

    def read(self, name: str) -> dict[str, str]:
        """A private file's members; empty if it does not exist."""
        with plainly(self.path):
            return read_private(self.path / name)

    def write(self, name: str, members: Mapping[str, str]) -> None:
        """Replace a private file in one step, readable by the caller only."""
        with plainly(self.path):
            _write_private(self.path / name, members)

    def remove(self, name: str) -> None:
        """Forget a private file."""
        (self.path / name).unlink(missing_ok=True)

    def password(self, name: str) -> str:
        """The password kept under this name, made on first use."""
        kept = self.read(SECRETS)
        if name not in kept:
            kept[name] = secrets.token_urlsafe(PASSWORD_BYTES)
            self.write(SECRETS, kept)
        return kept[name]

    def lend(self, name: str, text: str) -> Path:
        """A private file for the servers' account to read; the caller removes it."""
        path = self.path / name
        with plainly(self.path):
            _write_file(path, text)
            own(self.account, path)
        return path

    def make_room(self, name: str) -> Path:
        """A sub-folder that belongs to the servers' account and to nobody else."""
        room = self.path / name
        with plainly(self.path):
            room.mkdir(mode=0o700, exist_ok=True)
            own(self.account, room)
        return room


def locate_folder(chosen: Path | None) -> Path:
    """The folder the person chose, else `./.espalier`, else (for root) one below `/var/lib`.

    Root's own folders are often closed to the account that runs the servers; a checkout below `/root` then
    gets a folder named after its path.
    """
    here = Path.cwd()
    if chosen is not None:
        return (here / chosen.expanduser()).resolve()
    account, usual = server_account(), here / DEFAULT_NAME
    if account is None or can_enter(account, usual if usual.exists() else here):
        return usual
    digest = hashlib.sha256(os.fsencode(here)).hexdigest()[:8]
    return SHARED_HOME / f"{here.name or 'root'}-{digest}"


@contextmanager
def open_folder(path: Path) -> Iterator[DataFolder]:
    """Make the folder if need be and hold its lock; every complaint is one sentence."""
    account = server_account()
    with plainly(path):
        _make(path, account)
        lock = _take_lock(path)
    try:
        yield DataFolder(path, account)
    finally:
        os.close(lock)


@contextmanager
def throwaway_folder() -> Iterator[Path]:
    """A folder for one use (tests, the demo), removed afterwards.

    Not pytest's `tmp_path`, which is closed to the account that runs the servers when root runs the tests.
    """
    path = Path(tempfile.mkdtemp(prefix="espalier-"))
    _let_through(path, server_account())
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def running_servers(path: Path) -> dict[str, str]:
    """Where a launcher that is alive put its servers; the left-over file of a dead one is not believed."""
    with plainly(path):
        found = read_private(path / RUNTIME)
        if not found or not _is_locked(path):
            raise LocalError(
                f"Nothing is running in {path}; start it with `espalier up`, or pass --postgres-url."
            )
    return found


def read_private(path: Path) -> dict[str, str]:
    """A private file's members; empty if it does not exist."""
    try:
        with path.open("rb") as file:
            members = json.loads(file.read(PRIVATE_BYTES_MAX))
    except FileNotFoundError:
        return {}
    except ValueError as err:
        raise LocalError(f"The file {path} is damaged; restore it, or remove it to start afresh.") from err
    if not isinstance(members, dict):
        raise LocalError(f"The file {path} is damaged; restore it, or remove it to start afresh.")
    return {str(name): str(value) for name, value in members.items()}


def _write_private(path: Path, members: Mapping[str, str]) -> None:
    fresh = path.with_name(path.name + ".new")
    _write_file(fresh, json.dumps(dict(members), indent=2) + "\n")
    fresh.replace(path)


def _write_file(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)


def _make(path: Path, account: Account | None) -> None:
    if not path.exists():
        for missing in reversed([each for each in (path, *path.parents) if not each.exists()]):
            missing.mkdir(mode=0o700)
            _let_through(missing, account)
        (path / ".gitignore").write_text("*\n")  # it holds passwords; keep it out of a person's repository
    if not path.is_dir():
        raise LocalError(f"The data folder {path} is a file; choose a folder.")
    if path.stat().st_uid != os.geteuid():
        raise LocalError(f"The data folder {path} belongs to another user; choose one of your own.")
    if account is not None and not can_enter(account, path):
        raise LocalError(
            f"The data folder {path} is closed to the user {account.name!r}, as whom Postgres runs when root"
            " starts it; choose one that everybody may enter."
        )


def _let_through(made: Path, account: Account | None) -> None:
    """Open a folder that we have just made for passing (0711: no listing), whatever the umask."""
    if account is not None:
        made.chmod(0o711)


def _take_lock(path: Path) -> int:
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise LocalError(
            f"The data folder {path} is in use by process {holder or '?'}; stop that first."
        ) from err
    os.ftruncate(descriptor, 0)
    os.write(descriptor, b"%d\n" % os.getpid())
    return descriptor


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def plainly(path: Path) -> Iterator[None]:
    """What the system refuses in the folder is one sentence."""
    try:
        yield
    except OSError as err:
        raise LocalError(f"The data folder {path} cannot be used: {err.strerror or err}.") from err
