"""The checker, judged: a sound little storm passes, and each promise that is broken in it is found out.

The sample is written by the product's own pure code: entries, what is told of them, and ids. Every breach is
a change of that sample, and must be found as a breach of exactly the invariant that it breaks.
"""

import json
import time
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
from tests.chaos.stories import canary

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
from espalier_domain.trees import DEPTH_MAX
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
SAID, RESULT, TOLD = (str(UUID(int=31 + n)) for n in range(3))
NOBODYS: Final = str(UUID(int=99))
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
            "wake_seq": 0,
            "wake_seen": 0,
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
        {"id": AGENT, "owner_id": ADA, "parent_id": None, "name": "first"},
        {"id": HELPER, "owner_id": ADA, "parent_id": AGENT, "name": "helper"},
        {"id": OTHERS, "owner_id": BOB, "parent_id": None, "name": "first"},
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
        (8.0, MessageSent(wire("msg", RESULT), wire("agt", AGENT))),
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
        {**call, "call_id": "call_1_1", "state": "done", "result": {"isError": False}},
        {**call, "call_id": "call_1_2", "state": "in_doubt", "result": None},
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
    said = sample.row("messages", id=SAID)
    told = {"id": TOLD, "sender": "embedder", "body": "hurry", "created_at": moment(18.0)}
    sample.dump["messages"].append(said | told)


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
    send = {"to_agent_id": wire("agt", HELPER), "body": "hurry"}
    sent = Call(18.1, 17.9, "c", "ada", "gateway-0", "message.send", send, "ok", {"id": wire("msg", TOLD)})
    sample.add(replace(sent, idempotency_key="m"))
    begun = {"capabilities": {"espalier.events": True}}
    sample.add(Call(0.2, 0.1, "c", "ada", "gateway-0", "initialize", {}, "ok", begun))
    agent = replace(create, at=0.5, began=0.4, method="agent.create", params={"name": "first"})
    sample.add(replace(agent, answer={"id": wire("agt", AGENT)}, idempotency_key="a"))
    for asked in (PARENT, NOBODYS):
        peek = {"run_id": wire("run", asked)}
        missing = {"code": -32008, "data": {"symbol": "tool_not_found", "id": wire("run", asked)}}
        sample.add(Call(19.0, 18.9, "peek", "bob", "gateway-0", "run.get", peek, "error", missing))
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


def follows_what_is_not_there(sample: Sample) -> None:
    sample.add(Connection(150.0, "lost", wire("run", NOBODYS), 1, "opened"))


def not_told_of_our_own_events(sample: Sample) -> None:
    sample.records = [
        each for each in sample.records if not (isinstance(each, Frame) and each.type.startswith("espalier."))
    ]


def told_what_is_in_no_log(sample: Sample) -> None:
    last = max(place for place, record in enumerate(sample.records) if isinstance(record, Frame))
    frame = sample.records[last]
    assert isinstance(frame, Frame)
    sample.records.insert(last + 1, replace(frame, event_id=event_id(900), digest="0" * 64))


def ended_twice(sample: Sample) -> None:
    run = sample.row("runs", id=CHILD)
    last = [each for each in sample.dump["events"] if each["run_id"] == CHILD][-1]
    sample.dump["events"].append({**last, "seq": run["next_seq"]})
    run["next_seq"] += 1


def ended_otherwise(sample: Sample) -> None:
    sample.row("runs", id=CHILD)["state"] = "error"


def told_after_its_end(sample: Sample) -> None:
    run = sample.row("runs", id=CHILD)
    told = [each for each in sample.dump["events"] if each["run_id"] == CHILD][1]
    sample.dump["events"].append({**told, "seq": run["next_seq"], "emitted_at": moment(9.0)})
    run["next_seq"] += 1


def written_after_its_end(sample: Sample) -> None:
    run, entry = sample.row("runs", id=CHILD), sample.entry(CHILD, "message_sent")
    sample.dump["journal"].append({**entry, "entry_no": run["next_entry_no"]})
    run["next_entry_no"] += 1


def ended_and_alive(sample: Sample) -> None:
    lives = {"state": "sleeping", "wait_reason": "timer", "due_at": moment(ENDS + 60)}
    sample.row("runs", id=CHILD).update(lives)


def forgotten(sample: Sample) -> None:
    sample.row("runs", id=OPEN)["due_at"] = moment(ENDS - 30)


def without_a_time(sample: Sample) -> None:
    sample.row("runs", id=OPEN)["due_at"] = None


def asleep_on_a_wake(sample: Sample) -> None:
    sample.row("runs", id=OPEN)["wake_seq"] = 1


def asleep_for_nothing(sample: Sample) -> None:
    sample.row("runs", id=OPEN)["wait_reason"] = None


def asleep_and_held(sample: Sample) -> None:
    sample.row("runs", id=OPEN)["lease_until"] = moment(ENDS + 2)


def running_in_nobodys_hands(sample: Sample) -> None:
    sample.row("runs", id=OPEN).update(state="running", wait_reason=None)


def promised_in_vain(sample: Sample) -> None:
    sample.dump["outbox"].append({"id": 9, "kind": "wake", "created_at": moment(ENDS - 30)})


def accepted_and_lost(sample: Sample) -> None:
    lost = wire("run", NOBODYS)
    sample.change(Call, 1, answer={"id": lost})
    sample.change(Call, 2, answer={"id": lost})


def started_twice(sample: Sample) -> None:
    sample.entry(PARENT, "cycle_started", 1)["body"]["cycle"] = 1


def an_older_token_wrote(sample: Sample) -> None:
    sample.entry(PARENT, "model_call_started", 1)["body"]["lease_token"] = 1


def its_token_went_back(sample: Sample) -> None:
    sample.row("runs", id=PARENT)["lease_token"] = 1


def answered_unasked(sample: Sample) -> None:
    answered = {**sample.entry(PARENT, "model_answered")["body"], "calls": [], "tokens": 0}
    sample.entry(PARENT, "calls_planned")["body"] = answered


def an_entry_is_missing(sample: Sample) -> None:
    sample.dump["journal"].remove(sample.entry(PARENT, "calls_planned"))


def ran_twice(sample: Sample) -> None:
    sample.add(ToolRan(9.0, "ledger", "record", RUN, "call_1_1"))


def ran_unplanned(sample: Sample) -> None:
    sample.row("tool_calls", call_id="call_1_1")["state"] = "skipped"


def done_and_never_ran(sample: Sample) -> None:
    del sample.records[sample.index(ToolRan)]


def ran_and_told_unmade(sample: Sample) -> None:
    said = {"content": [{"type": "text", "text": "unavailable: the call was not made. It is away."}]}
    sample.row("tool_calls", call_id="call_1_1").update(state="failed", result=said)


def ended_without_a_word(sample: Sample) -> None:
    row = sample.row("tool_calls", call_id="call_1_2")
    sample.dump["tool_calls"].append({**row, "call_id": "call_1_9"})


def asked_about_and_untold(sample: Sample) -> None:
    row = sample.row("approvals", call_id="call_1_2")
    sample.dump["approvals"].append({**row, "call_id": "call_1_9"})


def doubt_that_nobody_is_asked_about(sample: Sample) -> None:
    sample.dump["approvals"].clear()


def doubt_told_as_an_answer(sample: Sample) -> None:
    sample.entry(PARENT, "tool_returned", 1)["body"]["in_doubt"] = False
    sample.dump["approvals"].clear()


def reserved_beyond_the_limit(sample: Sample) -> None:
    sample.entry(PARENT, "model_call_started", 0)["body"]["reserved"] = 101


def a_tree_beyond_its_means(sample: Sample) -> None:
    sample.entry(CHILD, "cycle_started")["body"]["budgets"]["tokens_per_cycle"] = 5_000
    sample.entry(CHILD, "model_call_started")["body"]["reserved"] = 2_000
    sample.entry(CHILD, "model_answered")["body"]["tokens"] = 2_000


def billed_more_than_settled(sample: Sample) -> None:
    sample.change(ModelAsked, tokens=71)


def cancelled_too_late(sample: Sample) -> None:
    sample.row("runs", id=STOPPED)["cancel_requested_at"] = moment(20.0)


def completed_after_its_cancel(sample: Sample) -> None:
    sample.row("runs", id=CHILD)["cancel_requested_at"] = moment(7.5)


def its_agent_cancelled_in_vain(sample: Sample) -> None:
    agent = {"agent_id": wire("agt", AGENT)}
    answer = {"id": wire("agt", AGENT), "lifecycle_state": "cancelled"}
    sample.add(Call(51.0, 50.5, "c", "ada", "gateway-0", "agent.cancel", agent, "ok", answer))


def cancelled_and_gone(sample: Sample) -> None:
    lost = {"id": wire("run", NOBODYS)}
    sample.add(Call(51.0, 50.5, "c", "ada", "gateway-0", "run.cancel", {"run_id": lost["id"]}, "ok", lost))


def called_after_its_cancel(sample: Sample) -> None:
    stopped = wire("run", STOPPED)
    call = {"run_id": STOPPED, "owner_id": ADA, "call_id": "late", "tool": "mcp.ledger.record"}
    sample.dump["tool_calls"].append({**call, "state": "failed", "result": {"isError": True}})
    said = ToolReturned(1, "late", "mcp.ledger.record", False, "it failed")
    sample.entry(STOPPED, "cycle_ended")["body"] = json.loads(encode(said))
    sample.add(ToolRan(34.0, "ledger", "record", stopped, "late"))


def outlived_its_spawner(sample: Sample) -> None:
    sample.row("runs", id=CHILD)["ended_at"] = moment(60.0)


def created_twice(sample: Sample) -> None:
    sample.row("runs", id=OPEN)["goal"] = f"goal of {PARENT}"


def made_an_agent_twice(sample: Sample) -> None:
    sample.dump["agents"].append({**sample.row("agents", id=AGENT), "id": NOBODYS})


def made_a_message_twice(sample: Sample) -> None:
    sample.dump["messages"].append({**sample.row("messages", id=TOLD), "id": NOBODYS})


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


def accepted_and_not_there(sample: Sample) -> None:
    place = next(
        place
        for place, each in enumerate(sample.records)
        if isinstance(each, Call) and each.method == "message.send"
    )
    call = sample.records[place]
    assert isinstance(call, Call)
    sample.records[place] = replace(call, answer={"id": wire("msg", NOBODYS)})


def sent_and_not_there(sample: Sample) -> None:
    sample.dump["messages"].remove(sample.row("messages", id=SAID))


def there_and_not_sent(sample: Sample) -> None:
    sample.dump["messages"].append({**sample.row("messages", id=SAID), "id": NOBODYS})


def read_and_not_delivered(sample: Sample) -> None:
    sample.row("messages", id=RESULT)["delivered_at"] = None


def read_behind_a_later_one(sample: Sample) -> None:
    row, earlier = sample.row("messages", id=RESULT), str(UUID(int=30))
    sample.dump["messages"].append({**row, "id": earlier, "body": "first", "created_at": moment(7.0)})
    read = sample.entry(PARENT, "inbox_read")["body"]["messages"]
    read.append({**read[0], "message_id": wire("msg", earlier)})
    _told_by_another(sample, "message.delivered", earlier)
    _told_by_another(sample, "message.sent", earlier)


def _told_by_another(sample: Sample, event: str, message_id: str) -> None:
    run = sample.row("runs", id=OPEN)
    payload = json.dumps({"message_id": wire("msg", message_id)})
    told = {"run_id": OPEN, "seq": run["next_seq"], "type": event, "payload": payload}
    sample.dump["events"].append(told | {"owner_id": ADA, "emitted_at": moment(41.0)})
    run["next_seq"] += 1


def read_and_not_told(sample: Sample) -> None:
    sample.row("messages", id=SAID).update(read_at=moment(18.0), delivered_at=moment(18.0))


def read_out_of_order(sample: Sample) -> None:
    row = sample.row("messages", id=RESULT)
    earlier = str(UUID(int=30))
    sample.dump["messages"].append(
        {**row, "id": earlier, "body": "first", "created_at": moment(7.0), "read_at": moment(18.0)}
        | {"delivered_at": moment(18.0)}
    )
    _told_by_another(sample, "message.delivered", earlier)
    _told_by_another(sample, "message.sent", earlier)


def result_lost(sample: Sample) -> None:
    sample.row("messages", id=RESULT)["body"] = "nothing"


def too_many_helpers(sample: Sample) -> None:
    sample.row("runs", id=PARENT)["max_subagents"] = 0


def too_deep(sample: Sample) -> None:
    sample.row("runs", id=PARENT)["depth"] = DEPTH_MAX
    sample.row("runs", id=CHILD)["depth"] = DEPTH_MAX + 1


def in_another_tree(sample: Sample) -> None:
    sample.row("runs", id=CHILD)["root_id"] = HELPER


def spawned_and_told_of_another(sample: Sample) -> None:
    sample.entry(PARENT, "subagent_spawned")["body"]["child_run_id"] = wire("run", NOBODYS)


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


def bound_to_anothers(sample: Sample) -> None:
    sample.row("messages", id=TOLD)["from_agent_id"] = OTHERS


def written_what_another_knows(sample: Sample) -> None:
    sample.row("runs", id=STOPPED)["inputs"] = {"told": [canary("bob")]}


def told_what_another_knows(sample: Sample) -> None:
    sample.change(Call, 3, answer={"id": wire("run", STOPPED), "goal": canary("bob")})


def told_that_another_has_it(sample: Sample) -> None:
    place = next(
        place for place, each in enumerate(sample.records) if isinstance(each, Call) and each.client == "peek"
    )
    call = sample.records[place]
    assert isinstance(call, Call)
    sample.records[place] = replace(call, answer={"code": -32004, "data": {"symbol": "forbidden"}})


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


def pruned_before_the_time_that_was_set(sample: Sample) -> None:
    sample.change(Began, settings={"lease_ttl_s": 3.0, "sweep_s": 3.0, "log_retention_days": 7.0})
    sample.row("runs", id=CHILD)["log_pruned_at"] = moment(6 * 24 * 3600.0)


BREACHES: Final[dict[str, tuple[Breach, ...]]] = {
    "INV-1": (renumbered, written_backwards, told_in_other_bytes),
    "INV-2": (
        *(told_again, left_out, not_told_the_end, told_what_is_in_no_log),
        *(follows_what_is_not_there, not_told_of_our_own_events),
    ),
    "INV-3": (ended_twice, ended_otherwise, ended_and_alive, told_after_its_end, written_after_its_end),
    "INV-4": (
        *(forgotten, without_a_time, promised_in_vain, accepted_and_lost),
        *(asleep_on_a_wake, asleep_for_nothing, asleep_and_held, running_in_nobodys_hands),
    ),
    "INV-5": (
        *(started_twice, an_older_token_wrote, an_entry_is_missing),
        *(its_token_went_back, answered_unasked),
    ),
    "INV-6": (
        *(ran_twice, ran_unplanned, done_and_never_ran, ran_and_told_unmade),
        *(doubt_that_nobody_is_asked_about, doubt_told_as_an_answer),
        *(ended_without_a_word, asked_about_and_untold),
    ),
    "INV-7": (reserved_beyond_the_limit, billed_more_than_settled, a_tree_beyond_its_means),
    "INV-8": (
        *(cancelled_too_late, called_after_its_cancel, outlived_its_spawner),
        *(completed_after_its_cancel, its_agent_cancelled_in_vain, cancelled_and_gone),
    ),
    "INV-9": (
        *(created_twice, answered_otherwise, taken_with_other_params),
        *(made_an_agent_twice, made_a_message_twice),
    ),
    "INV-10": (
        *(delivered_twice, read_and_not_told, read_out_of_order, read_behind_a_later_one),
        *(accepted_and_not_there, sent_and_not_there, there_and_not_sent, read_and_not_delivered),
    ),
    "INV-11": (
        *(result_lost, too_many_helpers, too_many_cycles, spawned_from_the_grave),
        *(too_deep, in_another_tree, spawned_and_told_of_another),
    ),
    "INV-12": (woke_early, woke_late),
    "INV-13": (lives_on_after_an_erasure,),
    "INV-14": (
        *(told_of_anothers, told_what_another_knows, told_that_another_has_it),
        *(bound_to_anothers, written_what_another_knows),
    ),
    "INV-15": (holds_on, keeps_children),
    "INV-16": (ready_without_a_database, dead_to_its_probe),
    "INV-19": (pruned_early, pruned_before_the_time_that_was_set),
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


def test_a_log_that_was_removed_in_its_time_is_not_missed() -> None:
    sample = sound()
    sample.row("runs", id=PARENT)["log_pruned_at"] = moment(2 * 24 * 3600.0)
    for table in ("events", "journal", "tool_calls"):
        sample.dump[table] = [row for row in sample.dump[table] if row["run_id"] != PARENT]
    assert check(sample.records, sample.dump) == []


def test_who_did_not_ask_for_our_own_events_need_not_be_told_of_them() -> None:
    sample = sound()
    not_told_of_our_own_events(sample)
    place = next(
        place
        for place, each in enumerate(sample.records)
        if isinstance(each, Call) and each.method == "initialize"
    )
    del sample.records[place]
    assert sample.violated() == set()


def test_a_helper_ends_soon_after_the_cancel_and_not_only_after_the_end_of_its_spawner() -> None:
    sample = sound()
    sample.row("runs", id=PARENT)["cancel_requested_at"] = moment(4.0)
    sample.row("runs", id=CHILD)["ended_at"] = moment(16.5)
    late = {each.subject for each in check(sample.records, sample.dump) if each.invariant == "INV-8"}
    assert late == {RUN, wire("run", CHILD)}


@pytest.mark.slow
def test_a_long_storm_is_judged_in_less_than_a_minute() -> None:
    """A thousand runs with three hundred thousand frames and two thousand faults, as 25 minutes give."""
    sample = sound()
    frame = sample.records[sample.index(Frame)]
    many = [Connection(150.0, f"late-{n}", RUN, 1, "opened") for n in range(20_000)]
    told = [each for each in sample.records if isinstance(each, Frame) and each.follower == "straight"]
    assert frame in told
    frames = [replace(each, follower=f"late-{n}") for n in range(20_000) for each in told]
    faults = [Fault(float(n % 100), "F1", "gateway.kill", "gateway-0") for n in range(2_000)]
    row = sample.row("runs", id=OPEN)
    entries = [each for each in sample.dump["journal"] if each["run_id"] == OPEN]
    events = [each for each in sample.dump["events"] if each["run_id"] == OPEN]
    for n in range(1_000):
        copy = {"run_id": str(UUID(int=10_000 + n))}
        ended = {"cancel_requested_at": moment(41.0)}
        sample.dump["runs"].append({**row, "id": copy["run_id"], "goal": f"{n}", **ended})
        sample.dump["journal"] += [{**each, **copy} for each in entries]
        sample.dump["events"] += [{**each, **copy} for each in events]
    sample.records[-1:-1] = [*many, *frames, *faults]
    began = time.process_time()
    assert sample.violated() == {"INV-8"}
    assert time.process_time() - began < 25


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
