"""The seam between a run and whatever thinks for it."""

from dataclasses import dataclass
from typing import Any, Protocol

from espalier_domain.history import ModelMessage
from espalier_domain.progress import Progress
from espalier_domain.run import RunFacts


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool as the model is told of it. `input_schema` is JSON Schema."""

    name: str
    description: str
    input_schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that a model may call; `troubles`: one sentence for each server whose tools are missing."""

    definitions: tuple[ToolDefinition, ...]
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One attempt at one answer. `attempt` counts from 1 since the cycle began or was last answered."""

    run: RunFacts
    progress: Progress
    messages: tuple[ModelMessage, ...]
    tools: tuple[ToolDefinition, ...]
    tokens_max: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Question:
    """What a provider is told of a request: it knows nothing of runs."""

    messages: tuple[ModelMessage, ...]
    tools: tuple[ToolDefinition, ...]
    tokens_max: int


@dataclass(frozen=True, slots=True)
class WantedCall:
    name: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """`tokens` is what the provider says it charged, input and output together."""

    text: str
    calls: tuple[WantedCall, ...]
    tokens: int


class ModelFault(Exception):
    """No answer. `reason` is a short word for the embedder, `tokens` what the attempt cost at most.

    `retry_after_s` is how long the provider wants to be left alone, in seconds, if it said so.
    """

    def __init__(
        self, reason: str, *, retryable: bool, tokens: int = 0, retry_after_s: float | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable
        self.tokens = tokens
        self.retry_after_s = retry_after_s


class Model(Protocol):
    async def answer(self, request: ModelRequest) -> ModelAnswer:
        """One answer. Raises ModelFault; may be cancelled at any await, and is not asked again for it."""
        ...


class OperatorModel(Model, Protocol):
    def named(self, model: str) -> Model:
        """Another model at the same place; the same one where there is only one."""
        ...
