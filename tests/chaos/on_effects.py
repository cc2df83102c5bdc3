"""Checks of what runs do to the world and to one another: INV-6, INV-7, INV-9, INV-10."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final
from uuid import UUID

from tests.chaos.history import Call, ModelAsked, ToolRan
from tests.chaos.seen import Row, Seen, Violation, run_of, twice, violation

from espalier_protocol.ids import to_wire

SENT: Final = ("sent", "done", "failed", "in_doubt")
UNMADE: Final = "the call was not made"
"""What a caller is told of a call of which not a byte has left."""


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
        if key[0] in seen.runs and not seen.whole(key[0]):
            continue
        row = rows.get(key)
        if row is None or row["state"] not in SENT:
            said = "is in no row" if row is None else f"is {row['state']} in its row"
            yield violation("INV-6", key[0], f"call {key[1]} was carried out and {said}", *lines)
        elif len(lines) > 1 and row["tool"] not in safe:
            yield violation("INV-6", key[0], f"call {key[1]} was carried out {len(lines)} times", *lines)
        elif row["state"] == "failed" and UNMADE in json.dumps(row["result"]):
            yield violation("INV-6", key[0], f"call {key[1]} was carried out and told otherwise", *lines, row)
    for key, row in rows.items():
        if row["state"] == "done" and key not in ran and row["tool"].rpartition(".")[2] in tools:
            yield violation("INV-6", key[0], f"call {key[1]} is done and in no ledger", row)
    yield from _doubted(seen, rows)
    yield from _none_untold(seen, rows)


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
            asked.pop(key, None)
    for key in asked:
        if seen.whole(key[0]):
            yield violation("INV-6", key[0], f"call {key[1]} is asked about, and nobody was told of it")


def _none_untold(seen: Seen, rows: dict[tuple[str, str], Row]) -> Iterator[Violation]:
    told = {
        (run_id, row["body"]["call_id"])
        for run_id in seen.runs
        for row in seen.entries_of(run_id, "tool_returned")
    }
    for key, row in rows.items():
        over = seen.whole(key[0]) and seen.runs[key[0]]["ended_at"]
        if over and row["state"] in SENT and key not in told:
            sentence = f"call {key[1]} is {row['state']}, and its run ended without a word of it"
            yield violation("INV-6", key[0], sentence, row)


def paid_for(seen: Seen) -> Iterator[Violation]:
    """INV-7: a question is paid for before it is asked, from what is left; and no bill is higher."""
    spent: dict[str, _Spent] = {}
    for run_id, rows in seen.journals.items():
        spent[run_id] = _Spent()
        for row in rows:
            if wrong := spent[run_id].book(row["body"]):
                yield violation("INV-7", run_id, wrong, row)
    billed: Counter[str] = Counter()
    for asked in seen.of(ModelAsked):
        if asked.run_id is not None:
            billed[asked.run_id] += asked.tokens
    for run_id, tokens in billed.items():
        settled = spent[run_id].settled if run_id in spent else 0
        if tokens > settled and (run_id not in seen.runs or seen.whole(run_id)):
            yield violation("INV-7", run_id, f"it was billed {tokens} tokens and settled {settled}")
    yield from _whole_trees(seen, spent)


@dataclass(slots=True)
class _Spent:
    """A run's tokens so far, entry by entry: of its cycle, and before that."""

    limit: int = 0
    in_cycle: int = 0
    reserved: int = 0
    before: int = 0
    overdrawn: int = 0
    """What answers cost more than was reserved for them."""

    @property
    def settled(self) -> int:
        return self.before + self.in_cycle + self.reserved

    def book(self, body: Row) -> str | None:
        """What is wrong with this entry, if anything is."""
        match body["kind"]:
            case "cycle_started":
                self.before = self.settled
                self.limit, self.in_cycle, self.reserved = body["budgets"]["tokens_per_cycle"], 0, 0
            case "model_call_started":
                self.in_cycle, self.reserved = self.in_cycle + self.reserved, body["reserved"]
                if self.in_cycle >= self.limit or self.reserved > self.limit - self.in_cycle:
                    return f"{self.reserved} tokens were reserved with {self.in_cycle} of {self.limit} spent"
            case "model_answered" | "model_failed":
                self.overdrawn += max(body["tokens"] - self.reserved, 0)
                self.in_cycle, self.reserved = self.in_cycle + body["tokens"], 0
            case "cycle_ended":
                self.in_cycle, self.reserved = self.in_cycle + self.reserved, 0
        return None


def _whole_trees(seen: Seen, spent: dict[str, _Spent]) -> Iterator[Violation]:
    """A tree spends what its root may, and beyond it what answers cost more than they were reserved for."""
    of_tree: dict[str, list[str]] = defaultdict(list)
    for run_id in spent:
        of_tree[[run_id, *seen.ancestors(run_id)][-1]].append(run_id)
    for root_id, run_ids in of_tree.items():
        started = seen.entries_of(root_id, "cycle_started")
        if not started or not all(map(seen.whole, run_ids)):
            continue
        per_cycle = max(row["body"]["budgets"]["tokens_per_cycle"] for row in started)
        limit = seen.runs[root_id]["max_cycles"] * per_cycle
        settled = sum(spent[run_id].settled for run_id in run_ids)
        overdrawn = sum(spent[run_id].overdrawn for run_id in run_ids)
        if settled > limit + overdrawn:
            sentence = f"its tree spent {settled} of {limit} tokens, {overdrawn} of them unforeseen"
            yield violation("INV-7", root_id, sentence, seen.runs[root_id])


Asked = tuple[str, str, str]


def created_once(seen: Seen) -> Iterator[Violation]:
    """INV-9: a create with a key happens once, and answers the same to whoever asks again."""
    calls: dict[Asked, list[Call]] = defaultdict(list)
    keys: dict[str, set[Asked]] = defaultdict(set)
    for place, call in enumerate(seen.of(Call)):
        asked = (call.owner, call.method, call.idempotency_key or f"without a key: {place}")
        if call.idempotency_key is not None:
            calls[asked].append(call)
        if wanted := _wanted(call.owner, call.method, call.params):
            keys[wanted].add(asked)
    for asked, of_key in calls.items():
        answered = [call for call in of_key if call.outcome == "ok"]
        for call in answered[1:]:
            if call.params != answered[0].params:
                yield violation("INV-9", asked[2], "other params were accepted", answered[0], call)
            elif call.answer != answered[0].answer:
                yield violation("INV-9", asked[2], "it was answered otherwise", answered[0], call)
    for made, rows in _made(seen).items():
        if 0 < len(keys[made]) < len(rows):
            yield violation("INV-9", made, f"{len(rows)} came of {len(keys[made])} keys", *rows)


def _wanted(owner: str, method: str, params: dict[str, Any]) -> str | None:
    """What a create asks for, in words that its row has as well. What two keys ask for alike is counted."""
    match method:
        case "agent.create":
            return f"{owner}: agent {params['name']}"
        case "run.create":
            return f"{owner}: run of {params['agent_id']}: {params['goal']}"
        case "message.send":
            return (
                f"{owner}: message to {params['to_agent_id']}: {json.dumps(params['body'], sort_keys=True)}"
            )
    return None


def _made(seen: Seen) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)

    def add(method: str, row: Row, params: dict[str, Any]) -> None:
        wanted = _wanted(seen.owners.get(row["owner_id"], ""), method, params)
        found[wanted or ""].append(row)

    for row in seen.rows("agents"):
        if row["parent_id"] is None:
            add("agent.create", row, row)
    for row in seen.rows("runs"):
        if row["parent_id"] is None:
            add("run.create", row, row | {"agent_id": to_wire("agt", UUID(row["agent_id"]))})
    for row in seen.rows("messages"):
        if row["sender"] == "embedder":
            add("message.send", row, row | {"to_agent_id": to_wire("agt", UUID(row["to_agent_id"]))})
    return found


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
    left, arrived, partly = set(sent), set(delivered), _partly_told(seen)
    for message_id, row in messages.items():
        told_all = row["to_agent_id"] not in partly
        if told_all and (row["read_at"] is not None) != (message_id in arrived):
            yield violation("INV-10", message_id, f"read_at is {row['read_at']}, the log says otherwise", row)
        if row["delivered_at"] != row["read_at"]:
            yield violation("INV-10", message_id, "it is delivered and not read, or the other way", row)
        if row["sender"] == "agent" and message_id not in left and row["from_agent_id"] not in partly:
            yield violation("INV-10", message_id, "it is there, and no run tells of sending it", row)
    for again in left - set(messages):
        yield violation("INV-10", again, "it is told as sent and is not there")
    yield from _in_order(messages)
    yield from _in_order_of_reading(seen, messages)


def _partly_told(seen: Seen) -> set[str]:
    """Agents with a run whose log is not whole any more; it may have told what is told nowhere."""
    return {run["agent_id"] for run_id, run in seen.runs.items() if not seen.whole(run_id)}


def _told(seen: Seen, kind: str) -> list[str]:
    return [
        json.loads(row["payload"])["message_id"]
        for run_id, rows in seen.events.items()
        if seen.whole(run_id)
        for row in rows
        if row["type"] == kind
    ]


def _in_order(messages: dict[str, Row]) -> Iterator[Violation]:
    lanes: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in messages.values():
        if row["read_at"] is not None:
            lanes[_lane(row)].append(row)
    for rows in lanes.values():
        rows.sort(key=lambda row: (row["created_at"], row["id"]))
        for before, after in pairwise(rows):
            if after["read_at"] < before["read_at"]:
                yield violation(
                    "INV-10", after["id"], "it was read before one that came earlier", before, after
                )


def _lane(row: Row) -> tuple[Any, ...]:
    return row["from_agent_id"], row["sender"], row["to_agent_id"], row["to_run_id"]


def _in_order_of_reading(seen: Seen, messages: dict[str, Row]) -> Iterator[Violation]:
    """What was read at once was read in the order of its senders, too."""
    for run_id in seen.runs:
        for entry in seen.entries_of(run_id, "inbox_read"):
            last: dict[tuple[Any, ...], Row] = {}
            for read in entry["body"]["messages"]:
                if (row := messages.get(read["message_id"])) is None:
                    continue
                before = last.get(_lane(row))
                if before and (before["created_at"], before["id"]) > (row["created_at"], row["id"]):
                    sentence = "it was read behind one that came later"
                    yield violation("INV-10", read["message_id"], sentence, entry, before, row)
                last[_lane(row)] = row
