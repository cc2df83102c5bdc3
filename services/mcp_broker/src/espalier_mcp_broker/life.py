"""That a broker lives: said in Postgres once a second, and believed by itself no longer than by others.

A broker that cannot say so sends nothing more: somebody may hold its calls for doubtful by then.
"""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import anyio
import anyio.abc
import structlog

from espalier_domain.errors import Unavailable
from espalier_store.fleet import renew_broker
from espalier_store.pool import Pool, reading

RENEW_EVERY_S: Final = 1.0
AGAIN_S: Final = 0.1

log = structlog.get_logger(__name__)


class Life:
    """`listed` are the names of the operator's servers, told with the rest.

    `lives` until `ttl_s` after the last request to say so was sent, on this process's monotonic clock."""

    def __init__(self, pool: Pool, broker_id: UUID, ttl_s: float, listed: Sequence[str] = ()) -> None:
        self.broker_id = broker_id
        self._pool, self._ttl_s, self._listed = pool, ttl_s, listed
        self._until = 0.0

    @property
    def lives(self) -> bool:
        return anyio.current_time() < self._until

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Say so once a second, for ever. Started as soon as it has been said once."""
        while True:  # bounded: one statement a turn, turns at least AGAIN_S apart
            asked_at = anyio.current_time()
            try:
                with anyio.fail_after(self._ttl_s):
                    async with reading(self._pool) as connection:
                        await renew_broker(connection, self.broker_id, self._ttl_s, self._listed)
            except (Unavailable, TimeoutError) as error:
                log.warning("life.not_renewed", error=type(error).__name__)
                await anyio.sleep(AGAIN_S)
                continue
            if not self._until:
                task_status.started()
            self._until = asked_at + self._ttl_s
            await anyio.sleep(RENEW_EVERY_S)
