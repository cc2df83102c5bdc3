"""What has to hold in a world: the invariants of the reliability contract that a schedule can break.

`check_rows` is cheap and looks after every rule; `check_story` reads whole journals, at the end. Not here:
what is judged from outside with real processes (`tests/chaos`).
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final
from uuid import UUID

from tests.simulation.database import LIVE, RESTS, Row
from tests.simulation.world import World, require

from espalier_acts.log import restored
from espalier_domain.decisions import Sleep
from espalier_domain.history import fold
from espalier_domain.journal import (
    ApprovalRequested,
    CycleEnded,
    CycleStarted,
    Entry,
    InboxRead,
    MessageSent,
    ModelAnswered,
    ModelCallStarted,
    ModelFailed,
    RunEnded,
    SubagentSpawned,
    ToolReturned,
    decode,
)
from espalier_domain.progress import SNAPSHOT_VERSION, Progress, apply
from espalier_domain.run import MODEL_ATTEMPTS_MAX
from espalier_domain.tools import is_brokered
from espalier_protocol.ids import from_wire, to_wire
from espalier_run_worker.held import CLAIMS_MAX
from espalier_store.runs import loaded_run

LAST: Final = "run.ended"
ATTEMPTS_MAX: Final = 4
POISON_CLAIMS: Final = 3
TICK_S: Final = 3e-6
"""The precision of a stored time."""

assert (ATTEMPTS_MAX, POISON_CLAIMS) == (MODEL_ATTEMPTS_MAX, CLAIMS_MAX), "the contract says how often"


def check_rows(world: World) -> None:
    """After every rule."""
    db = world.db
    require(not db.stale_writes, f"INV-5: {db.stale_writes}")
    for run_id, run in db.runs.items():
        told = db.events[run_id]
        require(run["next_seq"] == len(told) + 1, f"INV-1: {run_id} counts {run['next_seq']}, {len(told)}")
        require(run["next_entry_no"] == len(db.journal[run_id]) + 1, f"INV-1: entries of {run_id}")
        if run["state"] in LIVE:
            require(told[-1][1] != LAST, f"INV-3: {run_id} lives after its end")
            require(run["due_at"] <= run["wall_at"], f"INV-4: {run_id} sleeps past its wall")
            require(run["expired_claims"] < POISON_CLAIMS, f"F21: {run_id} was claimed in vain too often")
        else:
            require(told[-1][1] == LAST, f"INV-3: {run_id} ended with {told[-1][1]}")
            flagged = run["cancel_requested_at"] is not None
            require(run["state"] == "cancelled" or not flagged, f"INV-8: cancelled, but {run['state']}")
    require(not world.made_after_cancel, f"INV-8: made after a cancel {world.made_after_cancel}")
    require(len(set(world.ledger)) == len(world.ledger), f"INV-6: made twice {world.ledger}")
    _check_asked(world)


def _check_asked(world: World) -> None:
    for call in world.asked_calls:
        require(call.reserved, f"INV-7: {call.run_id} asked a model for {call.tokens_max} without reserving")
        ours = call.holds and call.leased_until is not None and call.at < call.leased_until
        ended = world.db.runs[call.run_id]["state"] not in LIVE
        require(ours or ended, f"INV-5: {call.run_id} asked a model under a lease that was over")
    world.asked_calls.clear()


@dataclass
class Story:
    """One run, as its journal tells it."""

    run: Row
    entries: list[tuple[float, Entry]] = field(default_factory=list)

    def of(self, *kinds: type) -> list[tuple[float, Entry]]:
        return [(at, entry) for at, entry in self.entries if isinstance(entry, kinds)]


def check_story(world: World) -> None:
    """At the end of a schedule, healed or not."""
    db = world.db
    stories = {
        run_id: Story(run, [(at, decode(body)) for at, body in db.journal[run_id]])
        for run_id, run in db.runs.items()
    }
    for story in stories.values():
        _check_replay(world, story)
        _check_cycles(world, story)
        _check_budget(world, story)
        _check_calls(world, story)
        _check_sleeps(world, story)
    _check_messages(world, stories)
    _check_tree(world, stories)
    for reader in world.readers:
        told = [type_ for _, type_, _ in db.events[reader.run_id]]
        got = [line.type for line in reader.got]
        require(got == told[: len(got)], f"INV-2: a follower has {got} of {told}")


def _check_replay(world: World, story: Story) -> None:
    """INV-3, INV-5: the journal is a legal one, and the snapshot is what it builds."""
    progress = Progress()
    for _, entry in story.entries:
        progress = apply(progress, entry)
        if isinstance(entry, CycleEnded):
            progress = fold(progress)
    db, run = world.db, story.run
    row = {**db.given(run), **db.lived(run, SNAPSHOT_VERSION)}
    _, loaded = restored(loaded_run(run["id"], row))  # type: ignore[arg-type]
    require(loaded == progress, f"INV-5: the snapshot of {run['id']} is not what its journal builds")
    ended = [entry for _, entry in story.of(RunEnded)]
    state = progress.final_state
    require((run["state"] not in LIVE) == (len(ended) == 1), f"INV-3: {run['state']} after {ended}")
    require(state is None or state == run["state"], f"INV-3: {state} and {run['state']}")


def _check_cycles(_: World, story: Story) -> None:
    """INV-5: cycles are numbered without a gap, and each ends before the next begins."""
    marks = [(type(entry).__name__, entry.cycle) for _, entry in story.of(CycleStarted, CycleEnded)]  # type: ignore[union-attr]
    wanted = [
        (name, number) for number in range(1, len(marks) + 1) for name in ("CycleStarted", "CycleEnded")
    ]
    require(marks == wanted[: len(marks)], f"INV-5: cycles of {story.run['id']}: {marks}")
    if story.run["state"] not in LIVE:
        require(len(marks) % 2 == 0, f"INV-3: {story.run['id']} ended within a cycle")
    kept_to = story.run["cycle_count"] <= story.run["max_cycles"]
    require(kept_to, f"INV-7: {story.run['id']} had more cycles than its ceiling")


def _check_budget(_: World, story: Story) -> None:
    """INV-7: nothing is reserved beyond what the cycle has left; and a model is not asked without end."""
    limit = settled = reserved = failed = 0
    for _at, entry in story.entries:
        match entry:
            case CycleStarted(budgets=budgets):
                limit, settled, reserved, failed = budgets.tokens_per_cycle, 0, 0, 0
            case ModelCallStarted():
                settled, reserved = settled + reserved, entry.reserved
                require(0 < settled + reserved <= limit, f"INV-7: {settled} + {reserved} of {limit}")
            case ModelAnswered():
                settled, reserved, failed = settled + entry.tokens, 0, 0
            case ModelFailed():
                settled, reserved, failed = settled + entry.tokens, 0, failed + 1
                require(failed <= ATTEMPTS_MAX, f"F22: {failed} attempts at one answer")


def _check_calls(world: World, story: Story) -> None:
    """INV-6: what is told of a call agrees with the tool's own ledger, and doubt is shown to a person."""
    run_id = story.run["id"]
    made = {call_id for each, call_id in world.ledger if each == run_id}
    told: set[str] = set()
    for place, (_, entry) in enumerate(story.entries):
        if not isinstance(entry, ToolReturned) or not is_brokered(entry.tool):
            continue
        require(entry.call_id not in told, f"INV-6: {entry.call_id} returned twice")
        told.add(entry.call_id)
        if entry.in_doubt:
            asked = story.entries[place + 1][1]
            asks = isinstance(asked, ApprovalRequested) and asked.about == "in_doubt"
            require(asks, f"INV-6: nobody is asked about {entry.call_id}")
        elif entry.ok or entry.content == "the tool failed":
            require(entry.call_id in made, f"INV-6: {entry.call_id} was never made: {entry.content}")
        else:
            require(entry.call_id not in made, f"INV-6: {entry.call_id} was made, told {entry.content}")
    if story.run["state"] not in LIVE:
        require(made <= told, f"INV-6: nothing is told of {made - told}")
    calls = {call_id: call for (each, call_id), call in world.db.calls.items() if each == run_id}
    require(made <= calls.keys(), f"INV-6: {made} without a row")
    doubted = {each["call_id"] for each in world.db.approvals.values() if each["run_id"] == run_id}
    shown = {e.call_id for _, e in story.of(ToolReturned) if isinstance(e, ToolReturned) and e.in_doubt}
    require(doubted == shown, f"INV-6: asked about {doubted}, in doubt {shown}")


def _check_sleeps(world: World, story: Story) -> None:
    """INV-12: who sleeps for a time does not begin a cycle before it, unless somebody woke it."""
    run_id = story.run["id"]
    turns = story.of(CycleStarted, CycleEnded)
    for (began, _), (slept, end), (woke, _) in zip(turns, turns[1:], turns[2:], strict=False):
        if not isinstance(end, CycleEnded) or not isinstance(end.decision, Sleep):
            continue
        early = woke < slept + (end.decision.seconds or 0.0) - TICK_S
        roused = any(each == run_id and began <= at <= woke for each, at in world.db.roused)
        require(not early or roused, f"INV-12: {run_id} slept {woke - slept} of {end.decision.seconds} s")


def _check_messages(world: World, stories: dict[UUID, Story]) -> None:
    """INV-10: each message is read once, in the order of its sender, and was sent with its step."""
    rows = world.db.messages
    place = {to_wire("msg", message_id): number for number, message_id in enumerate(rows)}
    read: list[str] = []
    sent: set[str] = set()
    for story in stories.values():
        by_sender: dict[str, list[int]] = {}
        for _, entry in story.of(InboxRead):
            assert isinstance(entry, InboxRead)
            for message in entry.messages:
                read.append(message.message_id)
                by_sender.setdefault(message.from_agent_id, []).append(place[message.message_id])
        for places in by_sender.values():
            require(all(a < b for a, b in pairwise(places)), f"INV-10: read in the order {places}")
        sent |= {e.message_id for _, e in story.of(MessageSent) if isinstance(e, MessageSent)}
    taken = {to_wire("msg", each["id"]) for each in rows.values() if each["read_at"] is not None}
    require(len(read) == len(set(read)) and set(read) == taken, f"INV-10: read {read}, taken {taken}")
    from_agents = {to_wire("msg", each["id"]) for each in rows.values() if each["sender"] == "agent"}
    require(sent == from_agents, f"INV-10: sent {sent ^ from_agents} without the other half")


def _check_tree(world: World, stories: dict[UUID, Story]) -> None:
    """INV-11: spawns and children are the same, grants stay within, and what is unspent returns once."""
    db = world.db
    returned = db.cycles_returned
    require(len(set(returned)) == len(returned), f"INV-11: cycles returned twice {returned}")
    for run_id, story in stories.items():
        run, children = story.run, db.children(run_id)
        spawned = [e.child_run_id for _, e in story.of(SubagentSpawned) if isinstance(e, SubagentSpawned)]
        wanted = [to_wire("run", child["id"]) for child in children]
        require(sorted(spawned) == sorted(wanted), f"INV-11: {spawned} of {wanted}")
        require(run["subagents_granted"] <= run["max_subagents"], f"INV-11: {run_id} has too many helpers")
        granted = sum(child["cycles_given"] for child in children)
        back = sum(_unspent(child) for child in children if child["id"] in returned)
        require(run["cycles_granted"] == granted - back, f"INV-11: {run['cycles_granted']} granted")
        used = run["cycle_count"] + run["cycles_granted"]
        forfeit = run["cycles_lost"] + sum(child["cycles_lost"] for child in children)
        require(used <= run["max_cycles"] + forfeit, f"INV-11: {run_id} used and granted {used}")
        for _, entry in story.of(SubagentSpawned):
            assert isinstance(entry, SubagentSpawned)
            child_id = from_wire("run", entry.child_run_id)
            require(child_id in db.runs, f"INV-11: there is no {entry.child_run_id}")


def _unspent(child: Row) -> int:
    used = child["cycle_count"] + child["cycles_granted"] + child["cycles_lost"]
    return int(child["cycles_given"] - used)


def check_healed(world: World) -> None:
    """When nothing is wrong any more and nothing is left to do: who still lives sleeps for a live reason."""
    db = world.db
    require(not db.outbox, f"INV-4: promises that nobody keeps: {list(db.outbox.values())}")
    for call_id, call in db.calls.items():
        require(call["state"] != "sent", f"INV-6: {call_id} is sent and nobody settles it")
    for run_id, run in db.runs.items():
        if run["state"] not in LIVE:
            below = [child["id"] for child in db.children(run_id) if child["state"] in LIVE]
            require(not below, f"INV-8: {run_id} ended, and {below} live on")
            continue
        why = f"{run_id} is {run['state']} for {run['wait_reason']}"
        require(run["state"] == "sleeping" and run["lease_until"] is None, f"INV-4: {why}")
        require(run["wait_reason"] in RESTS, f"INV-4: {why}")
        require(run["cancel_requested_at"] is None, f"INV-8: {why} with a cancel")
        require(run["wake_seq"] <= run["wake_seen"], f"INV-10: {why} and does not hear a wake")
        if run["wait_reason"] == "child":
            require(db.has_children(run), f"INV-11: {why} and has none")
    for message in db.messages.values():
        _check_woken(world, message)
    for reader in world.readers:
        have, wanted = len(reader.got), len(db.events[reader.run_id])
        require(have == wanted, f"INV-2: a follower has {have} of {wanted} events")


def _check_woken(world: World, message: Row) -> None:
    """A message that a live run could read has woken one, or was there when one began."""
    db, agent_id, sent_at = world.db, message["to_agent_id"], message["created_at"].timestamp() - TICK_S
    runs = {run_id: run for run_id, run in db.runs.items() if run["agent_id"] == agent_id}
    could = [run_id for run_id, run in runs.items() if run["state"] in LIVE and db.is_for(message, run_id)]
    if message["read_at"] is not None or not could:
        return
    woken = any(run_id in runs and at >= sent_at for run_id, at in db.roused)
    began = any(run["created_at"] >= sent_at for run in runs.values())
    require(woken or began, f"INV-10: {message['id']} woke nobody")
