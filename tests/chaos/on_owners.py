"""Checks of what belongs to whom, and of what is to be nobody's: INV-13, INV-14."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final
from uuid import UUID

from tests.chaos.history import Call
from tests.chaos.seen import Seen, Violation, violation
from tests.chaos.stories import canary

from espalier_protocol.ids import from_wire, to_wire

PREFIXES: Final = {
    "agents": "agt",
    "runs": "run",
    "messages": "msg",
    "artifacts": "art",
    "memory_records": "mem",
}
WIRE_ID: Final = re.compile(r"(?:agt|run|msg|art|mem)_[0-9A-Z]{26}")
INTERNAL: Final = -32603
"""What passes, or is a bug; it says nothing about an id."""


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
    """INV-14: nobody is told of what is another owner's, and no row of one owner is bound to another's."""
    owner_of = {
        row["id"]: row["owner_id"]
        for table in ("owners", *PREFIXES)
        for row in seen.rows(table)
        if "owner_id" in row
    }
    yield from _rows(seen, owner_of)
    yield from _answers(
        seen,
        {
            to_wire(prefix, UUID(row["id"])): seen.owners.get(row["owner_id"], "")
            for table, prefix in PREFIXES.items()
            for row in seen.rows(table)
        },
    )


def _rows(seen: Seen, owner_of: dict[str, str]) -> Iterator[Violation]:
    """Frames are rows, byte for byte (INV-1), so that what is not in a row was not streamed."""
    canaries = {owner_id: canary(name) for owner_id, name in seen.owners.items()}
    for table, rows in seen.dump.items():
        for row in rows:
            owner_id = row.get("owner_id")
            if owner_id is None:
                continue
            for column, value in row.items():
                if column.endswith("_id") and owner_of.get(value, owner_id) != owner_id:
                    yield violation("INV-14", str(value), f"{table}.{column} is of another owner", row)
            text = json.dumps(row)
            for other, said in canaries.items():
                if other != owner_id and said in text:
                    sentence = f"a row of {table} has what {seen.owners[other]} alone knows"
                    yield violation("INV-14", str(row.get("id", table)), sentence, row)


def _answers(seen: Seen, owner_of: dict[str, str]) -> Iterator[Violation]:
    shapes: dict[str, set[str]] = defaultdict(set)
    of_others: list[tuple[Call, str]] = []
    for call in seen.of(Call):
        if call.answer is None:
            continue
        asked, told = _ids(call.params), _ids(call.answer)
        for wire_id in told - (asked if call.outcome == "error" else set()):
            if owner_of.get(wire_id, call.owner) != call.owner:
                sentence = f"{call.owner} was told of it by {call.method}"
                yield violation("INV-14", wire_id, sentence, call)
        text = json.dumps(call.answer)
        for other in seen.owners.values():
            if other != call.owner and canary(other) in text:
                sentence = f"{call.owner} was told by {call.method} what {other} alone knows"
                yield violation("INV-14", call.client, sentence, call)
        if len(asked) == 1 and call.outcome == "error" and call.answer["code"] != INTERNAL:
            (wire_id,) = asked
            if wire_id not in owner_of:
                shapes[call.method].add(_shape(call.answer, wire_id))
            elif owner_of[wire_id] != call.owner:
                of_others.append((call, _shape(call.answer, wire_id)))
    for call, shape in of_others:
        if shapes[call.method] and shape not in shapes[call.method]:
            sentence = f"{call.method} answers what is another's unlike what is not there"
            yield violation("INV-14", call.client, sentence, call)


def _ids(said: Any) -> set[str]:
    return set(WIRE_ID.findall(json.dumps(said)))


def _shape(error: Any, wire_id: str) -> str:
    return json.dumps(error, sort_keys=True).replace(wire_id, "")
