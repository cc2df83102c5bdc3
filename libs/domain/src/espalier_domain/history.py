"""What the model is shown of a run: the normalised form of a conversation, and how old cycles fold.

The constitution, the goal and the newest cycle never fall out. Older cycles shrink to their decision and
short results, then to their decision, so that a run which has lived a thousand cycles costs a prompt of the
same size as one that has lived ten.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from espalier_domain.decisions import Complete, ContinueNow, Sleep, Wait
from espalier_domain.journal import CycleEnded, ToolCall
from espalier_domain.progress import Progress, Turn
from espalier_domain.run import RunFacts

HISTORY_CHARS_MAX: Final = 200_000
"""Size from which the oldest whole cycles are folded; about 60,000 tokens."""

FOLDED_RESULT_CHARS_MAX: Final = 200
FOLDED_CYCLES_MAX: Final = 200
BYTES_PER_TOKEN: Final = 3
MESSAGE_WAITS: Final = "(A message came for you. Read it with inbox_read.)"


@dataclass(frozen=True, slots=True)
class System:
    text: str


@dataclass(frozen=True, slots=True)
class User:
    text: str


@dataclass(frozen=True, slots=True)
class Assistant:
    text: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ToolResult:
    call_id: str
    tool: str
    text: str


ModelMessage = System | User | Assistant | ToolResult


def conversation(run: RunFacts, progress: Progress, inputs_json: str) -> tuple[ModelMessage, ...]:
    """The messages of the next model call. `inputs_json` is the run's inputs as text."""
    directives = f"{run.constitution.immutable_directives}\n\n{run.constitution.mutable_prompt}"
    lines: list[ModelMessage] = [System(directives), User(f"Goal: {run.goal}\n\nInputs: {inputs_json}")]
    for past in progress.past:
        lines += _turns(past.turns) if past.turns else []
        lines.append(User(_how_it_ended(past.end)))
    if progress.cycle:
        if progress.cycle.woken:
            lines.append(User(MESSAGE_WAITS))
        lines += _turns(progress.cycle.turns)
    return tuple(lines)


def prompt_tokens(messages: tuple[ModelMessage, ...]) -> int:
    """An upper estimate, for a reservation before any provider has counted."""
    return sum(_bytes(message) for message in messages) // BYTES_PER_TOKEN + 1


def fold(progress: Progress) -> Progress:
    """The same progress with its oldest cycles shortened, and then emptied, until the rest fits the limit."""
    past = list(progress.past[-FOLDED_CYCLES_MAX:])
    size = sum(_size(cycle.turns) for cycle in past)
    for shorten in (_shortened, _emptied):
        for place, cycle in enumerate(past[:-1]):
            if size <= HISTORY_CHARS_MAX:
                break
            past[place] = replace(cycle, turns=shorten(cycle.turns))
            size += _size(past[place].turns) - _size(cycle.turns)
    return replace(progress, past=tuple(past))


def _turns(turns: tuple[Turn, ...]) -> list[ModelMessage]:
    lines: list[ModelMessage] = []
    for turn in turns:
        lines.append(Assistant(turn.answer.text, turn.answer.calls))
        lines += [ToolResult(result.call_id, result.tool, result.content) for result in turn.results]
    return lines


def _how_it_ended(end: CycleEnded) -> str:
    match end.decision:
        case Sleep(reason=reason):
            return (
                f"(Cycle {end.cycle} ended: you slept{f', {reason}' if reason else ''}. You are awake again.)"
            )
        case Wait(on=on):
            awaited = "a sub-agent" if on == "child" else "a message"
            return f"(Cycle {end.cycle} ended: you waited for {awaited}. You are awake again.)"
        case ContinueNow() | Complete() | None:
            return f"(Cycle {end.cycle} ended; a new one begins.)"


def _shortened(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            replace(turn.answer, text="", calls=tuple(replace(call, args={}) for call in turn.answer.calls)),
            tuple(replace(result, content=_cut(result.content)) for result in turn.results),
        )
        for turn in turns
    )


def _emptied(_: tuple[Turn, ...]) -> tuple[Turn, ...]:
    return ()


def _cut(text: str) -> str:
    return text if len(text) <= FOLDED_RESULT_CHARS_MAX else text[:FOLDED_RESULT_CHARS_MAX] + " [shortened]"


def _size(turns: tuple[Turn, ...]) -> int:
    return sum(
        len(turn.answer.text)
        + sum(_args_size(call.args) for call in turn.answer.calls)
        + sum(len(result.content) for result in turn.results)
        for turn in turns
    )


def _args_size(args: dict[str, Any]) -> int:
    return len(str(args))


def _bytes(message: ModelMessage) -> int:
    match message:
        case System(text) | User(text):
            return len(text.encode())
        case Assistant(text, calls):
            return len(text.encode()) + sum(_args_size(call.args) for call in calls)
        case ToolResult(text=text):
            return len(text.encode())
