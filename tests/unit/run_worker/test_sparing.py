"""The retry budget: what is still asked of a provider that is in trouble."""

from dataclasses import replace
from uuid import UUID

import pytest

from espalier_domain.progress import Progress
from espalier_domain.run import BoundProvider, RunFacts, Runner
from espalier_protocol.agent import Budgets, Ceilings, Constitution
from espalier_run_worker.models.model import ModelAnswer, ModelFault, ModelRequest
from espalier_run_worker.models.sparing import ENDPOINTS_MAX, IN_HAND, SHARE, WAIT_S, SparingModel

pytestmark = pytest.mark.anyio

RUN = RunFacts(
    run_id="run_x",
    agent_id="agt_x",
    root_agent_id="agt_x",
    toolset=(),
    constitution=Constitution(immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"),
    goal="goal",
    inputs={},
    agent_metadata={},
    ceilings=Ceilings(max_cycles=4, max_subagents=0, max_tool_calls_per_cycle=4, max_wall_seconds=60),
    budgets=Budgets(tokens_per_cycle=500, tool_calls_per_cycle=3, seconds_per_cycle=60),
)
REQUEST = ModelRequest(RUN, Progress(), (), (), 100, attempt=1)


class Away:
    """A provider that is down, and counts who asks."""

    def __init__(self) -> None:
        self.asked = 0

    async def answer(self, request: ModelRequest) -> ModelAnswer:
        self.asked += 1
        raise ModelFault("unavailable", retryable=True, tokens=request.attempt)


def attempt(number: int, provider: int | None = None) -> ModelRequest:
    runner = None
    if provider is not None:
        bound = BoundProvider(UUID(int=1), UUID(int=provider), "openai_compat", None, b"")
        runner = Runner("small", bound)
    return replace(REQUEST, attempt=number, run=replace(REQUEST.run, runner=runner))


async def fault(model: SparingModel, request: ModelRequest) -> ModelFault:
    with pytest.raises(ModelFault) as caught:
        await model.answer(request)
    return caught.value


async def test_second_attempts_are_a_share_of_the_first_ones_and_a_few_more() -> None:
    provider = Away()
    model = SparingModel(provider, operators_too=True)
    for _ in range(500):
        for number in (1, 2, 3, 4):
            await fault(model, attempt(number))
    assert provider.asked == pytest.approx(500 + IN_HAND + 500 * SHARE, abs=2)


async def test_what_is_not_asked_costs_nothing_and_is_asked_again_later() -> None:
    model = SparingModel(Away(), operators_too=True)
    told = [await fault(model, attempt(2)) for _ in range(int(IN_HAND) + 1)]
    assert [each.reason for each in told[:-1]] == ["unavailable"] * int(IN_HAND)
    spared = told[-1]
    assert spared.reason.startswith("retry_budget: ")
    assert (spared.retryable, spared.tokens, spared.retry_after_s) == (True, 0, WAIT_S)


async def test_one_provider_in_trouble_leaves_the_others_their_attempts() -> None:
    model = SparingModel(Away(), operators_too=True)
    for _ in range(2 * int(IN_HAND)):
        await fault(model, attempt(2, provider=1))
    assert (await fault(model, attempt(2, provider=1))).reason.startswith("retry_budget")
    assert (await fault(model, attempt(2, provider=2))).reason == "unavailable"
    assert (await fault(model, attempt(2))).reason == "unavailable"


async def test_the_scripted_model_is_spared_nothing_and_providers_are() -> None:
    model = SparingModel(Away(), operators_too=False)
    for _ in range(2 * int(IN_HAND)):
        assert (await fault(model, attempt(2))).reason == "unavailable"
        await fault(model, attempt(2, provider=1))
    assert (await fault(model, attempt(2, provider=1))).reason.startswith("retry_budget")


async def test_endpoints_that_nobody_asks_any_more_are_forgotten() -> None:
    model = SparingModel(Away(), operators_too=True)
    for _ in range(2 * int(IN_HAND)):
        await fault(model, attempt(2, provider=1))
    for provider in range(2, ENDPOINTS_MAX + 2):
        await fault(model, attempt(1, provider=provider))
    assert (await fault(model, attempt(2, provider=1))).reason == "unavailable"
