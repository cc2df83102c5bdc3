"""The storm's fake provider: an OpenAI-compatible server that answers what a story's plan says, and bills it.

Its answer is a function of the story, which the goal names, and of how many answers the conversation has:
asking again gives the same. It can be told to misbehave for a while. What reaches it is strictly checked, as
by the server that it is made of (tests/support/fake_openai.py).
"""

import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import anyio
from anyio.abc import SocketAttribute
from fake_openai import ChatRequest, FakeOpenAI, Reply, Said, Told, answer, failure
from tests.chaos.history import ModelAsked
from tests.chaos.recording import Recorder

KEY: Final = "sk-only-for-the-storm-0123456789"
MODEL: Final = "small"
LABEL: Final = re.compile(r"Goal: \[([\w-]+)\]")
USAGE: Final = (70, 30)
Trouble = Literal["reset", "stall", "away", "busy", "garbage"]
TROUBLES: Final[tuple[Trouble, ...]] = ("reset", "stall", "away", "busy", "garbage")
GARBAGE: Final = Reply(b"<html>502 Bad Gateway</html>", content_type="text/html")

Plan = Sequence[dict[str, Any]]


@dataclass
class ModelServer(FakeOpenAI):
    """`plans` finds a story's answers by its label, `runs` the run that it became, if that is known yet."""

    plans: Callable[[str], Plan] = field(default=lambda _: ())
    runs: Callable[[str], str | None] = field(default=lambda _: None)
    recorder: Recorder = field(default_factory=Recorder)
    trouble: Trouble | None = None

    def reply_to(self, request: ChatRequest) -> Reply:
        self.requests.clear()
        label = _label(request)
        reply = self._troubled(self._planned(label, request))
        ended: Literal["answered", "cut", "refused"] = "answered"
        if reply.status != 200:
            ended = "refused"
        elif reply.ending != "close" or not reply.tokens:
            ended = "cut"
        tokens = reply.tokens if ended != "refused" else 0
        self.recorder.note(ModelAsked(self.recorder.now(), self.runs(label), tokens, ended))
        return reply

    def _planned(self, label: str, request: ChatRequest) -> Reply:
        position = sum(isinstance(message, Said) for message in request.messages)
        plan = self.plans(label)
        if position >= len(plan):
            return answer("ok", usage=USAGE)
        names = [tool.function.name for tool in request.tools or []]
        calls = [(_spelled(call["tool"], names), call.get("args", {})) for call in plan[position]["calls"]]
        return answer(None, *calls, usage=USAGE)

    def _troubled(self, reply: Reply) -> Reply:
        match self.trouble:
            case None:
                return reply
            case "reset":
                return replace(reply, missing=len(reply.body), ending="reset")
            case "stall":
                return replace(reply, missing=len(reply.body), ending="hang")
            case "away":
                return failure(503, "overloaded")
            case "busy":
                return failure(429, "slow down", Retry_After="1")
            case "garbage":
                return GARBAGE


def _label(request: ChatRequest) -> str:
    for message in request.messages:
        if isinstance(message, Told) and (found := LABEL.search(message.content)):
            return found[1]
    return ""


def _spelled(tool: str, names: Sequence[str]) -> str:
    """The tool as this request spells it: providers accept no dots."""
    plain = tool.replace(".", "__")
    return next((name for name in names if name.startswith(plain)), plain)


@asynccontextmanager
async def model_server(
    recorder: Recorder, plans: Callable[[str], Plan], runs: Callable[[str], str | None]
) -> AsyncIterator[ModelServer]:
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - no database
        server = ModelServer(
            KEY, MODEL, f"http://127.0.0.1:{port}/v1", [], plans=plans, runs=runs, recorder=recorder
        )
        group.start_soon(listener.serve, server.serve)
        yield server
        group.cancel_scope.cancel()
