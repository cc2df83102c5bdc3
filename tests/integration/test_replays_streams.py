"""Faults of other people's event streams: readers that are told of others' runs, too little, or too much.

Each test is about a whole kind of fault; docs/reliability/replays.md says which reports it stands for.
"""

import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import anyio
import httpx2
import pytest
from anyio.abc import SocketAttribute, SocketStream
from invariants import violations
from scripted_runs import DONE, Plan, log_of, make_agent, note, start_run
from tests.integration.conftest import Start, StartGateway, Stores
from tests.integration.wire import Gateway, Wire
from tests.integration.wire_runs import uuid

from espalier_acts.log import tell_live_run, write_entries
from espalier_acts.runs import cancel_run
from espalier_client.client import AepClient
from espalier_domain.journal import LimitReached, PromptModified
from espalier_domain.progress import Progress
from espalier_local.keys import create_key
from espalier_protocol.access import SCOPES
from espalier_store.events import events_after
from espalier_store.pool import Connection, Pool, transaction
from espalier_store.runs import lock_run

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(120)]

WAIT_S = 50.0
POLL_S = 0.005
READERS = 12
RUNS = 3
REDIS_ROUND_TRIP_S = 0.02
ON = {"ESPALIER_MODELS_SCRIPTED": "on"}
UNLIMITED = {"ESPALIER_RPC_RATE": "100000", "ESPALIER_RPC_BURST": "100000"}
DICE = 20260301
FRAME = re.compile(r"id: (\d{16})\nevent: (\S+)\ndata: (.*)\n\n")


# ------------------------------------------------------------------ a slow line to Redis


@asynccontextmanager
async def slow_line(url: str, delay_s: float) -> AsyncIterator[str]:
    """The same Redis, each piece of whose answers is late: the moment in which a command can be cancelled."""
    parts = urlsplit(url)

    async def forward(source: SocketStream, target: SocketStream, late_s: float) -> None:
        try:
            async for piece in source:
                await anyio.sleep(late_s)
                await target.send(piece)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        await source.aclose()
        await target.aclose()

    async def serve(caller: SocketStream) -> None:
        server = await anyio.connect_tcp(str(parts.hostname), int(parts.port or 0))
        async with caller, server, anyio.create_task_group() as both:
            both.start_soon(forward, caller, server, 0)
            both.start_soon(forward, server, caller, delay_s)

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610
        group.start_soon(listener.serve, serve)
        password = f":{parts.password}@" if parts.password else ""
        yield parts._replace(netloc=f"{password}127.0.0.1:{port}").geturl()
        group.cancel_scope.cancel()


@pytest.fixture
async def stores(stores: Stores) -> AsyncIterator[Stores]:
    async with slow_line(stores.redis_url, REDIS_ROUND_TRIP_S) as url:
        yield replace(stores, redis_url=url)


# ------------------------------------------------------------------ readers that leave


@dataclass
class Leaver:
    """A reader that hangs up again and again in the middle of whatever it is sent, and resumes."""

    wire: Wire
    run_id: str
    dice: random.Random
    events: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    visits: int = 0

    @property
    def is_done(self) -> bool:
        return bool(self.events) and self.events[-1][1] == "run.ended"

    async def read(self) -> None:
        while not self.is_done:  # bounded by the test
            self.visits += 1
            with anyio.move_on_after(self.dice.choice([0.01, 0.03, 0.1, 0.5])):
                await self._visit()

    async def _visit(self) -> None:
        since, text = (self.events[-1][0] if self.events else 0), ""
        path = f"/aep/v1/runs/{self.run_id}/events?since={since}"
        async with self.wire.http.stream("GET", path, headers=self.wire.headers()) as response:
            assert response.status_code == 200, await response.aread()
            async for piece in response.aiter_text():
                text += piece
                frames = list(FRAME.finditer(text))
                self.events += [(int(m[1]), m[2], json.loads(m[3])) for m in frames]
                text = text[frames[-1].end() :] if frames else text


@dataclass
class Tenant:
    wire: Wire
    client: AepClient
    runs: list[str] = field(default_factory=list)


@asynccontextmanager
async def tenant(base_url: str, pool: Pool, owner: str) -> AsyncIterator[Tenant]:
    async with transaction(pool) as connection:
        key = await create_key(connection, owner, SCOPES)
    limits = httpx2.Limits(max_connections=500)
    async with (
        AepClient(base_url, key) as client,
        httpx2.AsyncClient(base_url=base_url, limits=limits, timeout=WAIT_S, trust_env=False) as http,
    ):
        wire = Wire(http, key)
        await wire.begin()
        yield Tenant(wire, client)


async def test_readers_that_hang_up_at_any_moment_never_get_what_is_another_runs(
    start: Start, start_gateway: StartGateway, pool: Pool
) -> None:
    gateway = await start_gateway(**UNLIMITED)
    start("worker", **ON)
    dice = random.Random(DICE)
    async with tenant(gateway.base_url, pool, "one") as one, tenant(gateway.base_url, pool, "two") as two:
        leavers: list[Leaver] = []
        for which, each in enumerate([one, two]):
            agent_id = (await make_agent(each.client)).id
            for number in range(RUNS):
                plan: Plan = [*[note(f"of {which}, {number}: {n}", delay_s=0.1) for n in range(25)], DONE]
                each.runs.append((await start_run(each.client, plan, agent_id)).id)
            leavers += [Leaver(each.wire, run, random.Random(dice.random())) for run in each.runs * READERS]
        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as group:
                for leaver in leavers:
                    group.start_soon(leaver.read)

        whole = {run: await log_of(pool, run) for run in [*one.runs, *two.runs]}
        for leaver in leavers:
            told = [(seq, kind, event["payload"]) for seq, kind, event in leaver.events]
            assert told == whole[leaver.run_id]
            assert {event["run_id"] for _, _, event in leaver.events} == {leaver.run_id}
        assert min(leaver.visits for leaver in leavers) > 3, "they did leave"
        # Whoever comes last finds a gateway that is as quick as before.
        with anyio.fail_after(2):
            await one.client.run_get(one.runs[0])
    assert "Traceback" not in gateway.service.output()
    assert await violations(pool) == {}


# ------------------------------------------------------------------ numbers and commits


@dataclass
class Log:
    """A run without a worker, to whose log a test writes as each kind of writer of the product does."""

    owner_id: UUID
    agent_id: UUID
    run_id: UUID

    async def step(self, connection: Connection) -> None:
        """As a worker's step, or an act on a run that nobody holds."""
        locked = await lock_run(connection, self.owner_id, self.run_id)
        assert locked is not None
        entries = (LimitReached(None, "budget_exhausted", "so"),) * 3
        await write_entries(connection, locked, Progress(), entries, release=True, lease_ttl_s=0.0)

    async def notice(self, connection: Connection) -> None:
        """As somebody who may tell a run of something that another holds."""
        notices = (PromptModified("diff", "embedder", "key"),)
        assert await tell_live_run(connection, self.owner_id, self.agent_id, notices, run_id=self.run_id)

    async def end(self, connection: Connection) -> None:
        assert await cancel_run(connection, self.owner_id, self.run_id)

    async def seen(self, pool: Pool, after: int) -> list[int]:
        """What a reader is given who asks for what comes after `after`."""
        async with transaction(pool) as connection:
            return [each.seq for each in await events_after(connection, self.owner_id, self.run_id, after)]


WAITING = """
select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'
"""
WRITES = {"step": 3, "notice": 1, "end": 1}


@pytest.mark.parametrize("second", ["step", "notice", "end"])
@pytest.mark.parametrize("first", ["step", "notice"])
async def test_a_number_is_seen_after_all_smaller_ones_whoever_commits_first(
    first: str, second: str, pool: Pool, owner_id: UUID, gateway: Gateway
) -> None:
    """One has its numbers and has not committed: whoever writes then waits, and nobody reads past it."""
    wire = await gateway.caller("one")
    agent = await wire.agent()
    log = Log(owner_id, uuid("agt", agent), uuid("run", await wire.run(agent)))
    first_seqs = [2 + n for n in range(WRITES[first])]
    second_seqs = [first_seqs[-1] + 1 + n for n in range(WRITES[second])]

    async def write_second() -> None:
        async with transaction(pool) as connection:
            await getattr(log, second)(connection)

    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            async with transaction(pool) as connection:
                await getattr(log, first)(connection)
                group.start_soon(write_second)
                while not await pool.fetchval(WAITING):
                    assert await log.seen(pool, 1) == []
                    await anyio.sleep(POLL_S)
                assert await log.seen(pool, 1) == []
            assert (await log.seen(pool, 1))[: len(first_seqs)] == first_seqs
    assert await log.seen(pool, 1) == first_seqs + second_seqs
    assert await log.seen(pool, first_seqs[-1]) == second_seqs
