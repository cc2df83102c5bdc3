"""Acts on runs: starting, waking and cancelling them."""

from dataclasses import dataclass
from functools import reduce
from typing import Any
from uuid import UUID

from espalier_acts.calls import known_outcomes
from espalier_acts.log import Written, lines_of, load, numbered, write_entries
from espalier_acts.subjects import admit_subjects
from espalier_domain.errors import LifecycleConflict, NotFound
from espalier_domain.journal import Entry, RunCreated
from espalier_domain.progress import Progress, apply
from espalier_domain.run import closing
from espalier_protocol.ids import to_wire
from espalier_protocol.run import Run
from espalier_store.agents import lock_agent
from espalier_store.ids import new_id
from espalier_store.log import NewRun, begin_run
from espalier_store.pool import Connection
from espalier_store.runs import LockedRun, lock_run, request_cancel, wake_run

NO_LEASE_S = 0.0


@dataclass(frozen=True, slots=True)
class RunOrder:
    """What an embedder asks of an agent."""

    agent_id: UUID
    goal: str
    inputs: dict[str, Any]
    subject_ids: list[str]


async def create_run(connection: Connection, owner_id: UUID, order: RunOrder) -> tuple[Run, Written]:
    """A run that is due at once, with `run.started` as its first event.

    Raises NotFound, or LifecycleConflict when the agent takes no new run.
    """
    agent = await lock_agent(connection, owner_id, order.agent_id)
    if agent is None:
        raise NotFound("agent", to_wire("agt", order.agent_id))
    if agent.lifecycle_state in ("cancelled", "archived"):
        raise LifecycleConflict(f"The agent is {agent.lifecycle_state} and takes no new run.")
    subjects = sorted({*agent.subject_ids, *order.subject_ids})
    await admit_subjects(connection, owner_id, subjects)
    new = NewRun(new_id(), order.agent_id, order.goal, order.inputs, subjects, agent.ceilings)
    first = RunCreated(to_wire("agt", order.agent_id))
    lines = lines_of(new.run_id, (first,), Progress())
    begun = await begin_run(connection, owner_id, new, lines, live_max=agent.max_live_runs)
    if begun is None:
        raise LifecycleConflict(f"The agent has {agent.max_live_runs} live runs, which is its limit.")
    run, moved = begun
    progress, events = apply(Progress(), first), numbered(moved, lines)
    return run, Written(new.run_id, progress, True, True, moved.outbox_id, events)


async def cancel_run(
    connection: Connection, owner_id: UUID, run_id: UUID, *, force: bool = False
) -> Written | None:
    """End the run as `cancelled`, or raise the flag for the worker that holds it (None then).

    `force` ends it over the holder's head: the token rises, and whatever the holder still writes is refused.
    Cancelling what is cancelled already changes nothing. Raises NotFound or LifecycleConflict.
    """
    run = await _lock(connection, owner_id, run_id)
    if run.state == "cancelled":
        return None
    if run.state not in ("running", "sleeping"):
        raise LifecycleConflict(f"The run has ended as {run.state}.")
    await request_cancel(connection, owner_id, run_id)
    if run.leased and not force:
        return None
    _, progress = await load(connection, owner_id, run_id)
    known = await known_outcomes(connection, owner_id, run_id, progress, stopping=True)
    closed = cancelled(reduce(apply, known, progress))
    return await write_entries(
        connection, run, progress, (*known, *closed), release=True, lease_ttl_s=NO_LEASE_S
    )


def cancelled(progress: Progress) -> tuple[Entry, ...]:
    """The entries that end a run whose cancel was asked for."""
    return closing(progress, "cancelled", {"reason": "cancelled"}, open_calls="cancelled")


async def continue_run(connection: Connection, owner_id: UUID, run_id: UUID) -> None:
    """Wake a sleeping run now. Raises NotFound, or LifecycleConflict when it does not sleep."""
    run = await _lock(connection, owner_id, run_id)
    if run.state != "sleeping" or run.wait_reason == "approval":
        waits = "waits for an approval" if run.wait_reason == "approval" else f"is {run.state}"
        raise LifecycleConflict(f"Only a sleeping run can be continued; this one {waits}.")
    await wake_run(connection, owner_id, run_id)


async def _lock(connection: Connection, owner_id: UUID, run_id: UUID) -> LockedRun:
    run = await lock_run(connection, owner_id, run_id)
    if run is None:
        raise NotFound("run", to_wire("run", run_id))
    return run
