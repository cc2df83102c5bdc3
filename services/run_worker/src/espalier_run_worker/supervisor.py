"""Keeping leases alive, and noticing when a run is no longer ours to live.

One task and one connection of its own renew every lease of the process in one statement. A run whose row is
locked (by its own step, most likely) is skipped, and a plain read tells whether it is still ours; the same
read brings cancels and walls that moved. The supervisor interrupts what a run does outside; it never writes
for one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from uuid import UUID

import anyio
import structlog

from espalier_run_worker.held import Held
from espalier_store.fleet import held_states, renew_leases
from espalier_store.pool import AWAY, REPEATABLE, Connection, PostgresSettings, connect

LOOK_EVERY_S: Final = 0.5
SKIPPED_AGAIN_S: Final = 0.1
RECONNECT_S: Final = 0.2
ANSWER_WAIT_S_MAX: Final = 2.0

log = structlog.get_logger(__name__)


class Supervisor:
    """Watches the runs that live in this process."""

    def __init__(self, settings: PostgresSettings) -> None:
        self._settings = settings
        self._ttl_s = settings.lease_ttl_s
        self._answer_wait_s = min(ANSWER_WAIT_S_MAX, settings.lease_ttl_s / 4)
        self._held: dict[UUID, Held] = {}
        self._renew_at: dict[UUID, float] = {}
        self._handing_over = False

    @contextmanager
    def watching(self, held: Held) -> Iterator[None]:
        held.hand_over = self._handing_over
        self._held[held.run_id] = held
        self._renew_at[held.run_id] = anyio.current_time() + self._ttl_s / 4
        try:
            yield
        finally:
            del self._held[held.run_id], self._renew_at[held.run_id]

    def hand_over(self) -> None:
        """From now on every run gives its lease up with its next commit: the process is stopping."""
        self._handing_over = True
        for held in self._held.values():
            held.hand_over = True

    async def run(self) -> None:
        """Renew and look, for ever. Without a connection the fences of the runs do their work."""
        while True:  # bounded per turn by `_answer_wait_s`; a turn that fails begins with a new connection
            try:
                connection = await connect(self._settings)
            except AWAY:
                await anyio.sleep(RECONNECT_S)
                continue
            try:
                await self._serve(connection)
            except (*AWAY, *REPEATABLE) as error:
                log.warning("supervisor.reconnecting", error=type(error).__name__)
            finally:
                connection.terminate()

    async def _serve(self, connection: Connection) -> None:
        look_at = 0.0
        while True:  # bounded: two statements a turn, at least SKIPPED_AGAIN_S apart
            with anyio.fail_after(self._answer_wait_s):
                skipped = await self._renew(connection)
                if skipped or anyio.current_time() >= look_at:
                    await self._look(connection)
                    look_at = anyio.current_time() + LOOK_EVERY_S
            await anyio.sleep(SKIPPED_AGAIN_S)

    async def _renew(self, connection: Connection) -> bool:
        """Renew what is due for it; whether some of it could not be."""
        asked_at = anyio.current_time()
        due = {run_id: held for run_id, held in self._held.items() if self._renew_at[run_id] <= asked_at}
        if not due:
            return False
        tokens = {run_id: held.lease_token for run_id, held in due.items()}
        renewed = await renew_leases(connection, tokens, self._ttl_s)
        for run_id in renewed & self._held.keys():
            self._held[run_id].renewed(asked_at)
            self._renew_at[run_id] = asked_at + self._ttl_s / 4
        return len(renewed) < len(due)

    async def _look(self, connection: Connection) -> None:
        watched = dict(self._held)  # a run that is claimed while we ask is not in the answer
        if not watched:
            return
        states = await held_states(connection, list(watched))
        for run_id, held in watched.items():
            state = states.get(run_id)
            if state is None or state.lease_token != held.lease_token:
                held.lose()
            elif state.to_stop:
                held.interrupt()
