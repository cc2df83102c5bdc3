"""Where the data folder lies, and what is in it for whom."""

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from espalier_local.errors import LocalError
from espalier_local.folder import SHARED_HOME, locate_folder, open_folder, read_private, throwaway_folder

AS_ROOT = os.geteuid() == 0


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with throwaway_folder() as path:
        monkeypatch.chdir(path)
        yield path


def test_the_usual_place_is_below_the_current_folder(here: Path) -> None:
    assert locate_folder(None) == here / ".espalier"


def test_a_chosen_place_is_made_absolute(here: Path) -> None:
    assert locate_folder(Path("data")) == here / "data"


@pytest.mark.skipif(not AS_ROOT, reason="an ordinary user can enter its own folders")
def test_root_in_a_closed_folder_gets_one_below_var_lib_named_after_it(here: Path) -> None:
    here.chmod(0o700)
    found = locate_folder(None)
    assert found.parent == SHARED_HOME
    assert found.name.startswith(f"{here.name}-")


def test_a_new_folder_is_closed_to_others_and_kept_out_of_git(here: Path) -> None:
    with open_folder(here / "data") as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == (0o711 if AS_ROOT else 0o700)
        assert (folder.path / ".gitignore").read_text() == "*\n"
        assert folder.read("profile.json") == {}


def test_a_password_is_made_once_and_kept_privately(here: Path) -> None:
    with open_folder(here / "data") as folder:
        made = folder.password("redis_password")
        assert folder.password("redis_password") == made
        assert stat.S_IMODE((folder.path / "secrets.json").stat().st_mode) == 0o600
    with open_folder(here / "data") as again:
        assert again.password("redis_password") == made


def test_a_damaged_private_file_is_one_sentence(here: Path) -> None:
    (here / "profile.json").write_text("{")
    with pytest.raises(LocalError, match=r"profile\.json is damaged; restore it"):
        read_private(here / "profile.json")


def test_a_folder_has_one_user_at_a_time(here: Path) -> None:
    in_use = pytest.raises(LocalError, match="is in use by process")
    with ExitStack() as second, open_folder(here), in_use:
        second.enter_context(open_folder(here))
    with open_folder(here) as folder:
        assert folder.path == here
