"""`espalier up`: the whole runtime in the foreground, one log, until Ctrl-C.

Signals live here and nowhere else. The first one stops everything within the bound that `runtime.py` gives;
further ones change nothing, so that an impatient person cannot leave half of it behind.
"""

import os
import signal
from collections.abc import AsyncIterator

import anyio

from espalier_local.children import lone_errors
from espalier_local.console import Terminal
from espalier_local.folder import locate_folder
from espalier_local.options import RuntimeOptions
from espalier_local.runtime import local_runtime

LAUNCHER = "espalier"


async def run_up(options: RuntimeOptions) -> None:
    """Start, say where, wait for a signal, stop. Raises LocalError if it cannot start or cannot go on."""
    say = Terminal(no_color="NO_COLOR" in os.environ)
    with anyio.open_signal_receiver(*_stop_signals()) as signals, lone_errors():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stop_on_first, signals, tasks.cancel_scope, say)
            say(LAUNCHER, f"starting; its data is in {locate_folder(options.data_dir)}")
            async with local_runtime(options, on_line=say) as runtime:
                say(LAUNCHER, f"ready at {runtime.base_url}")
                say(LAUNCHER, f"the key for it is in {runtime.profile}; Ctrl-C stops everything")
                await anyio.sleep_forever()
    say(LAUNCHER, "stopped")


async def _stop_on_first(
    signals: AsyncIterator[signal.Signals], running: anyio.CancelScope, say: Terminal
) -> None:
    async for number in signals:
        say(LAUNCHER, f"stopping ({number.name})")
        running.cancel()
        return


def _stop_signals() -> list[signal.Signals]:
    """Those of a person and of a system; the closed terminal's unless the person said not to care (nohup)."""
    wanted = [signal.SIGINT, signal.SIGTERM]
    return wanted if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*wanted, signal.SIGHUP]
