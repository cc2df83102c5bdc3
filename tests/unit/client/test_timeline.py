"""A run's events as a person reads them."""

import io
from typing import Any

import pytest
from rich.console import Console
from tests.unit.client.loopback import envelope

from espalier_client.timeline import Timeline
from espalier_protocol.events import EVENT_TYPES, Event

AT = "2026-01-01T00:{}.000Z"


def event(type: str, at: str = "00:00", **payload: Any) -> Event:  # noqa: A002
    return Event.model_validate({**envelope(1, type), "emitted_at": AT.format(at), "payload": payload})


def shown(*events: Event, terminal: bool = False, width: int = 80) -> list[str]:
    console = Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=width,
        color_system="standard" if terminal else "auto",
    )
    timeline = Timeline(console)
    for each in events:
        timeline.show(each)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def test_a_run_reads_as_one_line_per_event() -> None:
    lines = shown(
        event("run.started", run_id="run_1", agent_id="agt_1"),
        event("cycle.started", "00:01", cycle_number=1),
        event(
            "tool.called", "00:02", cycle_number=1, tool_name="artifact_create", args={"content": "x" * 99}
        ),
        event(
            "tool.returned",
            "00:02",
            cycle_number=1,
            tool_name="artifact_create",
            result_summary={"ok": True, "preview": "done"},
        ),
        event(
            "artifact.created", "00:02", artifact_id="art_1", name="n.md", mime_type="text/x", size_bytes=9
        ),
        event(
            "tool.called",
            "00:02",
            cycle_number=1,
            tool_name="sleep",
            args={"duration_seconds": 90, "reason": "later"},
        ),
        event(
            "cycle.ended",
            "00:03",
            cycle_number=1,
            outcome="slept",
            reason="later",
            tool_calls_made=1,
            tokens_used=5,
        ),
        event("error", "02:05", cycle_number=2, symbol="ceiling_exceeded", message="no more"),
        event("run.ended", "02:05", final_state="complete", result={"final_message": "all done"}),
    )
    assert lines == [
        "     0.0s            ● run run_1 of agt_1",
        "     1.0s  cycle 1   ▶ cycle 1 begins",
        f'     2.0s  cycle 1   → artifact_create content="{"x" * 60}…" (99 characters)',
        "     2.0s  cycle 1   ← artifact_create done",
        "     2.0s  cycle 1   ◆ artifact n.md, text/x, 9 bytes, art_1",
        "     2.0s  cycle 1   → sleep until 2026-01-01 00:01:32 UTC: later",
        "     3.0s  cycle 1   ☾ cycle ended, asleep: later (1 tool call, 5 tokens)",
        "   2m 05s  cycle 2   ! ceiling_exceeded: no more",
        "   2m 05s  cycle 2   ✔ run ended, complete: all done",
    ]


def test_memory_messages_and_tools_of_servers_have_words_of_their_own() -> None:
    log: dict[str, Any] = {"cycle_number": 1, "tool_name": "mcp.git.git_log"}
    lines = shown(
        event("tool.called", **log, args={"repo_path": "/a b", "max_count": 9, "end_timestamp": None}),
        event("tool.returned", **log, result_summary={"ok": True, "preview": "Commits:\nCommit: 1f\n\tAda"}),
        event("tool.returned", **log, result_summary={"ok": False, "preview": "no such\npath"}),
        event("tool.returned", **log, result_summary={"ok": False, "in_doubt": True, "preview": "unknown"}),
        event("memory.written", memory_id="mem_1", namespace="notes", key="june", subject_id=None),
        event("memory.written", memory_id="mem_2", namespace="notes", key="july", subject_id="ada"),
        event("message.sent", to_agent_id="agt_2", message_id="msg_1"),
        event("message.delivered", from_agent_id="agt_1", message_id="msg_2"),
        event("tool.called", tool_name="keep", args={"value": "x" * 4000 + " [shortened]"}),
    )
    assert [line.removeprefix("     0.0s  cycle 1   ") for line in lines] == [
        '→ mcp.git.git_log repo_path="/a b" max_count=9 end_timestamp=null',
        "← mcp.git.git_log Commits: Commit: 1f Ada",
        "← mcp.git.git_log failed: no such path",
        "? mcp.git.git_log in doubt: unknown",
        "✎ memory record notes/june",
        '✎ memory record notes/july, about "ada"',
        "✉ message msg_1 to agt_2",
        "✉ message msg_2 from agt_1 read",
        f'→ keep value="{"x" * 60}…" (4000 characters and more)',
    ]


def test_changes_of_the_prompt_and_what_waits_for_a_person_have_words_of_their_own() -> None:
    change: dict[str, Any] = {"pending_change_id": "pch_1", "reason": "to be\nbrief"}
    lines = shown(
        event("prompt.modified", diff="--- before", reason="to be\nbrief", approved_by=None),
        event("prompt.modified", diff="--- before", reason="to be brief", approved_by="key_1"),
        event("prompt.change_queued", diff="--- before", **change),
        event("prompt.change_rejected", rejected_by="key_1", comment=None, **change),
        event("prompt.change_rejected", rejected_by="key_1", comment="not\nnow", **change),
        event("espalier.approval.requested", approval_id="apr_1", kind="in_doubt"),
        event("espalier.approval.resolved", approval_id="apr_1", kind="in_doubt", resolution="done"),
    )
    assert [line.removeprefix("     0.0s            ") for line in lines] == [
        "✎ prompt changed: to be brief",
        "✎ prompt changed, approved by key_1: to be brief",
        "? prompt change pch_1 waits: to be brief",
        "✖ prompt change pch_1 rejected by key_1",
        "✖ prompt change pch_1 rejected by key_1, not now",
        "? approval apr_1 waits for a person, in_doubt",
        "✎ approval apr_1 resolved, done",
    ]


def test_a_sleep_that_names_no_time_says_so() -> None:
    (line,) = shown(event("tool.called", cycle_number=1, tool_name="sleep", args={}))
    assert line.endswith("→ sleep without a time")


def test_what_a_run_says_is_neither_markup_nor_obeyed() -> None:
    """Colours of rich, an escape sequence that would clear the screen, line ends, and reversed text."""
    (line,) = shown(event("error", symbol="s", message="[red]\x1b[2J\r\n\u2028\u202e[/]\x9b31m"))
    assert line == "     0.0s            ! s: [red] [2J [/] 31m"


@pytest.mark.parametrize(
    "told",
    [
        event("tool.called", tool_name="t\x1b[2J", args={"\x1b[2J": "\x1b[2J\u202e"}),
        event("tool.returned", tool_name="t\x1b[2J", result_summary={"ok": True, "preview": "\x9b2J\r\x07"}),
        event("memory.written", namespace="\x1b[2J", key="\u202e\n", subject_id="\x1b[2J\u202e"),
        event("message.delivered", from_agent_id="\x1b[2J", message_id="\u2028"),
        event("prompt.modified", reason="\x1b[2J\u202e", approved_by="\x9b2J"),
        event("prompt.change_rejected", pending_change_id="\x1b[2J", rejected_by="\r", comment="\u202e"),
        event("espalier.approval.resolved", approval_id="\x1b[2J", kind="\x07", resolution="\u2028"),
    ],
    ids=lambda told: told.type,
)
def test_no_part_of_an_event_reaches_the_terminal_raw(told: Event) -> None:
    (line,) = shown(told)
    assert line.isprintable()


@pytest.mark.parametrize("type_", [*EVENT_TYPES, "espalier.new.kind"])
def test_an_event_without_what_is_expected_of_it_is_still_a_line(type_: str) -> None:
    assert len(shown(event(type_))) == 1


def test_a_terminal_gets_colours_and_lines_that_fit_it() -> None:
    (line,) = shown(event("error", symbol="s", message="m" * 150), terminal=True, width=40)
    assert "\x1b[31m" in line
    assert line.replace("\x1b[0m", "").endswith("…")


def test_a_file_gets_whole_lines_without_colours() -> None:
    (line,) = shown(event("error", symbol="s", message="m" * 150), terminal=False, width=40)
    assert line.endswith("m" * 150)
    assert "\x1b" not in line
