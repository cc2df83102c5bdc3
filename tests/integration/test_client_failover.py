"""Two gateways and one worker on the same stores, and a client that knows both: each gateway dies in turn.

Whatever dies: every follower sees 1..n once and in order and within seconds, typed calls go on, creates among
them, and none is doubled.
"""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import asyncpg
import pytest
from forked import Service
from scripted_runs import DONE, POLL_S, Reader, follow, log_of, make_agent, note, start_run
from tests.integration.conftest import GatewayProcess, StartGateway, Stores
from tests.integration.wire_artifacts import keep_artifact

from espalier_client import AepClient, Cause, TransportError
from espalier_protocol.ids import from_wire
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WAIT_S = 40.0
CALL_WAIT_S = 15.0
MOVES_WITHIN_S = 8.0
"""How long after the death of its gateway a follower may see nothing of a run that goes on all the time."""

PLAN_DELAY_S = 0.1
LONG_PLAN = [note(f"{number}.md", delay_s=PLAN_DELAY_S) for number in range(300)] + [DONE]
"""Goes on for longer than any test looks, which then cancels it."""

FOLLOWERS = 6
CALLERS = 4


@dataclass
class Pair:
    """Two gateways, and a client that was given both."""

    gateways: list[GatewayProcess]
    client: AepClient
    start: StartGateway

    async def restart(self, place: int) -> None:
        """Where it was before."""
        port = int(self.gateways[place].base_url.rsplit(":")[-1])
        self.gateways[place] = await self.start(port=port)

    def kill(self, place: int) -> None:
        self.gateways[place].service.kill()


@pytest.fixture
async def pair(
    start: Callable[..., Service], start_gateway: StartGateway, api_key: str
) -> AsyncIterator[Pair]:
    start("worker", ESPALIER_MODELS_SCRIPTED="on")
    gateways = [await start_gateway() for _ in range(2)]
    async with AepClient([gateway.base_url for gateway in gateways], api_key) as client:
        yield Pair(gateways, client, start_gateway)


async def all_move(pool: Pool, readers: list[Reader], within_s: float = MOVES_WITHIN_S) -> None:
    """Wait until each of them has seen something that happens from now on."""
    last = await pool.fetchval("select max(seq) from events")
    with anyio.fail_after(within_s):
        while any(len(reader.events) <= last for reader in readers):
            await anyio.sleep(POLL_S)


async def test_followers_see_everything_once_while_their_gateways_die_in_turn(pair: Pair, pool: Pool) -> None:
    with anyio.fail_after(WAIT_S):
        run = await start_run(pair.client, LONG_PLAN)
        async with anyio.create_task_group() as group:
            readers = follow(group, pair.client, [run.id] * FOLLOWERS)
            await all_move(pool, readers)
            for place in (0, 1, 0):
                pair.kill(place)
                await all_move(pool, readers)
                await pair.restart(place)
            await pair.client.run_cancel(run.id)

    log = await log_of(pool, run.id)
    assert [seq for seq, _, _ in log] == list(range(1, len(log) + 1))
    assert log[-1][1] == "run.ended"
    assert [reader.log for reader in readers] == [log] * FOLLOWERS


@dataclass
class Caller:
    """Makes agents and reads them all the time."""

    client: AepClient
    made: list[str] = field(default_factory=list)
    enough: bool = False

    async def call(self) -> None:
        while not self.enough:
            agent_id = (await make_agent(self.client)).id
            assert (await self.client.agent_get(agent_id)).id == agent_id
            self.made.append(agent_id)

    async def advances(self, count: int) -> None:
        """Wait until it made so many more agents."""
        wanted = len(self.made) + count
        while len(self.made) < wanted:
            await anyio.sleep(POLL_S)


async def all_advance(callers: list[Caller], count: int) -> None:
    with anyio.fail_after(MOVES_WITHIN_S):
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(caller.advances, count)


async def test_calls_go_on_while_gateways_die_in_mid_call_and_no_create_is_doubled(
    pair: Pair, pool: Pool
) -> None:
    """No call fails, and each create is one row: those that were lost are asked for again under their key."""
    callers = [Caller(pair.client) for _ in range(CALLERS)]
    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(caller.call)
            await all_advance(callers, 3)
            for place in (0, 1) * 2:
                pair.kill(place)
                await all_advance(callers, 3)
                await pair.restart(place)
            for caller in callers:
                caller.enough = True

    made = [from_wire("agt", agent_id) for caller in callers for agent_id in caller.made]
    assert len(set(made)) == len(made)
    assert {row["id"] for row in await pool.fetch("select id from agents")} == set(made)


async def test_a_read_and_a_create_go_on_when_their_gateway_dies_in_the_middle_of_them(
    pair: Pair, pool: Pool, stores: Stores
) -> None:
    agent = await make_agent(pair.client)
    read: list[str] = []
    made: list[str] = []

    async def reader() -> None:
        read.append((await pair.client.agent_get(agent.id)).id)

    async def maker() -> None:
        made.append((await make_agent(pair.client)).id)

    with anyio.fail_after(CALL_WAIT_S):
        async with anyio.create_task_group() as group, agents_locked(stores.postgres_url):
            group.start_soon(reader)
            group.start_soon(maker)
            await _kill_when_calls_wait(pair, pool, 2)
            assert (read, made) == ([], [])

    assert read == [agent.id]
    ids = [row["id"] for row in await pool.fetch("select id from agents order by created_at")]
    assert ids == [from_wire("agt", each) for each in (agent.id, *made)]


@asynccontextmanager
async def agents_locked(postgres_url: str) -> AsyncIterator[None]:
    """Every call that looks at an agent waits for the end of this."""
    connection = await asyncpg.connect(postgres_url)
    try:
        async with connection.transaction():
            await connection.execute("lock table agents in access exclusive mode")
            yield
    finally:
        await connection.close()


async def _kill_when_calls_wait(pair: Pair, pool: Pool, count: int) -> None:
    waiting = "select count(*) from pg_locks where relation = 'agents'::regclass and not granted"
    while await pool.fetchval(waiting) < count:
        await anyio.sleep(POLL_S)
    pair.kill(0)


async def test_a_create_at_a_frozen_gateway_is_made_once_at_the_other_one(
    pair: Pair, pool: Pool, monkeypatch: pytest.MonkeyPatch, api_key: str
) -> None:
    """The kernel took it, so that the frozen one hears it later: it finds that it was done already."""
    monkeypatch.setattr("espalier_client.transport.ANSWER_TIMEOUT_S", 1.0)
    async with AepClient(pair.client.base_urls, api_key) as client:
        first = await make_agent(client)
        with anyio.fail_after(CALL_WAIT_S):
            with pair.gateways[0].service.frozen():
                second = await make_agent(client)
            async with AepClient(pair.client.base_urls[0], api_key) as thawed:
                third = await make_agent(thawed)

    ids = {row["id"] for row in await pool.fetch("select id from agents")}
    assert ids == {from_wire("agt", each.id) for each in (first, second, third)}


async def test_without_any_gateway_a_call_ends_with_one_sentence_and_a_stream_waits(
    pair: Pair, pool: Pool
) -> None:
    with anyio.fail_after(WAIT_S):
        run = await start_run(pair.client, LONG_PLAN)
        async with anyio.create_task_group() as group:
            (reader,) = follow(group, pair.client, [run.id])
            await all_move(pool, [reader])
            pair.kill(0)
            pair.kill(1)
            with pytest.raises(TransportError) as caught:
                await make_agent(pair.client)
            await pair.restart(1)
            await all_move(pool, [reader], within_s=15.0)
            await pair.client.run_cancel(run.id)

    urls = ", ".join(pair.client.base_urls)
    assert str(caught.value).startswith(f"None of the gateways {urls} answers: The runtime at ")
    assert caught.value.cause is Cause.unsent
    assert reader.log == await log_of(pool, run.id)


async def test_a_download_goes_on_at_the_other_gateway(pair: Pair, pool: Pool) -> None:
    """It is larger than what sockets hold, so that the rest cannot have been on its way already."""
    content = random.Random(1).randbytes(30_000_000)
    with anyio.fail_after(WAIT_S):
        run = await start_run(pair.client, [DONE])
        artifact_id = await keep_artifact(pool, run.id, content)
        pieces = pair.client.artifact_bytes(artifact_id)
        got = await anext(pieces)
        pair.kill(0)
        got += b"".join([piece async for piece in pieces])

    assert got == content
