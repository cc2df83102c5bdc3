"""The main job as a person runs it: a repository of random history, one command, and a file that tells it."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import pytest

COMMITS = 30
WAIT_S = 55
INTERRUPTED = 130
MARKS = ["", " <b>&amp;</b>", ' "quoted"', " ${/goal}", " émoji 🌱", " | a | table |", " \\back`tick`"]


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, list[str]]:
    """A git repository, and the subjects of its commits."""
    folder = tmp_path / "some project"
    folder.mkdir()
    subjects = [f"Change {secrets.token_hex(8)}{MARKS[number % len(MARKS)]}" for number in range(COMMITS)]
    git(folder, "init", "--quiet")
    for subject in subjects:
        git(folder, "commit", "--quiet", "--allow-empty", "--message", subject)
    return folder, subjects


def espalier(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).parent / "espalier", *command],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "NO_COLOR": "1"},
    )


def git(folder: Path, *command: str) -> None:
    nobody = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *nobody, *command], cwd=folder, check=True, capture_output=True)


def test_every_subject_of_a_random_history_is_in_the_release_notes(
    repository: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, subjects = repository
    notes = tmp_path / "notes.md"

    run = espalier(tmp_path, "demo", "--repo", str(folder), "--output", str(notes))

    assert run.returncode == 0, run.stderr
    text = notes.read_text()
    assert [subject for subject in subjects if subject not in text] == []
    assert "asleep" in run.stdout and "run ended, complete" in run.stdout and str(notes) in run.stdout
    plan = files("espalier_local").joinpath("demo_plan.yaml").read_text()
    assert [subject for subject in subjects if subject in plan] == []


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    repository: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, _ = repository
    missing = tmp_path / "missing"
    run = espalier(tmp_path, "demo", "--repo", str(folder), "--output", str(missing / "notes.md"))
    assert run.returncode == 2
    assert run.stderr == f"espalier: There is no folder {missing} to write notes.md to.\n"
    assert "Starting" not in run.stdout


def test_a_terminated_demo_leaves_no_folder_behind(
    repository: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, _ = repository
    room = Path(tempfile.mkdtemp(prefix="demo-"))
    room.chmod(0o711)  # the servers' own user enters it
    command = [str(Path(sys.executable).parent / "espalier"), "demo", "--repo", str(folder)]
    environment = {**os.environ, "TMPDIR": str(room), "ESPALIER_DATA_DIR": str(room / "data")}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, env=environment) as demo:
        assert demo.stdout is not None
        assert any(b"cycle 1" in line for line in demo.stdout)
        demo.terminate()
        assert demo.wait(timeout=WAIT_S) == INTERRUPTED
    assert [path.name for path in room.iterdir()] == ["data"]
    shutil.rmtree(room)


def test_a_folder_without_a_repository_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run = espalier(tmp_path, "demo", "--repo", str(tmp_path))

    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("espalier: ") and run.stderr.count("\n") == 1
