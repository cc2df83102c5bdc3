"""Checks of what runs do to the world and to one another: INV-6, INV-7, INV-9, INV-10, INV-13, INV-14."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final
from uuid import UUID

from tests.chaos.history import Call, ModelAsked, ToolRan
from tests.chaos.seen import Row, Seen, Violation, run_of, twice, violation

from espalier_protocol.ids import from_wire, to_wire

PREFIXES: Final = {
    "agents": "agt",
    "runs": "run",
    "messages": "msg",
    "artifacts": "art",
    "memory_records": "mem",
}
WIRE_ID: Final = re.compile(r"(?:agt|run|msg|art|mem)_[0-9A-Z]{26}")
SENT: Final = ("sent", "done", "failed", "in_doubt")


def called_once(seen: Seen) -> Iterator[Violation]:
    """INV-6: what a tool's own ledger has is what the rows say, once; what nobody knows is asked about."""
    safe = set(seen.began.settings.get("retry_safe_tools", ()))
    rows = {(run_of(row["run_id"]), row["call_id"]): row for row in seen.rows("tool_calls")}
    ran: dict[tuple[str, str], list[ToolRan]] = defaultdict(list)
    tools: set[str] = set()
    for line in seen.of(ToolRan):
        ran[(line.run_id, line.call)].append(line)
        tools.add(line.tool)
    for key, lines in ran.items():
        row = rows.get(key)
        if row is None or row["state"] not in SENT:
            said = "is in no row" if row is None else f"is {row['state']} in its row"
            yield violation("INV-6", key[0], f"call {key[1]} was carried out and {said}", *lines)
        elif len(lines) > 1 and row["tool"] not in safe:
            yield violation("INV-6", key[0], f"call {key[1]} was carried out {len(lines)} times", *lines)
    for key, row in rows.items():
        if row["state"] == "done" and key not in ran and row["tool"].rpartition(".")[2] in tools:
            yield violation("INV-6", key[0], f"call {key[1]} is done and in no ledger", row)
    yield from _doubted(seen, rows)


def _doubted(seen: Seen, rows: dict[tuple[str, str], Row]) -> Iterator[Violation]:
    asked = Counter(
        (run_of(row["run_id"]), row["call_id"]) for row in seen.rows("approvals") if row["kind"] == "in_doubt"
    )
    for run_id in seen.runs:
        for told in seen.entries_of(run_id, "tool_returned"):
            key, doubt = (run_id, told["body"]["call_id"]), told["body"].get("in_doubt", False)
            if asked[key] != doubt:
                sentence = f"call {key[1]} is told in_doubt={doubt}, and asked about {asked[key]} times"
                yield violation("INV-6", run_id, sentence, told)
            row = rows.get(key)
            if row is not None and row["state"] == "in_doubt" and not doubt:
                yield violation("INV-6", run_id, f"call {key[1]} is in doubt, and told otherwise", row, told)


def paid_for(seen: Seen) -> Iterator[Violation]:
    """INV-7: a question is paid for before it is asked, from what is left; and no bill is higher."""
    settled: dict[str, int] = {}
    for run_id, rows in seen.journals.items():
        limit = spent = reserved = total = 0
        for row in rows:
            body = row["body"]
            match body["kind"]:
                case "cycle_started":
                    limit, spent, reserved, total = body["budgets"]["tokens_per_cycle"], 0, 0, total + spent
                case "model_call_started":
                    spent, reserved = spent + reserved, body["reserved"]
                    if spent >= limit or reserved > limit - spent:
                        sentence = f"{reserved} tokens were reserved with {spent} of {limit} spent"
                        yield violation("INV-7", run_id, sentence, row)
                case "model_answered" | "model_failed":
                    spent, reserved = spent + body["tokens"], 0
                case "cycle_ended":
                    spent, reserved = spent + reserved, 0
        settled[run_id] = total + spent + reserved
    billed: Counter[str] = Counter()
    for asked in seen.of(ModelAsked):
        if asked.run_id is not None:
            billed[asked.run_id] += asked.tokens
    for run_id, tokens in billed.items():
        if tokens > settled.get(run_id, 0):
            sentence = f"it was billed {tokens} tokens and settled {settled.get(run_id, 0)}"
            yield violation("INV-7", run_id, sentence)


def created_once(seen: Seen) -> Iterator[Violation]:
    """INV-9: a create with a key happens once, and answers the same to whoever asks again."""
    calls: dict[tuple[str, str, str], list[Call]] = defaultdict(list)
    for call in seen.of(Call):
        if call.idempotency_key is not None:
            calls[(call.owner, call.method, call.idempotency_key)].append(call)
    keys: dict[str, set[tuple[str, str, str]]] = defaultdict(set)
    for key, of_key in calls.items():
        answered = [call for call in of_key if call.outcome == "ok"]
        for call in answered[1:]:
            if call.params != answered[0].params:
                yield violation("INV-9", key[2], "other params were accepted", answered[0], call)
            elif call.answer != answered[0].answer:
                yield violation("INV-9", key[2], "it was answered otherwise", answered[0], call)
        if key[1] == "run.create":
            for call in of_key:
                keys[_wanted(call.params["agent_id"], call.params["goal"])].add(key)
    made: dict[str, list[Row]] = defaultdict(list)
    for run in seen.runs.values():
        made[_wanted(to_wire("agt", UUID(run["agent_id"])), run["goal"])].append(run)
    for wanted, of_wanted in keys.items():
        if len(made[wanted]) > len(of_wanted):
            sentence = f"{len(made[wanted])} runs came of {len(of_wanted)} keys"
            yield violation("INV-9", wanted, sentence, *made[wanted])


def _wanted(agent_id: str, goal: str) -> str:
    return f"{agent_id} {goal}"


def delivered_once(seen: Seen) -> Iterator[Violation]:
    """INV-10: a message that was sent is there, is read once, and in the order of its sender."""
    messages = {to_wire("msg", UUID(row["id"])): row for row in seen.rows("messages")}
    for call in seen.of(Call):
        if call.method == "message.send" and call.outcome == "ok" and call.answer["id"] not in messages:
            yield violation("INV-10", call.answer["id"], "it was accepted and is not there", call)
    sent, delivered = _told(seen, "message.sent"), _told(seen, "message.delivered")
    for kind, told in (("sent", sent), ("delivered", delivered)):
        for again in twice(told):
            yield violation("INV-10", again, f"it is told as {kind} {told.count(again)} times")
    arrived = set(delivered)
    for message_id, row in messages.items():
        if (row["read_at"] is not None) != (message_id in arrived):
            yield violation("INV-10", message_id, f"read_at is {row['read_at']}, the log says otherwise", row)
        if row["delivered_at"] != row["read_at"]:
            yield violation("INV-10", message_id, "it is delivered and not read, or the other way", row)
    for again in set(sent) - set(messages):
        yield violation("INV-10", again, "it is told as sent and is not there")
    yield from _in_order(messages)


def _told(seen: Seen, kind: str) -> list[str]:
    return [
        json.loads(row["payload"])["message_id"]
        for run_id, rows in seen.events.items()
        if not seen.runs[run_id]["erased_at"]
        for row in rows
        if row["type"] == kind
    ]


def _in_order(messages: dict[str, Row]) -> Iterator[Violation]:
    lanes: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in messages.values():
        if row["read_at"] is not None:
            lane = (row["from_agent_id"], row["sender"], row["to_agent_id"], row["to_run_id"])
            lanes[lane].append(row)
    for rows in lanes.values():
        rows.sort(key=lambda row: (row["created_at"], row["id"]))
        for before, after in pairwise(rows):
            if after["read_at"] < before["read_at"]:
                yield violation(
                    "INV-10", after["id"], "it was read before one that came earlier", before, after
                )


def erased(seen: Seen) -> Iterator[Violation]:
    """INV-13: what an erasure says it deleted is in no table."""
    there = {
        row["id"]: table
        for table, rows in seen.dump.items()
        if table not in ("erasures", "erased_records")
        for row in rows
        if "id" in row
    }
    for record in seen.rows("erased_records"):
        wire_id = record["record_id"]
        if record["action"] == "deleted" and WIRE_ID.fullmatch(wire_id):
            uuid = str(from_wire(wire_id[:3], wire_id))
            if uuid in there:
                yield violation("INV-13", wire_id, f"it was erased and is in {there[uuid]}", record)


def kept_apart(seen: Seen) -> Iterator[Violation]:
    """INV-14: nobody is told of what is another owner's."""
    names = {row["id"]: row["name"] for row in seen.rows("owners")}
    owner_of = {
        to_wire(prefix, UUID(row["id"])): names.get(row["owner_id"])
        for table, prefix in PREFIXES.items()
        for row in seen.rows(table)
    }
    for call in seen.of(Call):
        if call.answer is None:
            continue
        asked = set(WIRE_ID.findall(json.dumps(call.params))) if call.outcome == "error" else set()
        for wire_id in set(WIRE_ID.findall(json.dumps(call.answer))) - asked:
            if owner_of.get(wire_id, call.owner) != call.owner:
                sentence = f"{call.owner} was told of it by {call.method}"
                yield violation("INV-14", wire_id, sentence, call)
