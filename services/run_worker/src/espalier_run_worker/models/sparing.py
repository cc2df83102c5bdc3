"""A retry budget for each endpoint: a worker whose provider is in trouble asks again a little.

Each run has its own patience (`espalier_domain.run`). But a thousand runs that each ask four times quadruple
the load on a provider that is failing. So only a share of the attempts at one endpoint may be second ones,
and a few more that are in hand. A second attempt beyond that is not made; it counts as failed, at no cost.
"""

from typing import Final
from uuid import UUID

from espalier_run_worker.models.model import Model, ModelAnswer, ModelFault, ModelRequest

IN_HAND: Final = 20.0
SHARE: Final = 0.2
"""What a first attempt adds to what is in hand."""

WAIT_S: Final = 30.0
ENDPOINTS_MAX: Final = 1_000
SPARED: Final = "retry_budget: too many runs of this worker wait for this provider; it was not asked again"


class SparingModel:
    """Another model, asked within the budgets. The operator's own, if it is the scripted one, needs none."""

    def __init__(self, model: Model, *, operators_too: bool) -> None:
        self._model, self._operators_too = model, operators_too
        self._in_hand: dict[UUID | None, float] = {}

    async def answer(self, request: ModelRequest) -> ModelAnswer:
        runner = request.run.runner
        endpoint = runner.provider.provider_id if runner and runner.provider else None
        if (endpoint or self._operators_too) and not self._allows(endpoint, request.attempt):
            raise ModelFault(SPARED, retryable=True, retry_after_s=WAIT_S)
        return await self._model.answer(request)

    def _allows(self, endpoint: UUID | None, attempt: int) -> bool:
        left = self._in_hand.pop(endpoint, IN_HAND)
        allowed = attempt == 1 or left >= 1
        if allowed:
            left = min(left + SHARE, IN_HAND) if attempt == 1 else left - 1
        self._in_hand[endpoint] = left  # last: the one that was asked least lately comes first
        if len(self._in_hand) > ENDPOINTS_MAX:
            del self._in_hand[next(iter(self._in_hand))]
        return allowed
