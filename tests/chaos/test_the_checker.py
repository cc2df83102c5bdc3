"""The checker, judged: a sound little storm passes, and each promise that is broken in it is found out.

The sample is written by the product's own pure code: entries, what is told of them, and ids. Every breach is
a change of that sample, and must be found as a breach of exactly the invariant that it breaks.
"""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest
from tests.chaos.history import (
    Began,
    Call,
    Connection,
    Ended,
    Fault,
    Frame,
    ModelAsked,
    Probe,
    Record,
    ToolRan,
    Usage,
    read_dump,
    read_history,
    write_dump,
    write_history,
)
from tests.chaos.invariants import CHECKER_VERSION, CHECKS, check

from espalier_domain.decisions import Complete, Sleep
from espalier_domain.journal import (
    ApprovalRequested,
    CallsPlanned,
    CycleEnded,
    CycleStarted,
    Entry,
    InboxRead,
    MessageSent,
    ModelAnswered,
    ModelCallStarted,
    ReadMessage,
    RunCreated,
    RunEnded,
    SubagentSpawned,
    ToolCall,
    ToolReturned,
    encode,
)
from espalier_domain.telling import events_of
from espalier_protocol.agent import Budgets
from espalier_protocol.events import NumberedEvent
from espalier_protocol.ids import event_id, to_wire

PAGES: Final = Path(__file__).parents[2] / "docs" / "reliability"
CLOCK: Final = 1_800_000_000.0
"""The database's time when the bench began."""

ENDS: Final = 200.0
BUDGETS: Final = Budgets(tokens_per_cycle=100, tool_calls_per_cycle=5, seconds_per_cycle=60)
ADA, BOB = str(UUID(int=1)), str(UUID(int=2))
AGENT, HELPER, OTHERS = str(UUID(int=11)), str(UUID(int=12)), str(UUID(int=13))
PARENT, CHILD, STOPPED, OPEN = (str(UUID(int=20 + n)) for n in range(4))
SAID, RESULT = str(UUID(int=31)), str(UUID(int=32))
RUN: Final = to_wire("run", UUID(PARENT))


def moment(at: float) -> str:
    return datetime.fromtimestamp(CLOCK + at, UTC).isoformat()


def wire(prefix: Any, uuid: str) -> str:
    return to_wire(prefix, UUID(uuid))


@dataclass
class Sample:
    """A history and a dump that may be broken."""

    records: list[Record] = field(default_factory=list)
    dump: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def row(self, table: str, **wanted: Any) -> dict[str, Any]:
        """The one row that has these values."""
        (row,) = [row for row in self.dump[table] if wanted.items() <= row.items()]
        return row

    def entry(self, run_id: str, kind: str, n: int = 0) -> dict[str, Any]:
        found = [row for row in self.dump["journal"] if row["run_id"] == run_id]
        return [row for row in found if row["body"]["kind"] == kind][n]

    def index(self, kind: type[Any], n: int = 0) -> int:
        return [place for place, record in enumerate(self.records) if isinstance(record, kind)][n]

    def change(self, kind: type[Any], n: int = 0, **fields: Any) -> None:
        place = self.index(kind, n)
        self.records[place] = replace(self.records[place], **fields)

    def add(self, record: Record) -> None:
        self.records.insert(-1, record)

    def violated(self) -> set[str]:
        return {violation.invariant for violation in check(self.records, self.dump)}

    # --- building

    def run(self, run_id: str, agent_id: str, told: Sequence[tuple[float, Entry]], **columns: Any) -> None:
        """A run, and what its journal and its log say of it."""
        row = {
            "id": run_id,
            "owner_id": ADA,
            "agent_id": agent_id,
            "root_id": AGENT,
            "parent_id": None,
            "depth": 0,
            "goal": f"goal of {run_id}",
            "state": "running",
            "wait_reason": None,
            "created_at": moment(told[0][0]),
            "due_at": moment(told[-1][0]),
            "ended_at": None,
            "lease_token": 3,
            "lease_until": None,
            "cancel_requested_at": None,
            "max_cycles": 10,
            "max_subagents": 3,
            "cycle_count": 0,
            "cycles_granted": 0,
            "subagents_granted": 0,
            "cycles_lost": 0,
            "log_pruned_at": None,
            "erased_at": None,
            **columns,
        }
        seq = 0
        for entry_no, (at, entry) in enumerate(told, start=1):
            body = json.loads(encode(entry))
            common = {"run_id": run_id, "owner_id": ADA}
            self.dump["journal"].append(
                {**common, "entry_no": entry_no, "body": body, "created_at": moment(at)}
            )
            for payload in events_of(wire("run", run_id), entry):
                seq += 1
                event = {"seq": seq, "type": payload.type, "payload": payload.text()}
                self.dump["events"].append({**common, **event, "emitted_at": moment(at)})
            if isinstance(entry, RunEnded):
                row |= {"state": entry.final_state, "ended_at": moment(at)}
        self.dump["runs"].append(row | {"next_seq": seq + 1, "next_entry_no": len(told) + 1})

    def follow(self, name: str, run_id: str, *cuts: int) -> None:
        """A follower of all events, on a new connection after each of these seqs."""
        rows = [row for row in self.dump["events"] if row["run_id"] == run_id]
        number, since = 0, None
        for row in rows:
            if row["seq"] == 1 or row["seq"] - 1 in cuts:
                number += 1
                opened = Connection(150.0, name, wire("run", run_id), number, "opened", since)
                self.add(opened)
            stored = NumberedEvent(
                row["seq"], row["type"], datetime.fromisoformat(row["emitted_at"]), row["payload"]
            )
            digest = sha256(stored.line(wire("run", run_id)).data.encode()).hexdigest()
            since = event_id(row["seq"])
            self.add(Frame(150.0, name, wire("run", run_id), number, since, row["type"], digest))


def cycle(at: float, number: int, *, wake_seen: int = 0, woken: bool = False) -> tuple[float, Entry]:
    return at, CycleStarted(number, at, wake_seen, BUDGETS, woken)


def asked(at: float, number: int, *calls: ToolCall, reserved: int = 60, tokens: int = 40) -> list[Any]:
    started = ModelCallStarted(number, 1, reserved, 2)
    return [(at, started), (at + 0.5, ModelAnswered(number, "so be it", calls, tokens))]


def sound() -> Sample:
    """A parent that spawns, speaks, calls and sleeps; its child; one that was cancelled; one that waits."""
    sample = Sample(
        [Began(0.0, 7, {"lease_ttl_s": 3.0, "sweep_s": 3.0}), Ended(ENDS, CLOCK + ENDS)],
        {name: [] for name in TABLES},
    )
    sample.dump["owners"] = [{"id": ADA, "name": "ada"}, {"id": BOB, "name": "bob"}]
    sample.dump["agents"] = [
        {"id": AGENT, "owner_id": ADA},
        {"id": HELPER, "owner_id": ADA},
        {"id": OTHERS, "owner_id": BOB},
    ]
    _parent(sample)
    _child(sample)
    told: list[tuple[float, Entry]] = [
        (30.0, RunCreated(wire("agt", AGENT))),
        cycle(31.0, 1),
        (33.0, CycleEnded(1, None, 0, 0)),
        (33.0, RunEnded("cancelled", {"reason": "cancelled"})),
    ]
    sample.run(STOPPED, AGENT, told, cancel_requested_at=moment(32.0), cycle_count=1)
    rests = [(40.0, RunCreated(wire("agt", AGENT)))]
    sample.run(OPEN, AGENT, rests, state="sleeping", wait_reason="timer", due_at=moment(ENDS + 60))
    _effects(sample)
    _outside(sample)
    return sample


def _parent(sample: Sample) -> None:
    record = ToolCall("call_1_1", "mcp.ledger.record", {"text": "call_1_1"})
    silent = ToolCall("call_1_2", "mcp.ledger.record", {"text": "call_1_2"})
    spawned = SubagentSpawned(wire("agt", HELPER), wire("run", CHILD), 2, 0)
    read = InboxRead((ReadMessage(wire("msg", RESULT), wire("agt", HELPER)),), 1)
    told: list[tuple[float, Entry]] = [
        (1.0, RunCreated(wire("agt", AGENT))),
        cycle(2.0, 1),
        *asked(2.5, 1, record, silent),
        (3.0, CallsPlanned(1, ("call_1_1", "call_1_2"))),
        (4.0, ToolReturned(1, "call_1_1", record.name, True, "recorded")),
        (4.0, ToolReturned(1, "call_1_2", silent.name, False, "outcome unknown", in_doubt=True)),
        (4.0, ApprovalRequested(wire("apr", str(UUID(int=41))), "in_doubt")),
        (5.0, spawned),
        (5.0, CycleEnded(1, Sleep(None, 10.0), 40, 2)),
        cycle(15.2, 2),
        *asked(15.5, 2, reserved=100, tokens=30),
        (16.0, read),
        (16.5, MessageSent(wire("msg", SAID), wire("agt", HELPER))),
        (17.0, CycleEnded(2, Complete({"done": True}), 30, 1)),
        (17.0, RunEnded("complete", {"done": True})),
    ]
    sample.run(PARENT, AGENT, told, cycle_count=2, cycles_granted=1, subagents_granted=1)


def _child(sample: Sample) -> None:
    told: list[tuple[float, Entry]] = [
        (5.0, RunCreated(wire("agt", HELPER))),
        cycle(6.0, 1),
        *asked(6.5, 1),
        (8.0, CycleEnded(1, Complete("found"), 40, 0)),
        (8.0, RunEnded("complete", "found")),
    ]
    sample.run(CHILD, HELPER, told, parent_id=PARENT, depth=1, max_subagents=0, max_cycles=2, cycle_count=1)


TABLES: Final = (
    *("owners", "agents", "runs", "journal", "events", "messages", "tool_calls", "approvals"),
    *("outbox", "artifacts", "memory_records", "erasures", "erased_records"),
)


def _effects(sample: Sample) -> None:
    call = {"run_id": PARENT, "owner_id": ADA, "tool": "mcp.ledger.record"}
    sample.dump["tool_calls"] = [
        {**call, "call_id": "call_1_1", "state": "done"},
        {**call, "call_id": "call_1_2", "state": "in_doubt"},
    ]
    sample.dump["approvals"] = [
        {"id": str(UUID(int=41)), "run_id": PARENT, "call_id": "call_1_2", "kind": "in_doubt"}
    ]
    message = {"owner_id": ADA, "root_id": AGENT, "sender": "agent"}
    result = {"type": "subagent_result", "result": "found"}
    sample.dump["messages"] = [
        {
            **message,
            "id": RESULT,
            "from_agent_id": HELPER,
            "to_agent_id": AGENT,
            "to_run_id": PARENT,
            "body": result,
            "created_at": moment(8.0),
            "delivered_at": moment(16.0),
            "read_at": moment(16.0),
        },
        {
            **message,
            "id": SAID,
            "from_agent_id": AGENT,
            "to_agent_id": HELPER,
            "to_run_id": None,
            "body": "thanks",
            "created_at": moment(16.5),
            "delivered_at": None,
            "read_at": None,
        },
    ]


def _outside(sample: Sample) -> None:
    params = {"agent_id": wire("agt", AGENT), "goal": f"goal of {PARENT}", "inputs": {}}
    create = Call(
        *(1.0, 0.9, "c", "ada", "gateway-0", "run.create", params, "ok"), {"id": RUN}, idempotency_key="k"
    )
    sample.add(replace(create, at=1.1, outcome="unknown", answer=None))
    sample.add(create)
    sample.add(replace(create, at=1.4, gateway="gateway-1"))
    cancel = {"run_id": wire("run", STOPPED)}
    sample.add(
        Call(32.5, 31.9, "c", "ada", "gateway-0", "run.cancel", cancel, "ok", {"id": wire("run", STOPPED)})
    )
    send = {"to_agent_id": wire("agt", HELPER), "body": "thanks"}
    sample.add(
        Call(16.6, 16.4, "c", "ada", "gateway-0", "message.send", send, "ok", {"id": wire("msg", SAID)})
    )
    sample.add(ModelAsked(2.6, RUN, 40, "answered"))
    sample.add(ToolRan(3.5, "ledger", "record", RUN, "call_1_1"))
    sample.add(ToolRan(3.6, "ledger", "record", RUN, "call_1_2"))
    sample.follow("straight", PARENT)
    sample.follow("cut", PARENT, 2, 5)
    sample.add(Usage(0.0, "worker-0", "before", 40, 1, 100_000_000))
    sample.add(Usage(190.0, "worker-0", "after", 41, 1, 105_000_000))
    sample.add(Fault(100.0, "F12", "postgres.crash", "postgres", {"seconds": 5.0}))
    sample.add(Probe(101.0, "gateway-0", "/readyz", 200))
    sample.add(Probe(103.0, "gateway-0", "/readyz", 503))
    sample.add(Probe(103.0, "gateway-0", "/healthz", 200))


# --- breaches --------------------------------------------------------------------------------------------

Breach = Callable[[Sample], object]


def renumbered(sample: Sample) -> None:
    sample.row("runs", id=OPEN)["next_seq"] += 1


def written_backwards(sample: Sample) -> None:
    [each for each in sample.dump["events"] if each["run_id"] == CHILD][2]["emitted_at"] = moment(5.5)


def told_in_other_bytes(sample: Sample) -> None:
    sample.change(Frame, 3, digest="0" * 64)


def told_again(sample: Sample) -> None:
    frame = sample.records[sample.index(Frame, 4)]
    sample.records.insert(sample.index(Frame, 4), frame)


def left_out(sample: Sample) -> None:
    del sample.records[sample.index(Frame, 4)]


def not_told_the_end(sample: Sample) -> None:
    last = max(place for place, record in enumerate(sample.records) if isinstance(record, Frame))
    del sample.records[last]


def ended_twice(sample: Sample) -> None:
    run = sample.row("runs", id=CHILD)
    last = [each for each in sample.dump["events"] if each["run_id"] == CHILD][-1]
    sample.dump["events"].append({**last, "seq": run["next_seq"]})
    run["next_seq"] += 1


def ended_otherwise(sample: Sample) -> None:
    sample.row("runs", id=CHILD)["state"] = "error"


def forgotten(sample: Sample) -> None:
    sample.row("runs", id=OPEN)["due_at"] = moment(ENDS - 30)


def without_a_time(sample: Sample) -> None:
    sample.row("runs", id=OPEN)["due_at"] = None


def promised_in_vain(sample: Sample) -> None:
    sample.dump["outbox"].append({"id": 9, "kind": "wake", "created_at": moment(ENDS - 30)})


def accepted_and_lost(sample: Sample) -> None:
    lost = wire("run", str(UUID(int=99)))
    sample.change(Call, 1, answer={"id": lost})
    sample.change(Call, 2, answer={"id": lost})


def started_twice(sample: Sample) -> None:
    sample.entry(PARENT, "cycle_started", 1)["body"]["cycle"] = 1


def an_older_token_wrote(sample: Sample) -> None:
    sample.entry(PARENT, "model_call_started", 1)["body"]["lease_token"] = 1


def an_entry_is_missing(sample: Sample) -> None:
    sample.dump["journal"].remove(sample.entry(PARENT, "calls_planned"))


def ran_twice(sample: Sample) -> None:
    sample.add(ToolRan(9.0, "ledger", "record", RUN, "call_1_1"))


def ran_unplanned(sample: Sample) -> None:
    sample.row("tool_calls", call_id="call_1_1")["state"] = "skipped"


def done_and_never_ran(sample: Sample) -> None:
    del sample.records[sample.index(ToolRan)]


def doubt_that_nobody_is_asked_about(sample: Sample) -> None:
    sample.dump["approvals"].clear()


def doubt_told_as_an_answer(sample: Sample) -> None:
    sample.entry(PARENT, "tool_returned", 1)["body"]["in_doubt"] = False
    sample.dump["approvals"].clear()


def reserved_beyond_the_limit(sample: Sample) -> None:
    sample.entry(PARENT, "model_call_started", 0)["body"]["reserved"] = 101


def billed_more_than_settled(sample: Sample) -> None:
    sample.change(ModelAsked, tokens=71)


def cancelled_too_late(sample: Sample) -> None:
    sample.row("runs", id=STOPPED)["cancel_requested_at"] = moment(20.0)


def called_after_its_cancel(sample: Sample) -> None:
    stopped = wire("run", STOPPED)
    call = {"run_id": STOPPED, "call_id": "late", "tool": "mcp.ledger.record", "state": "failed"}
    sample.dump["tool_calls"].append(call)
    sample.add(ToolRan(34.0, "ledger", "record", stopped, "late"))


def outlived_its_spawner(sample: Sample) -> None:
    sample.row("runs", id=CHILD)["ended_at"] = moment(60.0)


def created_twice(sample: Sample) -> None:
    sample.row("runs", id=OPEN)["goal"] = f"goal of {PARENT}"


def answered_otherwise(sample: Sample) -> None:
    sample.change(Call, 2, answer={"id": RUN, "state": "complete"})


def taken_with_other_params(sample: Sample) -> None:
    first = sample.records[sample.index(Call, 1)]
    assert isinstance(first, Call)
    sample.change(Call, 2, params={**first.params, "inputs": {"other": True}})


def delivered_twice(sample: Sample) -> None:
    body = sample.entry(PARENT, "inbox_read")["body"]
    event = next(each for each in sample.dump["events"] if each["type"] == "message.delivered")
    run = sample.row("runs", id=OPEN)
    sample.dump["events"].append({**event, "run_id": OPEN, "seq": run["next_seq"], "emitted_at": moment(41)})
    run["next_seq"] += 1
    assert body["messages"]


def read_and_not_told(sample: Sample) -> None:
    sample.row("messages", id=SAID).update(read_at=moment(18.0), delivered_at=moment(18.0))


def read_out_of_order(sample: Sample) -> None:
    row = sample.row("messages", id=RESULT)
    earlier, event = str(UUID(int=30)), "message.delivered"
    sample.dump["messages"].append(
        {**row, "id": earlier, "body": "first", "created_at": moment(7.0), "read_at": moment(18.0)}
        | {"delivered_at": moment(18.0)}
    )
    run, payload = sample.row("runs", id=OPEN), {"from_agent_id": "x", "message_id": wire("msg", earlier)}
    sample.dump["events"].append(
        {"run_id": OPEN, "seq": run["next_seq"], "type": event, "payload": json.dumps(payload)}
        | {"emitted_at": moment(41.0)}
    )
    run["next_seq"] += 1


def result_lost(sample: Sample) -> None:
    sample.row("messages", id=RESULT)["body"] = "nothing"


def too_many_helpers(sample: Sample) -> None:
    sample.row("runs", id=PARENT)["max_subagents"] = 0


def too_many_cycles(sample: Sample) -> None:
    sample.row("runs", id=PARENT)["cycles_granted"] = 9


def spawned_from_the_grave(sample: Sample) -> None:
    sample.row("runs", id=CHILD)["created_at"] = moment(17.5)


def woke_early(sample: Sample) -> None:
    sample.entry(PARENT, "cycle_started", 1)["created_at"] = moment(14.0)


def woke_late(sample: Sample) -> None:
    sample.entry(PARENT, "cycle_started", 1)["created_at"] = moment(24.0)


def lives_on_after_an_erasure(sample: Sample) -> None:
    sample.dump["erased_records"].append({"action": "deleted", "record_id": wire("msg", SAID)})


def told_of_anothers(sample: Sample) -> None:
    sample.change(Call, 3, answer={"id": wire("run", STOPPED), "agent_id": wire("agt", OTHERS)})


def holds_on(sample: Sample) -> None:
    sample.change(Usage, 1, descriptors=400)


def keeps_children(sample: Sample) -> None:
    sample.change(Usage, 1, children=3)


def ready_without_a_database(sample: Sample) -> None:
    sample.change(Probe, 1, status=200)


def dead_to_its_probe(sample: Sample) -> None:
    sample.change(Probe, 2, status=500)


def pruned_early(sample: Sample) -> None:
    sample.row("runs", id=CHILD)["log_pruned_at"] = moment(100.0)


BREACHES: Final[dict[str, tuple[Breach, ...]]] = {
    "INV-1": (renumbered, written_backwards, told_in_other_bytes),
    "INV-2": (told_again, left_out, not_told_the_end),
    "INV-3": (ended_twice, ended_otherwise),
    "INV-4": (forgotten, without_a_time, promised_in_vain, accepted_and_lost),
    "INV-5": (started_twice, an_older_token_wrote, an_entry_is_missing),
    "INV-6": (
        *(ran_twice, ran_unplanned, done_and_never_ran),
        *(doubt_that_nobody_is_asked_about, doubt_told_as_an_answer),
    ),
    "INV-7": (reserved_beyond_the_limit, billed_more_than_settled),
    "INV-8": (cancelled_too_late, called_after_its_cancel, outlived_its_spawner),
    "INV-9": (created_twice, answered_otherwise, taken_with_other_params),
    "INV-10": (delivered_twice, read_and_not_told, read_out_of_order),
    "INV-11": (result_lost, too_many_helpers, too_many_cycles, spawned_from_the_grave),
    "INV-12": (woke_early, woke_late),
    "INV-13": (lives_on_after_an_erasure,),
    "INV-14": (told_of_anothers,),
    "INV-15": (holds_on, keeps_children),
    "INV-16": (ready_without_a_database, dead_to_its_probe),
    "INV-19": (pruned_early,),
}
CASES: Final = [(name, breach) for name, breaches in BREACHES.items() for breach in breaches]


def test_a_sound_storm_has_no_violation() -> None:
    sample = sound()
    assert check(sample.records, sample.dump) == []


def test_every_check_has_a_breach_that_it_finds() -> None:
    assert list(BREACHES) == list(CHECKS)


@pytest.mark.parametrize(("invariant", "breach"), CASES, ids=[breach.__name__ for _, breach in CASES])
def test_a_breach_is_found_as_what_it_is(invariant: str, breach: Breach) -> None:
    sample = sound()
    before = deepcopy(sample)
    breach(sample)
    assert sample != before
    assert sample.violated() == {invariant}


def test_what_the_database_was_away_for_is_excused_and_no_more() -> None:
    sample = sound()
    woke_late(sample)
    sample.add(Fault(14.0, "F12", "postgres.crash", "postgres", {"seconds": 4.0}))
    assert sample.violated() == set()
    sample.entry(PARENT, "cycle_started", 1)["created_at"] = moment(34.0)
    assert sample.violated() == {"INV-12"}


def test_histories_that_are_kept_are_judged_again_by_this_checker(tmp_path: Path) -> None:
    sample = sound()
    write_history(tmp_path / "history.jsonl.gz", sample.records)
    write_dump(tmp_path / "dump.json.gz", sample.dump)
    (tmp_path / "reliability-report.json").write_text(json.dumps({"checker_version": CHECKER_VERSION}))
    for folder in [tmp_path, *(path.parent for path in sorted(PAGES.glob("*/history.jsonl.gz")))]:
        report = json.loads((folder / "reliability-report.json").read_text())
        assert report["checker_version"] == CHECKER_VERSION, f"{folder.name} was judged by another checker"
        records = list(read_history(folder / "history.jsonl.gz"))
        assert check(records, read_dump(folder / "dump.json.gz")) == [], folder.name
