"""The figures of a storm, from its history and its dump. Pure; what they mean is in docs/reliability.

Whether anything was violated is the checker's to say. Times that are compared are the database's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from statistics import quantiles
from typing import Any, Final
from uuid import UUID

from tests.chaos.history import Began, Call, Dump, Ended, Fault, Frame, Orphaned, Process, Record, ToolRan

from espalier_protocol.ids import to_wire

RULE_OF_THREE: Final = 3
DISTURBS_S: Final = 5.0
"""A recovery is told apart when the database was troubled before it was over, or should have been."""

TAKES_S: Final = 1.5
"""A look for due runs, and taking one."""

BACK_S: Final = 2.0
"""So long after its end a trouble is still one."""

OF_THE_DATABASE: Final = ("postgres.", "line.")


def figures(records: Sequence[Record], dump: Dump) -> dict[str, Any]:
    """Everything that a report has besides what it was made from and what the checker found."""
    faults = [record for record in records if isinstance(record, Fault)]
    gaps, duplicates = _disorder(record for record in records if isinstance(record, Frame))
    number = len(faults)
    return {
        "faults": dict(sorted(Counter(fault.act for fault in faults).items())),
        "faults_by_row": dict(sorted(Counter(fault.row for fault in faults).items())),
        "restarts": _restarts(records),
        "n": number,
        "bound_95": round(RULE_OF_THREE / number, 6) if number else None,
        "recovery_s": _recovery(records, faults, dump),
        "cancel_s": _cancels(records, faults, dump),
        "gaps": gaps,
        "duplicates": duplicates,
        "calls": dict(
            sorted(
                Counter(f"{call.method} {call.outcome}" for call in records if isinstance(call, Call)).items()
            )
        ),
        "tool_calls": dict(sorted(Counter(row["state"] for row in dump["tool_calls"]).items())),
        "in_doubt": sum(row["state"] == "in_doubt" for row in dump["tool_calls"]),
        "tools_ran": sum(isinstance(record, ToolRan) for record in records),
        "runs": dict(sorted(Counter(row["state"] for row in dump["runs"]).items())),
        "run_errors": _errors(dump),
        "events": len(dump["events"]),
        "frames": sum(isinstance(record, Frame) for record in records),
    }


def spread(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """How many, and the middle, the 99th of a hundred and the worst of them."""
    if len(seconds) < 2:
        only = round(seconds[0], 3) if seconds else None
        return {"count": len(seconds), "p50": only, "p99": only, "max": only}
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {
        "count": len(seconds),
        "p50": round(cuts[49], 3),
        "p99": round(cuts[98], 3),
        "max": round(max(seconds), 3),
    }


def _disorder(frames: Iterable[Frame]) -> tuple[int, int]:
    """(events that a follower was not sent, events that it was sent again)."""
    last: dict[str, int] = {}
    gaps = duplicates = 0
    for frame in frames:
        seq, before = int(frame.event_id), last.get(frame.follower, 0)
        gaps += max(0, seq - before - 1)
        duplicates += seq <= before
        last[frame.follower] = max(seq, before)
    return gaps, duplicates


def _restarts(records: Sequence[Record]) -> dict[str, int]:
    exits = [record for record in records if isinstance(record, Process) and record.act == "exited"]
    return dict(sorted(Counter(each.service.partition("-")[0] for each in exits).items()))


def _errors(dump: Dump) -> dict[str, int]:
    reasons = [_reason(row) for row in dump["runs"] if row["state"] == "error"]
    return dict(sorted(Counter(reasons).items()))


def _reason(run: Mapping[str, Any]) -> str:
    result = run["result"]
    return str(result.get("reason") if isinstance(result, dict) else result)[:80]


def seconds_of(timestamp: str) -> float:
    """A timestamp of a dump as seconds since 1970."""
    return datetime.fromisoformat(timestamp).timestamp()


# --- recovery --------------------------------------------------------------------------------------------


def _recovery(records: Sequence[Record], faults: Sequence[Fault], dump: Dump) -> dict[str, Any]:
    """From a worker's death to the next entry or event of each run that it held.

    Told apart are those during which Postgres, or a worker's way to it, was troubled, or no worker was there.
    """
    written = _written(dump)
    found: dict[tuple[str, bool], list[float]] = {}
    for death in (record for record in records if isinstance(record, Orphaned)):
        alone = _nobody_else(death, records)
        for run_id in death.run_ids:
            after = [at for at in written.get(run_id, ()) if at > death.clock]
            if after:
                took = min(after) - death.clock
                until = death.at + min(took, DISTURBS_S)
                shaken = alone or any(_shakes(fault, death, until) for fault in faults)
                found.setdefault((death.act, shaken), []).append(took)
    return {
        "after_sigkill": spread(found.get(("killed", False), [])),
        "after_sigterm": spread(found.get(("stopped", False), [])),
        "after_sigkill_disturbed": spread(found.get(("killed", True), [])),
        "after_sigterm_disturbed": spread(found.get(("stopped", True), [])),
    }


def _nobody_else(death: Orphaned, records: Sequence[Record]) -> bool:
    """Whether no worker was ready from when the runs could be had until a moment later."""
    lease_s = next((each.settings["lease_ttl_s"] for each in records if isinstance(each, Began)), 0.0)
    since = death.at + (lease_s if death.act == "killed" else 0.0)
    until = since + TAKES_S
    ready: dict[str, bool] = {}
    for record in records:
        match record:
            case Process(at=at, service=service, act=act) if service.startswith("worker") and at < until:
                ready[service] = act == "ready" and at <= since
            case Fault(at=at, act="worker.freeze", target=service, detail=detail) if at < until:
                ready[service] = ready.get(service, False) and at + detail["seconds"] <= since
    return not any(is_ready for service, is_ready in ready.items() if service != _leaving(death))


def _leaving(death: Orphaned) -> str:
    """A worker that was told to stop takes no more runs; one that was killed is a new one by then."""
    return death.worker if death.act == "stopped" else ""


def _shakes(fault: Fault, death: Orphaned, until: float) -> bool:
    lasts = float(fault.detail.get("seconds", 0))
    if not (fault.at < until and death.at < fault.at + lasts + BACK_S):
        return False
    if fault.target == death.worker and death.act == "stopped":
        return fault.act in (
            "worker.kill",
            "worker.dies",
            "worker.freeze",
        )  # it could not finish what it was told
    of_a_worker = fault.act.startswith("line.") and fault.target.startswith("postgres/worker")
    return of_a_worker or fault.act.startswith("postgres.")


def _written(dump: Dump) -> dict[str, list[float]]:
    """When something was written down of a run, by the run's id."""
    found: dict[str, list[float]] = {}
    for table, column in (("journal", "created_at"), ("events", "emitted_at")):
        for row in dump[table]:
            found.setdefault(to_wire("run", UUID(row["run_id"])), []).append(seconds_of(row[column]))
    return found


# --- cancels ---------------------------------------------------------------------------------------------


def _cancels(records: Sequence[Record], faults: Sequence[Fault], dump: Dump) -> dict[str, Any]:
    """From the wish to the end, of runs that were cancelled: with workers that live, and all."""
    offset = next((record.clock - record.at for record in records if isinstance(record, Ended)), 0.0)
    undisturbed, every = [], []
    for run in dump["runs"]:
        if run["cancel_requested_at"] is None or run["ended_at"] is None:
            continue
        asked_at = seconds_of(run["cancel_requested_at"])
        took = max(0.0, seconds_of(run["ended_at"]) - asked_at)
        every.append(took)
        if not _troubled(asked_at - offset, took, faults):
            undisturbed.append(took)
    return {"live": spread(undisturbed), "all": spread(every)}


def _troubled(at: float, took: float, faults: Sequence[Fault]) -> bool:
    for fault in faults:
        lasts = float(fault.detail.get("seconds", 0))
        if fault.act.startswith(("worker.", "gateway.", "broker.", *OF_THE_DATABASE)) and (
            fault.at - took - 0.5 < at < fault.at + lasts + 4.0
        ):
            return True
    return False
