"""The scripted model: it answers what a plan says, and needs no key, network or luck.

It is what an installation has before it has a provider, and what the tests run on; it is no imitation of
thinking, so everything it says is in the plan or in the run. Where a run stands in its plan is counted in the
run's own state and never remembered here: any process may give the next answer. Above: the cycle, through
`Model`. Below: `plan`.
"""

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from typing import Final

import anyio
import anyio.to_thread

from espalier_domain.history import BYTES_PER_TOKEN
from espalier_domain.progress import Turn
from espalier_domain.run import RunFacts
from espalier_protocol import strict_json
from espalier_protocol.strict_json import JsonValue
from espalier_run_worker.models import SCRIPT_KEY
from espalier_run_worker.models.model import ModelAnswer, ModelFault, ModelRequest, WantedCall
from espalier_run_worker.models.plan import (
    SUBSTITUTION,
    Plan,
    PlanInvalid,
    PlannedAnswer,
    default_plan,
    load_plan,
    read_wire_plan,
)

__all__ = ["ScriptedModel", "load_plan"]

SUBSTITUTED_BYTES_MAX: Final = 1024 * 1024
"""What all pointers of one answer may bring in together: a short plan must not become a huge answer."""

EXCERPT_BYTES_MAX: Final = 160_000
"""Of an excerpt, as JSON: a memory record holds one and the arguments of a call hold three."""

CUT: Final = "\n[shortened: only the beginning was kept]"
REASON_CHARS_MAX: Final = 300
_INDEX_DIGITS_MAX: Final = 9


class ScriptedModel:
    """`plan` is the operator's, None the default; `plans_from_wire` lets runs and agents bring their own."""

    def __init__(self, plan: Plan | None, *, plans_from_wire: bool) -> None:
        self._own_plan = plan or default_plan()
        self._plans_from_wire = plans_from_wire

    def named(self, _: str) -> "ScriptedModel":
        """Plans know no models."""
        return self

    async def answer(self, request: ModelRequest) -> ModelAnswer:
        plan = await self._plan(request.run)
        planned = plan.at(request.progress.answers)
        await anyio.sleep(planned.delay_s)
        _fail_as_planned(planned, request)
        filling = _Filling(request)
        text = filling.text(planned.text)
        calls = tuple(WantedCall(call.tool, filling.args(call.args)) for call in planned.calls)
        tokens = _counted(text, calls) if planned.tokens is None else planned.tokens
        return ModelAnswer(text, calls, min(tokens, request.tokens_max))

    async def _plan(self, run: RunFacts) -> Plan:
        if self._plans_from_wire:
            for holder in (run.inputs, run.agent_metadata):
                if SCRIPT_KEY in holder:
                    return await _read(holder[SCRIPT_KEY])
        return self._own_plan


async def _read(value: JsonValue) -> Plan:
    """In a thread: a plan of the largest size takes long enough to make other runs of the worker wait."""
    try:
        return await anyio.to_thread.run_sync(read_wire_plan, value)
    except PlanInvalid as error:
        raise _final(f"script_invalid: {error}") from error


def _final(reason: str) -> ModelFault:
    return ModelFault(reason[:REASON_CHARS_MAX], retryable=False)


def _fail_as_planned(planned: PlannedAnswer, request: ModelRequest) -> None:
    fault = planned.fault
    if fault and request.attempt <= fault.times:
        tokens = min(fault.tokens, request.tokens_max)
        raise ModelFault(fault.reason, retryable=fault.retryable, tokens=tokens)


def _counted(text: str, calls: tuple[WantedCall, ...]) -> int:
    size = len(text.encode()) + sum(len(strict_json.dumps(call.args)) for call in calls)
    return -(-size // BYTES_PER_TOKEN)


# --- filling in ------------------------------------------------------------------------------------------


class _Filling:
    """One answer being filled in from what the run knows, within one budget of bytes."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._bytes_left = SUBSTITUTED_BYTES_MAX

    @cached_property
    def _known(self) -> JsonValue:
        """The document that pointers look into; only answers that point pay for it."""
        turns = tuple(_turns(self._request))
        cycle = self._request.progress.cycle
        this_cycle = [result.content for turn in cycle.turns for result in turn.results] if cycle else []
        return {
            "goal": self._request.run.goal,
            "inputs": self._request.run.inputs,
            "results": [_parsed(result.content) for turn in turns for result in turn.results],
            "texts": [turn.answer.text for turn in turns],
            "cycle": {
                "results": [_parsed(content) for content in this_cycle],
                "excerpts": [_excerpt(content) for content in this_cycle],
            },
        }

    def text(self, template: str) -> str:
        return SUBSTITUTION.sub(
            lambda found: "${" if found[1] is None else self._inserted(found[1]), template
        )

    def args(self, template: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """A copy of its own, within the limits that arguments from anywhere else would have to keep."""
        filled = {name: self._value(value) for name, value in template.items()}
        try:
            copy = strict_json.loads(strict_json.dumps(filled))
        except strict_json.JsonError as error:
            raise _final(f"script_error: filled-in arguments: {error.reason}") from error
        assert isinstance(copy, dict)
        return copy

    def _value(self, template: JsonValue) -> JsonValue:
        match template:
            case str():
                whole = SUBSTITUTION.fullmatch(template)
                return self.text(template) if whole is None or whole[1] is None else self._found(whole[1])
            case list():
                return [self._value(item) for item in template]
            case dict():
                return {name: self._value(value) for name, value in template.items()}
            case _:
                return template

    def _inserted(self, pointer: str) -> str:
        value = self._found(pointer)
        return value if isinstance(value, str) else strict_json.dumps(value).decode()

    def _found(self, pointer: str) -> JsonValue:
        value = self._known
        for token in pointer.split("/")[1:]:
            value = _member(value, token.replace("~1", "/").replace("~0", "~"), pointer)
        self._bytes_left -= len(strict_json.dumps(value))
        if self._bytes_left < 0:
            raise _final(f"script_error: the pointers bring in more than {SUBSTITUTED_BYTES_MAX} bytes")
        return value


def _turns(request: ModelRequest) -> Iterator[Turn]:
    for past in request.progress.past:
        yield from past.turns
    if request.progress.cycle:
        yield from request.progress.cycle.turns


def _parsed(content: str) -> JsonValue:
    try:
        return strict_json.loads(content.encode())
    except strict_json.JsonError:
        return content


def _excerpt(content: str) -> str:
    """The text, or as much of its beginning as an excerpt holds and a note that says so."""
    if len(strict_json.dumps(content)) <= EXCERPT_BYTES_MAX:
        return content
    room = EXCERPT_BYTES_MAX - len(strict_json.dumps(CUT))
    ends = range(min(len(content), room))
    fitting = bisect_right(ends, room, key=lambda end: len(strict_json.dumps(content[:end])))
    return content[: ends[fitting - 1]] + CUT


def _member(value: JsonValue, token: str, pointer: str) -> JsonValue:
    match value:
        case dict() if token in value:
            return value[token]
        case list() if _is_index(token) and int(token) < len(value):
            return value[int(token)]
    raise _final(f"script_error: there is nothing at {pointer}")


def _is_index(step: str) -> bool:
    """Digits without a leading zero, as RFC 6901 has it."""
    digits = step.isascii() and step.isdigit() and len(step) <= _INDEX_DIGITS_MAX
    return digits and (step == "0" or not step.startswith("0"))
