"""Somebody who speaks the wire over a WebSocket, with a client library that is not ours."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
from tests.integration.wire import ANSWER_WAIT_S, Wire, request
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError
from websockets.protocol import State
from websockets.typing import Subprotocol

PATH = "/aep/v1/ws"
EVENT = "run.event"
ENDED = "run.subscription_ended"


@dataclass
class SocketCaller:
    """One connection. What comes that is no answer to the question at hand is kept in `told`."""

    connection: ClientConnection
    told: list[dict[str, Any]] = field(default_factory=list)
    asked: int = 0

    async def say(self, message: Any) -> None:
        """A JSON value, or text or bytes as they are."""
        await self.connection.send(message if isinstance(message, str | bytes) else json.dumps(message))

    async def hear(self) -> Any:
        with anyio.fail_after(ANSWER_WAIT_S):
            return json.loads(await self.connection.recv())

    async def answer(self, method: str, params: Any = None) -> dict[str, Any]:
        self.asked += 1
        await self.say(request(method, params, self.asked))
        while True:  # bounded by `hear`
            heard: dict[str, Any] = await self.hear()
            if heard.get("id") == self.asked:
                return heard
            self.told.append(heard)

    async def call(self, method: str, **params: Any) -> Any:
        """The result of a call that has to succeed."""
        answer = await self.answer(method, params)
        assert "error" not in answer, answer
        return answer["result"]

    async def refused(self, method: str, **params: Any) -> dict[str, Any]:
        error: dict[str, Any] = (await self.answer(method, params))["error"]
        return error

    async def subscribe(self, run_id: str, **params: Any) -> str:
        return str((await self.call("run.subscribe", run_id=run_id, **params))["subscription_id"])

    async def next_told(self) -> dict[str, Any]:
        return self.told.pop(0) if self.told else await self.hear()

    async def until_ended(self, subscription_id: str) -> tuple[list[int], str]:
        """The ids of its events, and the reason of its end. What others say meanwhile stays in `told`."""
        seqs: list[int] = []
        others: list[dict[str, Any]] = []
        while True:  # bounded by `hear`
            said = await self.next_told()
            params = said.get("params", {})
            if params.get("subscription_id") != subscription_id:
                others.append(said)
            elif said["method"] == EVENT:
                seqs.append(int(params["event"]["event_id"]))
            else:
                assert said["method"] == ENDED
                self.told = [*others, *self.told]
                return seqs, params["reason"]

    async def closed(self) -> tuple[int | None, str | None]:
        """Code and reason with which the other side closes; what it says before is kept."""
        with anyio.fail_after(ANSWER_WAIT_S), suppress(ConnectionClosedError):
            async for text in self.connection:
                self.told.append(json.loads(text))
        return self.connection.close_code, self.connection.close_reason


@asynccontextmanager
async def socket(
    base_url: str,
    headers: Mapping[str, str] | Wire,
    *,
    subprotocols: tuple[str, ...] = (),
    queue_max: int | None = None,
) -> AsyncIterator[SocketCaller]:
    """`headers`, or a caller whose ordinary ones are sent. The library reads `queue_max` messages ahead."""
    connection = await connect(
        f"{base_url.replace('http', 'ws', 1)}{PATH}",
        additional_headers=headers.headers() if isinstance(headers, Wire) else headers,
        subprotocols=[Subprotocol(name) for name in subprotocols] or None,
        proxy=None,
        max_size=None,
        max_queue=queue_max,
        compression=None,
    )
    try:
        yield SocketCaller(connection)
    finally:
        if (
            connection.state is not State.CLOSED
        ):  # of what the other side closed it would close the rest twice
            await connection.close()
