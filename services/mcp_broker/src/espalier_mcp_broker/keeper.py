"""The stub that a stdio server runs under: no server, and nothing that it started, outlives the broker.

Run as a plain script (`python -I -S keeper.py LEASH PROGRAM ARGS...`) in a session of its own, so it imports
nothing of ours. LEASH is the reading end of a pipe whose other end only the broker holds and never writes to:
when the broker ends, however it ends, the pipe ends too, and the stub kills its whole process group. It does
the same when the program ends, so that a child which the program left behind neither lives on nor holds the
program's output open. A request for a signal on the parent's death would reach the program alone.
What leaves the process group on purpose (a daemon) is not followed.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys

PR_SET_NO_NEW_PRIVS = 38


def main(arguments: list[str]) -> int:
    """Start the program, and wait for its end or the broker's. Returns only if it cannot be started."""
    leash = int(arguments[0])
    ended, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):  # handled, not ignored: the program would inherit that
        signal.signal(number, lambda _number, _frame: None)
    give_up_new_privileges()
    try:
        program = subprocess.Popen(arguments[1:])
    except OSError as error:
        sys.stderr.write(f"cannot start: {error.strerror}\n")
        return 127
    let_go_of_pipes()
    while True:  # bounded by the lives of the program and of the broker
        ready, _, _ = select.select([leash, ended], [], [])
        if leash in ready:
            break
        os.read(ended, 64)
        if program.poll() is not None:
            sys.stderr.write(f"ended with exit code {program.returncode}\n")
            sys.stderr.flush()
            break
    os.killpg(0, signal.SIGKILL)
    return 0


def give_up_new_privileges() -> None:
    """No set-user-id program below this one gains anything. Linux only: one more wall, not the only one."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def let_go_of_pipes() -> None:
    """Only the program holds its input and output, so that their ends mean what they say."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
