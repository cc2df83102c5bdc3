"""Erasing a subject from beginning to end: stop what lives, erase part by part, and clear Redis of it.

Each part is one transaction. Whoever gives up in the middle, or dies, leaves an erasure on record that the
next request goes on with; nothing is erased twice and nothing forgotten. Above: `methods.subject` and
`subjects_rest`. Below: `acts.subjects`, which knows what a part is.
"""

from contextlib import suppress
from typing import Final
from uuid import UUID

import anyio
import structlog

from espalier_acts.messages import wake_for_message
from espalier_acts.runs import cancel_run
from espalier_acts.subjects import (
    ask_runs_to_end,
    begin_erasure,
    end_erasure,
    erase_a_part,
    manifest,
)
from espalier_domain.errors import Conflicted, LeaseLost, LifecycleConflict, NotFound, Unavailable
from espalier_gateway.methods.call import Desk
from espalier_protocol.ids import from_wire
from espalier_protocol.subject import ErasureManifest, ErasureMode
from espalier_store.erasure import Erasure, erased_runs, wakes_for_spawners
from espalier_store.pool import reading, transaction

GRACE_S: Final = 0.5
"""How long workers have to end runs of the subject by themselves. Then they are ended over their heads."""

LOOK_EVERY_S: Final = 0.05
STOPS_MAX: Final = 20
"""Looks for runs that live; each finds many, and there are no new ones."""

STREAMS_AT_ONCE: Final = 100
AGAIN_MS: Final = 500
CONFLICTS_MAX: Final = 5
"""Parts that stood in the way of a step, or a step in theirs, and are done again."""


log = structlog.get_logger(__name__)


async def erase_subject(desk: Desk, owner_id: UUID, subject_id: str, mode: ErasureMode) -> ErasureManifest:
    """Erase the subject, or go on with an erasure of it that was broken off; what that did, in all.

    Raises SubjectNotFound, or Unavailable when it has to be asked for again.
    """
    async with transaction(desk.pool) as connection:
        begun = await begin_erasure(connection, owner_id, subject_id, mode)
    if not begun.held:
        await _stop_runs(desk, owner_id, subject_id)
        await _wake_spawners(desk, owner_id, subject_id)
        await _erase_rows(desk, owner_id, begun.erasure)
        await _clear_streams(desk, owner_id, begun.erasure)
        async with transaction(desk.pool) as connection:
            return await end_erasure(connection, owner_id, begun.erasure)
    async with reading(desk.pool) as connection:
        return await manifest(connection, owner_id, begun.erasure)


async def _erase_rows(desk: Desk, owner_id: UUID, erasure: Erasure) -> None:
    more, conflicts = True, 0
    while more:  # bounded by what is tagged: nothing new can be
        try:
            async with transaction(desk.pool) as connection:
                more = await erase_a_part(connection, owner_id, erasure)
        except Conflicted:
            conflicts += 1
            if conflicts > CONFLICTS_MAX:
                raise


async def _wake_spawners(desk: Desk, owner_id: UUID, subject_id: str) -> None:
    """Give back what ended helpers did not use while their rows still tell how much that is."""
    async with reading(desk.pool) as connection:
        promised = await wakes_for_spawners(connection, owner_id, subject_id)
    for wake_id in promised:
        async with transaction(desk.pool) as connection:
            woken = await wake_for_message(connection, wake_id)
        if woken is not None:
            desk.couriers.ring(woken)


async def _stop_runs(desk: Desk, owner_id: UUID, subject_id: str) -> None:
    """End every live run that knows of the subject; after this none of them writes any more."""
    for _ in range(STOPS_MAX):
        live = await _asked_to_end(desk, owner_id, subject_id)
        if not live:
            return
        for run_id in live:
            await _end(desk, owner_id, run_id, force=False)
        with anyio.move_on_after(GRACE_S):
            while live := await _asked_to_end(desk, owner_id, subject_id):  # bounded by the scope
                await anyio.sleep(LOOK_EVERY_S)
        for run_id in live:
            await _end(desk, owner_id, run_id, force=True)
    raise Unavailable(AGAIN_MS)


async def _asked_to_end(desk: Desk, owner_id: UUID, subject_id: str) -> list[UUID]:
    async with transaction(desk.pool) as connection:
        return await ask_runs_to_end(connection, owner_id, subject_id)


async def _end(desk: Desk, owner_id: UUID, run_id: UUID, *, force: bool) -> None:
    with suppress(LifecycleConflict, NotFound, LeaseLost):  # it ended otherwise, or somebody took it just now
        async with desk.couriers.in_order(run_id):
            async with transaction(desk.pool) as connection:
                written = await cancel_run(connection, owner_id, run_id, force=force)
            if written is not None:
                desk.couriers.publish(written)


async def _clear_streams(desk: Desk, owner_id: UUID, erasure: Erasure) -> None:
    """Empty the streams of erased and stripped runs, in which their events still are as they were.

    All of them have ended, and whoever follows one goes on from Postgres.
    """
    after = ""
    while True:  # bounded by the runs that were erased
        async with reading(desk.pool) as connection:
            page = await erased_runs(connection, owner_id, erasure.erasure_id, after, STREAMS_AT_ONCE)
        if not page:
            return
        await desk.couriers.clear_streams([run_id for each in page if (run_id := from_wire("run", each))])
        after = page[-1]
