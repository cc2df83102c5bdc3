"""A gateway on loopback, in this process, and a caller that speaks its wire; for the `test_wire_*` files."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2

from espalier_gateway.app import open_gateway, stop
from espalier_gateway.http import State
from espalier_gateway.settings import GatewaySettings
from espalier_local.keys import create_key
from espalier_protocol.access import CAPABILITIES, SCOPES
from espalier_protocol.errors import ErrorCode
from espalier_protocol.versions import SERVED, SERVED_VERSIONS, Versions
from espalier_store.pool import Pool, transaction

VERSION = SERVED_VERSIONS[0]
ANSWER_WAIT_S = 20.0
POLL_S = 0.01
RPC = "/aep/v1/rpc"

AGENT: dict[str, Any] = {
    "name": "anybody",
    "constitution": {
        "immutable_directives": "Be brief.",
        "mutable_prompt": "Say ok.",
        "mutable_prompt_policy": "auto",
    },
    "toolset": ["helix.web_search"],
    "ceilings": {"max_cycles": 5, "max_subagents": 2, "max_tool_calls_per_cycle": 4, "max_wall_seconds": 300},
    "budgets": {"tokens_per_cycle": 10_000, "tool_calls_per_cycle": 4, "seconds_per_cycle": 60},
}
UNKNOWN_TAIL = "0" * 26
# Not the outbox: the publisher empties it at its own pace.
LASTING = "owners keys sessions agents runs journal events snapshots artifacts blobs"
TABLES = [*LASTING.split(), "messages", "memory_records"]


def request(method: str, params: Any = None, request_id: Any = 1) -> dict[str, Any]:
    given = {} if params is None else {"params": params}
    return {"jsonrpc": "2.0", "id": request_id, "method": method, **given}


def symbol(answer: Mapping[str, Any]) -> str:
    """The code by its name, or `result`; the data's own symbol is checked to be there."""
    if "error" not in answer:
        return "result"
    assert answer["error"]["data"]["symbol"]
    return ErrorCode(answer["error"]["code"]).name


@dataclass
class Wire:
    """One caller: a key, and the session that `begin` made."""

    http: httpx2.AsyncClient
    key: str
    session_id: str = ""
    version: str = VERSION

    def headers(self, **changes: str | None) -> dict[str, str]:
        """The headers of an ordinary request; a change to None leaves one out."""
        usual: dict[str, str | None] = {
            "Authorization": f"Bearer {self.key}",
            "Agent-Protocol-Version": self.version,
            "X-AEP-Session-Id": self.session_id or None,
            **{name.replace("_", "-"): value for name, value in changes.items()},
        }
        return {name: value for name, value in usual.items() if value is not None}

    async def post(self, body: Any, headers: Mapping[str, str] | None = None) -> httpx2.Response:
        """A JSON value or raw bytes."""
        sent = {"Content-Type": "application/json", **(self.headers() if headers is None else headers)}
        if isinstance(body, bytes):
            return await self.http.post(RPC, content=body, headers=sent)
        return await self.http.post(RPC, json=body, headers=sent)

    async def answer(self, method: str, params: Any = None) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.post(request(method, params))).json()
        return answer

    async def call(self, method: str, **params: Any) -> Any:
        """The result of a call that has to succeed."""
        answer = await self.answer(method, params)
        assert "error" not in answer, answer
        return answer["result"]

    async def refused(self, method: str, **params: Any) -> dict[str, Any]:
        """The error of a call that has to fail."""
        error: dict[str, Any] = (await self.answer(method, params))["error"]
        return error

    async def begin(self, **capabilities: bool) -> dict[str, Any]:
        params = {
            "client_info": {"name": "test", "version": "0"},
            "requested_versions": [self.version],
            "requested_capabilities": capabilities or dict.fromkeys(CAPABILITIES, True),
        }
        result: dict[str, Any] = await self.call("initialize", **params)
        self.session_id = result["session_id"]
        return result

    async def get(self, path: str, headers: Mapping[str, str] | None = None, **query: str) -> httpx2.Response:
        return await self.http.get(path, params=query, headers=self.headers() if headers is None else headers)

    async def agent(self, **changes: Any) -> str:
        return str((await self.call("agent.create", **{**AGENT, **changes}))["id"])

    async def run(self, agent_id: str | None = None, **params: Any) -> str:
        agent_id = agent_id or await self.agent()
        return str((await self.call("run.create", agent_id=agent_id, **{"goal": "nothing", **params}))["id"])


@dataclass
class Gateway:
    """A running gateway, and callers for it."""

    pool: Pool
    base_url: str
    state: State
    http: httpx2.AsyncClient
    _owners: int = field(default=0)

    async def caller(self, owner: str | None = None, scopes: tuple[str, ...] = SCOPES, **caps: bool) -> Wire:
        """Someone with a session; a new owner unless one is named."""
        self._owners += 1
        wire = await self.stranger(owner or f"owner-{self._owners}", scopes)
        await wire.begin(**caps)
        return wire

    async def stranger(self, owner: str, scopes: tuple[str, ...] = SCOPES) -> Wire:
        """Someone with a key and no session."""
        async with transaction(self.pool) as connection:
            return Wire(self.http, await create_key(connection, owner, scopes))

    async def rows(self) -> dict[str, int]:
        """How many rows each table has: what a refused request must not change."""
        return {table: await self.pool.fetchval(f"select count(*) from {table}") for table in TABLES}

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.base_url.removeprefix("http://").split(":")
        return host, int(port)


@asynccontextmanager
async def running_gateway(
    settings: GatewaySettings, pool: Pool, versions: Versions = SERVED
) -> AsyncIterator[Gateway]:
    """The real application behind the real server. `pool` is the test's own, not the gateway's."""
    async with (
        open_gateway(settings, versions) as (server, state),
        anyio.create_task_group() as group,
    ):
        group.start_soon(server.serve)
        with anyio.fail_after(ANSWER_WAIT_S):
            while not server.started:
                await anyio.sleep(POLL_S)
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        base_url = f"http://{host}:{port}"
        timeout = httpx2.Timeout(ANSWER_WAIT_S)
        async with httpx2.AsyncClient(base_url=base_url, timeout=timeout, trust_env=False) as http:
            yield Gateway(pool, base_url, state, http)
        await stop(server, state)


async def raw_exchange(address: tuple[str, int], sent: bytes, answer_bytes_max: int = 65_536) -> bytes:
    """What a server answers to bytes that no client library would send, until it closes the connection."""
    answer = b""
    async with await anyio.connect_tcp(*address) as stream:
        with anyio.fail_after(ANSWER_WAIT_S):
            try:
                await stream.send(sent)
                while len(answer) < answer_bytes_max:
                    answer += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return answer
    return answer
