"""The broker's connections to attached servers: by the checked way out, for one owner each, not too many."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest
from mcp_servers.running import HttpLedger, comes_true, http_echo, http_ledger, notes
from pydantic import SecretStr
from tests.integration.wire import AGENT

from espalier_acts.agent_servers import WantedServer
from espalier_acts.agents import create_agent
from espalier_domain.mcp_servers import auth_place
from espalier_egress import Egress, EgressSettings, open_egress
from espalier_local.ports import free_port
from espalier_mcp_broker import attached as attached_module
from espalier_mcp_broker.attached import AttachedServers
from espalier_mcp_broker.catalog import OwnServers, Shelf, open_catalog
from espalier_mcp_broker.outcomes import (
    RESULT_BYTES_MAX,
    Answer,
    Answered,
    NotSent,
    Reason,
    TooLarge,
    Unknown,
)
from espalier_mcp_broker.servers import AttachedServer
from espalier_mcp_broker.session import REDIRECTED_TEXT, McpSession
from espalier_protocol.agent import AgentCreate
from espalier_protocol.ids import from_wire
from espalier_protocol.mcp_server import ExternalMcpServer, McpServerAuth
from espalier_secrets.sealing import new_sealing_key, place_of, sealer
from espalier_store.pool import Pool, transaction

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SEALER = sealer(SecretStr(new_sealing_key()))
BEARER = "bearer-canary-0123456789"
CALL_S = 45.0
SHORT_S = 0.4
ERAS = ((), ("--handshake",))


@asynccontextmanager
async def way_to(*ports: int) -> AsyncIterator[Egress]:
    """A way out that may also go to these ports of this machine."""
    allowed = tuple(f"127.0.0.1/32:{port}" for port in ports)
    async with open_egress(EgressSettings(egress_allow=allowed)) as egress:
        yield egress


@asynccontextmanager
async def session_of(url: str, egress: Egress, **headers: str) -> AsyncIterator[McpSession]:
    server = AttachedServer(name="s", url=url, headers=headers, egress=egress)
    async with open_catalog([server], None) as catalog:
        found = catalog.find("mcp.s.any")
        assert found is not None
        yield found.session


def url_of(running: HttpLedger) -> str:
    return f"http://127.0.0.1:{running.port}/mcp"


def text_of(answer: Answer) -> str:
    assert isinstance(answer, Answered), answer
    return str(answer.result["content"][0]["text"])


# ------------------------------------------------------------------ one connection


@pytest.mark.parametrize("era", ERAS, ids=["modern", "handshake"])
async def test_every_call_through_the_checked_way_has_its_outcome(
    tmp_path: Path, era: tuple[str, ...]
) -> None:
    ledger = tmp_path / "ledger"
    async with (
        http_ledger(ledger, *era) as running,
        way_to(running.port) as egress,
        session_of(url_of(running), egress) as session,
    ):
        call = partial(session.call, seconds=CALL_S)
        assert text_of(await call("record", {"text": "a"}, meta={"run_id": "r"})) == "recorded a"
        assert notes(ledger, event="called")[0]["meta"]["run_id"] == "r"
        failing = await call("fail", {})
        assert isinstance(failing, Answered) and failing.result["isError"]
        assert text_of(await call("refuse", {})) == "the arguments are wrong"
        assert await call("big", {"bytes": RESULT_BYTES_MAX + 1}) == TooLarge()
        assert await session.call("hang", {}, seconds=SHORT_S) == Unknown(Reason.DEADLINE)
        await comes_true(lambda: bool(notes(ledger, event="cancelled", tool="hang")))
        assert await call("die", {}) == Unknown(Reason.CONNECTION_LOST)
        await running.process.wait()
        assert await call("record", {"text": "b"}) == NotSent(Reason.CANNOT_CONNECT)


@pytest.mark.parametrize("era", ERAS, ids=["modern", "handshake"])
async def test_nothing_leaves_for_an_address_that_is_not_allowed(
    tmp_path: Path, era: tuple[str, ...]
) -> None:
    async with (
        http_echo(tmp_path / "seen") as running,
        way_to(free_port()) as egress,
        session_of(url_of(running), egress) as session,
    ):
        assert await session.call("echo", {}, seconds=CALL_S) == NotSent(Reason.NOT_ALLOWED)
        assert await session.page_of_tools(None) == Reason.NOT_ALLOWED
    assert notes(tmp_path / "seen") == []


@pytest.mark.parametrize(
    "url", ["http://tools.example:0/mcp", "http://2130706433/mcp", "http://[fe80::1%25eth0]/"]
)
async def test_a_url_that_can_never_be_right_is_a_reason_and_no_failure(url: str) -> None:
    async with way_to() as egress, session_of(url, egress) as session:
        assert await session.call("echo", {}, seconds=CALL_S) == NotSent(Reason.NOT_ALLOWED)


async def test_a_call_that_is_redirected_failed(tmp_path: Path) -> None:
    """The server begins to redirect after it was connected to."""
    port = free_port()
    async with way_to(port) as egress, session_of(f"http://127.0.0.1:{port}/mcp", egress) as session:
        async with http_echo(tmp_path / "seen", port=port) as first:
            assert isinstance(await session.call("echo", {}, seconds=CALL_S), Answered)
            first.process.kill()
            await first.process.wait()
        async with http_echo(tmp_path / "later", "--redirect-to", "http://127.0.0.1:1/", port=port):
            assert text_of(await session.call("echo", {}, seconds=CALL_S)) == REDIRECTED_TEXT


async def test_descriptions_and_schemas_repeat_no_credential(tmp_path: Path) -> None:
    async with http_echo(tmp_path / "seen") as running, way_to(running.port) as egress:
        headers = {"authorization": f"Bearer {BEARER}"}
        server = AttachedServer(name="s", url=url_of(running), headers=headers, egress=egress)
        async with open_catalog([server], None) as catalog:
            tools, troubles = await catalog.definitions(["mcp.s.*"])
    assert (len(tools), troubles) == (3, ())
    assert {tool.description for tool in tools} == {"Got [secret]."}
    assert BEARER not in "".join(tool.model_dump_json() for tool in tools)


# ------------------------------------------------------------------ all connections


class Desk:
    """Agents with servers in a real database, and the connections of a broker."""

    def __init__(self, pool: Pool, owner_id: UUID, attached: AttachedServers) -> None:
        self.pool, self.owner_id, self.attached = pool, owner_id, attached

    async def agent(self, url: str, *names: str, bearer: str = BEARER) -> UUID:
        auth = McpServerAuth(bearer=bearer)
        sealed = SEALER.seal(auth.model_dump_json().encode(), place_of(*auth_place(self.owner_id, url)))
        servers = [WantedServer(ExternalMcpServer(url=url, name=name, auth=auth), sealed) for name in names]
        async with transaction(self.pool) as connection:
            made = await create_agent(connection, self.owner_id, AgentCreate(**AGENT), servers)
        agent_id = from_wire("agt", made.id)
        assert agent_id is not None
        return agent_id

    def of_agent(self, agent_id: UUID, *slugs: str, owner_id: UUID | None = None) -> Any:
        return self.attached.of_agent(owner_id or self.owner_id, agent_id, slugs or ("a",))

    async def shelf(self, agent_id: UUID, slug: str = "a") -> Shelf:
        """The shelf of one server, not used any more."""
        async with self.of_agent(agent_id, slug) as own:
            return own_shelf(own, slug)

    async def touch(self, agent_id: UUID) -> None:
        """The rows of the agent's servers are changed ones."""
        later = "update agent_servers set updated_at = updated_at + $2 where agent_id = $1"
        await self.pool.execute(later, agent_id, timedelta(seconds=1))


def own_shelf(own: OwnServers, slug: str = "a") -> Shelf:
    assert own.troubles == {}
    return own.shelves[slug]


@asynccontextmanager
async def desk_of(pool: Pool, owner_id: UUID, *ports: int, open_max: int = 8) -> AsyncIterator[Desk]:
    async with way_to(*ports) as egress, anyio.create_task_group() as tasks:
        attached = AttachedServers(pool, egress, SEALER, tasks, open_max=open_max)
        tasks.start_soon(attached.close_rested)
        yield Desk(pool, owner_id, attached)
        tasks.cancel_scope.cancel()


URL = "http://127.0.0.1:9/mcp"
"""Nobody may go there, so nothing is resolved and nothing leaves."""


async def test_a_connection_is_kept_for_its_agent_and_nobody_else(pool: Pool, owner_id: UUID) -> None:
    async with desk_of(pool, owner_id) as desk:
        one, other = await desk.agent(URL, "a", "b"), await desk.agent(URL, "a")
        await pool.execute("update agent_servers set updated_at = $1", datetime.now(UTC))
        kept = await desk.shelf(one)
        assert await desk.shelf(one) is kept
        assert len({id(each) for each in (kept, await desk.shelf(one, "b"), await desk.shelf(other))}) == 3
        async with desk.of_agent(one, "a", owner_id=uuid4()) as foreign:
            assert foreign == OwnServers({}, {})
        async with desk.of_agent(one, "c") as unknown:
            assert unknown == OwnServers({}, {})


async def test_a_changed_row_is_another_connection_while_the_old_one_finishes(
    pool: Pool, owner_id: UUID, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    async with http_ledger(ledger) as running, desk_of(pool, owner_id, running.port) as desk:
        agent_id = await desk.agent(url_of(running), "a")
        answers: list[Answer] = []

        async def call_slowly() -> None:
            async with desk.of_agent(agent_id) as own:
                session = own_shelf(own).session
                answers.append(await session.call("record", {"text": "slow", "delay_s": 1}, seconds=CALL_S))

        before = await desk.shelf(agent_id)
        async with anyio.create_task_group() as group:
            group.start_soon(call_slowly)
            await comes_true(lambda: bool(notes(ledger, event="called")))
            await desk.touch(agent_id)
            after = await desk.shelf(agent_id)
            quick = await after.session.call("record", {"text": "quick"}, seconds=CALL_S)
        assert after is not before
        assert [text_of(each) for each in (quick, *answers)] == ["recorded quick", "recorded slow"]
        assert await before.session.call("record", {"text": "late"}, seconds=CALL_S) == NotSent(
            Reason.CLOSING
        )


async def test_the_one_that_was_not_used_for_longest_gives_way(pool: Pool, owner_id: UUID) -> None:
    async with desk_of(pool, owner_id, open_max=2) as desk:
        agents = [await desk.agent(URL, "a") for _ in range(3)]
        first, second = [await desk.shelf(agent_id) for agent_id in agents[:2]]
        assert await desk.shelf(agents[0]) is first
        await desk.shelf(agents[2])
        assert await desk.shelf(agents[0]) is first, "it was used after the second one"
        assert await desk.shelf(agents[1]) is not second


async def test_when_all_are_in_use_the_next_server_is_said_to_be_one_too_many(
    pool: Pool, owner_id: UUID
) -> None:
    async with desk_of(pool, owner_id, open_max=2) as desk:
        busy, waiting = await desk.agent(URL, "a", "b"), await desk.agent(URL, "a")
        async with desk.of_agent(busy, "a", "b"), desk.of_agent(waiting) as refused:
            assert refused == OwnServers({}, {"a": Reason.CROWDED})
        await desk.shelf(waiting)


async def test_an_outdated_connection_counts_until_nobody_uses_it(pool: Pool, owner_id: UUID) -> None:
    async with desk_of(pool, owner_id, open_max=2) as desk:
        agent_id, other = await desk.agent(URL, "a"), await desk.agent(URL, "a")
        async with desk.of_agent(agent_id):
            await desk.touch(agent_id)
            async with desk.of_agent(agent_id), desk.of_agent(other) as refused:
                assert refused == OwnServers({}, {"a": Reason.CROWDED})
        async with desk.of_agent(agent_id):
            await desk.shelf(other)


async def test_a_connection_that_rests_is_closed(
    pool: Pool, owner_id: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_module, "RESTS_S_MAX", 0.0)
    monkeypatch.setattr(attached_module, "LOOK_EVERY_S", 0.02)
    async with desk_of(pool, owner_id) as desk:
        resting, used = await desk.agent(URL, "a"), await desk.agent(URL, "a")
        async with desk.of_agent(used) as own:
            rested = await desk.shelf(resting)
            with anyio.fail_after(CALL_S):
                while await rested.session.page_of_tools(None) != Reason.CLOSING:
                    await anyio.sleep(0.02)
            assert await desk.shelf(used) is own_shelf(own)


async def test_the_agents_own_server_is_meant_where_the_operator_lists_one_of_its_name(
    pool: Pool, owner_id: UUID, tmp_path: Path
) -> None:
    async with (
        http_ledger(tmp_path / "listed") as listed,
        http_ledger(tmp_path / "own") as its,
        desk_of(pool, owner_id, its.port) as desk,
        open_catalog([listed.as_server("a")], None) as catalog,
    ):
        agent_id = await desk.agent(url_of(its), "a")
        async with desk.of_agent(agent_id) as own:
            found = catalog.find("mcp.a.record", own)
            assert found is not None and found.session is own_shelf(own).session
            assert len((await catalog.definitions(["mcp.a.record"], own))[0]) == 1
        cannot = OwnServers({}, {"a": Reason.CROWDED})
        assert catalog.find("mcp.a.record", cannot) is None
        assert (await catalog.definitions(["mcp.a.record"], cannot))[0] == ()
        theirs = catalog.find("mcp.a.record")
        assert theirs is not None
        assert text_of(await theirs.session.call("record", {"text": "x"}, seconds=CALL_S)) == "recorded x"


async def test_a_credential_that_was_moved_to_another_owner_or_url_is_not_sent(
    pool: Pool, owner_id: UUID
) -> None:
    async with desk_of(pool, owner_id) as desk:
        agent_id = await desk.agent(URL, "a")
        await pool.execute("update agent_servers set url = $1", URL + "/elsewhere")
        async with desk.of_agent(agent_id) as moved:
            assert moved == OwnServers({}, {"a": Reason.NO_CREDENTIAL})
