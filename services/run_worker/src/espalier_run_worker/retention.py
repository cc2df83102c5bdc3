"""Removing the logs of runs that ended long ago: events, journal, snapshot, tool calls; never the run itself.

A log is closed first, so that nobody is shown a part of it, and then deleted a few rows at a time. Whatever
dies in between leaves a closed log, and the next turn of any worker goes on with it. Redis needs nothing: a
stream expires an hour after its last event.
"""

from typing import Final

import anyio
import structlog

from espalier_domain.errors import DomainError
from espalier_store.fleet import prune_logs, remove_log
from espalier_store.pool import Pool, transaction

TURN_EVERY_S: Final = 60.0
LOGS_MAX: Final = 1_000
"""Closed in one turn; at ten workers that keeps up with more than a hundred runs a second."""

ROWS_MAX: Final = 1_000
"""Of each kind, in one transaction: some milliseconds."""

BATCHES_MAX: Final = 2_000
PAUSE_S: Final = 0.02
"""After a batch, for those who are working."""

log = structlog.get_logger(__name__)


async def retain(pool: Pool, kept_s: float) -> None:
    """Remove logs once a minute, for ever. `kept_s` is how long one is kept after its run has ended."""
    while True:  # bounded: LOGS_MAX and BATCHES_MAX a turn
        try:
            await remove_old_logs(pool, kept_s)
        except DomainError as error:
            log.warning("retention.put_off", error=type(error).__name__)
        await anyio.sleep(TURN_EVERY_S)


async def remove_old_logs(pool: Pool, kept_s: float) -> None:
    """One turn. Raises Unavailable or Conflicted; what was done by then stays done."""
    async with transaction(pool) as connection:
        await prune_logs(connection, kept_s, LOGS_MAX)
    for _ in range(BATCHES_MAX):
        async with transaction(pool) as connection:
            if not await remove_log(connection, ROWS_MAX):
                return
        await anyio.sleep(PAUSE_S)
