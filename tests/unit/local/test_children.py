"""Child processes: read line by line, restarted, stopped within the bound, and tied to their launcher."""

import os
import signal
import sys
from collections.abc import Awaitable, Callable

import anyio
import psutil
import pytest

from espalier_local import guard
from espalier_local.children import LINE_BYTES_MAX, Child, ChildPlan, guarded, running
from espalier_local.errors import LocalError

pytestmark = pytest.mark.anyio

BOUND_S = 10.0
POLL_S = 0.01
IGNORES_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
WAITS = "print('up', flush=True); signal.pause()"


class Log:
    """What a person would see."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    async def shows(self, name: str, line: str, *, times: int = 1) -> None:
        await until(lambda: self.lines.count((name, line)) >= times)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(BOUND_S):
        while not condition():
            await anyio.sleep(POLL_S)


def plan(code: str, *, name: str = "child", grace_s: float = BOUND_S, quiet: bool = False) -> ChildPlan:
    command = (sys.executable, "-c", f"import os, signal, sys, time; {code}")
    return ChildPlan(name=name, command=command, env=dict(os.environ), grace_s=grace_s, quiet=quiet)


def ready_when(log: Log, line: str) -> Callable[[], Awaitable[bool]]:
    async def probe() -> bool:
        return any(seen == line for _, seen in log.lines)

    return probe


async def test_both_outputs_of_every_child_arrive_as_lines_with_its_name() -> None:
    log = Log()
    code = "print('out', flush=True); print('err', file=sys.stderr, flush=True); signal.pause()"
    async with running([plan(code, name="a"), plan(code, name="b")], log):
        for name in ("a", "b"):
            await log.shows(name, "out")
            await log.shows(name, "err")


async def test_an_endless_line_is_cut_into_bounded_pieces() -> None:
    log = Log()
    async with running([plan(f"print('x' * {3 * LINE_BYTES_MAX}, flush=True); signal.pause()")], log):
        await until(lambda: sum(len(line) for _, line in log.lines) == 3 * LINE_BYTES_MAX)
    assert max(len(line) for _, line in log.lines) <= LINE_BYTES_MAX


async def test_a_crashed_child_is_started_again() -> None:
    log = Log()
    async with running([plan(WAITS)], log) as [child]:
        await child.become_ready(ready_when(log, "up"), within_s=BOUND_S)
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await log.shows("child", "up", times=2)
        assert child.pid not in (None, first)
    assert ("child", "ended by SIGKILL; starting it again in 0.25 s") in log.lines


async def test_a_child_that_ends_before_it_was_ready_ends_the_start_with_its_own_words() -> None:
    log = Log()

    async def never() -> bool:
        return False

    with pytest.raises(LocalError) as caught:
        async with running([plan("print('FATAL: no such port'); print('bye')")], log) as [child]:
            await child.become_ready(never, within_s=BOUND_S)
    assert caught.value.sentence == "child ended before it was ready; it said: FATAL: no such port"


async def test_waiting_for_a_child_to_be_ready_is_bounded() -> None:
    log = Log()

    async def never() -> bool:
        return False

    async with running([plan(WAITS)], log) as [child]:
        await log.shows("child", "up")
        with pytest.raises(LocalError) as caught:
            await child.become_ready(never, within_s=POLL_S)
    assert caught.value.sentence == "child was not ready within 0.01 s; it said: up"
    assert child.pid is None


async def test_a_child_that_keeps_failing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier_local.children.BACKOFF_MAX_S", POLL_S)
    monkeypatch.setattr("espalier_local.children.FAILURES_MAX", 3)

    async def keep(each: ChildPlan) -> None:
        async with running([each], Log()) as [child]:
            child.mark_ready()
            await anyio.sleep_forever()

    with pytest.raises(LocalError) as caught:
        await keep(plan("print('oh no')"))
    assert caught.value.sentence == "child ended 3 times in a row; it said: oh no"


@pytest.mark.slow
async def test_a_child_that_ignores_the_signal_is_killed_after_its_grace_with_its_own_children() -> None:
    log = Log()
    code = IGNORES_TERM + "os.fork(); os.write(1, b'%d\\n' % os.getpid()); signal.pause()"
    async with running([plan(code, grace_s=POLL_S)], log) as [child]:
        await until(lambda: len(log.lines) == 2)
        group = [psutil.Process(int(line)) for _, line in log.lines]
    assert child.pid is None
    assert psutil.wait_procs(group, timeout=BOUND_S)[1] == []


async def test_a_quiet_child_is_heard_only_while_it_is_up() -> None:
    log = Log()
    farewell = "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit())); "
    again = "signal.signal(signal.SIGUSR1, lambda *_: print('news', flush=True)); "
    forever = "print('hello', flush=True); [signal.pause() for _ in range(9)]"
    async with running([plan(farewell + again + forever, quiet=True)], log) as [child]:
        await until(lambda: list(child.last_lines) == ["hello"])
        child.mark_ready()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGUSR1)
        await log.shows("child", "news")
    assert log.lines == [("child", "news")]
    assert list(child.last_lines) == ["hello", "news", "bye"]


async def test_stopping_takes_no_longer_for_many_children_than_for_one() -> None:
    log = Log()
    grace_s = 0.5
    plans = [plan(IGNORES_TERM + WAITS, name=f"child-{n}", grace_s=grace_s) for n in range(4)]
    async with running(plans, log):
        for each in plans:
            await log.shows(each.name, "up")
        began = anyio.current_time()
    assert anyio.current_time() - began < 3 * grace_s


async def test_the_stub_does_not_start_anything_for_a_launcher_that_is_gone() -> None:
    interpreter, *flags, script, _parent, number, uid, gid = guarded(())
    done = await anyio.run_process(
        [interpreter, *flags, script, "1", number, uid, gid, sys.executable, "-c", "print('started')"],
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")


WATCHER = """
import os, sys
sys.path.insert(0, os.path.dirname({path!r}))
import guard
command = [sys.executable, "-c", "import os, signal; print(os.getpid(), flush=True); signal.pause()"]
if os.fork() == 0:
    guard.watch(os.getppid(), 15, command)
    os._exit(0)
print("forked", flush=True)
os.read(0, 1)
"""


@pytest.mark.slow
async def test_where_the_kernel_sends_no_signal_the_stub_watches_its_launcher() -> None:
    code = WATCHER.format(path=guard.__file__)
    async with await anyio.open_process([sys.executable, "-c", code]) as launcher:
        assert launcher.stdout is not None
        seen = b""
        with anyio.fail_after(BOUND_S):
            while seen.count(b"\n") < 2:
                seen += await launcher.stdout.receive()
        watched = psutil.Process(int(seen.replace(b"forked", b"")))
        stub = watched.parent()
        assert stub is not None
        launcher.kill()
        assert psutil.wait_procs([watched, stub], timeout=BOUND_S)[1] == []


def test_a_child_shows_no_process_before_it_was_started() -> None:
    assert Child(plan(WAITS), Log()).pid is None
