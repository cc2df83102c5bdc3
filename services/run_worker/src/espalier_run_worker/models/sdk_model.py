"""A real model through pydantic-ai's model layer, and not its agent loop: the part that all providers share.

One request is one attempt: the SDK's own retries are off, nothing streams, and the run decides about asking
again. Tokens are what the provider says it used. If it says nothing they are estimated, three bytes to a
token for prompt and answer, and an attempt that broke after it was sent costs all that was reserved for it.

Importing this module loads the SDK. Above: a module for each kind of provider. Below: `tool_spelling` for
names, `provider_faults` for trouble.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, Final

import structlog
from pydantic_ai import direct, messages
from pydantic_ai.exceptions import ModelAPIError
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition as SdkTool

from espalier_domain.history import (
    BYTES_PER_TOKEN,
    Assistant,
    ModelMessage,
    System,
    ToolResult,
    User,
    prompt_tokens,
)
from espalier_egress import EgressError
from espalier_protocol import strict_json
from espalier_run_worker.models.bounded_http import ANSWER_BYTES_MAX, AnswerTooLarge
from espalier_run_worker.models.model import (
    ModelAnswer,
    ModelFault,
    ModelRequest,
    Question,
    ToolDefinition,
    WantedCall,
)
from espalier_run_worker.models.provider_faults import OTHER_FROM_500, UNREADABLE, ProviderFaults
from espalier_run_worker.models.tool_spelling import ToolSpelling

ANSWER_TOKENS_MIN: Final = 256
"""What an answer may have even where the estimate of the prompt leaves less: the estimate is an upper one."""

DESCRIPTION_CHARS_MAX: Final = 1024
"""OpenAI refuses a request with a longer description of a tool."""

TOKENS_MAX: Final = 2**31 - 1
"""No provider's count is believed beyond this."""

CUT: Final = "answer_cut: it did not fit into the tokens that were left"
FINISHES: Final = {
    "length": CUT,
    "max_tokens": CUT,
    "model_length": CUT,
    "content_filter": "content_filter",
    "safety": "content_filter",
    "guardrail_intervened": "content_filter",
    "error": OTHER_FROM_500[0],
}
"""How an answer may end that is none, in whoever's words, and the fault that it is; asking again may help in
each case. What ends in a word that nobody knows, or in none, is an answer: many servers have their own.
"""

log = structlog.get_logger(__name__)


class Unreadable(Exception):
    """A body that is no completion. `tokens` is what it says was used, None if it says nothing."""

    def __init__(self, tokens: int | None) -> None:
        super().__init__(UNREADABLE[0])
        self.tokens = tokens


def used(usage: object) -> int | None:
    counts = (getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens"))
    return believed([count for count in counts if isinstance(count, int)])


def believed(counts: Iterable[int]) -> int | None:
    return min(sum(max(count, 0) for count in counts), TOKENS_MAX) or None


class SdkModel:
    """A model of the SDK behind our seam. `named` makes the same of another model at the same place."""

    def __init__(self, sdk: Model[Any], faults: ProviderFaults, named: Callable[[str], Model[Any]]) -> None:
        self._sdk, self._faults, self._named = sdk, faults, named

    def named(self, model: str) -> "SdkModel":
        return SdkModel(self._named(model), self._faults, self._named)

    async def answer(self, request: ModelRequest) -> ModelAnswer:
        return await self.ask(Question(request.messages, request.tools, request.tokens_max))

    async def ask(self, question: Question) -> ModelAnswer:
        """`answer` for what is not asked for a run."""
        spelling = ToolSpelling(_names(question))
        conversation = list(_conversation(question.messages, spelling))
        settings: ModelSettings = {"max_tokens": _answer_tokens(question)}
        tools = ModelRequestParameters(function_tools=[_tool(tool, spelling) for tool in question.tools])
        return _answer(await self._ask(question, conversation, settings, tools), question, spelling)

    async def _ask(
        self,
        question: Question,
        conversation: list[messages.ModelMessage],
        settings: ModelSettings,
        tools: ModelRequestParameters,
    ) -> messages.ModelResponse:
        """Raises ModelFault whatever the SDK makes of what it was sent: the sender is not ours."""
        try:
            return await direct.model_request(
                self._sdk, conversation, model_settings=settings, model_request_parameters=tools
            )
        except (ModelAPIError, EgressError) as error:
            raise self._faults.of(error, question.tokens_max) from error
        except AnswerTooLarge as error:
            reason = f"answer_too_large: more than {ANSWER_BYTES_MAX} bytes"
            raise ModelFault(reason, retryable=True, tokens=question.tokens_max) from error
        except Exception as error:
            tokens = error.tokens if isinstance(error, Unreadable) else None
            log.warning("model.unreadable_answer", error=type(error).__name__)
            raise _fault(UNREADABLE[0], question.tokens_max if tokens is None else tokens) from error


def _fault(reason: str, tokens: int) -> ModelFault:
    return ModelFault(reason, retryable=True, tokens=tokens)


# --- what is asked ---------------------------------------------------------------------------------------


def _answer_tokens(question: Question) -> int:
    return max(question.tokens_max - prompt_tokens(question.messages), ANSWER_TOKENS_MIN)


def _names(question: Question) -> Iterator[str]:
    """Offered tools first and in their own order, then whatever else the conversation names."""
    yield from sorted(tool.name for tool in question.tools)
    for message in question.messages:
        match message:
            case Assistant(calls=calls):
                yield from (call.name for call in calls)
            case ToolResult(tool=tool):
                yield tool
            case System() | User():
                pass


def _tool(tool: ToolDefinition, spelling: ToolSpelling) -> SdkTool:
    return SdkTool(
        name=spelling.spelled(tool.name),
        description=tool.description[:DESCRIPTION_CHARS_MAX],
        # Providers refuse an object without properties, which JSON Schema and MCP allow.
        parameters_json_schema={"type": "object", "properties": {}, **tool.input_schema},
        strict=False,
    )


def _conversation(shown: tuple[ModelMessage, ...], spelling: ToolSpelling) -> Iterator[messages.ModelMessage]:
    """The SDK's form. Neighbours of one role become one message, which some servers insist on."""
    told = [message for message in shown if _says_something(message)]
    for kind, group in groupby(told, key=type):
        if kind is Assistant:
            yield from (_response(message, spelling) for message in group if isinstance(message, Assistant))
        else:
            yield messages.ModelRequest(parts=_parts(list(group), spelling))


def _says_something(message: ModelMessage) -> bool:
    match message:
        case System(text) | User(text):
            return bool(text.strip())
        case Assistant(text, calls):
            return bool(text.strip() or calls)
        case ToolResult():
            return True


def _response(message: Assistant, spelling: ToolSpelling) -> messages.ModelResponse:
    said = [messages.TextPart(message.text)] if message.text.strip() else []
    called = [
        messages.ToolCallPart(spelling.spelled(call.name), call.args, tool_call_id=call.call_id)
        for call in message.calls
    ]
    return messages.ModelResponse(parts=[*said, *called])


def _parts(group: list[ModelMessage], spelling: ToolSpelling) -> list[messages.ModelRequestPart]:
    if isinstance(group[0], ToolResult):
        return [
            messages.ToolReturnPart(spelling.spelled(each.tool), each.text, tool_call_id=each.call_id)
            for each in group
            if isinstance(each, ToolResult)
        ]
    text = "\n\n".join(each.text for each in group if isinstance(each, System | User))
    said_by = messages.SystemPromptPart if isinstance(group[0], System) else messages.UserPromptPart
    return [said_by(text)]


# --- what is answered ------------------------------------------------------------------------------------


def _answer(response: messages.ModelResponse, question: Question, spelling: ToolSpelling) -> ModelAnswer:
    text = "\n\n".join(part.content for part in response.parts if isinstance(part, messages.TextPart))
    wanted = [part for part in response.parts if isinstance(part, messages.ToolCallPart)]
    tokens = believed((response.usage.input_tokens, response.usage.output_tokens))
    if tokens is None:
        tokens = _estimated(question, text, wanted)
    # The provider's own word first: the SDK knows fewer of them.
    for finish in ((response.provider_details or {}).get("finish_reason"), response.finish_reason):
        if (word := str(finish).lower()) in FINISHES:
            raise _fault(FINISHES[word], tokens)
    calls = tuple(WantedCall(spelling.meant(part.tool_name), _args(part, tokens)) for part in wanted)
    return ModelAnswer(text, calls, tokens)


def _args(part: messages.ToolCallPart, tokens: int) -> dict[str, Any]:
    """The arguments as we accept JSON from anywhere. Models leave them out where a tool needs none."""
    if isinstance(part.args, str) and part.args.strip():
        try:
            args = strict_json.loads(part.args.encode(errors="surrogatepass"))
        except strict_json.JsonError as error:
            raise _fault(f"malformed_tool_call: {error.reason}", tokens) from error
    else:
        args = part.args or {}
    if not isinstance(args, dict):
        raise _fault("malformed_tool_call: the arguments are no object", tokens)
    return args


def _estimated(question: Question, text: str, wanted: list[messages.ToolCallPart]) -> int:
    said = "".join([text, *(str(part.args) for part in wanted)])
    return prompt_tokens(question.messages) + -(-len(said.encode(errors="surrogatepass")) // BYTES_PER_TOKEN)
