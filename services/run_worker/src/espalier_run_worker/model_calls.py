"""Asking the model: one attempt, inside its limits, and the entry that says what came of it."""

from typing import Final

import anyio
import orjson

from espalier_domain.history import ModelMessage, conversation
from espalier_domain.journal import Entry, ModelAnswered, ModelFailed, ToolCall
from espalier_domain.progress import Progress
from espalier_domain.run import CallModel, RunFacts
from espalier_run_worker.models import SCRIPT_KEY
from espalier_run_worker.models.model import Model, ModelAnswer, ModelFault, ModelRequest, ToolDefinition

ANSWER_TOKENS_MAX: Final = 4096
CALLS_PER_ANSWER_MAX: Final = 100


def shown(run: RunFacts, progress: Progress) -> tuple[ModelMessage, ...]:
    """What the model is shown next. A plan that came with the inputs is not part of the work."""
    inputs = {name: value for name, value in run.inputs.items() if name != SCRIPT_KEY}
    return conversation(run, progress, orjson.dumps(inputs).decode())


async def ask(
    model: Model, tools: tuple[ToolDefinition, ...], run: RunFacts, progress: Progress, step: CallModel
) -> tuple[Entry, ...]:
    """One attempt at one answer. Never raises for what a model can do wrong."""
    assert progress.cycle is not None
    number = progress.cycle.number
    messages = shown(run, progress)
    request = ModelRequest(run, progress, messages, tools, step.tokens_max, step.attempt)
    with anyio.move_on_after(step.seconds_max):
        try:
            answer = await model.answer(request)
        except ModelFault as fault:
            return (ModelFailed(number, fault.reason, fault.retryable, fault.tokens),)
        return (_answered(number, progress.answers + 1, answer),)
    return (ModelFailed(number, "timeout", retryable=True, tokens=step.tokens_max),)


def _answered(cycle: int, answer_no: int, answer: ModelAnswer) -> Entry:
    if len(answer.calls) > CALLS_PER_ANSWER_MAX:
        return ModelFailed(cycle, "too_many_calls", retryable=True, tokens=answer.tokens)
    calls = tuple(
        ToolCall(f"call_{answer_no}_{place}", call.name, call.args)
        for place, call in enumerate(answer.calls, start=1)
    )
    return ModelAnswered(cycle, answer.text, calls, answer.tokens)
