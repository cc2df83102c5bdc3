"""Checks of how runs live and end: INV-4, INV-5, INV-8, INV-11, INV-12."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from typing import Final
from uuid import UUID

from tests.chaos.history import Call, ModelAsked, ToolRan
from tests.chaos.seen import LIVE, Row, Seen, Violation, run_of, twice, violation

from espalier_domain.trees import DEPTH_MAX
from espalier_protocol.ids import to_wire

CANCELLED_S: Final = 5.0
STOPS_S: Final = 1.0
FAMILY_S: Final = 10.0
WAKES_S: Final = 2.0
WOKEN: Final = ("timer", "message", "child")
"""What a wake ends; an approval and a retry are waited for whatever comes."""

LOOK_S: Final = 1.0
"""Looks for what is due, or is to be stopped, come once in so long; these machines are slow besides."""

CLOCK_S: Final = 0.05
"""Two clocks of one machine, tied together once."""

OF_A_WORKER: Final = ("worker.", "postgres.", "line.")
OF_ANYBODY: Final = ("worker.", "gateway.", "broker.", "postgres.", "line.")


def lives_for_a_reason(seen: Seen) -> Iterator[Violation]:
    """INV-4: what was accepted is there, and has ended, is held, or is due soon."""
    for call in seen.of(Call):
        if call.method == "run.create" and call.outcome == "ok" and call.answer["id"] not in seen.runs:
            yield violation("INV-4", call.answer["id"], "it was accepted and is not there", call)
    for run_id, run in seen.runs.items():
        if run["state"] not in LIVE:
            continue
        if run["due_at"] is None:
            yield violation("INV-4", run_id, f"it is {run['state']} and due at no time", run)
            continue
        if wrong := _without_reason(seen, run):
            yield violation("INV-4", run_id, wrong, run)
        free_at = max(seen.at(run["due_at"]), seen.at(run["lease_until"] or run["due_at"]))
        waited_s = seen.ended.at - free_at
        if waited_s > seen.sweep_s + LOOK_S:
            yield violation("INV-4", run_id, f"nobody has taken it for {waited_s:.1f} s", run)
    for promise in seen.rows("outbox"):
        waited_s = seen.ended.at - seen.at(promise["created_at"])
        if waited_s > seen.sweep_s + LOOK_S:
            sentence = f"a {promise['kind']} was not carried out for {waited_s:.1f} s"
            yield violation("INV-4", str(promise["id"]), sentence, promise)


def _without_reason(seen: Seen, run: Row) -> str | None:
    """What is wrong with a live run that is due later, or that somebody holds."""
    due_later = seen.at(run["due_at"]) > seen.ended.at
    if run["state"] == "running":
        return "it is running, and nobody holds it" if due_later and run["lease_until"] is None else None
    if run["lease_until"] is not None:
        return "it sleeps, and somebody holds it"
    if run["wait_reason"] is None:
        return "it sleeps, and waits for nothing"
    if due_later and run["wait_reason"] in WOKEN and run["wake_seq"] > run["wake_seen"]:
        return f"it sleeps on wake {run['wake_seq']}, and has seen {run['wake_seen']}"
    return None


def one_authority(seen: Seen) -> Iterator[Violation]:
    """INV-5: one holder at a time writes a run's journal, each cycle and each outcome once."""
    for run_id, rows in seen.journals.items():
        run = seen.runs[run_id]
        if [row["entry_no"] for row in rows] != list(range(1, run["next_entry_no"])):
            yield violation("INV-5", run_id, f"its journal is not 1..{run['next_entry_no'] - 1}", run)
        for kind, name in (
            ("cycle_started", "cycle"),
            ("cycle_ended", "cycle"),
            ("tool_returned", "call_id"),
        ):
            told = seen.entries_of(run_id, kind)
            for again in twice(row["body"][name] for row in told):
                shown = [row for row in told if row["body"][name] == again]
                yield violation("INV-5", run_id, f"{kind} {again} is there twice", *shown)
        asked = seen.entries_of(run_id, "model_call_started")
        for before, after in pairwise(asked):
            if after["body"]["lease_token"] < before["body"]["lease_token"]:
                yield violation("INV-5", run_id, "an older token wrote later", before, after)
        if asked and asked[-1]["body"]["lease_token"] > run["lease_token"]:
            yield violation("INV-5", run_id, "its token went back", asked[-1], run)
        answered = len(seen.entries_of(run_id, "model_answered")) + len(
            seen.entries_of(run_id, "model_failed")
        )
        if answered > len(asked):
            yield violation("INV-5", run_id, f"{answered} answers to {len(asked)} questions", run)


def cancelled_in_time(seen: Seen) -> Iterator[Violation]:
    """INV-8: a cancel ends a run and its helpers soon, whoever holds them, and nothing starts any more."""
    cancelled = _cancels(seen)
    for run_id, since in cancelled.items():
        run = seen.runs.get(run_id)
        if run is None:
            yield violation("INV-8", run_id, "its cancel was answered, and it is not there")
            continue
        if run["state"] not in ("cancelled", *LIVE):
            yield violation("INV-8", run_id, f"it was cancelled, and ended {run['state']}", run)
        yield from _over_by(seen, run_id, since, CANCELLED_S)
    for run_id, run in seen.runs.items():
        since_of_each = [_to_end_since(seen, above, cancelled) for above in seen.ancestors(run_id)]
        if known := [since for since in since_of_each if since is not None]:
            yield from _over_by(seen, run_id, max(min(known), seen.at(run["created_at"])), FAMILY_S)
    effects: list[ToolRan | ModelAsked] = [*seen.of(ToolRan), *seen.of(ModelAsked)]
    for record in effects:
        if record.run_id is None or record.run_id not in cancelled:
            continue
        late_s = record.at - cancelled[record.run_id] - STOPS_S
        if late_s > seen.excused_s(cancelled[record.run_id], record.at, *OF_ANYBODY):
            sentence = f"{type(record).__name__} {late_s + STOPS_S:.1f} s after its cancel"
            yield violation("INV-8", record.run_id, sentence, record)


def _cancels(seen: Seen) -> dict[str, float]:
    """When each cancelled run's cancel was known to be taken, at the latest."""
    found: dict[str, float] = {}
    for run_id, run in seen.runs.items():
        if run["cancel_requested_at"]:
            found[run_id] = seen.at(run["cancel_requested_at"])
    runs_of: dict[str, list[str]] = defaultdict(list)
    for run_id, run in seen.runs.items():
        runs_of[to_wire("agt", UUID(run["agent_id"]))].append(run_id)
    for call in seen.of(Call):
        if call.outcome != "ok" or call.method not in ("run.cancel", "agent.cancel"):
            continue
        asked = [call.answer["id"]] if call.method == "run.cancel" else runs_of[call.answer["id"]]
        for run_id in asked:
            if call.method == "run.cancel" or _lived(seen, run_id, call):
                found[run_id] = min(found.get(run_id, call.at), call.at)
    return found


def _lived(seen: Seen, run_id: str, call: Call) -> bool:
    """Whether a run was surely alive while this was asked and answered."""
    run = seen.runs[run_id]
    before = seen.at(run["created_at"]) < call.began - CLOCK_S
    return before and (not run["ended_at"] or seen.at(run["ended_at"]) > call.at + CLOCK_S)


def _to_end_since(seen: Seen, run_id: str, cancelled: dict[str, float]) -> float | None:
    """From when on nothing below a run may live."""
    ended_at = seen.runs[run_id]["ended_at"]
    known = [cancelled[run_id]] if run_id in cancelled else []
    return min([*known, *([seen.at(ended_at)] if ended_at else [])], default=None)


def _over_by(seen: Seen, run_id: str, since: float, within_s: float) -> Iterator[Violation]:
    run = seen.runs[run_id]
    over = seen.at(run["ended_at"]) if run["ended_at"] else seen.ended.at
    took_s = over - since
    if took_s > within_s + LOOK_S + seen.excused_s(since, over, *OF_ANYBODY):
        yield violation("INV-8", run_id, f"{run['state']} {took_s:.1f} s after it was to stop", run)


def families(seen: Seen) -> Iterator[Violation]:
    """INV-11: helpers are as many, as deep and as rich as was granted, and their end is told once."""
    given: dict[str, list[Row]] = defaultdict(list)
    for child in seen.runs.values():
        if child["parent_id"]:
            given[run_of(child["parent_id"])].append(child)
    told: dict[tuple[str, str], int] = defaultdict(int)
    for message in seen.rows("messages"):
        if isinstance(message["body"], dict) and message["body"].get("type") == "subagent_result":
            told[(message["to_run_id"], message["from_agent_id"])] += 1
    for parent_id, children in given.items():
        parent = seen.runs.get(parent_id)
        if parent is None:
            continue
        yield from _granted(parent_id, parent, children)
        for child in children:
            run_id, times = run_of(child["id"]), told[(parent["id"], child["agent_id"])]
            if child["depth"] > DEPTH_MAX:
                yield violation("INV-11", run_id, f"it is {child['depth']} levels deep", child)
            if child["depth"] != parent["depth"] + 1 or child["root_id"] != parent["root_id"]:
                yield violation("INV-11", run_id, "it is not where its spawner is in the tree", parent, child)
            if parent["ended_at"] and child["created_at"] > parent["ended_at"]:
                yield violation("INV-11", run_id, "it was spawned by a run that had ended", parent, child)
            if times != (child["ended_at"] is not None):
                sentence = f"it is {child['state']}, and its spawner was told {times} times"
                yield violation("INV-11", run_id, sentence, child)
    for run_id in filter(seen.whole, seen.runs):
        entries = seen.entries_of(run_id, "subagent_spawned")
        spawned = sorted(row["body"]["child_run_id"] for row in entries)
        if spawned != sorted(run_of(child["id"]) for child in given.get(run_id, [])):
            yield violation("INV-11", run_id, f"it tells of {len(spawned)} helpers and has others", *entries)


def _granted(parent_id: str, parent: Row, children: list[Row]) -> Iterator[Violation]:
    subagents = sum(1 + child["max_subagents"] for child in children)
    if subagents > parent["max_subagents"]:
        yield violation("INV-11", parent_id, f"{subagents} helpers of {parent['max_subagents']}", parent)
    used = parent["cycle_count"] + parent["cycles_granted"] + parent["cycles_lost"]
    if used > parent["max_cycles"]:
        yield violation("INV-11", parent_id, f"{used} cycles of {parent['max_cycles']}", parent)


def slept(seen: Seen) -> Iterator[Violation]:
    """INV-12: a sleep that nobody disturbs ends at its time, never before, and soon after."""
    for run_id in seen.runs:
        ends = {row["body"]["cycle"]: row for row in seen.entries_of(run_id, "cycle_ended")}
        starts = {row["body"]["cycle"]: row for row in seen.entries_of(run_id, "cycle_started")}
        for cycle, end in ends.items():
            decision, start = end["body"]["decision"], starts.get(cycle + 1)
            if start is None or decision is None or decision["kind"] != "sleep":
                continue
            if start["body"]["wake_seen"] > _seen_by(seen, run_id, cycle, starts):
                continue  # somebody woke it
            yield from _woke(seen, run_id, _due(seen, end), end, start)


def _seen_by(seen: Seen, run_id: str, cycle: int, starts: dict[int, Row]) -> int:
    """The last wake that a cycle took in: at its start, or when it read its inbox."""
    rows = [starts[cycle], *seen.entries_of(run_id, "inbox_read")]
    following = starts[cycle + 1]["entry_no"]
    return max(int(row["body"]["wake_seen"]) for row in rows if row["entry_no"] < following)


def _due(seen: Seen, end: Row) -> float:
    decision = end["body"]["decision"]
    if decision["until"]:
        return seen.ended.at + datetime.fromisoformat(decision["until"]).timestamp() - seen.ended.clock
    return seen.at(end["created_at"]) + float(decision["seconds"])


def _woke(seen: Seen, run_id: str, due: float, end: Row, start: Row) -> Iterator[Violation]:
    woke = seen.at(start["created_at"])
    if woke < due - CLOCK_S:
        yield violation("INV-12", run_id, f"it woke {due - woke:.2f} s early", end, start)
    late_s = woke - due - WAKES_S - LOOK_S
    if late_s > 0 and late_s > seen.excused_s(due - seen.lease_s, woke, *OF_A_WORKER):
        yield violation("INV-12", run_id, f"it woke {woke - due:.1f} s late", end, start)
