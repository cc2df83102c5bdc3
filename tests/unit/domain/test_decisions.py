"""Control calls: both published spellings, and one clear sentence for everything else."""

from datetime import UTC, datetime
from typing import Any

import pytest

from espalier_domain.decisions import Complete, ContinueNow, Sleep, Unreadable, read_decision


@pytest.mark.parametrize(
    ("tool", "args", "decision"),
    [
        ("sleep", {"duration_seconds": 90}, Sleep(None, 90.0)),
        ("sleep", {"duration_seconds": 0, "reason": "r"}, Sleep(None, 1.0, "r")),
        ("sleep", {"until": "2030-01-01T00:00:00Z"}, Sleep(datetime(2030, 1, 1, tzinfo=UTC), None)),
        ("sleep", {"until": "2030-01-01T02:00:00+02:00"}, Sleep(datetime(2030, 1, 1, tzinfo=UTC), None)),
        ("continue_now", {}, ContinueNow()),
        ("complete", {"result": None}, Complete(None)),
        ("complete", {"final_message": "m"}, Complete({"final_message": "m", "artifact_ids": []})),
        (
            "complete",
            {"final_message": "m", "artifact_ids": ["art_1"]},
            Complete({"final_message": "m", "artifact_ids": ["art_1"]}),
        ),
    ],
)
def test_both_published_spellings_are_read(tool: str, args: dict[str, Any], decision: object) -> None:
    assert read_decision(tool, args) == decision


@pytest.mark.parametrize(
    ("tool", "args"),
    [
        ("sleep", {}),
        ("sleep", {"duration_seconds": -1}),
        ("sleep", {"duration_seconds": True}),
        ("sleep", {"duration_seconds": float("nan")}),
        ("sleep", {"duration_seconds": 10**12}),
        ("sleep", {"until": "tomorrow"}),
        ("sleep", {"until": "2030-01-01T00:00:00"}),
        ("sleep", {"until": "0001-01-01T00:00:00+14:00"}),
        ("sleep", {"until": "9999-12-31T23:59:59-14:00"}),
        ("sleep", {"until": "2030-01-01T00:00:00Z", "duration_seconds": 1}),
        ("sleep", {"duration_seconds": 1, "reason": "r" * 501}),
        ("sleep", {"duration_seconds": 1, "budget": 5}),
        ("continue_now", {"now": True}),
        ("complete", {}),
        ("complete", {"final_message": ""}),
        ("complete", {"final_message": "m", "artifact_ids": "art_1"}),
        ("complete", {"result": 1, "extra": 2}),
    ],
)
def test_other_arguments_are_answered_with_what_was_expected(tool: str, args: dict[str, Any]) -> None:
    unread = read_decision(tool, args)
    assert isinstance(unread, Unreadable) and unread.reason.startswith(tool)
