"""The WebSocket: the same calls, and events that arrive as notifications. An extension; skipped elsewhere."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, WebSocketException

from espalier_client.conformance.behaviour import calls, sleeps, tool
from espalier_client.conformance.expected import nobody
from espalier_client.conformance.ground import Trial
from espalier_client.conformance.verdicts import Failed, brief, expect, same
from espalier_client.conformance.wire import (
    Caller,
    envelope,
    require_error,
    require_response,
    symbol_in,
)

ANSWER_WAIT_S: Final = 10.0
SAID_MAX: Final = 10_000
NOBODY_S: Final = "Bearer nobody0123456789"


@dataclass
class Socket:
    """A connection. What arrives is an answer or a notification; notifications are kept."""

    connection: ClientConnection
    heard: list[dict[str, Any]]

    async def say(self, message: Any) -> None:
        text = message if isinstance(message, str) else json.dumps(message)
        try:
            await self.connection.send(text)
        except ConnectionClosed as err:
            raise Failed(f"the WebSocket was closed ({err.rcvd or 'without a word'}).") from err

    async def next(self) -> Any:
        """The next message of any kind."""
        try:
            with anyio.fail_after(ANSWER_WAIT_S):
                return json.loads(await self.connection.recv())
        except TimeoutError as err:
            raise Failed(f"nothing came over the WebSocket within {ANSWER_WAIT_S:g} s.") from err
        except ConnectionClosed as err:
            raise Failed(f"the WebSocket was closed ({err.rcvd or 'without a word'}).") from err
        except ValueError as err:
            raise Failed("what came over the WebSocket is not JSON.") from err

    async def answer(self) -> Any:
        """The next message that is no notification."""
        for _ in range(SAID_MAX):
            message = await self.next()
            if not isinstance(message, dict) or "method" not in message:
                return message
            self.heard.append(message)
        raise Failed(f"{SAID_MAX} notifications and no answer.")

    async def ask(self, method: str, params: Any, request_id: Any = 1) -> dict[str, Any]:
        await self.say(envelope(method, params, request_id))
        return require_response(await self.answer(), request_id, method)


@asynccontextmanager
async def _open(trial: Trial, caller: Caller, **changes: str | None) -> AsyncIterator[Socket]:
    headers = caller.headers(**changes)
    try:
        async with connect(
            trial.ground.ws_url, additional_headers=headers, proxy=None, max_size=None
        ) as connection:
            yield Socket(connection, [])
    except InvalidHandshake as err:
        raise Failed(f"the WebSocket cannot be opened: {err}") from err
    except (OSError, WebSocketException) as err:
        raise Failed(f"the WebSocket broke: {err}") from err


async def websocket_01_calls(trial: Trial) -> None:
    agent = await trial.agent()
    asked: list[tuple[str, Any]] = [
        ("agent.get", {"agent_id": agent["id"]}),
        ("agent.get", {"agent_id": nobody("agt")}),
        ("agent.create", {}),
        ("agent.nonsense", {}),
    ]
    async with _open(trial, trial.me) as socket:
        for request_id, (method, params) in enumerate(asked):
            told = await socket.ask(method, params, f"id-{request_id}")
            over_http = await trial.me.answer(method, params)
            same({**told, "id": None}, {**over_http, "id": None}, f"{method} {brief(params)}")


async def websocket_02_events(trial: Trial) -> None:
    plan = (calls(tool("sleep", duration_seconds=1)), {"text": "done"})
    run = await trial.run(*plan)
    async with _open(trial, trial.me) as socket:
        told = await socket.ask("run.subscribe", {"run_id": run["id"]})
        expect("result" in told, f"run.subscribe is refused: {brief(told)}")
        events = await _events(socket)
    same(events, await trial.me.events(run["id"]), "the events over the WebSocket")
    async with _open(trial, trial.me) as socket:
        await socket.ask("run.subscribe", {"run_id": run["id"], "since": events[1]["event_id"]})
        same(await _events(socket), events[2:], "the events after the second")


async def _events(socket: Socket) -> list[dict[str, Any]]:
    """The envelopes up to `run.ended`."""
    place = 0
    found: list[dict[str, Any]] = []
    while not found or found[-1].get("type") != "run.ended":  # bounded by the check's own time
        while place >= len(socket.heard):  # bounded by the wait for each message
            socket.heard.append(await socket.next())
        message = socket.heard[place]
        place += 1
        if message.get("method") == "run.event":
            params = message.get("params") or {}
            event = params.get("event", params)
            expect("id" not in message, "a notification has an id.")
            found.append(
                {name: event.get(name) for name in ("event_id", "run_id", "type", "emitted_at", "payload")}
            )
    return found


async def websocket_03_envelope(trial: Trial) -> None:
    async with _open(trial, trial.me) as socket:
        await socket.say("nonsense")
        require_error(require_response(await socket.answer(), None, "nonsense"), "parse_error", "nonsense")
        await socket.say({"jsonrpc": "2.0", "method": "agent.list", "params": {"limit": 1}})
        batch = [envelope("agent.list", {"limit": 1}, 1), envelope("agent.nonsense", {}, 2)]
        await socket.say(batch)
        told = await socket.answer()
        expect(isinstance(told, list), f"a batch should be answered with an array, got {brief(told)}.")
        same([symbol_in(each) for each in told], ["result", "method_not_found"], "the answers to a batch")


async def websocket_04_no_key(trial: Trial) -> None:
    for token in (None, NOBODY_S):
        headers = trial.me.headers(Authorization=token)
        try:
            async with connect(trial.ground.ws_url, additional_headers=headers, proxy=None) as connection:
                socket = Socket(connection, [])
                require_error(await socket.ask("agent.list", {}), "authn_failed", "agent.list")
        except (InvalidHandshake, ConnectionClosed):
            continue


async def websocket_05_of_another(trial: Trial) -> None:
    run = await trial.run(sleeps()) if trial.scripted else await trial.run()
    async with _open(trial, trial.they) as socket:
        told = [await socket.ask("run.subscribe", {"run_id": each}) for each in (run["id"], nobody("run"))]
    for answer in told:
        require_error(answer, "tool_not_found", "run.subscribe")
    if trial.scripted:
        await trial.me.call("run.cancel", run_id=run["id"])
