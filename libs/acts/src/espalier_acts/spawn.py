"""The act of spawning: a helper and its first run, out of what the spawner's run may still grant.

It belongs to the step of the spawner that asks for it, and commits with it. What becomes of the child
afterwards, its end and the way back of what it did not use, is in `log` and `messages`.
"""

from dataclasses import dataclass

from espalier_acts.log import Written, lines_of, numbered
from espalier_domain.journal import RunCreated, SubagentSpawned
from espalier_domain.progress import Progress, apply
from espalier_domain.run import RunFacts
from espalier_domain.tools import canonical, server_of
from espalier_domain.trees import Refusal, SpawnOrder, directives, refusal
from espalier_protocol.ids import to_wire
from espalier_store.agent_servers import hand_down_servers
from espalier_store.ids import new_id
from espalier_store.pool import Connection
from espalier_store.runs import LockedRun
from espalier_store.trees import NewChild, get_spawner, spawn


@dataclass(frozen=True, slots=True)
class Spawned:
    """The entry that tells of it, and the child's run: published and rung for after the commit."""

    entry: SubagentSpawned
    written: Written


async def spawn_subagent(
    connection: Connection, run: LockedRun, facts: RunFacts, order: SpawnOrder
) -> Spawned | Refusal:
    """Begin a helper's first run, due at once. A refusal has changed nothing.

    Whatever else is granted from the run's row at the same moment, no more is granted than there is.
    """
    spawner = await get_spawner(connection, run.owner_id, run.run_id, facts)
    if refused := refusal(spawner, order):
        return refused
    child = NewChild(new_id(), new_id(), directives(spawner.immutable_directives, order), order)
    first = RunCreated(to_wire("agt", child.agent_id))
    lines = lines_of(child.run_id, (first,), Progress())
    moved = await spawn(connection, run.owner_id, run.run_id, child, lines)
    if moved is None:  # others were granted something, or time has passed, since the row was read
        spawner = await get_spawner(connection, run.owner_id, run.run_id, facts)
        return refusal(spawner, order) or Refusal("ceiling_exceeded", "the run is about to end")
    if slugs := {server_of(canonical(entry)) for entry in order.toolset_subset} - {""}:
        await hand_down_servers(connection, run.owner_id, run.agent_id, child.agent_id, sorted(slugs))
    entry = SubagentSpawned(
        to_wire("agt", child.agent_id),
        to_wire("run", child.run_id),
        order.ceilings.max_cycles,
        1 + order.ceilings.max_subagents,
    )
    begun = apply(Progress(), first)
    events = numbered(moved, lines)
    return Spawned(entry, Written(child.run_id, begun, True, True, moved.outbox_id, events))
