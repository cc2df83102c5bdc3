"""Having planned calls carried out by the broker, all of an answer at once, and recording what came of them.

Only a call's row knows whether it was sent. So whatever goes wrong between here and the broker is met by
asking again for the same call, or by reading the row: neither can send a call twice. Nothing here raises for
what a broker or a server can do wrong.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final
from uuid import UUID

import anyio
import structlog

from espalier_acts.calls import DOUBT_GRACE_S, SETTLED
from espalier_domain.errors import Unavailable
from espalier_domain.journal import ToolCall, ToolReturned
from espalier_domain.run import CallBroker
from espalier_domain.tool_results import CallState, returned, shown
from espalier_protocol.broker import CallOrder, CallStanding
from espalier_run_worker.broker_link import BrokerAway, BrokerLink, BrokerSilent
from espalier_run_worker.draft import Draft
from espalier_run_worker.held import Held
from espalier_store.pool import Pool, reading
from espalier_store.tool_calls import CallRow, doubt_call, get_calls

AWAY_S_MAX: Final = 15.0
"""For so long a broker that cannot be reached, or refuses, is asked again; then a call is given up unsent."""

AGAIN_S: Final = 0.2
ROW_EVERY_S: Final = 0.25
SILENT_TWICE_S: Final = 3.0
"""Between two looks that find the same broker's time passed: after an outage all of them are past."""

UNMADE: Final = "unavailable: no tool broker could take the call; it was not made"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call came out, as its row says; `planned`: we gave up asking, and believe it was never sent."""

    state: CallState
    content: str


@dataclass(slots=True)
class _Errand:
    """One call on its way: for whom, until when, and since when nobody could be asked."""

    held: Held
    call: ToolCall
    seconds_max: float
    away_since: float | None = None
    silent: datetime | None = field(default=None)
    silent_since: float = 0.0


class BrokeredCalls:
    def __init__(self, pool: Pool, link: BrokerLink) -> None:
        self._pool, self._link = pool, link

    async def carry_out(self, held: Held, step: CallBroker) -> dict[str, Outcome]:
        """The outcomes by call id; a call that is missing goes on, and may be asked for again."""
        outcomes: dict[str, Outcome] = {}

        async def run(call: ToolCall) -> None:
            outcome = await self._outcome(_Errand(held, call, step.seconds_max))
            if outcome is not None:
                outcomes[call.call_id] = outcome

        async with anyio.create_task_group() as group:
            for call in step.calls:
                group.start_soon(run, call)
        return outcomes

    async def _outcome(self, errand: _Errand) -> Outcome | None:
        with anyio.move_on_after(errand.seconds_max + DOUBT_GRACE_S + AWAY_S_MAX):
            while True:  # bounded by the scope; a turn that comes to nothing pauses
                try:
                    if outcome := await self._ask(errand):
                        return outcome
                except Unavailable:
                    log.info("brokered_calls.store_away", call_id=errand.call.call_id)
                await anyio.sleep(AGAIN_S)
        return None

    async def _ask(self, errand: _Errand) -> Outcome | None:
        """Ask the broker; where it cannot say, ask the row."""
        held, call = errand.held, errand.call
        order = CallOrder(
            owner_id=held.owner_id,
            run_id=held.run_id,
            call_id=call.call_id,
            lease_token=held.lease_token,
            seconds_max=errand.seconds_max,
        )
        try:
            standing = await self._link.call(order)
        except BrokerSilent:
            return await self._look(errand)
        except BrokerAway as away:
            log.info("brokered_calls.broker_away", call_id=call.call_id, why=str(away))
            standing = CallStanding(state="refused")
        match standing.state:
            case "done" | "failed" | "in_doubt":
                return Outcome(standing.state, standing.content)
            case "elsewhere" | "refused":
                return await self._watch(errand)

    async def _watch(self, errand: _Errand) -> Outcome | None:
        """Follow the row of a call that was sent until it is settled. None when the broker is to be asked."""
        while (row := await self._row(errand)).state == "sent":  # bounded by `_outcome`
            await self._doubt(errand, row)
            await anyio.sleep(ROW_EVERY_S)
        return self._told(errand, row)

    async def _look(self, errand: _Errand) -> Outcome | None:
        """One look at the row of a call that a broker may be at work on."""
        row = await self._row(errand)
        if row.state == "sent":
            await self._doubt(errand, row)
            return None
        return self._told(errand, row)

    def _told(self, errand: _Errand, row: CallRow) -> Outcome | None:
        if row.state in SETTLED:
            return Outcome(row.state, shown(row.result) if row.result else "")
        now = anyio.current_time()
        errand.away_since = errand.away_since or now
        return Outcome("planned", UNMADE) if now >= errand.away_since + AWAY_S_MAX else None

    async def _doubt(self, errand: _Errand, row: CallRow) -> None:
        """Settle a call that nobody else will: its broker is dead, or its deadline passed long ago."""
        now = anyio.current_time()
        if row.silent and (errand.silent_since == 0.0 or errand.silent != row.alive_until):
            errand.silent, errand.silent_since = row.alive_until, now
        dead = row.silent and now >= errand.silent_since + SILENT_TWICE_S
        if not (dead or row.overdue):
            return
        async with reading(self._pool) as connection:
            await doubt_call(
                connection,
                errand.held.owner_id,
                errand.held.run_id,
                errand.call.call_id,
                alive_until=row.alive_until,
                grace_s=DOUBT_GRACE_S,
            )

    async def _row(self, errand: _Errand) -> CallRow:
        held, call_id = errand.held, errand.call.call_id
        async with reading(self._pool) as connection:
            rows = await get_calls(connection, held.owner_id, held.run_id, [call_id], grace_s=DOUBT_GRACE_S)
        return rows[call_id]


async def commit_outcomes(held: Held, outcomes: dict[str, Outcome]) -> None:
    """Write down what is known by now. Without any outcome the row tells why there is none."""

    async def record(draft: Draft) -> None:
        await _record(draft, outcomes)

    settled = {call_id for call_id, outcome in outcomes.items() if outcome.state in SETTLED}
    all_settled = settled >= {call.call_id for call in held.progress.under_way()}
    await (held.commit_at_once(record) if all_settled else held.commit(record))


async def _record(draft: Draft, outcomes: dict[str, Outcome]) -> None:
    """A call that we gave up is one only if its row agrees, under the lock."""
    cycle, run = draft.progress.cycle, draft.run
    under_way = draft.progress.under_way()
    if draft.cancelled or cycle is None or not under_way:
        return
    given_up = [call.call_id for call in under_way if _given_up(outcomes, call)]
    unsent = await _still_planned(draft, run.owner_id, run.run_id, given_up) if given_up else set()
    for call in under_way:
        outcome = outcomes.get(call.call_id)
        if outcome is None or (_given_up(outcomes, call) and call.call_id not in unsent):
            continue
        entry: ToolReturned = returned(cycle.number, call, outcome.state, outcome.content)
        draft.record(entry)


def _given_up(outcomes: dict[str, Outcome], call: ToolCall) -> bool:
    outcome = outcomes.get(call.call_id)
    return outcome is not None and outcome.state == "planned"


async def _still_planned(draft: Draft, owner_id: UUID, run_id: UUID, call_ids: list[str]) -> set[str]:
    rows = await get_calls(draft.connection, owner_id, run_id, call_ids, grace_s=DOUBT_GRACE_S)
    return {call_id for call_id, row in rows.items() if row.state == "planned"}
