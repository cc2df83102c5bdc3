"""Finding the repository that a path means: its top, its name, or one sentence why there is none to read."""

import subprocess
from pathlib import Path

import pytest

from espalier_local.errors import LocalError
from espalier_local.git_repository import Repository, find_repository, git_environment

pytestmark = pytest.mark.anyio

AUTHOR = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false")
ABSENT = "1" * 40


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *AUTHOR, *words], check=True, capture_output=True)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "my shop"
    folder.mkdir()
    git(folder, "init")
    return folder


@pytest.fixture
def repo(empty: Path) -> Path:
    git(empty, "commit", "--allow-empty", "-m", "first")
    return empty


async def test_a_folder_inside_a_repository_means_its_top(repo: Path) -> None:
    (repo / "below" / "it").mkdir(parents=True)

    found = [await find_repository(folder) for folder in (repo, repo / "below" / "it")]

    assert found == [Repository(repo, "my shop", 1)] * 2


async def test_a_bare_repository_is_read_where_it_is(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--bare", str(repo), "copy.git")

    assert await find_repository(tmp_path / "copy.git") == Repository(tmp_path / "copy.git", "copy", 1)


async def test_a_linked_worktree_is_a_repository_of_its_own_name(repo: Path, tmp_path: Path) -> None:
    git(repo, "worktree", "add", "--detach", str(tmp_path / "a tree"))

    assert await find_repository(tmp_path / "a tree") == Repository(tmp_path / "a tree", "a tree", 1)


async def test_the_insides_of_a_repository_have_its_name(repo: Path) -> None:
    assert await find_repository(repo / ".git") == Repository(repo / ".git", "my shop", 1)


async def test_a_top_that_only_the_configuration_names_is_not_believed(repo: Path, tmp_path: Path) -> None:
    git(repo, "config", "core.worktree", str(tmp_path))

    assert await find_repository(repo) == Repository(repo / ".git", "my shop", 1)


async def test_what_has_no_history_is_one_sentence(empty: Path, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"^The git repository .*my shop has no commits yet\.$"):
        await find_repository(empty)
    with pytest.raises(
        LocalError, match=r"cannot be read as a git repository: not a git repository[^\n]*\.$"
    ):
        await find_repository(tmp_path)
    with pytest.raises(LocalError, match=r"^There is no folder .*none\.$"):
        await find_repository(tmp_path / "none")


async def test_a_machine_without_git_is_one_sentence(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repo))

    with pytest.raises(LocalError, match="git, which is not on the PATH"):
        await find_repository(repo)


async def test_a_repository_cannot_have_a_program_run_for_an_object_that_it_lacks(
    empty: Path, tmp_path: Path
) -> None:
    (empty / ".git" / "HEAD").write_text(f"{ABSENT}\n")
    for name, value in {
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": str(tmp_path),
        "remote.origin.promisor": "true",
        "remote.origin.uploadpack": f"touch '{tmp_path}/was run';",
        "protocol.file.allow": "always",
    }.items():
        git(empty, "config", name, value)

    with pytest.raises(LocalError, match="has no commits yet"):
        await find_repository(empty)

    assert not (tmp_path / "was run").exists()


async def test_the_environment_configures_git_and_does_not_name_another_repository(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    for name, value in {**configured, "GIT_DIR": str(tmp_path), "GIT_WORK_TREE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)

    assert configured.items() <= git_environment().items()
    assert not {"GIT_DIR", "GIT_WORK_TREE"} & git_environment().keys()
    assert await find_repository(repo) == Repository(repo, "my shop", 1)
