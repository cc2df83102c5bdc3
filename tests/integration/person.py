"""A person at a terminal: the `espalier` command as it is installed, run in this process."""

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio.to_thread
import pytest

from espalier_local.command import main


@dataclass(frozen=True)
class Done:
    """What the person sees of a command that has ended."""

    code: int
    stdout: str
    stderr: str = ""


Espalier = Callable[..., Awaitable[Done]]


def at_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Espalier:
    """`espalier` with these words. It runs its own event loop, so it gets a thread."""

    async def espalier(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["espalier", *words])
        code = await anyio.to_thread.run_sync(_exit_code)
        seen = capsys.readouterr()
        return Done(code, seen.out, seen.err)

    return espalier


def _exit_code() -> int:
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0
