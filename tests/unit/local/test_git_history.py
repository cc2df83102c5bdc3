"""Reading a repository's history for the demo: whole, in order, bounded, or one sentence why not."""

import subprocess
from pathlib import Path

import pytest

from espalier_local import git_history
from espalier_local.errors import LocalError
from espalier_local.git_history import NOTHING, read_history

pytestmark = pytest.mark.anyio

AUTHOR = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *AUTHOR, *words], check=True, capture_output=True)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    git(folder, "init")
    return folder


def commit(repo: Path, subject: str) -> None:
    words = ("--allow-empty", "--allow-empty-message", "--cleanup=verbatim", "--no-verify")
    git(repo, "commit", *words, "--date=2026-01-02T03:04:05Z", "-m", subject)


def subjects(lines: str) -> list[str]:
    return [line.removeprefix("- ").rpartition(" (")[0] for line in lines.split("\n")]


async def test_every_commit_is_in_one_of_three_parts_newest_first(repo: Path) -> None:
    for number in range(7):
        commit(repo, f"change {number}")

    history = await read_history(repo)

    assert (history.repository, history.total, history.left_out, history.authors) == ("shop", 7, 0, 1)
    assert [subjects(chapter.lines) for chapter in history.chapters] == [
        ["change 6", "change 5", "change 4"],
        ["change 3", "change 2", "change 1"],
        ["change 0"],
    ]
    assert history.chapters[0].title == "2026-01-02, 3 commits"


@pytest.mark.parametrize(
    "subject", ["${/goal} $${ ~1", "-- - # [x](y) <b>", "naïve 😀 \x1b[2J \t", '"\\', ""]
)
async def test_a_subject_is_kept_as_it_is(repo: Path, subject: str) -> None:
    commit(repo, subject)

    history = await read_history(repo)

    assert subjects(history.chapters[0].lines) == [subject.rstrip() or "(no subject)"]
    assert [chapter.lines for chapter in history.chapters[1:]] == [NOTHING, NOTHING]


async def test_of_a_long_history_the_newest_that_fit_are_read(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_history, "HISTORY_BYTES_MAX", 100)
    for number in range(5):
        commit(repo, f"change {number}")

    history = await read_history(repo)

    assert (history.total, history.left_out) == (5, 3)
    assert "".join(chapter.lines for chapter in history.chapters).count("change") == 2


async def test_a_subject_of_unusual_length_is_cut(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_history, "SUBJECT_CHARS_MAX", 6)
    commit(repo, "change 1")
    commit(repo, "change")

    history = await read_history(repo)

    assert [subjects(chapter.lines) for chapter in history.chapters[:2]] == [["change"], ["change…"]]


async def test_a_folder_inside_the_repository_and_a_bare_one_have_its_name(
    repo: Path, tmp_path: Path
) -> None:
    commit(repo, "first")
    (repo / "below").mkdir()
    git(tmp_path, "clone", "--bare", str(repo), "copy.git")

    assert (await read_history(repo / "below")).repository == "shop"
    assert (await read_history(tmp_path / "copy.git")).repository == "copy"


async def test_what_has_no_history_is_one_sentence(repo: Path, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"shop has no commits yet\.$"):
        await read_history(repo)
    with pytest.raises(LocalError, match=r"cannot be read as a git repository: not a git repository"):
        await read_history(tmp_path)
    with pytest.raises(LocalError, match=r"^There is no folder .*none\.$"):
        await read_history(tmp_path / "none")


async def test_a_machine_without_git_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(LocalError, match="git, which is not on the PATH"):
        await read_history(tmp_path)
