"""A real model behind an OpenAI-compatible server, through pydantic-ai's model layer and not its agent loop.

One request is one attempt: the SDK's own retries are off, nothing streams, and the run decides about asking
again. Tokens are what the provider says it used. If it says nothing they are estimated, three bytes to a
token for prompt and answer, and an attempt that broke after it was sent costs all that was reserved for it.

Importing this module loads the SDK, so only the choice of a model does. Above: `choice`. Below:
`tool_spelling` for names, `provider_faults` for trouble, `bounded_http` for the connection.
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any, Final

import structlog
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from pydantic import ValidationError
from pydantic_ai import direct, messages
from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers import Provider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider
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
from espalier_protocol import strict_json
from espalier_run_worker.models.bounded_http import (
    ANSWER_BYTES_MAX,
    READ_TIMEOUT_S,
    AnswerTooLarge,
    open_http,
)
from espalier_run_worker.models.endpoint import OPENAI_HOST, Endpoint
from espalier_run_worker.models.model import (
    Model,
    ModelAnswer,
    ModelFault,
    ModelRequest,
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

NO_KEY: Final = "none"
"""The SDK wants to send some key."""

FINISHES: Final = {
    "length": "answer_cut: it did not fit into the tokens that were left",
    "content_filter": "content_filter",
    "error": OTHER_FROM_500[0],
}
"""How an answer may end that is none, and the fault that it is; asking again may help in each case."""

log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_openai_compatible(
    endpoint: Endpoint, *, read_timeout_s: float = READ_TIMEOUT_S
) -> AsyncIterator[Model]:
    """A model at an endpoint, and the connections to it as long as the context is open."""
    async with open_http(read_timeout_s) as http:
        client = AsyncOpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key or NO_KEY, http_client=http, max_retries=0
        )
        sdk = _CheckedModel(endpoint.model, provider=_provider(endpoint, client))
        yield OpenAICompatibleModel(sdk, ProviderFaults(endpoint.secrets))


def _provider(endpoint: Endpoint, client: AsyncOpenAI) -> Provider[AsyncOpenAI]:
    """OpenAI's newer models refuse the name `max_tokens`; not every other server knows the newer name."""
    if endpoint.host == OPENAI_HOST:
        return OpenAIProvider(openai_client=client)
    profile = OpenAIModelProfile(openai_chat_supports_max_completion_tokens=False)
    return OpenAICompatibleProvider("openai-compatible", openai_client=client, profile=profile)


class _Unreadable(Exception):
    """A body that is no completion. `tokens` is what it says was used, None if it says nothing."""

    def __init__(self, tokens: int | None) -> None:
        super().__init__(UNREADABLE[0])
        self.tokens = tokens


class _CheckedModel(OpenAIChatModel):
    """The SDK's model, which also sees an error that came as a success, and what a broken answer cost."""

    def _validate_completion(self, response: ChatCompletion) -> Any:
        error = (response.model_extra or {}).get("error")
        if error and not response.choices:
            raise ModelHTTPError(_status_of(error), self.model_name, error)
        try:
            return super()._validate_completion(response)
        except ValidationError as invalid:
            raise _Unreadable(_used(response.usage)) from invalid


def _status_of(error: object) -> int:
    """Gateways put the status into an error's code; what says nothing is the provider's own trouble."""
    code = str(error.get("code")) if isinstance(error, dict) else ""
    return int(code) if code in map(str, range(400, 600)) else 500


def _used(usage: object) -> int | None:
    counts = (getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens"))
    return _believed([count for count in counts if isinstance(count, int)])


def _believed(counts: Iterable[int]) -> int | None:
    return min(sum(max(count, 0) for count in counts), TOKENS_MAX) or None


class OpenAICompatibleModel:
    def __init__(self, sdk: OpenAIChatModel, faults: ProviderFaults) -> None:
        self._sdk = sdk
        self._faults = faults

    async def answer(self, request: ModelRequest) -> ModelAnswer:
        spelling = ToolSpelling(_names(request))
        conversation = list(_conversation(request.messages, spelling))
        settings: ModelSettings = {"max_tokens": _answer_tokens(request)}
        tools = ModelRequestParameters(function_tools=[_tool(tool, spelling) for tool in request.tools])
        return _answer(await self._ask(request, conversation, settings, tools), request, spelling)

    async def _ask(
        self,
        request: ModelRequest,
        conversation: list[messages.ModelMessage],
        settings: ModelSettings,
        tools: ModelRequestParameters,
    ) -> messages.ModelResponse:
        """Raises ModelFault whatever the SDK makes of what it was sent: the sender is not ours."""
        try:
            return await direct.model_request(
                self._sdk, conversation, model_settings=settings, model_request_parameters=tools
            )
        except ModelAPIError as error:
            raise self._faults.of(error, request.tokens_max) from error
        except AnswerTooLarge as error:
            reason = f"answer_too_large: more than {ANSWER_BYTES_MAX} bytes"
            raise ModelFault(reason, retryable=True, tokens=request.tokens_max) from error
        except Exception as error:
            tokens = error.tokens if isinstance(error, _Unreadable) else None
            log.warning("model.unreadable_answer", error=type(error).__name__)
            raise _fault(UNREADABLE[0], request.tokens_max if tokens is None else tokens) from error


def _fault(reason: str, tokens: int) -> ModelFault:
    return ModelFault(reason, retryable=True, tokens=tokens)


# --- what is asked ---------------------------------------------------------------------------------------


def _answer_tokens(request: ModelRequest) -> int:
    return max(request.tokens_max - prompt_tokens(request.messages), ANSWER_TOKENS_MIN)


def _names(request: ModelRequest) -> Iterator[str]:
    """Offered tools first and in their own order, then whatever else the conversation names."""
    yield from sorted(tool.name for tool in request.tools)
    for message in request.messages:
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


def _answer(response: messages.ModelResponse, request: ModelRequest, spelling: ToolSpelling) -> ModelAnswer:
    text = "\n\n".join(part.content for part in response.parts if isinstance(part, messages.TextPart))
    wanted = [part for part in response.parts if isinstance(part, messages.ToolCallPart)]
    tokens = _believed((response.usage.input_tokens, response.usage.output_tokens))
    if tokens is None:
        tokens = _estimated(request, text, wanted)
    finish = (response.provider_details or {}).get("finish_reason") or response.finish_reason
    if finish in FINISHES:
        raise _fault(FINISHES[finish], tokens)
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


def _estimated(request: ModelRequest, text: str, wanted: list[messages.ToolCallPart]) -> int:
    said = "".join([text, *(str(part.args) for part in wanted)])
    return prompt_tokens(request.messages) + -(-len(said.encode(errors="surrogatepass")) // BYTES_PER_TOKEN)
