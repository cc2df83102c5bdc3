"""A git repository's history, read for the demo: bounded, in three parts, as lines of Markdown.

Git is asked in its own process, without a shell, and nothing in the repository's configuration may make it
run another program. What is read is handed on as plain values; nothing here knows of agents. Above it stands
`demo.py`.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
from anyio.abc import ByteReceiveStream

from espalier_local.errors import LocalError

HISTORY_BYTES_MAX = 450_000
"""All lines together, as JSON: the request that carries them and the text that joins them have limits."""

SUBJECT_CHARS_MAX = 10_000
OUTPUT_BYTES_MAX = 4 * 1024 * 1024
GIT_TIMEOUT_S = 60.0
CHAPTERS = 3
NOTHING = "- no commits in this part"

# A signature check would run a program that the repository names.
_LOG = ("log", "--no-show-signature", "--no-patch", "--no-color", "--encoding=UTF-8", "--date=short", "-z")
_FIELDS = ("%h", "%ad", "%an", "%s")
_SEPARATOR = b"\0"


@dataclass(frozen=True, slots=True)
class Commit:
    sha: str
    date: str
    author: str
    subject: str

    def line(self) -> str:
        return f"- {self.subject or '(no subject)'} ({self.sha}, {self.date})"


@dataclass(frozen=True, slots=True)
class Chapter:
    """Consecutive commits, newest first."""

    title: str
    lines: str


@dataclass(frozen=True, slots=True)
class History:
    """The newest commits that fit; `left_out` older ones do not."""

    repository: str
    total: int
    left_out: int
    authors: int
    chapters: tuple[Chapter, ...]

    def as_inputs(self) -> dict[str, Any]:
        return {**asdict(self), "chapters": [asdict(chapter) for chapter in self.chapters]}


async def read_history(repo: Path) -> History:
    """Read it newest first. Raises LocalError with one sentence when there is nothing to read."""
    folder = _existing(repo)
    code, said, complaint = await _git(folder, "rev-parse", "--absolute-git-dir")
    if code != 0:
        raise LocalError(f"{folder} cannot be read as a git repository: {_reason(complaint)}.")
    code, counted, _ = await _git(folder, "rev-list", "--count", "HEAD", "--")
    if code != 0:
        raise LocalError(f"The git repository {folder} has no commits yet.")
    _, output, _ = await _git(folder, *_LOG, f"--format=tformat:{'%x00'.join(_FIELDS)}", "HEAD", "--")
    commits = list(_that_fit(_commits(output)))
    total = int(counted)
    return History(
        repository=_name(Path(said.decode("utf-8", "replace").strip())),
        total=total,
        left_out=total - len(commits),
        authors=len({commit.author for commit in commits}),
        chapters=_chapters(commits),
    )


def _existing(repo: Path) -> Path:
    folder = repo.expanduser().resolve()
    if not folder.is_dir():
        raise LocalError(f"There is no folder {folder}.")
    return folder


def _commits(output: bytes) -> Iterator[Commit]:
    """Whole records only: the output may have been cut."""
    fields = [field.decode("utf-8", "replace") for field in output.split(_SEPARATOR)[:-1]]
    for start in range(0, len(fields) - len(_FIELDS) + 1, len(_FIELDS)):
        sha, date, author, subject = fields[start : start + len(_FIELDS)]
        shown = subject if len(subject) <= SUBJECT_CHARS_MAX else subject[:SUBJECT_CHARS_MAX] + "…"
        yield Commit(sha, date, author, shown)


def _that_fit(commits: Iterator[Commit]) -> Iterator[Commit]:
    left = HISTORY_BYTES_MAX
    for commit in commits:
        left -= len(json.dumps(commit.line() + "\n", ensure_ascii=False).encode())
        if left < 0:
            return
        yield commit


def _chapters(commits: list[Commit]) -> tuple[Chapter, ...]:
    """Always as many as the plan has cycles for; parts of a short history may be empty."""
    size = max(-(-len(commits) // CHAPTERS), 1)
    return tuple(_chapter(commits[place * size : (place + 1) * size]) for place in range(CHAPTERS))


def _chapter(commits: list[Commit]) -> Chapter:
    if not commits:
        return Chapter("Nothing older", NOTHING)
    first, last = min(each.date for each in commits), max(each.date for each in commits)
    dates = first if first == last else f"{first} to {last}"
    count = "1 commit" if len(commits) == 1 else f"{len(commits)} commits"
    return Chapter(f"{dates}, {count}", "\n".join(commit.line() for commit in commits))


def _name(git_folder: Path) -> str:
    return git_folder.parent.name if git_folder.name == ".git" else git_folder.name.removesuffix(".git")


def _reason(complaint: bytes) -> str:
    lines = complaint.decode("utf-8", "replace").strip().splitlines() or ["git gave no reason"]
    return lines[0].removeprefix("fatal: ").rstrip(".")


async def _git(folder: Path, *arguments: str) -> tuple[int, bytes, bytes]:
    """Exit code, output (cut at a bound; the rest is not waited for) and complaints."""
    command = ["git", "--no-pager", "-C", str(folder), *arguments]
    try:
        with anyio.fail_after(GIT_TIMEOUT_S):
            async with await anyio.open_process(command, stderr=PIPE) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                output = await _read(process.stdout)
                if len(output) > OUTPUT_BYTES_MAX:
                    process.kill()
                complaint = await _read(process.stderr)
                return await process.wait(), output, complaint
    except FileNotFoundError as err:
        raise LocalError("The demo reads a history with git, which is not on the PATH here.") from err
    except TimeoutError as err:
        raise LocalError(f"Git did not read {folder} within {GIT_TIMEOUT_S:g} s.") from err


async def _read(stream: ByteReceiveStream) -> bytes:
    read = bytearray()
    async for chunk in stream:
        read += chunk
        if len(read) > OUTPUT_BYTES_MAX:
            break
    return bytes(read)
