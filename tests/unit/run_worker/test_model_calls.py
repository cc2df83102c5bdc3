"""What comes of asking a model, whatever the model answers."""

from typing import Any

import anyio
import pytest

from espalier_domain.journal import CycleStarted, ModelAnswered, ModelFailed, RunCreated
from espalier_domain.progress import Progress, apply
from espalier_domain.run import CallModel, RunFacts
from espalier_protocol.agent import Budgets, Ceilings, Constitution
from espalier_run_worker.model_calls import CALLS_PER_ANSWER_MAX, ask
from espalier_run_worker.models.model import ModelAnswer, ModelFault, ModelRequest, Offer, WantedCall

pytestmark = pytest.mark.anyio

TOKENS_MAX = 400
BUDGETS = Budgets(tokens_per_cycle=500, tool_calls_per_cycle=3, seconds_per_cycle=300)
RUN = RunFacts(
    run_id="run_x",
    agent_id="agt_x",
    root_agent_id="agt_x",
    toolset=(),
    constitution=Constitution(immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"),
    goal="goal",
    inputs={},
    agent_metadata={},
    ceilings=Ceilings(max_cycles=4, max_subagents=0, max_tool_calls_per_cycle=4, max_wall_seconds=100),
    budgets=BUDGETS,
)
PROGRESS = apply(apply(Progress(), RunCreated("agt_x")), CycleStarted(1, 0.0, 0, BUDGETS))


class Model:
    """Answers what it was given, raises it, or never answers."""

    def __init__(self, answer: ModelAnswer | ModelFault | None) -> None:
        self._answer = answer

    async def answer(self, request: ModelRequest) -> ModelAnswer:
        assert request.tokens_max == TOKENS_MAX
        if self._answer is None:
            await anyio.sleep_forever()
        if isinstance(self._answer, ModelFault):
            raise self._answer
        assert self._answer is not None
        return self._answer


async def outcome(answer: ModelAnswer | ModelFault | None, seconds_max: float = 5.0) -> Any:
    (entry,) = await ask(Model(answer), Offer(()), RUN, PROGRESS, CallModel(1, TOKENS_MAX, seconds_max))
    return entry


async def test_what_postgres_cannot_hold_is_replaced_everywhere() -> None:
    call = WantedCall("t\x00", {"a\x00": ["b\ud800", {"c": "\udfff"}], "n": 1})
    entry = await outcome(ModelAnswer("x\x00y\ud800", (call,), 7))

    assert isinstance(entry, ModelAnswered)
    assert entry.text == "x\ufffdy\ufffd"
    assert entry.calls[0].name == "t\ufffd"
    assert entry.calls[0].args == {"a\ufffd": ["b\ufffd", {"c": "\ufffd"}], "n": 1}


async def test_a_fault_keeps_its_reason_and_its_price() -> None:
    entry = await outcome(ModelFault("overloaded", retryable=True, tokens=3))
    assert entry == ModelFailed(1, "overloaded", retryable=True, tokens=3)


async def test_a_model_that_does_not_answer_in_time_costs_the_whole_reservation() -> None:
    assert await outcome(None, seconds_max=0.01) == ModelFailed(
        1, "timeout", retryable=True, tokens=TOKENS_MAX
    )


async def test_an_answer_of_endless_calls_is_none() -> None:
    calls = (WantedCall("sleep", {}),) * (CALLS_PER_ANSWER_MAX + 1)
    assert await outcome(ModelAnswer("", calls, 9)) == ModelFailed(1, "too_many_calls", True, 9)
