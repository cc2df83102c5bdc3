"""Following runs on real servers: every reader gets every event once and in order, whatever Redis forgets."""

import os
import random
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import anyio
import psutil
import pytest
from anyio.abc import TaskGroup
from redis.asyncio import Redis
from tests.integration.conftest import Stores

from espalier_acts.agents import create_agent
from espalier_acts.log import write_entries
from espalier_acts.runs import RunOrder, cancel_run, create_run
from espalier_domain.errors import Unavailable
from espalier_domain.journal import LimitReached
from espalier_domain.progress import Progress
from espalier_eventlog import DATA_FIELD, TYPE_FIELD, stream_key
from espalier_eventlog.tail import ANSWER_S, BLOCK_S, StreamReader
from espalier_gateway.following import Pace
from espalier_gateway.sse import event_stream
from espalier_gateway.tails import BUFFER_EVENTS_MAX, CHECK_EVERY_S, SILENCE_S, Tail, Tails
from espalier_local.folder import throwaway_folder
from espalier_local.keys import create_key
from espalier_local.servers import local_servers
from espalier_protocol.access import SCOPES
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.events import EventLine, NumberedEvent
from espalier_protocol.ids import from_wire, to_wire
from espalier_secrets import fingerprint
from espalier_store.events import open_log
from espalier_store.ids import new_id
from espalier_store.keys import find_key
from espalier_store.migrate import migrate
from espalier_store.pool import Pool, PostgresSettings, open_pool, transaction
from espalier_store.runs import lock_run

pytestmark = pytest.mark.anyio

SOON_S = 20.0
POLL_S = 0.005
WITHOUT_REDIS_S = CHECK_EVERY_S + SILENCE_S + 1.0
ANYBODY = AgentCreate(
    name="anybody",
    constitution=Constitution(immutable_directives="", mutable_prompt="", mutable_prompt_policy="auto"),
    toolset=[],
    ceilings=Ceilings(max_cycles=5, max_subagents=0, max_tool_calls_per_cycle=4, max_wall_seconds=600),
    budgets=Budgets(tokens_per_cycle=1000, tool_calls_per_cycle=4, seconds_per_cycle=10),
)


async def comes_true(question: Callable[[], bool], within_s: float = SOON_S) -> None:
    with anyio.fail_after(within_s):
        while not question():
            await anyio.sleep(POLL_S)


@dataclass
class Run:
    """A run whose log the test writes, as its worker would, and publishes as far as the test wants."""

    pool: Pool
    redis: Redis
    prefix: str
    owner_id: UUID
    run_id: UUID
    progress: Progress = field(default_factory=Progress)
    last: int = 0

    async def emit(self, count: int = 1, *, publish: bool = True, say: str = "so") -> None:
        async with transaction(self.pool) as connection:
            locked = await lock_run(connection, self.owner_id, self.run_id)
            assert locked is not None
            entry = LimitReached(None, "budget_exhausted", say)
            entries = (entry,) * count
            written = await write_entries(
                connection, locked, self.progress, entries, release=True, lease_ttl_s=0.0
            )
        self.progress = written.progress
        await self.publish(written.events if publish else ())

    async def end(self, *, publish: bool = True) -> None:
        async with transaction(self.pool) as connection:
            written = await cancel_run(connection, self.owner_id, self.run_id)
        assert written is not None
        self.last = written.events[-1].seq
        await self.publish(written.events if publish else ())

    async def note_own(self) -> None:
        """An event of a type that only those get who negotiated it."""
        async with transaction(self.pool) as connection:
            statement = (
                "update runs set next_seq = next_seq + 1 where id = $1 returning next_seq - 1 as seq, now()"
            )
            row = await connection.fetchrow(statement, self.run_id)
            assert row is not None
            noted = NumberedEvent(row["seq"], "espalier.spend.noted", row["now"], "{}")
            await connection.execute(
                "insert into events (run_id, owner_id, seq, type, payload, emitted_at)"
                " values ($1, $2, $3, $4, $5, $6)",
                *(self.run_id, self.owner_id, noted.seq, noted.type, noted.payload, noted.emitted_at),
            )
        await self.publish((noted,))

    async def publish(self, events: Sequence[NumberedEvent]) -> None:
        for event in events:
            line = event.line(to_wire("run", self.run_id))
            entry: dict[Any, Any] = {TYPE_FIELD: line.type, DATA_FIELD: line.data}
            await self.redis.xadd(self.key, entry, id=f"{line.seq}-0")

    @property
    def key(self) -> str:
        return stream_key(self.prefix, self.run_id)


@dataclass
class Reader:
    """One connection: what it got, parsed as strictly as the framing is promised."""

    events: list[tuple[int, str, str]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    over: bool = False

    @property
    def seqs(self) -> list[int]:
        return [seq for seq, _, _ in self.events]

    @property
    def last_word(self) -> str:
        return self.comments[-1]

    def take(self, chunk: bytes) -> None:
        text = chunk.decode()
        assert text.endswith("\n\n") and "\r" not in text
        for block in text.removesuffix("\n\n").split("\n\n"):
            match block.split("\n"):
                case [number, type_, data] if number.startswith("id: "):
                    assert type_.startswith("event: ") and data.startswith("data: ")
                    self.events.append((int(number[4:]), type_[7:], data[6:]))
                case lines:
                    self.comments += [each[2:] for each in lines if each.startswith(": ")]


@dataclass
class Following:
    """The reading half of a gateway: its tails, and the streams that its clients have open."""

    tails: Tails
    run: Run
    group: TaskGroup
    allowed: bool = True

    async def still_allowed(self) -> bool:
        return self.allowed

    async def stream(
        self, since: int = 0, *, own_events: bool = False, pace: Pace | None = None
    ) -> AsyncGenerator[bytes, None]:
        run = self.run
        async with transaction(run.pool) as connection:
            log = await open_log(connection, run.owner_id, run.run_id, since)
        assert log is not None
        return event_stream(
            self.tails,
            run.pool,
            run.owner_id,
            run.run_id,
            log,
            since=since,
            own_events=own_events,
            still_allowed=self.still_allowed,
            pace=pace,
        )

    async def read(self, reader: Reader, since: int = 0, **options: object) -> None:
        async with aclosing(await self.stream(since, **options)) as stream:  # type: ignore[arg-type]
            async for chunk in stream:
                reader.take(chunk)
        reader.over = True

    def open(self, since: int = 0, *, own_events: bool = False, pace: Pace | None = None) -> Reader:
        reader = Reader()
        self.group.start_soon(lambda: self.read(reader, since, own_events=own_events, pace=pace))
        return reader

    async def whole(self, since: int = 0) -> Reader:
        """A reading of a run that has ended."""
        reader = Reader()
        with anyio.fail_after(SOON_S):
            await self.read(reader, since)
        return reader

    @property
    def is_clean(self) -> bool:
        pool = self.run.pool
        idle = pool.get_size() == pool.get_idle_size()
        return self.tails.followed == 0 and self.tails.reader.watched == 0 and idle


async def new_run(pool: Pool, redis: Redis, prefix: str, api_key: str) -> Run:
    async with transaction(pool) as connection:
        caller = await find_key(connection, fingerprint(api_key))
        assert caller is not None
        agent = await create_agent(connection, caller.owner_id, ANYBODY)
        agent_id = from_wire("agt", agent.id)
        assert agent_id is not None
        _, written = await create_run(connection, caller.owner_id, RunOrder(agent_id, "talk", {}, []))
    run = Run(pool, redis, prefix, caller.owner_id, written.run_id, written.progress)
    await run.publish(written.events)
    return run


@asynccontextmanager
async def reading(pool: Pool, redis_url: str, prefix: str, api_key: str) -> AsyncIterator[Following]:
    """Tails that run and one run to follow; what a test leaves open is closed as a disconnect would."""
    async with Redis.from_url(redis_url) as redis:
        run = await new_run(pool, redis, prefix, api_key)
        tails = Tails(pool, redis_url, prefix, anyio.Event())
        async with anyio.create_task_group() as group:
            await group.start(tails.run)
            async with anyio.create_task_group() as clients:
                yield Following(tails, run, clients)
                clients.cancel_scope.cancel()
            group.cancel_scope.cancel()


@pytest.fixture
async def following(pool: Pool, stores: Stores, api_key: str) -> AsyncIterator[Following]:
    async with reading(pool, stores.redis_url, stores.redis_prefix, api_key) as opened:
        yield opened


@pytest.fixture
async def lonely(pool: Pool, stores: Stores, api_key: str) -> AsyncIterator[tuple[Following, str]]:
    """The same with a Redis of its own, to be flushed and killed."""
    with throwaway_folder() as folder:
        async with (
            local_servers(folder, postgres_url=stores.postgres_url) as servers,
            reading(pool, servers.redis_url, stores.redis_prefix, api_key) as opened,
        ):
            yield opened, servers.redis_url


async def joined(following: Following, *readers: Reader, at: int = 1) -> None:
    """The readers have caught up: what they get from now on comes from the tail."""
    await comes_true(lambda: all(reader.seqs[-1:] == [at] for reader in readers))


def upto(last: int, first: int = 1) -> list[int]:
    return list(range(first, last + 1))


# --- the way it goes --------------------------------------------------------------------------------------


async def test_a_live_stream_carries_each_event_as_it_is_written_and_ends_with_the_run(
    following: Following,
) -> None:
    reader = following.open()
    await joined(following, reader)
    for last in range(2, 12):
        await following.run.emit()
        await joined(following, reader, at=last)
    await following.run.end()
    await comes_true(lambda: reader.over)
    assert reader.seqs == upto(12)
    assert [type_ for _, type_, _ in reader.events] == ["run.started", *["error"] * 10, "run.ended"]
    assert reader.comments == ["espalier"]


async def test_replay_from_every_cursor_is_a_suffix_of_the_whole_and_then_ends(following: Following) -> None:
    await following.run.emit(20)
    await following.run.end()
    whole = await following.whole()
    assert whole.seqs == upto(22)
    for since in range(23):
        part = await following.whole(since)
        assert part.events == whole.events[since:]
    assert following.is_clean


async def test_a_replay_longer_than_many_pages_is_whole(following: Following) -> None:
    await following.run.emit(1_234)
    await following.run.end()
    assert (await following.whole()).seqs == upto(1_236)


async def test_live_replayed_and_resumed_readings_are_the_same_bytes(following: Following) -> None:
    live = following.open()
    await joined(following, live)
    for _ in range(5):
        await following.run.emit(3)
    await following.run.end()
    await comes_true(lambda: live.over)
    assert (await following.whole()).events == live.events
    assert (await following.whole(7)).events == live.events[7:]


@pytest.mark.slow
async def test_late_joiners_of_a_fast_run_each_get_every_event_once(following: Following) -> None:
    chance = random.Random(2)
    run, readers = following.run, [following.open()]
    written = 1
    while written < 500:
        count = chance.randint(1, 9)
        await run.emit(count)
        written += count
        if chance.random() < 0.5:
            since = chance.randint(0, written)
            readers.append(following.open(since))
            readers[-1].comments.append(str(since))
    await run.end()
    await comes_true(lambda: all(reader.over for reader in readers))
    assert len(readers) > 20
    assert readers[0].seqs == upto(run.last)
    for reader in readers[1:]:
        assert reader.seqs == upto(run.last, first=int(reader.comments[0]) + 1)
    await comes_true(lambda: following.is_clean)


@pytest.mark.slow
async def test_two_hundred_followers_of_one_run_share_one_tail_and_hold_no_connection(
    following: Following,
) -> None:
    readers = [following.open() for _ in range(200)]
    await joined(following, *readers)
    assert following.tails.followed == following.tails.reader.watched == 1
    assert following.run.pool.get_size() == following.run.pool.get_idle_size()
    for _ in range(30):
        await following.run.emit(2)
    await following.run.end()
    await comes_true(lambda: all(reader.over for reader in readers))
    assert all(reader.seqs == upto(62) for reader in readers)
    assert len({tuple(reader.events) for reader in readers}) == 1


async def test_many_runs_are_followed_over_few_connections(
    following: Following, pool: Pool, api_key: str
) -> None:
    first = following.run
    runs = [first, *[await new_run(pool, first.redis, first.prefix, api_key) for _ in range(7)]]
    readers = []
    for run in runs:
        following.run = run
        readers.append(following.open())
    await joined(following, *readers)
    for run in runs:
        await run.emit(3)
        await run.end()
    await comes_true(lambda: all(reader.over for reader in readers))
    assert all(reader.seqs == upto(5) for reader in readers)
    await comes_true(lambda: following.is_clean)


async def test_a_new_watch_interrupts_the_read_that_its_connection_is_in(
    following: Following, stores: Stores
) -> None:
    reader = StreamReader(stores.redis_url, stores.redis_prefix, connections=1)
    heard: list[EventLine] = []
    async with anyio.create_task_group() as group:
        group.start_soon(reader.run)
        for _ in range(5):
            reader.watch(new_id(), 0, heard.extend)  # silent: from here on the connection waits for BLOCK_S
            with anyio.fail_after(BLOCK_S / 2):
                heard.clear()
                reader.watch(following.run.run_id, 0, heard.extend)
                while not heard:
                    await anyio.sleep(POLL_S)
            assert [line.type for line in heard] == ["run.started"]
            reader.unwatch(following.run.run_id)
        group.cancel_scope.cancel()
    assert reader.watched == 5


# --- what Redis forgets -----------------------------------------------------------------------------------


async def test_a_hole_in_redis_is_filled_from_postgres_in_order(following: Following) -> None:
    readers = [following.open() for _ in range(3)]
    await joined(following, *readers)
    await following.run.emit(5, publish=False)
    await following.run.emit(1)
    await comes_true(lambda: all(reader.seqs == upto(7) for reader in readers), SILENCE_S)


async def test_events_deleted_from_the_stream_are_filled_too(following: Following) -> None:
    run = following.run
    await run.emit(3)
    late = following.open()
    await joined(following, late, at=4)
    await run.emit(2, publish=False)
    await run.redis.delete(run.key)
    await run.emit(2)
    await run.redis.xdel(run.key, "7-0")
    await comes_true(lambda: late.seqs == upto(8), WITHOUT_REDIS_S)


async def test_a_hole_wider_than_a_page_is_filled(following: Following) -> None:
    reader = following.open()
    await joined(following, reader)
    await following.run.emit(1_300, publish=False)
    await following.run.emit(1)
    await comes_true(lambda: reader.seqs == upto(1_302))


async def test_a_last_event_that_redis_never_had_arrives_about_a_second_later(following: Following) -> None:
    reader = following.open()
    await joined(following, reader)
    await following.run.emit(1)
    await joined(following, reader, at=2)
    await following.run.end(publish=False)
    await comes_true(lambda: reader.over, WITHOUT_REDIS_S)
    assert reader.seqs == upto(3)


async def test_lines_in_any_disorder_leave_a_tail_in_order(following: Following) -> None:
    chance = random.Random(5)
    for _ in range(200):
        await _disorder(chance)


async def _disorder(chance: random.Random) -> None:
    """Random lines from Redis, with losses and repeats, and random pages from Postgres."""
    log = [EventLine(seq, "error", "{}") for seq in range(1, chance.randint(2, 40))]
    tail = Tail(new_id(), new_id(), 0, ended=False)
    handed: list[int] = []

    class Listener:
        joined = True

        def feed(self, lines: list[EventLine]) -> None:
            handed.extend(line.seq for line in lines)

    tail.followers.add(Listener())  # type: ignore[arg-type]
    while tail.last < len(log):
        start = chance.randint(0, len(log) - 1)
        tail.offer(
            [line for line in log[start : start + 9] if chance.random() < 0.8] or log[start : start + 1]
        )
        if chance.random() < 0.5:
            tail.filling = not tail.filling
        if tail.has_hole and chance.random() < 0.5:
            assert tail.fill(log[tail.last : tail.last + chance.randint(1, 5)])
        assert handed == upto(tail.last)


async def test_a_flushed_redis_costs_followers_nothing(lonely: tuple[Following, str]) -> None:
    following, _ = lonely
    readers = [following.open() for _ in range(10)]
    await joined(following, *readers)
    for place in range(60):
        await following.run.emit(publish=place % 4 != 0)
        if place % 7 == 0:
            await following.run.redis.flushall()
    await following.run.end()
    await comes_true(lambda: all(reader.over for reader in readers))
    assert all(reader.seqs == upto(62) for reader in readers)


def server_process(url: str) -> psutil.Process:
    port = urlsplit(url).port
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(each.laddr.port == port and each.status == "LISTEN" for each in process.net_connections()):
                return process
    raise AssertionError("no server of ours listens there")


@pytest.mark.slow
async def test_followers_go_on_from_postgres_when_redis_is_killed_and_live_when_it_is_back(
    lonely: tuple[Following, str],
) -> None:
    following, redis_url = lonely
    readers = [following.open() for _ in range(10)]
    await joined(following, *readers)
    server_process(redis_url).kill()
    await following.run.emit(3, publish=False)
    await comes_true(lambda: not following.tails.reader.healthy)
    await joined(following, *readers, at=4)
    late = following.open()
    await joined(following, late, at=4)
    await comes_true(lambda: following.tails.reader.healthy)
    await following.run.redis.connection_pool.disconnect()  # the writer's own, which died with the server
    await following.run.emit(1)
    await comes_true(lambda: all(reader.seqs == upto(5) for reader in [*readers, late]), WITHOUT_REDIS_S)
    await following.run.end()
    await comes_true(lambda: all(reader.over for reader in [*readers, late]))
    assert all(reader.seqs == upto(6) for reader in [*readers, late])


@pytest.mark.slow
async def test_a_redis_that_hangs_is_noticed_and_replaced_by_postgres(lonely: tuple[Following, str]) -> None:
    following, redis_url = lonely
    reader = following.open()
    await joined(following, reader)
    process = server_process(redis_url)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        await following.run.emit(2, publish=False)
        await comes_true(lambda: reader.seqs == upto(3), WITHOUT_REDIS_S)
        await comes_true(lambda: not following.tails.reader.healthy, 2 * ANSWER_S)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    await comes_true(lambda: following.tails.reader.healthy)
    await following.run.end()
    await comes_true(lambda: reader.over)
    assert reader.seqs == upto(4)


# --- what Postgres does -----------------------------------------------------------------------------------


async def test_followers_outlive_the_loss_of_every_database_connection(
    following: Following, stores: Stores
) -> None:
    readers = [following.open() for _ in range(5)]
    await joined(following, *readers)
    statement = (
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )
    async with transaction(following.run.pool) as connection:
        await connection.execute(statement)
    await following.run.emit(2, publish=False)
    await following.run.emit(1)
    await comes_true(lambda: all(reader.seqs == upto(4) for reader in readers), WITHOUT_REDIS_S)


@pytest.mark.slow
async def test_followers_go_on_when_postgres_was_restarted_under_them() -> None:
    with throwaway_folder() as folder:
        async with local_servers(folder) as servers:
            await migrate(servers.postgres_url)
            async with open_pool(PostgresSettings(postgres_url=servers.postgres_url)) as pool:
                async with transaction(pool) as connection:
                    api_key = await create_key(connection, "one", SCOPES)
                async with reading(pool, servers.redis_url, "espalier:", api_key) as following:
                    await _restarts(following, servers.postgres_url)


async def _restarts(following: Following, postgres_url: str) -> None:
    readers = [following.open() for _ in range(20)]
    await joined(following, *readers)
    for how in (signal.SIGQUIT, signal.SIGKILL):  # an immediate shutdown, and a death
        os.kill(server_process(postgres_url).pid, how)
        await _persistently(lambda: following.run.emit(1, publish=False))
    await _persistently(lambda: following.run.end(publish=False))
    await comes_true(lambda: all(reader.over for reader in readers))
    assert all(reader.seqs == upto(following.run.last) for reader in readers)


async def _persistently(act: Callable[[], Awaitable[None]]) -> None:
    """Each connection of the pool may have died and tells so only when it is used."""
    with anyio.fail_after(SOON_S):
        while True:  # bounded by the time limit
            with suppress(Unavailable):
                return await act()
            await anyio.sleep(POLL_S)


async def test_a_log_that_was_pruned_ends_the_reading_instead_of_skipping(following: Following) -> None:
    await following.run.emit(9)
    async with transaction(following.run.pool) as connection:
        await connection.execute("delete from events where seq between 4 and 6")
    reader = following.open()
    await comes_true(lambda: reader.over)
    assert reader.seqs == upto(3) and reader.last_word == "pruned"


async def test_a_log_that_was_pruned_under_a_tail_cuts_its_followers(following: Following) -> None:
    reader = following.open()
    await joined(following, reader)
    await following.run.emit(1, publish=False)
    async with transaction(following.run.pool) as connection:
        await connection.execute("delete from events where seq = 2")
    await following.run.emit(1)
    await comes_true(lambda: reader.over)
    assert reader.seqs == upto(1) and reader.last_word == "pruned"
    await comes_true(lambda: following.is_clean)


async def test_a_run_of_somebody_else_has_no_log_even_while_its_owner_follows(following: Following) -> None:
    reader = following.open()
    await joined(following, reader)
    run = following.run
    async with transaction(run.pool) as connection:
        assert await open_log(connection, new_id(), run.run_id, 0) is None


# --- ends -------------------------------------------------------------------------------------------------


async def read_until_live(reader: Reader, stream: AsyncIterator[bytes]) -> None:
    """Read until the stream has waited in vain, which it does only at the tail."""
    with anyio.fail_after(SOON_S):
        while "heartbeat" not in reader.comments:
            reader.take(await anext(stream))


@pytest.mark.slow
async def test_a_follower_that_does_not_read_is_cut_resumes_and_hurts_nobody(following: Following) -> None:
    others = [following.open() for _ in range(5)]
    await joined(following, *others)
    stalled = Reader()
    async with aclosing(await following.stream(pace=Pace(heartbeat_s=0.05))) as stream:
        await read_until_live(stalled, stream)
        for _ in range(BUFFER_EVENTS_MAX // 100 + 2):
            await following.run.emit(100)
        await following.run.end()
        await comes_true(lambda: all(reader.over for reader in others))
        assert all(reader.seqs == upto(following.run.last) for reader in others)
        await comes_true(lambda: following.is_clean)  # although the stalled stream still stands
        async for chunk in stream:
            stalled.take(chunk)
    assert stalled.seqs == [1] and stalled.last_word == "lagged"
    resumed = await following.whole(1)
    assert stalled.seqs + resumed.seqs == upto(following.run.last)


@pytest.mark.slow
async def test_a_follower_that_does_not_read_is_cut_for_the_size_of_events_too(following: Following) -> None:
    stalled = Reader()
    async with aclosing(await following.stream(pace=Pace(heartbeat_s=0.05))) as stream:
        await read_until_live(stalled, stream)
        for _ in range(12):
            await following.run.emit(1, say="x" * 100_000)
        await comes_true(lambda: following.is_clean)
        async for chunk in stream:
            stalled.take(chunk)
    assert stalled.seqs == [1] and stalled.last_word == "lagged"


async def test_a_follower_that_is_slow_but_reads_gets_bursts_of_any_size(following: Following) -> None:
    reader = following.open()
    await joined(following, reader)
    await following.run.emit(40, publish=False, say="x" * 50_000)
    await following.run.emit(1)
    await comes_true(lambda: reader.seqs == upto(42))


async def test_a_disconnect_frees_tail_watch_and_connections(following: Following) -> None:
    for _ in range(3):
        async with anyio.create_task_group() as clients:
            following.group = clients
            readers = [following.open() for _ in range(20)]
            await comes_true(lambda opened=readers: any(reader.seqs for reader in opened))  # type: ignore[misc]
            clients.cancel_scope.cancel()
        assert following.tails.followed == following.tails.reader.watched == 0
        await comes_true(lambda: following.is_clean)


async def test_closing_ends_every_stream_at_once_and_says_why(following: Following) -> None:
    readers = [following.open() for _ in range(20)]
    await joined(following, *readers)
    following.tails.closing.set()
    await comes_true(lambda: all(reader.over for reader in readers), SILENCE_S)
    assert {reader.last_word for reader in readers} == {"closing"}
    assert following.is_clean


async def test_whoever_comes_after_the_closing_is_sent_what_there_is_and_told_at_once(
    following: Following,
) -> None:
    following.tails.closing.set()
    late = await following.whole()
    assert (late.seqs, late.last_word) == ([1], "closing")


async def test_a_stream_ends_when_its_caller_is_no_longer_allowed(following: Following) -> None:
    reader = following.open(pace=Pace(heartbeat_s=SOON_S, recheck_s=0.05))
    await joined(following, reader)
    await following.run.emit(1)
    await joined(following, reader, at=2)
    following.allowed = False
    await comes_true(lambda: reader.over)
    assert reader.last_word == "no longer allowed"


async def test_silence_is_filled_with_comments(following: Following) -> None:
    reader = following.open(pace=Pace(heartbeat_s=0.05))
    await comes_true(lambda: reader.comments.count("heartbeat") >= 3)
    assert reader.seqs == [1]


async def test_own_events_are_counted_for_all_and_shown_to_those_who_negotiated_them(
    following: Following,
) -> None:
    plain, full = following.open(), following.open(own_events=True)
    await joined(following, plain, full)
    await following.run.note_own()
    await following.run.emit(1)
    await following.run.end()
    await comes_true(lambda: plain.over and full.over)
    assert plain.seqs == [1, 3, 4]
    assert full.seqs == [1, 2, 3, 4]
