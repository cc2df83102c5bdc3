"""What every self-tool is: a definition for the model, and a function that runs under a step."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from espalier_domain.journal import Entry, LimitSymbol
from espalier_embeddings import Embedder
from espalier_run_worker.draft import Draft
from espalier_run_worker.models.model import ToolDefinition

NAME_CHARS_MAX: Final = 200


class ToolRefused(Exception):
    """The call's arguments are not what the tool takes, or its act was refused; the text is for the model.

    With a `symbol`, which then begins the text, readers of the run's events are told of it too.
    """

    def __init__(self, text: str, *, symbol: LimitSymbol | None = None) -> None:
        super().__init__(f"{symbol}: {text}" if symbol else text)
        self.symbol = symbol


@dataclass(slots=True)
class Under:
    """The step that a call belongs to, and what went wrong with its transaction.

    A tool leaves the entries that tell of its effect; the step writes them. `wakes` are rows of the outbox
    that are to be carried out once the step is committed. `embedder` tells what texts mean, if there is one.
    """

    draft: Draft
    embedder: Embedder | None = None
    entries: list[Entry] = field(default_factory=list)
    wakes: list[int] = field(default_factory=list)
    failure: Exception | None = None


@dataclass(frozen=True, slots=True)
class SelfTool:
    """`run` answers the text that the model is shown. It raises ToolRefused, and what Postgres raises."""

    definition: ToolDefinition
    run: Callable[[Under, dict[str, Any]], Awaitable[str]]


def object_schema(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
