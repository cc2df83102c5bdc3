"""Asking the model: one attempt, inside its limits, and the entry that says what came of it."""

import re
from typing import Final, TypeVar

import anyio
import orjson

from espalier_domain.history import ModelMessage, conversation
from espalier_domain.journal import Entry, ModelAnswered, ModelFailed, ToolCall, ToolsMissing
from espalier_domain.progress import Progress
from espalier_domain.run import TOOLS_UNAVAILABLE, CallModel, RunFacts
from espalier_run_worker.models import SCRIPT_KEY
from espalier_run_worker.models.model import Model, ModelAnswer, ModelFault, ModelRequest, Offer

ANSWER_TOKENS_MAX: Final = 4096
CALLS_PER_ANSWER_MAX: Final = 100
UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")

T = TypeVar("T")


def shown(run: RunFacts, progress: Progress) -> tuple[ModelMessage, ...]:
    """What the model is shown next. A plan that came with the inputs is not part of the work."""
    inputs = {name: value for name, value in run.inputs.items() if name != SCRIPT_KEY}
    return conversation(run, progress, orjson.dumps(inputs).decode())


async def ask(
    model: Model, offer: Offer | None, run: RunFacts, progress: Progress, step: CallModel
) -> tuple[Entry, ...]:
    """One attempt at one answer. Never raises for what a model can do wrong.

    Without an offer the model is not asked: it would act as if it had no tools.
    """
    assert progress.cycle is not None
    number = progress.cycle.number
    if offer is None:
        return (ModelFailed(number, TOOLS_UNAVAILABLE, retryable=True, tokens=0),)
    missing = () if progress.cycle.turns else offer.troubles
    answer = await _attempt(model, offer, run, progress, step)
    return (*(ToolsMissing(number, trouble) for trouble in missing), answer)


async def _attempt(model: Model, offer: Offer, run: RunFacts, progress: Progress, step: CallModel) -> Entry:
    assert progress.cycle is not None
    number = progress.cycle.number
    messages = shown(run, progress)
    request = ModelRequest(run, progress, messages, offer.definitions, step.tokens_max, step.attempt)
    with anyio.move_on_after(step.seconds_max):
        try:
            answer = await model.answer(request)
        except ModelFault as fault:
            return ModelFailed(number, fault.reason, fault.retryable, fault.tokens, fault.retry_after_s)
        return _answered(number, progress.answers + 1, answer)
    return ModelFailed(number, "timeout", retryable=True, tokens=step.tokens_max)


def _answered(cycle: int, answer_no: int, answer: ModelAnswer) -> Entry:
    if len(answer.calls) > CALLS_PER_ANSWER_MAX:
        return ModelFailed(cycle, "too_many_calls", retryable=True, tokens=answer.tokens)
    calls = tuple(
        ToolCall(f"call_{answer_no}_{place}", _storable(call.name), _storable(call.args))
        for place, call in enumerate(answer.calls, start=1)
    )
    return ModelAnswered(cycle, _storable(answer.text), calls, answer.tokens)


def _storable(value: T) -> T:
    """The same with U+FFFD for what neither Postgres nor UTF-8 can hold: U+0000 and lone surrogates."""
    match value:
        case str():
            return UNSTORABLE.sub("\ufffd", value)  # type: ignore[return-value]
        case list():
            return [_storable(item) for item in value]  # type: ignore[return-value]
        case dict():
            return {_storable(name): _storable(item) for name, item in value.items()}  # type: ignore[return-value]
    return value
