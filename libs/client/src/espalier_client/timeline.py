"""A run's events as a person reads them: one line each, with the time since the run's start and its cycle.

Whatever a run says is text of strangers: control characters are taken out and nothing in it is markup.
Colours and the cut at the window's edge appear on a terminal only; in a file lines stay whole. Below it
stand the wire's events; above it the commands and the demo.
"""

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from espalier_protocol.events import Event, EventType

VALUE_CHARS_MAX: Final = 60
TEXT_CHARS_MAX: Final = 160
NUMBER_COLUMNS: Final = 6
SHORTENED: Final = " [shortened]"
"""How the runtime ends an argument that is too long for an event."""

_UNSEEN: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069]+")
"""Control characters, and those that turn the direction of text round."""

_OUTCOMES: Final = {
    "slept": ("☾", "blue", "cycle ended, asleep"),
    "forced_sleep": ("☾", "yellow", "cycle ended by a limit, asleep"),
    "continue": ("■", "dim", "cycle ended, the next begins at once"),
    "completed": ("■", "dim", "cycle ended, the goal is reached"),
    "stopped_mid_cycle": ("■", "yellow", "cycle stopped"),
}
_ENDS: Final = {
    "complete": ("✔", "bold green"),
    "cancelled": ("✖", "bold yellow"),
    "error": ("✖", "bold red"),
}

Payload = Mapping[str, Any]
Said = tuple[str, str, str]
"""Symbol, style, words."""


class Timeline:
    """Prints events on a console. `started_at` is the first event's time unless it is given.

    With `numbered` each line begins with the event's id, unpadded: what `since` takes.
    """

    def __init__(
        self, console: Console, started_at: datetime | None = None, *, numbered: bool = False
    ) -> None:
        self._console = console
        self._started_at = started_at
        self._numbered = numbered
        self._cycle: int | None = None

    def show(self, event: Event) -> None:
        at = datetime.fromisoformat(event.emitted_at)
        self._started_at = self._started_at or at
        self._cycle = event.payload.get("cycle_number", self._cycle)
        symbol, style, words = _say(event, at)
        cycle = f"cycle {self._cycle}" if self._cycle else ""
        number = printable(event.event_id.lstrip("0")) if self._numbered else ""
        line = Text.assemble(
            (f"{number:>{NUMBER_COLUMNS}}  " if number else "", "dim"),
            (f"{since_start(at - self._started_at):>9}  ", "dim"),
            (f"{cycle:<9} ", "dim"),
            (f"{symbol} {printable(words)}", style),
        )
        if self._console.is_terminal:
            self._console.print(line, no_wrap=True, overflow="ellipsis")
        else:
            self._console.print(line, soft_wrap=True)


def printable(text: str) -> str:
    """The text on one line, without anything that a terminal would obey."""
    return _UNSEEN.sub(" ", text)


def since_start(span: timedelta) -> str:
    seconds = max(span.total_seconds(), 0.0)
    if seconds < 100:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"


def _say(event: Event, at: datetime) -> Said:
    payload = event.payload
    if event.type == "tool.called":
        return _called(payload, at)
    speaker = _SPEAKERS.get(event.type)
    return speaker(payload) if speaker else ("·", "dim", f"{event.type} {_short(payload, TEXT_CHARS_MAX)}")


def _started(payload: Payload) -> Said:
    return "●", "bold", f"run {payload.get('run_id')} of {payload.get('agent_id')}"


def _ended(payload: Payload) -> Said:
    state, result = str(payload.get("final_state")), payload.get("result")
    said = result
    if isinstance(result, Mapping):
        said = result.get("final_message") or result.get("reason") or result
    symbol, style = _ENDS.get(state, ("✖", "bold"))
    words = "" if said is None else f": {_cut(_text(said), TEXT_CHARS_MAX)}"
    return symbol, style, f"run ended, {state}{words}"


def _cycle_started(payload: Payload) -> Said:
    return "▶", "cyan", f"cycle {payload.get('cycle_number')} begins"


def _cycle_ended(payload: Payload) -> Said:
    outcome = str(payload.get("outcome"))
    symbol, style, words = _OUTCOMES.get(outcome, ("■", "dim", f"cycle ended, {outcome}"))
    reason = f": {payload['reason']}" if payload.get("reason") else ""
    spent = (
        f"{_counted(payload, 'tool_calls_made', 'tool call')}, {_counted(payload, 'tokens_used', 'token')}"
    )
    return symbol, style, f"{words}{reason} ({spent})"


def _counted(payload: Payload, member: str, thing: str) -> str:
    count = payload.get(member, 0)
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _called(payload: Payload, at: datetime) -> Said:
    name, args = str(payload.get("tool_name")), payload.get("args") or {}
    if name == "sleep":
        return "→", "blue", f"sleep {_wake(args, at)}{_reason(args)}"
    told = " ".join(f"{key}={_short(value, VALUE_CHARS_MAX)}" for key, value in args.items())
    return "→", "magenta", f"{name} {_cut(told, TEXT_CHARS_MAX)}".rstrip()


def _wake(args: Payload, at: datetime) -> str:
    seconds = args.get("duration_seconds")
    if isinstance(seconds, int | float):
        at = at + timedelta(seconds=min(max(seconds, 0), timedelta(days=366).total_seconds()))
        return at.strftime("until %Y-%m-%d %H:%M:%S UTC")
    until = args.get("until")
    return "without a time" if until is None else f"until {_cut(_text(until), VALUE_CHARS_MAX)}"


def _reason(args: Payload) -> str:
    return f": {_cut(_text(args['reason']), TEXT_CHARS_MAX)}" if args.get("reason") else ""


def _returned(payload: Payload) -> Said:
    summary = payload.get("result_summary") or {}
    preview = _cut(_text(summary.get("preview", "")), TEXT_CHARS_MAX)
    if summary.get("ok") is True:
        return "←", "green", f"{payload.get('tool_name')} {preview}"
    if summary.get("in_doubt") is True:
        return "?", "yellow", f"{payload.get('tool_name')} in doubt: {preview}"
    return "←", "red", f"{payload.get('tool_name')} failed: {preview}"


def _memory(payload: Payload) -> Said:
    about = f", about {_short(payload['subject_id'], VALUE_CHARS_MAX)}" if payload.get("subject_id") else ""
    key = f"{_text(payload.get('namespace'))}/{_text(payload.get('key'))}"
    return "✎", "bold blue", f"memory record {_cut(key, TEXT_CHARS_MAX)}{about}"


def _spawned(payload: Payload) -> Said:
    return "⑂", "bold blue", f"sub-agent {payload.get('child_agent_id')}, run {payload.get('child_run_id')}"


def _message_sent(payload: Payload) -> Said:
    return "✉", "bold blue", f"message {payload.get('message_id')} to {payload.get('to_agent_id')}"


def _message_read(payload: Payload) -> Said:
    return "✉", "bold blue", f"message {payload.get('message_id')} from {payload.get('from_agent_id')} read"


def _prompt_modified(payload: Payload) -> Said:
    by = f", approved by {payload['approved_by']}" if payload.get("approved_by") else ""
    return "✎", "bold blue", f"prompt changed{by}: {_why(payload)}"


def _prompt_queued(payload: Payload) -> Said:
    return "?", "yellow", f"prompt change {payload.get('pending_change_id')} waits: {_why(payload)}"


def _prompt_rejected(payload: Payload) -> Said:
    comment = f", {_cut(_text(payload['comment']), TEXT_CHARS_MAX)}" if payload.get("comment") else ""
    change, by = payload.get("pending_change_id"), payload.get("rejected_by")
    return "✖", "yellow", f"prompt change {change} rejected by {by}{comment}"


def _why(payload: Payload) -> str:
    return _cut(_text(payload.get("reason")), TEXT_CHARS_MAX)


def _approval_requested(payload: Payload) -> Said:
    return "?", "yellow", f"approval {payload.get('approval_id')} waits for a person, {payload.get('kind')}"


def _approval_resolved(payload: Payload) -> Said:
    return "✎", "bold blue", f"approval {payload.get('approval_id')} resolved, {payload.get('resolution')}"


def _artifact(payload: Payload) -> Said:
    facts = [payload.get(fact) for fact in ("name", "mime_type", "size_bytes", "artifact_id")]
    return "◆", "bold green", "artifact {}, {}, {} bytes, {}".format(*facts)


def _trouble(payload: Payload) -> Said:
    return "!", "red", f"{payload.get('symbol')}: {_cut(_text(payload.get('message')), TEXT_CHARS_MAX)}"


def _short(value: Any, chars: int) -> str:
    """JSON in short; of a long text its beginning and its size, as far as the event tells it."""
    if isinstance(value, str) and len(value) > chars:
        known = len(value.removesuffix(SHORTENED))
        size = f"{known} characters{' and more' if known < len(value) else ''}"
        return f'{json.dumps(value[:chars], ensure_ascii=False)[:-1]}…" ({size})'
    return _cut(json.dumps(value, ensure_ascii=False, default=str), chars)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"


# Types without words of their own are shown as they come.
_SPEAKERS: dict[EventType | str, Callable[[Payload], Said]] = {
    "run.started": _started,
    "run.ended": _ended,
    "cycle.started": _cycle_started,
    "cycle.ended": _cycle_ended,
    "tool.returned": _returned,
    "subagent.spawned": _spawned,
    "memory.written": _memory,
    "message.sent": _message_sent,
    "message.delivered": _message_read,
    "prompt.modified": _prompt_modified,
    "prompt.change_queued": _prompt_queued,
    "prompt.change_rejected": _prompt_rejected,
    "espalier.approval.requested": _approval_requested,
    "espalier.approval.resolved": _approval_resolved,
    "artifact.created": _artifact,
    "error": _trouble,
}
