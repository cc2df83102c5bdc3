"""The CycleDecision: how a cycle ends, and how an agent's tool call becomes one.

AEP knows five (spec section 8.1). `sleep`, `continue_now` and `complete` are calls that end the cycle;
both published spellings of their arguments are accepted. `spawn_subagent` and `send_message` do not end it,
so that several helpers can work at once: an answer without calls after them is the decision to wait.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

CONTROL_TOOLS: Final = frozenset({"sleep", "continue_now", "complete"})
SLEEP_S_MIN: Final = 1
SLEEP_S_MAX: Final = 366 * 24 * 3600
SPAWN: Final = "spawn_subagent"
SEND: Final = "send_message"
FORCED_SLEEP_S: Final = 300
REASON_CHARS_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Sleep:
    """Until a moment or for a while, exactly one of the two; the database's clock judges it, 1 s at least."""

    until: datetime | None
    seconds: float | None
    reason: str | None = None
    forced: bool = False
    kind: Literal["sleep"] = "sleep"


@dataclass(frozen=True, slots=True)
class ContinueNow:
    kind: Literal["continue_now"] = "continue_now"


@dataclass(frozen=True, slots=True)
class Complete:
    result: Any
    kind: Literal["complete"] = "complete"


@dataclass(frozen=True, slots=True)
class Wait:
    """Until a sub-agent's run ends, or until a message comes; a message ends either."""

    on: Literal["child", "message"]
    kind: Literal["wait"] = "wait"


CycleDecision = Sleep | ContinueNow | Complete | Wait


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The arguments of a control call that mean no decision, with what was expected instead."""

    reason: str


def read_decision(tool: str, args: dict[str, Any]) -> CycleDecision | Unreadable:
    """The decision that a call of a control tool means."""
    match tool:
        case "sleep":
            return _read_sleep(args)
        case "continue_now":
            return Unreadable("continue_now takes no arguments.") if args else ContinueNow()
        case "complete":
            return _read_complete(args)
    raise AssertionError(f"{tool} does not end a cycle")


def forced_sleep(reason: str, seconds: float = FORCED_SLEEP_S) -> Sleep:
    """The pause after a cycle that a limit or a failing model ended."""
    return Sleep(until=None, seconds=seconds, reason=reason, forced=True)


def _read_sleep(args: dict[str, Any]) -> CycleDecision | Unreadable:
    if extra := set(args) - {"until", "duration_seconds", "reason"}:
        return Unreadable(f"sleep does not know {sorted(extra)[0]!r}.")
    reason = args.get("reason")
    if reason is not None and (not isinstance(reason, str) or len(reason) > REASON_CHARS_MAX):
        return Unreadable(f"sleep: reason must be a text of at most {REASON_CHARS_MAX} characters.")
    match args:
        case {"until": _, "duration_seconds": _}:
            return Unreadable("sleep takes until or duration_seconds, not both.")
        case {"until": str(text)} if (until := _moment(text)) is not None:
            return Sleep(until=until, seconds=None, reason=reason)
        case {"duration_seconds": int() | float() as seconds} if not isinstance(seconds, bool):
            if 0 <= seconds <= SLEEP_S_MAX:
                return Sleep(until=None, seconds=max(float(seconds), SLEEP_S_MIN), reason=reason)
    return Unreadable(
        "sleep takes until (an ISO 8601 time with an offset) or duration_seconds (a number, a year at most)."
    )


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo else None
    except (ValueError, OverflowError):  # the edge of the calendar overflows in another zone
        return None


def _read_complete(args: dict[str, Any]) -> CycleDecision | Unreadable:
    if extra := set(args) - {"result", "final_message", "artifact_ids"}:
        return Unreadable(f"complete does not know {sorted(extra)[0]!r}.")
    if "result" in args:
        return Complete(args["result"])
    message, artifacts = args.get("final_message"), args.get("artifact_ids", [])
    if isinstance(message, str) and message and isinstance(artifacts, list):
        return Complete({"final_message": message, "artifact_ids": artifacts})
    return Unreadable("complete takes result, or final_message (a text) and artifact_ids (a list).")
