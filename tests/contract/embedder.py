"""An embedder: the published client and a bare caller of the same wire, with one key and one session.

The published client says everything that it can express; the caller says the rest, such as bad JSON or a
stale header. Not here: what is required of either; the tests say so.
"""

from collections.abc import Awaitable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

import anyio
import httpx2
from helix_sdk import AEPError, Capability, HelixClient, SseEvent
from tests.integration.wire import AGENT, POLL_S, Wire

WAIT_S: Final = 15.0
"""The most that a test waits for a run; the published client would wait for ever."""

NINE: Final = get_args(Capability)
"""The published capabilities, as the published client names them."""

UNKNOWN: Final = "0" * 26
MADE: Final = "${/results/0/artifact_id}"
MAKES_A_FILE: Final[list[dict[str, Any]]] = [
    {"calls": [{"tool": "artifact_create", "args": {"name": "ö.md", "content": "once, with ünïcode\n"}}]},
    {"calls": [{"tool": "continue_now"}]},
    {"calls": [{"tool": "complete", "args": {"final_message": "made", "artifact_ids": [MADE]}}]},
]
SLEEPS_FOR_AN_HOUR: Final[list[dict[str, Any]]] = [
    {"calls": [{"tool": "sleep", "args": {"duration_seconds": 3600, "reason": "nothing to do"}}]},
]
THINKS_FOR_A_MINUTE: Final[list[dict[str, Any]]] = [{"delay_s": 60}]


async def refused(call: Awaitable[Any]) -> AEPError:
    """The error of a call of the published client that has to fail."""
    try:
        answer = await call
    except AEPError as error:
        return error
    raise AssertionError(f"expected a refusal, got {answer}")


@dataclass(frozen=True)
class Embedder:
    """`capabilities` is what their session agreed on, of all nine published ones."""

    client: HelixClient
    wire: Wire
    capabilities: Mapping[str, bool]

    async def agent(self, **changes: Any) -> dict[str, Any]:
        return cast(dict[str, Any], await self.client.agent.create(**{**AGENT, **changes}))

    async def run(
        self, answers: list[dict[str, Any]] | None = None, *, agent_id: str | None = None
    ) -> dict[str, Any]:
        """A run that follows these answers of the model; without any it is answered "ok"."""
        agent_id = agent_id or (await self.agent())["id"]
        inputs = {} if answers is None else {"inputs": {"espalier.script": {"answers": answers}}}
        return cast(dict[str, Any], await self.client.run.create(agent_id, "Say ok.", **inputs))

    async def ended_run(self, answers: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """A run as it is after its last event."""
        run_id = (await self.run(answers))["id"]
        await self.events(run_id)
        return cast(dict[str, Any], await self.client.run.get(run_id))

    async def until(self, run_id: str, state: str) -> dict[str, Any]:
        with anyio.fail_after(WAIT_S):
            while (run := await self.client.run.get(run_id))["state"] != state:
                await anyio.sleep(POLL_S)
        return cast(dict[str, Any], run)

    async def events(self, run_id: str, since: str | None = None) -> list[SseEvent]:
        """What the published client hears, up to and with `run.ended`."""
        heard = []
        with anyio.fail_after(WAIT_S):
            async with aclosing(self.client.run.events(run_id, since=since)) as events:
                async for event in events:
                    heard.append(event)
                    if event.type == "run.ended":
                        break
        return heard

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        """A whole answer, of a stream too. Bounded: heartbeats would keep a stream that never ends alive."""
        with anyio.fail_after(WAIT_S):
            return await self.wire.get(path, self.wire.headers(**headers))

    async def stream(self, run_id: str, **headers: str) -> bytes:
        """The bytes of a stream, up to its own end."""
        response = await self.get(events_path(run_id), **headers)
        assert response.status_code == 200, response.text
        return response.content


def events_path(run_id: str) -> str:
    return f"/aep/v1/runs/{run_id}/events"


def bytes_path(artifact_id: str) -> str:
    return f"/aep/v1/artifacts/{artifact_id}/bytes"
