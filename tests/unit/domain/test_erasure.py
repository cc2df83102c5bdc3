"""Blanking an event: the shape stays, the words go."""

import json
from typing import Any

import pytest

from espalier_domain import journal
from espalier_domain.decisions import Complete, Sleep
from espalier_domain.erasure import blanked
from espalier_domain.telling import events_of

CANARY = "canary"
ENTRIES: list[journal.Entry] = [
    journal.ModelAnswered(1, CANARY, (journal.ToolCall("call_1_0", CANARY, {CANARY: [CANARY, 7]}),), 5),
    journal.ToolReturned(1, "call_1_0", CANARY, True, CANARY),
    journal.ModelFailed(1, CANARY, False, 0),
    journal.ToolsMissing(1, CANARY),
    journal.LimitReached(1, "budget_exhausted", CANARY),
    journal.MemoryWritten("mem_1", CANARY, CANARY, CANARY),
    journal.ArtifactCreated("art_1", CANARY, f"text/{CANARY}", 3),
    journal.PromptModified(CANARY, CANARY, CANARY),
    journal.PromptChangeQueued("pch_1", CANARY, CANARY),
    journal.PromptChangeRejected("pch_1", CANARY, CANARY, CANARY),
    journal.CycleEnded(1, Sleep(None, 1.0, CANARY), 4, 2),
    journal.CycleEnded(1, Complete(CANARY), 4, 2),
    journal.RunEnded("complete", {CANARY: CANARY}),
    journal.RunEnded("complete", CANARY),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.kind)
def test_no_word_of_an_event_is_left_and_its_members_are_the_same(entry: journal.Entry) -> None:
    payloads = [json.loads(each.text()) for each in events_of("run_1", entry)]
    told = [blanked(payload) for payload in payloads]
    assert told
    assert CANARY not in json.dumps(told)
    assert [list(each) for each in told] == [["redacted", *payload] for payload in payloads]


def test_ids_numbers_and_fixed_words_of_an_event_stay() -> None:
    payload: dict[str, Any] = {
        "run_id": "run_1",
        "cycle_number": 3,
        "result_summary": {"ok": True, "preview": CANARY, "in_doubt": False},
        "final_state": "complete",
        "result": {"phone": 123},
        "args": {"phone": 123},
        "comment": None,
    }
    assert blanked(payload) == {
        "redacted": True,
        "run_id": "run_1",
        "cycle_number": 3,
        "result_summary": {"ok": True, "preview": "[REDACTED]", "in_doubt": False},
        "final_state": "complete",
        "result": {"redacted": True},
        "args": {},
        "comment": None,
    }


def test_blanking_twice_changes_nothing() -> None:
    once = blanked({"run_id": "run_1", "reason": CANARY})
    assert blanked(once) == once
