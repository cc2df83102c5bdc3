"""What the figures were taken on. A fact that cannot be had says why."""

import os
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil
from benchmarks.report import said
from benchmarks.runtime import ROOT

GIT_S_MAX: Final = 10
CPU_FILE: Final = Path("/proc/cpuinfo")


def describe() -> dict[str, str]:
    """The machine and the code, before anything runs."""
    facts = {
        "date": _date,
        "code": _code,
        "CPU": _cpu,
        "memory": _memory,
        "system": _system,
        "Python": _python,
    }
    return {name: _or_error(fact) for name, fact in facts.items()}


def load_average() -> str:
    """Over 1, 5 and 15 minutes: whether the machine was ours alone."""
    return _or_error(lambda: " ".join(f"{load:.2f}" for load in os.getloadavg()))


def _or_error(fact: Callable[[], str]) -> str:
    try:
        return fact()
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        return f"failed: {said(error)}"


def _date() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def _code() -> str:
    command = ["git", "describe", "--always", "--dirty"]  # found on the PATH, as by make
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=GIT_S_MAX)
    return done.stdout.strip()


def _cpu() -> str:
    cores = f"{os.cpu_count()} cores"
    if not CPU_FILE.exists():
        return f"{platform.processor()}, {cores}"
    lines = CPU_FILE.read_text().splitlines()
    model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{model}, {cores}, {len(os.sched_getaffinity(0))} for us"


def _memory() -> str:
    return f"{psutil.virtual_memory().total / 2**30:.1f} GiB"


def _system() -> str:
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def _python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"
