"""The stub that becomes a child process and makes it die with its launcher.

Started as a plain script (`python -I -S guard.py PARENT SIGNAL UID GID PROGRAM ARGS...`), so it imports
nothing of ours. It gives up root if told to, asks the kernel for SIGNAL on the launcher's death, and execs
PROGRAM. A stub instead of a `preexec_fn`, because Python code between fork and exec is unsafe once the
launcher has threads. Above it stands `children.py`, which must start it from the main thread: Linux sends
the signal when the *thread* that forked ends.

macOS has no such request. There the stub stays, as the parent of PROGRAM: it passes signals on and looks
twice a second whether the launcher is still its own parent. Only a SIGKILL of the stub itself escapes that.

Neither way reaches grandchildren. Postgres' backends notice their postmaster's end by themselves; a service
that starts processes of its own has to guard them in the same manner.
"""

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
LOOK_INTERVAL_S = 0.5
LAST_GRACE_S = 1.5
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main(arguments: list[str]) -> int:
    """Become, or watch over, the program named after the four numbers."""
    parent, death_signal, uid, gid = (int(word) for word in arguments[:4])
    command = arguments[4:]
    if uid >= 0:
        _give_up_root(uid, gid)
    if not sys.platform.startswith("linux"):
        return watch(parent, death_signal, command)
    _become(parent, death_signal, command)
    return 1  # the launcher died before the request was in place, so no signal will ever come


def _become(parent: int, death_signal: int, command: list[str]) -> None:
    # After setuid, because changing the user clears the request.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() == parent:
        os.execv(command[0], command)


def watch(parent: int, death_signal: int, command: list[str]) -> int:
    """Run the program as a child until it ends; if the launcher goes first, take it along."""
    child = subprocess.Popen(command)
    for number in PASSED_ON:
        signal.signal(number, lambda received, _frame: child.send_signal(received))
    while True:  # bounded by the lives of child and launcher
        try:
            return child.wait(LOOK_INTERVAL_S)
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                return _end(child, death_signal)


def _end(child: "subprocess.Popen[bytes]", death_signal: int) -> int:
    child.send_signal(death_signal)
    try:
        return child.wait(LAST_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _give_up_root(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except OSError as error:
        sys.stderr.write(f"cannot start {sys.argv[5]}: {error.strerror}\n")
        sys.exit(127)
