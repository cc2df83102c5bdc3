"""Tools of servers that an embedder attached, through gateway, worker and broker, to real MCP servers.

The servers speak HTTP, repeat all that they are sent, and note it in a file: the witness of what arrived.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest
from mcp_servers.running import POLL_S, SOON_S, HttpLedger, http_echo, notes
from scripted_runs import Reader
from tests.integration.conftest import Start, StartBroker, StartGateway, Stores
from tests.integration.tools import calls, returned
from tests.integration.wire_runs import uuid

from espalier_client.client import AepClient
from espalier_eventlog import RedisSettings, open_streams
from espalier_local.keys import create_key
from espalier_local.ports import free_port
from espalier_protocol.access import SCOPES
from espalier_protocol.agent import Agent, AgentCreate, AgentUpdate, Budgets, Ceilings, Constitution
from espalier_protocol.events import Event
from espalier_protocol.mcp_server import ExternalMcpServer, McpServerAuth
from espalier_protocol.run import RunCreate
from espalier_secrets.sealing import new_sealing_key
from espalier_store.agent_servers import hand_down_servers
from espalier_store.fleet import listed_servers
from espalier_store.pool import Pool, transaction

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BEARER = "bearer-canary-0123456789"
HEADER = "header-canary-0123456789"
AUTH = McpServerAuth(bearer=BEARER, headers={"X-Key": HEADER})
ECHO = "mcp.echo.echo"
UNREACHED = "The tools of mcp.echo could not be listed: the server could not be reached."
NOT_ALLOWED = (
    "The tools of mcp.echo could not be listed: "
    "the server's address may not be gone to from here, or leads on to another one."
)


@dataclass
class Runtime:
    """A gateway, a worker and a broker that may go to the given ports of this machine, and an embedder."""

    client: AepClient
    base_url: str
    logs: Callable[[], str]

    async def agent(self, *servers: ExternalMcpServer, client: AepClient | None = None, **more: Any) -> Agent:
        members = {
            "name": "handy",
            "constitution": Constitution(
                immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"
            ),
            "toolset": [],
            "ceilings": Ceilings(
                max_cycles=20, max_subagents=0, max_tool_calls_per_cycle=50, max_wall_seconds=600
            ),
            "budgets": Budgets(tokens_per_cycle=500_000, tool_calls_per_cycle=50, seconds_per_cycle=120),
            "external_mcp_servers": list(servers),
            **more,
        }
        return await (client or self.client).agent_create(AgentCreate(**members))

    async def calling(self, agent: Agent, *tools: str, client: AepClient | None = None) -> list[Event]:
        """The events of a run that calls these tools at once and completes with what the last returned."""
        client = client or self.client
        last = {"result": f"${{/results/{len(tools) - 1}}}"}
        plan = [calls(*((tool, {}) for tool in tools)), calls(("complete", last))]
        inputs = {"espalier.script": {"answers": plan}}
        run = await client.run_create(RunCreate(agent_id=agent.id, goal="work", inputs=inputs))
        reader = Reader(run.id)
        await reader.read(client)
        return reader.events


StartRuntime = Callable[..., Awaitable[Runtime]]


@pytest.fixture
async def start_runtime(
    start: Start, start_broker: StartBroker, start_gateway: StartGateway, api_key: str
) -> AsyncIterator[StartRuntime]:
    async with AsyncExitStack() as stack:

        async def start_it(*ports: int, **settings: str) -> Runtime:
            key = new_sealing_key()
            allowed = ",".join(f"127.0.0.1/32:{port}" for port in ports)
            common = {"ESPALIER_SECRETS_KEY": key, "ESPALIER_LOG_LEVEL": "debug"}
            broker = await start_broker(ESPALIER_EGRESS_ALLOW=allowed, **{**common, **settings})
            worker = start("worker", ESPALIER_MODELS_SCRIPTED="on", **common, **broker.worker_settings)
            gateway = await start_gateway(**common)
            services = (broker.service, worker, gateway.service)
            client = await stack.enter_async_context(AepClient(gateway.base_url, api_key))
            return Runtime(client, gateway.base_url, lambda: "".join(each.output() for each in services))

        yield start_it


@dataclass
class Echo:
    """A server that repeats, and what it was sent."""

    running: HttpLedger
    seen: Path

    def attached(self, **more: Any) -> ExternalMcpServer:
        url = f"http://127.0.0.1:{self.running.port}/mcp"
        return ExternalMcpServer(**{"url": url, "name": "echo", "auth": AUTH, **more})

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [note["headers"] for note in notes(self.seen)]


@pytest.fixture
async def echo(tmp_path: Path) -> AsyncIterator[Echo]:
    async with http_echo(tmp_path / "seen.jsonl") as running:
        yield Echo(running, tmp_path / "seen.jsonl")


def troubles(events: list[Event]) -> list[str]:
    return [event.payload["message"] for event in events if event.type == "error"]


async def test_an_attached_server_is_called_without_being_named_in_the_toolset(
    start_runtime: StartRuntime, echo: Echo
) -> None:
    runtime = await start_runtime(echo.running.port)
    agent = await runtime.agent(echo.attached(), subject_ids=["sub_1"])

    events = await runtime.calling(agent, ECHO)

    assert troubles(events) == []
    assert returned(events)[0][:2] == (ECHO, True)
    got = events[-1].payload["result"]
    run_id = events[0].run_id
    assert got["meta"] == {
        "session_id": run_id,
        "agent_id": agent.id,
        "run_id": run_id,
        "subject_ids": ["sub_1"],
        "subject_id": "sub_1",
    }
    sent = [(each.get("authorization"), each.get("x-key")) for each in echo.requests]
    assert set(sent) == {(f"Bearer {BEARER}", HEADER)}


async def test_a_credential_that_a_server_repeats_is_in_no_answer_event_row_stream_or_log(
    start_runtime: StartRuntime, echo: Echo, pool: Pool, stores: Stores
) -> None:
    runtime = await start_runtime(echo.running.port)
    agent = await runtime.agent(echo.attached())

    events = await runtime.calling(agent, ECHO, "mcp.echo.fail", "mcp.echo.refuse")

    assert [ok for _, ok, _, _ in returned(events)[:3]] == [True, False, False]
    got = events[-1].payload["result"]
    assert (got["headers"]["authorization"], got["headers"]["x-key"]) == ("[secret]", "[secret]")
    answers = [
        agent.model_dump_json(),
        (await runtime.client.agent_get(agent.id)).model_dump_json(),
        *(event.model_dump_json() for event in events),
    ]
    places = {
        "answers": "".join(answers),
        "rows": await everything_in(pool),
        "streams": await everything_streamed(stores),
        "logs": runtime.logs(),
    }
    assert str(uuid("run", events[0].run_id)) in places["rows"] and events[0].run_id in places["streams"]
    assert [name for name, text in places.items() if BEARER in text or HEADER in text] == []


async def everything_in(pool: Pool) -> str:
    tables = await pool.fetch("select tablename from pg_tables where schemaname = 'public'")
    rows = [await pool.fetch(f"select t::text from {each['tablename']} t") for each in tables]
    return "".join(row[0] for table in rows for row in table)


async def everything_streamed(stores: Stores) -> str:
    """What Redis holds of the test's one run, as soon as that is all of it."""
    settings = RedisSettings(redis_url=stores.redis_url, redis_prefix=stores.redis_prefix)
    async with open_streams(settings) as redis:
        with anyio.fail_after(SOON_S):
            while "run.ended" not in (kept := await _streamed(redis, stores.redis_prefix)):
                await anyio.sleep(POLL_S)
    return kept


async def _streamed(redis: Any, prefix: str) -> str:
    names = [name async for name in redis.scan_iter(match=f"{prefix}run:*")]
    return str([(name, await redis.xrange(name)) for name in names])


async def test_a_dead_server_costs_its_tools_and_not_the_run(start_runtime: StartRuntime, echo: Echo) -> None:
    dead = free_port()
    runtime = await start_runtime(echo.running.port, dead)
    url = f"http://127.0.0.1:{dead}/mcp"
    agent = await runtime.agent(ExternalMcpServer(url=url, name="gone"), echo.attached())

    events = await runtime.calling(agent, "mcp.gone.search", ECHO)

    unmade = "unavailable: the call was not made. the server could not be reached"
    assert returned(events)[0] == ("mcp.gone.search", False, unmade, False)
    assert returned(events)[1][:2] == (ECHO, True)
    assert events[-1].payload["final_state"] == "complete"
    assert set(troubles(events)) == {UNREACHED.replace("echo", "gone")}
    assert str(dead) not in "".join(event.model_dump_json() for event in events)


async def test_an_address_that_is_not_public_is_refused_unless_the_operator_listed_it(
    start_runtime: StartRuntime, echo: Echo
) -> None:
    runtime = await start_runtime()
    agent = await runtime.agent(echo.attached())

    events = await runtime.calling(agent, ECHO)

    assert set(troubles(events)) == {NOT_ALLOWED}
    assert [ok for _, ok, _, _ in returned(events)] == [False, True]
    assert echo.requests == []


async def test_a_redirect_is_not_followed_and_carries_no_credential_anywhere(
    start_runtime: StartRuntime, echo: Echo, tmp_path: Path
) -> None:
    leads_on = f"http://127.0.0.1:{echo.running.port}/mcp"
    async with http_echo(tmp_path / "redirects.jsonl", "--redirect-to", leads_on) as running:
        redirects = Echo(running, tmp_path / "redirects.jsonl")
        runtime = await start_runtime(echo.running.port, running.port)
        agent = await runtime.agent(redirects.attached())

        events = await runtime.calling(agent, ECHO)

    assert set(troubles(events)) == {NOT_ALLOWED}
    assert events[-1].payload["final_state"] == "complete"
    assert redirects.requests and echo.requests == []


async def test_a_changed_credential_counts_from_the_next_call_on(
    start_runtime: StartRuntime, tmp_path: Path
) -> None:
    async with http_echo(tmp_path / "seen.jsonl", "--bearer", BEARER) as running:
        guarded = Echo(running, tmp_path / "seen.jsonl")
        runtime = await start_runtime(running.port)
        agent = await runtime.agent(guarded.attached(auth=McpServerAuth(bearer="a-wrong-one-0123456789")))

        before = await runtime.calling(agent, ECHO)
        change = AgentUpdate(agent_id=agent.id, external_mcp_servers=[guarded.attached()])
        await runtime.client.agent_update(change)
        after = await runtime.calling(agent, ECHO)

    refused = "The tools of mcp.echo could not be listed: the server refused."
    assert set(troubles(before)) == {refused}
    assert [ok for _, ok, _, _ in returned(before)] == [False, True]
    assert [ok for _, ok, _, _ in returned(after)] == [True, True]


async def test_a_detached_server_is_called_no_more(start_runtime: StartRuntime, echo: Echo) -> None:
    runtime = await start_runtime(echo.running.port)
    agent = await runtime.agent(echo.attached())
    await runtime.calling(agent, ECHO)
    seen = len(echo.requests)

    await runtime.client.agent_update(AgentUpdate(agent_id=agent.id, external_mcp_servers=[]))
    events = await runtime.calling(agent, ECHO)

    assert returned(events)[0][2].startswith("tool_not_found")
    assert len(echo.requests) == seen


async def test_two_owners_and_two_agents_have_nothing_of_each_others_servers(
    start_runtime: StartRuntime, echo: Echo, pool: Pool
) -> None:
    runtime = await start_runtime(echo.running.port)
    async with transaction(pool) as connection:
        other_key = await create_key(connection, "two", SCOPES)
    async with AepClient(runtime.base_url, other_key) as other:
        ours = await runtime.agent(echo.attached())
        theirs = await runtime.agent(
            echo.attached(auth=McpServerAuth(bearer="other-canary-0123456789")), client=other
        )
        nobodys = await runtime.agent(toolset=["mcp.echo.*"])
        bare = await runtime.agent()

        await runtime.calling(ours, ECHO)
        between = len(echo.requests)
        await runtime.calling(theirs, ECHO, client=other)
        whole = len(echo.requests)
        naming = await runtime.calling(nobodys, ECHO)
        without = await runtime.calling(bare, ECHO)

    sent = [each.get("authorization") for each in echo.requests]
    assert set(sent[:between]) == {f"Bearer {BEARER}"}
    assert set(sent[between:]) == {"Bearer other-canary-0123456789"}
    assert len(sent) == whole
    assert returned(naming)[0][2] == "unavailable: the call was not made. There is no such server."
    assert returned(without)[0][2].startswith("tool_not_found")


async def test_of_an_inherited_server_an_agent_has_only_what_its_toolset_names(
    start_runtime: StartRuntime, echo: Echo, pool: Pool, owner_id: UUID
) -> None:
    runtime = await start_runtime(echo.running.port)
    parent = await runtime.agent(echo.attached())
    child = await runtime.agent(toolset=[ECHO])
    async with transaction(pool) as connection:
        from_, to = uuid("agt", parent.id), uuid("agt", child.id)
        await hand_down_servers(connection, owner_id, from_, to, ["echo", "none"])

    events = await runtime.calling(child, "mcp.echo.fail", ECHO)

    assert returned(events)[0][2].startswith("tool_not_found")
    assert events[-1].payload["result"]["headers"]["authorization"] == "[secret]"


async def test_a_broker_without_the_key_says_so_and_sends_nothing(
    start_runtime: StartRuntime, echo: Echo
) -> None:
    runtime = await start_runtime(echo.running.port, ESPALIER_SECRETS_KEY=new_sealing_key())
    agent = await runtime.agent(echo.attached())

    events = await runtime.calling(agent, ECHO)

    why = "the credential for the server cannot be read here"
    assert set(troubles(events)) == {f"The tools of mcp.echo could not be listed: {why}."}
    assert returned(events)[0][2] == f"unavailable: the call was not made. {why}"
    assert echo.requests == []


async def test_a_broker_whose_operator_switched_attached_servers_off_reaches_none(
    start_runtime: StartRuntime, echo: Echo
) -> None:
    runtime = await start_runtime(echo.running.port, ESPALIER_CAPABILITIES="none")
    agent = await runtime.agent(echo.attached())

    events = await runtime.calling(agent, ECHO)

    assert set(troubles(events)) == {"There is no server 'mcp.echo'."}
    assert [ok for _, ok, _, _ in returned(events)] == [False, True]
    assert echo.requests == []


async def test_what_the_operator_lists_is_known_before_a_slug_is_given(
    start_broker: StartBroker, pool: Pool, tmp_path: Path
) -> None:
    await start_broker({"Git Hub": {"command": "none"}, "b": {"command": "none"}})
    async with pool.acquire() as connection:
        assert await listed_servers(connection) == {"git_hub", "b"}
