"""The loop of an agent's life: what comes next, do it, write it down, until the run rests.

All control flow of a run is here; the rules that choose the next step are in `espalier_domain.run`. Each turn
of the loop ends in one transaction, so a process that dies between any two lines loses at most one step, and
whoever claims the run next goes on from the journal.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import anyio
import structlog

from espalier_domain.errors import FenceReached, LeaseLost, Unavailable
from espalier_domain.journal import Entry
from espalier_domain.progress import Progress
from espalier_domain.run import (
    AwaitHeadroom,
    CallBroker,
    CallModel,
    CallSelf,
    Reserve,
    Rest,
    StartCycle,
    Write,
)
from espalier_run_worker.brokered_calls import BrokeredCalls, Outcome, commit_outcomes
from espalier_run_worker.held import Held
from espalier_run_worker.model_calls import ask
from espalier_run_worker.models.model import Model
from espalier_run_worker.self_tools import SelfTools, prompt
from espalier_run_worker.supervisor import Supervisor
from espalier_run_worker.tool_calls import run_calls
from espalier_run_worker.toolbox import Toolbox
from espalier_run_worker.wakes import Wakes

RING_WAIT_S: Final = 0.5
"""For a worker that is being stopped: whoever takes the run over need not wait for its next look."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Workshop:
    """What living needs: a way to take a run and to ring for one, who thinks, and who watches the lease.

    `claims` leaves connections to the steps of runs that live here already.
    """

    claims: anyio.CapacityLimiter
    claim: Callable[[UUID], Awaitable[Held | None]]
    ring: Callable[[UUID], Awaitable[object]]
    model: Model
    tools: SelfTools
    toolbox: Toolbox
    brokered: BrokeredCalls
    supervisor: Supervisor
    wakes: Wakes


async def live(workshop: Workshop, run_id: UUID) -> None:
    """Claim the run if it is due and free, and carry it until it sleeps, ends, or is no longer ours.

    A step that fails by a bug leaves the lease to run out, so that a run which kills every worker is stopped.
    """
    async with workshop.claims:
        held = await workshop.claim(run_id)
    if held is None:
        return
    with workshop.supervisor.watching(held):
        try:
            workshop.wakes.soon(held.promised_wakes())
            while not held.over:
                await _take_step(workshop, held)
                workshop.wakes.soon(held.promised_wakes())
        except FenceReached as lost:
            await held.give_back()
            log.warning("run.given_back", run_id=held.facts.run_id, why=str(lost))
        except LeaseLost as lost:
            log.warning("run.lease_lost", run_id=held.facts.run_id, why=str(lost))
        except (Unavailable, anyio.get_cancelled_exc_class()) as why:
            await held.give_back()
            with anyio.move_on_after(RING_WAIT_S, shield=True):
                await workshop.ring(run_id)
            log.info("run.given_back", run_id=held.facts.run_id, why=type(why).__name__)
            raise
    log.info(
        "run.rests", run_id=held.facts.run_id, cycles=held.progress.cycles, ended=held.progress.final_state
    )
    if held.still_due:
        await workshop.ring(run_id)


async def _take_step(workshop: Workshop, held: Held) -> None:
    match held.next_step():
        case CallModel() as step:
            outcome: tuple[Entry, ...] = ()
            with held.outside():
                offer = await workshop.toolbox.offer(held.owner_id, held.facts)
                outcome = await ask(workshop.model, offer, held.facts, held.progress, step)
            await held.write(*outcome)
        case CallSelf():
            await held.commit(
                lambda draft: run_calls(draft, workshop.tools), agent_first=_changes_agent(held.progress)
            )
        case CallBroker() as step:
            outcomes: dict[str, Outcome] = {}
            with held.outside():
                outcomes = await workshop.brokered.carry_out(held, step)
            await commit_outcomes(held, outcomes)
        case StartCycle() | AwaitHeadroom() | Reserve() | Write() | Rest():
            await held.write()


def _changes_agent(progress: Progress) -> bool:
    """Whether a call that may be run now changes the run's agent."""
    turns = progress.cycle.turns if progress.cycle else ()
    return any(call.name == prompt.NAME for turn in turns[-1:] for call in turn.pending())
