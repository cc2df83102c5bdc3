"""The processes of the simulation: workers, a gateway, a broker, Redis, followers; and what is outside.

Each is a set of half-steps: what a process does between two moments at which it may be killed, stalled or
overtaken. The half-steps call the product: `held.claim`, `Held`, `Draft`, the acts, the sweeper, the wakes
and the tails are the real ones, over `connections.ModelPool`. Modelled here are the loops around them
(`run_worker.cycle.live`, `supervisor`, `brokered_calls`, `mcp_broker.calls`, `gateway.following`), the model,
the tools, and Redis at the publisher's interface. No half-step waits for anything.
"""

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast
from uuid import UUID

import anyio.lowlevel
from tests.simulation.connections import ModelPool, as_pool
from tests.simulation.database import Database, Guard, new_agent

from espalier_acts.calls import DOUBT_GRACE_S, SETTLED
from espalier_acts.messages import MessageOrder, send_message, wake_for_message
from espalier_acts.runs import RunOrder, cancel_run, continue_run, create_run
from espalier_domain.errors import DomainError, FenceReached, LeaseLost, Unavailable
from espalier_domain.journal import (
    Entry,
    LimitReached,
    ModelAnswered,
    ModelFailed,
    ToolCall,
)
from espalier_domain.run import CallBroker, CallModel, CallSelf
from espalier_domain.tool_results import SettledState, shown, text_result
from espalier_eventlog.publisher import Publisher, StreamsAway
from espalier_gateway.tails import Follower, Tail, lines_of, read_page
from espalier_protocol.agent import Budgets, Ceilings
from espalier_protocol.events import EventLine, NumberedEvent
from espalier_protocol.ids import to_wire
from espalier_protocol.strict_json import dumps
from espalier_run_worker import sweeper
from espalier_run_worker.brokered_calls import (
    AWAY_S_MAX,
    SILENT_TWICE_S,
    UNMADE,
    Outcome,
    commit_outcomes,
)
from espalier_run_worker.draft import Draft
from espalier_run_worker.held import Held, claim
from espalier_run_worker.self_tools import Outcome as SelfOutcome
from espalier_run_worker.self_tools import SelfTools, control, messages, spawn
from espalier_run_worker.self_tools.tool import SelfTool, ToolRefused, Under
from espalier_run_worker.tool_calls import run_calls
from espalier_store.events import open_log
from espalier_store.fleet import (
    delete_published,
    due_runs,
    held_states,
    last_seqs,
    renew_broker,
    renew_leases,
)
from espalier_store.pool import reading, transaction
from espalier_store.tool_calls import doubt_call, get_calls, send_call, settle_call

OWNER: Final = UUID(int=1)
LEASE_TTL_S: Final = 4.0
BROKER_LIFE_S: Final = 3.0
FORCE_AFTER_S: Final = 4.5
SLOTS: Final = 3
CEILINGS: Final = Ceilings(max_cycles=6, max_subagents=2, max_tool_calls_per_cycle=4, max_wall_seconds=5_000)
BUDGETS: Final = Budgets(tokens_per_cycle=14_000, tool_calls_per_cycle=3, seconds_per_cycle=120)

SELF_TOOLS: Final = {tool.definition.name: tool for tool in (*control.TOOLS, *messages.TOOLS, *spawn.TOOLS)}
SPAWN_ARGS: Final[dict[str, Any]] = {
    "name": "helper",
    "constitution": {"immutable_directives": "", "mutable_prompt": ""},
    "toolset_subset": [],
    "initial_goal": "help",
    "ceilings": {
        "max_cycles": 2,
        "max_subagents": 0,
        "max_tool_calls_per_cycle": 3,
        "max_wall_seconds": 2_000,
    },
    "budgets": {"tokens_per_cycle": 9_000, "tool_calls_per_cycle": 2, "seconds_per_cycle": 60},
}

AnswerKind = Literal[
    "complete",
    "sleep",
    "continue",
    "act",
    "act twice",
    "too many acts",
    "send",
    "spawn",
    "spawn much",
    "inbox",
    "inbox and sleep",
    "empty",
    "fail",
    "fail for good",
    "costly",
]
CALLS: Final[dict[AnswerKind, tuple[tuple[str, dict[str, Any]], ...]]] = {
    "sleep": (("sleep", {"duration_seconds": 5}),),
    "continue": (("continue_now", {}),),
    "act": (("espalier.act", {}),),
    "act twice": (("espalier.act", {}), ("espalier.act", {}), ("inbox_read", {})),
    "too many acts": (("inbox_read", {}), *(("espalier.act", {}),) * 4),
    "spawn": (("spawn_subagent", SPAWN_ARGS),),
    "spawn much": (("spawn_subagent", SPAWN_ARGS),) * 3,
    "inbox": (("inbox_read", {}),),
    "inbox and sleep": (("inbox_read", {}), ("sleep", {"duration_seconds": 200})),
    "costly": (("continue_now", {}),),
}


class Violation(AssertionError):
    """An invariant of the reliability contract does not hold. The text begins with its id."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


# ---------------------------------------------------------------- Redis, at the publisher's interface


class Streams:
    """One stream per run. An entry that is not above the last one is refused; a flush forgets that too."""

    def __init__(self) -> None:
        self.away = False
        self._entries: dict[UUID, list[NumberedEvent]] = {}

    def add(self, run_id: UUID, events: Sequence[NumberedEvent]) -> None:
        if self.away:
            raise StreamsAway
        stream = self._entries.setdefault(run_id, [])
        for event in events:
            if not stream or stream[-1].seq < event.seq:
                stream.append(event)

    def after(self, run_id: UUID, seq: int) -> list[NumberedEvent]:
        if self.away:
            return []
        return [event for event in self._entries.get(run_id, ()) if event.seq > seq]

    def flush(self) -> None:
        self._entries.clear()


class Courier:
    """`Publisher` with its queue laid open: each act is carried, and acknowledged, by a half-step."""

    def __init__(self, streams: Streams) -> None:
        self.acts: deque[tuple[UUID, int, tuple[NumberedEvent, ...]]] = deque()
        self.sent: list[int] = []
        self._streams = streams

    @asynccontextmanager
    async def in_order(self, _: UUID) -> AsyncIterator[None]:
        """Nothing else runs in this process during a half-step."""
        yield

    def publish(self, run_id: UUID, outbox_id: int | None, events: tuple[NumberedEvent, ...]) -> None:
        if outbox_id is not None:
            self.acts.append((run_id, outbox_id, events))

    async def send(self, run_id: UUID, events: Sequence[NumberedEvent]) -> None:
        self._streams.add(run_id, events)

    def carry(self) -> None:
        if self.acts:
            run_id, outbox_id, events = self.acts.popleft()
            try:
                self._streams.add(run_id, events)
            except StreamsAway:
                return
            self.sent.append(outbox_id)


class Bells:
    """The doorbell: rings wait here, and may be lost or doubled."""

    def __init__(self) -> None:
        self.rung: deque[UUID] = deque()

    def ring(self, run_id: UUID) -> None:
        self.rung.append(run_id)


# ---------------------------------------------------------------- any process


class Process:
    """What gateways and workers have in common: a pool, a courier, and promises to carry out."""

    def __init__(self, db: Database, streams: Streams, bells: Bells) -> None:
        self.db, self.streams, self.bells = db, streams, bells
        self.promised: deque[int | UUID] = deque()
        self._start()

    def _start(self) -> None:
        self.model_pool = ModelPool(self.db)
        self.pool = as_pool(self.model_pool)
        self.courier = Courier(self.streams)
        self.publisher = cast(Publisher, self.courier)
        self.promised.clear()

    def die(self) -> None:
        """Everything in memory is gone, and a new process begins."""
        self.model_pool.dead = True
        self._start()

    async def keep_promise(self) -> None:
        """`Wakes.run` and `Couriers._wake_on`: one wake, or one ring."""
        if not self.promised:
            return
        promise = self.promised.popleft()
        if isinstance(promise, UUID):
            self.bells.ring(promise)
            return
        try:
            async with transaction(self.pool) as connection:
                woken = await wake_for_message(connection, promise)
        except Unavailable:
            return
        if woken is not None:
            self.bells.ring(woken)

    async def acknowledge(self) -> None:
        sent, self.courier.sent = self.courier.sent, []
        if sent:
            try:
                async with reading(self.pool) as connection:
                    await delete_published(connection, sent)
            except Unavailable:
                return


# ---------------------------------------------------------------- workers


class DirectTools:
    """`SelfTools` without the MCP session between a call and the tool."""

    async def call(self, draft: Draft, call: ToolCall) -> SelfOutcome:
        tool: SelfTool = SELF_TOOLS[call.name]
        under = Under(draft)
        try:
            text = await tool.run(under, call.args)
        except ToolRefused as refused:
            assert draft.progress.cycle is not None
            if refused.symbol is not None:
                told = LimitReached(draft.progress.cycle.number, refused.symbol, str(refused))
                under.entries.append(told)
            return SelfOutcome(False, str(refused), under.entries, under.wakes)
        return SelfOutcome(True, text, under.entries, under.wakes)


TOOLS: Final = cast(SelfTools, DirectTools())


@dataclass
class Errand:
    """`brokered_calls._Errand` and its loop, between two questions."""

    call: ToolCall
    away_since: float | None = None
    silent: object = None
    silent_since: float = 0.0


@dataclass
class Hold:
    """A run that lives in a worker, and what it does outside Postgres at the moment."""

    held: Held
    thinks: CallModel | None = None
    calls: list[Errand] | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    seconds_max: float = 0.0
    interrupted: bool = False

    def rest(self) -> None:
        self.thinks, self.calls, self.outcomes, self.interrupted = None, None, {}, False


class Worker(Process):
    def _start(self) -> None:
        super()._start()
        self.holds: list[Hold] = []
        self.renewed_at: dict[UUID, float] = {}

    async def claim(self, run_id: UUID) -> None:
        """The beginning of `cycle.live`."""
        if len(self.holds) >= SLOTS or any(hold.held.run_id == run_id for hold in self.holds):
            return
        try:
            held = await claim(self.pool, self.publisher, LEASE_TTL_S, run_id)
        except (Unavailable, LeaseLost):
            return
        if held is not None:
            hold = Hold(held)
            self.holds.append(hold)
            self._after_step(hold)

    async def look_out(self) -> None:
        try:
            async with reading(self.pool) as connection:
                due = await due_runs(connection, SLOTS)
        except Unavailable:
            return
        for run_id in due[:1]:
            await self.claim(run_id)

    async def go_on(self, world: "World", place: int, operand: int) -> None:
        """One half-step of `cycle.live` for one of the runs that live here."""
        if not self.holds:
            return
        hold = self.holds[place % len(self.holds)]
        try:
            await self._half_step(world, hold, operand)
        except FenceReached:
            await hold.held.give_back()
            self._drop(hold)
        except LeaseLost:
            self._drop(hold)
        except Unavailable:
            await hold.held.give_back()
            self._drop(hold)
        else:
            self._after_step(hold)

    async def _half_step(self, world: "World", hold: Hold, operand: int) -> None:
        held = hold.held
        if hold.thinks is not None:
            await self._answered(world, hold, operand)
            return
        if hold.calls is not None:
            await self._ask_broker(world, hold, operand)
            return
        match held.next_step():
            case CallModel() as step:
                await self._outside(hold)
                world.asked(held, step)
                hold.thinks = step
            case CallSelf():
                await held.commit(lambda draft: run_calls(draft, TOOLS))
            case CallBroker(calls=calls, seconds_max=seconds_max):
                await self._outside(hold)
                hold.calls, hold.seconds_max = [Errand(call) for call in calls], seconds_max
            case _:
                await held.write()

    async def _outside(self, hold: Hold) -> None:
        """Whether an effect outside may begin or go on: the fence says so, or raises."""
        with hold.held.outside():
            await anyio.lowlevel.checkpoint()

    async def _answered(self, world: "World", hold: Hold, operand: int) -> None:
        assert hold.thinks is not None
        await self._outside(hold)
        step, interrupted = hold.thinks, hold.interrupted
        hold.rest()
        await hold.held.write(*(() if interrupted else world.answer(hold.held, step, operand)))

    async def _ask_broker(self, world: "World", hold: Hold, operand: int) -> None:
        """One question for one call; when all are known, or we are interrupted, that is committed."""
        assert hold.calls is not None
        await self._outside(hold)
        waiting = [each for each in hold.calls if each.call.call_id not in hold.outcomes]
        if waiting and not hold.interrupted:
            errand = waiting[operand % len(waiting)]
            try:
                outcome = await self._outcome(world, hold, errand)
            except Unavailable:
                return
            if outcome is not None:
                hold.outcomes[errand.call.call_id] = outcome
            return
        outcomes = dict(hold.outcomes)
        hold.rest()
        await commit_outcomes(hold.held, outcomes)

    async def _outcome(self, world: "World", hold: Hold, errand: Errand) -> Outcome | None:
        """`BrokeredCalls._ask`: the broker's word, else the row's."""
        held, call_id = hold.held, errand.call.call_id
        flight = world.broker.order(held, call_id, hold.seconds_max)
        if flight is not None and flight.over is None:
            return None
        if flight is not None and isinstance(flight.over, Outcome):
            return flight.over
        async with reading(self.pool) as connection:
            rows = await get_calls(connection, OWNER, held.run_id, [call_id], grace_s=DOUBT_GRACE_S)
        row = rows[call_id]
        now = anyio.current_time()
        if row.state in SETTLED:
            return Outcome(row.state, shown(row.result) if row.result else "")
        if row.state == "planned":
            errand.away_since = errand.away_since or now
            return Outcome("planned", UNMADE) if now >= errand.away_since + AWAY_S_MAX else None
        if row.silent and (errand.silent_since == 0.0 or errand.silent != row.alive_until):
            errand.silent, errand.silent_since = row.alive_until, now
        if (row.silent and now >= errand.silent_since + SILENT_TWICE_S) or row.overdue:
            async with reading(self.pool) as connection:
                await doubt_call(
                    connection,
                    OWNER,
                    held.run_id,
                    call_id,
                    alive_until=row.alive_until,
                    grace_s=DOUBT_GRACE_S,
                )
        return None

    def _after_step(self, hold: Hold) -> None:
        held = hold.held
        self.promised.extend(held.promised_wakes())
        if held.over:
            self._drop(hold)
            if held.still_due:
                self.bells.ring(held.run_id)

    def _drop(self, hold: Hold) -> None:
        self.promised.extend(hold.held.promised_wakes())
        self.holds.remove(hold)

    async def supervise(self) -> None:
        """`Supervisor._renew` and `_look`, for all runs at once."""
        watched = {hold.held.run_id: hold for hold in self.holds}
        if not watched:
            return
        asked_at = anyio.current_time()
        try:
            async with reading(self.pool) as connection:
                tokens = {run_id: hold.held.lease_token for run_id, hold in watched.items()}
                for run_id in await renew_leases(connection, tokens, LEASE_TTL_S):
                    watched[run_id].held.renewed(asked_at)
                states = await held_states(connection, list(watched))
        except Unavailable:
            return
        for run_id, hold in watched.items():
            if states[run_id].lease_token != hold.held.lease_token:
                hold.held.lose()
            elif states[run_id].to_stop:
                hold.held.interrupt()
                hold.interrupted = hold.thinks is not None or hold.calls is not None

    def hand_over(self) -> None:
        """SIGTERM: every lease is given up with the next commit."""
        for hold in self.holds:
            hold.held.hand_over = True

    async def sweep(self, what: int) -> None:
        """One of the sweeper's repairs, of those that concern runs."""
        repairs = (
            sweeper.publish_again,
            sweeper.wake_again,
            sweeper.force_cancels,
            sweeper.settle_calls,
        )
        try:
            await repairs[what % len(repairs)](self.pool, self.publisher)
        except (DomainError, TimeoutError):
            return


# ---------------------------------------------------------------- the tool broker


@dataclass
class Flight:
    """`mcp_broker.calls._Flight`, between two lines. `over` is what its asker is told; False: nothing."""

    run_id: UUID
    call_id: str
    lease_token: int
    deadline: float
    state: Literal["taken", "sent", "made"] = "taken"
    outcome: tuple[SettledState, str] | None = None
    over: "Outcome | Literal[False] | None" = None


class Broker:
    """One broker at a time; when it dies another one begins, which knows of no flight."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._number = 100
        self.flights: dict[tuple[UUID, str], Flight] = {}
        self._start()

    def _start(self) -> None:
        self._number += 1
        self.broker_id = UUID(int=self._number)
        self.alive_until = 0.0
        self.pool = ModelPool(self._db)
        self.flights = {}

    def die(self) -> None:
        self._start()

    async def say_alive(self) -> None:
        asked_at = anyio.current_time()
        try:
            async with reading(as_pool(self.pool)) as connection:
                await renew_broker(connection, self.broker_id, BROKER_LIFE_S)
        except Unavailable:
            return
        self.alive_until = asked_at + BROKER_LIFE_S

    @property
    def lives(self) -> bool:
        return anyio.current_time() < self.alive_until

    def order(self, held: Held, call_id: str, seconds_max: float) -> Flight | None:
        """`Calls.carry_out`: join the flight, or begin one. None while the broker takes no calls."""
        key = (held.run_id, call_id)
        flight = self.flights.get(key)
        if flight is None and self.lives:
            deadline = anyio.current_time() + min(seconds_max, 20.0)
            flight = self.flights[key] = Flight(held.run_id, call_id, held.lease_token, deadline)
        if flight is not None and flight.over is not None:
            del self.flights[key]
        return flight

    async def fly(self, world: "World", operand: int) -> None:
        """The next line of one flight."""
        flying = [flight for flight in self.flights.values() if flight.over is None]
        if not flying:
            return
        flight = flying[operand % len(flying)]
        try:
            match flight.state:
                case "taken":
                    await self._send(flight)
                case "sent":
                    self._make(world, flight, operand)
                case "made":
                    await self._settle(flight)
        except Unavailable:
            if flight.state == "taken":  # not a byte of it leaves
                flight.state, flight.outcome = "made", ("failed", "unavailable: the call was not made.")

    async def _send(self, flight: Flight) -> None:
        async with reading(as_pool(self.pool)) as connection:
            sent = await send_call(
                connection,
                OWNER,
                flight.run_id,
                flight.call_id,
                lease_token=flight.lease_token,
                broker_id=self.broker_id,
                deadline_s=flight.deadline - anyio.current_time(),
            )
        if sent is None:
            flight.over = await self._as_it_stands(flight)
        else:
            flight.state = "sent"

    def _make(self, world: "World", flight: Flight, operand: int) -> None:
        """The bytes leave, if the broker may still send any; what the tool does, it has done then."""
        flight.state = "made"
        if not self.lives or anyio.current_time() >= flight.deadline:
            flight.outcome = ("failed", "unavailable: the call was not made.")
            return
        world.made(flight.run_id, flight.call_id)
        outcomes: tuple[tuple[SettledState, str], ...] = (
            ("done", "made"),
            ("done", "made"),
            ("failed", "the tool failed"),
            ("in_doubt", "no answer came"),
        )
        flight.outcome = outcomes[operand // 8 % 4]

    async def _settle(self, flight: Flight) -> None:
        assert flight.outcome is not None
        state, text = flight.outcome
        async with reading(as_pool(self.pool)) as connection:
            written = await settle_call(
                connection,
                OWNER,
                flight.run_id,
                flight.call_id,
                broker_id=self.broker_id,
                state=state,
                result=dumps(text_result(text)).decode(),
            )
        flight.over = Outcome(state, text) if written else await self._as_it_stands(flight)

    async def _as_it_stands(self, flight: Flight) -> "Outcome | Literal[False]":
        async with reading(as_pool(self.pool)) as connection:
            rows = await get_calls(connection, OWNER, flight.run_id, [flight.call_id], grace_s=0.0)
        row = rows[flight.call_id]
        if row.state not in SETTLED:
            return False
        return Outcome(row.state, shown(row.result) if row.result else "")


# ---------------------------------------------------------------- followers


class Reader:
    """One embedder that follows one run, over as many connections as it takes (`gateway.following`)."""

    def __init__(self, run_id: UUID) -> None:
        self.run_id = run_id
        self.got: list[EventLine] = []
        self._tail: Tail | None = None
        self._follower: Follower | None = None
        self._heard = 0

    def cut(self) -> None:
        """The gateway dies, or the connection breaks; what was fed and not taken is lost."""
        self._tail = self._follower = None

    async def open(self, world: "World") -> None:
        """Page from Postgres until the tail can be joined, as a reader that has `got` so much."""
        if self._tail is not None:
            return
        pool = world.gateway.pool
        last = self.got[-1].seq if self.got else 0
        try:
            async with reading(pool) as connection:
                opened = await open_log(connection, OWNER, self.run_id, last)
        except Unavailable:
            return
        assert opened is not None
        tail = Tail(OWNER, self.run_id, opened.last_seq, ended=opened.ended)
        follower = Follower(tail)
        tail.followers.add(follower)
        self._take(lines_of(self.run_id, opened.events))
        joined = follower.join(self.got[-1].seq if self.got else 0)
        assert joined, "the logs here are shorter than a page"
        self._tail, self._follower, self._heard = tail, follower, tail.last

    def hear(self, world: "World") -> None:
        """What the stream has, and the tail has not heard yet."""
        if self._tail is None:
            return
        events = world.streams.after(self.run_id, self._heard)
        if events:
            self._heard = events[-1].seq
            self._tail.offer([event.line(to_wire("run", self.run_id)) for event in events])

    async def check(self, world: "World") -> None:
        """`Tails._compare` and `_fill`: find what Redis never told, and read it from Postgres."""
        tail = self._tail
        if tail is None:
            return
        try:
            async with reading(world.gateway.pool) as connection:
                lasts = await last_seqs(connection, [self.run_id])
            tail.seen = max(tail.seen, lasts[self.run_id])
            if tail.has_hole:
                tail.fill(await read_page(world.gateway.pool, OWNER, self.run_id, tail.last))
        except Unavailable:
            return

    async def take(self) -> None:
        if self._follower is not None:
            last = self.got[-1].seq if self.got else 0
            self._take([line for line in await self._follower.take(0) if line.seq > last])

    def _take(self, lines: list[EventLine]) -> None:
        for line in lines:
            last = self.got[-1].seq if self.got else 0
            require(line.seq == last + 1, f"INV-2: a follower that had {last} was given {line.seq}")
            self.got.append(line)


# ---------------------------------------------------------------- all of it


@dataclass(frozen=True)
class Asked:
    """A model call that began: by whom, with how much, and until when its holder's lease was promised."""

    run_id: UUID
    lease_token: int
    tokens_max: int
    at: float
    holds: bool
    leased_until: float | None
    reserved: bool


class World:
    """Everything there is in one schedule."""

    def __init__(self, without: frozenset[Guard] = frozenset()) -> None:
        self.db = Database(without)
        self.streams, self.bells = Streams(), Bells()
        self.workers = [Worker(self.db, self.streams, self.bells) for _ in range(2)]
        self.gateway = Process(self.db, self.streams, self.bells)
        self.broker = Broker(self.db)
        self.readers: list[Reader] = []
        self.forced: list[tuple[float, UUID]] = []
        self.asked_calls: list[Asked] = []
        self.ledger: list[tuple[UUID, str]] = []
        self.made_after_cancel: list[tuple[UUID, str]] = []
        self.menu: tuple[AnswerKind, ...] = ("complete",)
        self.agents = [UUID(int=number) for number in (11, 12)]
        for agent_id in self.agents:
            self.db.agents[agent_id] = new_agent(agent_id, OWNER, CEILINGS, BUDGETS)
        self.db.agents[self.agents[1]] |= {"root_id": self.agents[0], "parent_id": self.agents[0]}

    def processes(self) -> tuple[Process, ...]:
        return (*self.workers, self.gateway)

    # ------------------------------------------------------------ what embedders do

    async def create(self, operand: int) -> None:
        if len(self.db.runs) >= 4:
            return
        order = RunOrder(self.agents[operand % 2], "a goal", {}, [])
        gateway = self.gateway
        try:
            async with transaction(gateway.pool) as connection:
                run, written = await create_run(connection, OWNER, order)
        except DomainError:
            return
        gateway.courier.publish(written.run_id, written.outbox_id, written.events)
        gateway.promised.append(written.run_id)
        assert run.state == "running"

    async def cancel(self, operand: int) -> None:
        run_id = self._run(operand)
        if run_id is None:
            return
        await self._cancel(run_id, force=False)
        self.forced.append((anyio.current_time() + FORCE_AFTER_S, run_id))

    async def force(self) -> None:
        """`ForcedCancels`: those whose time has come."""
        now = anyio.current_time()
        due, self.forced = [e for e in self.forced if e[0] <= now], [e for e in self.forced if e[0] > now]
        for _, run_id in due:
            await self._cancel(run_id, force=True)

    async def _cancel(self, run_id: UUID, *, force: bool) -> None:
        gateway = self.gateway
        try:
            async with transaction(gateway.pool) as connection:
                written = await cancel_run(connection, OWNER, run_id, force=force)
        except (DomainError, LeaseLost):
            return
        if written is not None:
            gateway.courier.publish(written.run_id, written.outbox_id, written.events)
            gateway.promised.extend((*written.wakes, *written.to_ring))

    async def message(self, operand: int) -> None:
        agents = list(self.db.agents)
        gateway = self.gateway
        try:
            async with transaction(gateway.pool) as connection:
                order = MessageOrder(agents[operand % len(agents)], operand)
                sent = await send_message(connection, OWNER, order)
        except DomainError:
            return
        gateway.promised.append(sent.wake_id)

    async def proceed(self, operand: int) -> None:
        """`run.continue`"""
        run_id = self._run(operand)
        if run_id is None:
            return
        try:
            async with transaction(self.gateway.pool) as connection:
                await continue_run(connection, OWNER, run_id)
        except DomainError:
            return
        self.gateway.promised.append(run_id)

    def follow(self, operand: int) -> None:
        run_id = self._run(operand)
        if run_id is not None and len(self.readers) < 3:
            self.readers.append(Reader(run_id))

    def gateway_dies(self) -> None:
        self.gateway.die()
        self.forced.clear()
        for reader in self.readers:
            reader.cut()

    def _run(self, operand: int) -> UUID | None:
        run_ids = list(self.db.runs)
        return run_ids[operand % len(run_ids)] if run_ids else None

    # ------------------------------------------------------------ what is outside

    def asked(self, held: Held, step: CallModel) -> None:
        """A model call begins: somebody has to pay for it from now on."""
        run = self.db.runs[held.run_id]
        cycle = held.progress.cycle
        reservation = cycle.reservation if cycle else None
        reserved = reservation is not None and reservation.lease_token == held.lease_token
        holds, until = run["lease_token"] == held.lease_token, run["lease_until"]
        call = Asked(held.run_id, held.lease_token, step.tokens_max, self.db.now, holds, until, reserved)
        self.asked_calls.append(call)

    def answer(self, held: Held, step: CallModel, operand: int) -> tuple[Entry, ...]:
        assert held.progress.cycle is not None
        cycle, kind = held.progress.cycle.number, self.menu[operand % len(self.menu)]
        match kind:
            case "complete":
                return (ModelAnswered(cycle, "done", (), 10),)
            case "empty":
                return (ModelAnswered(cycle, "", (), 10),)
            case "fail":
                return (ModelFailed(cycle, "overloaded", retryable=True, tokens=1),)
            case "fail for good":
                return (ModelFailed(cycle, "refused", retryable=False, tokens=1),)
            case "send":
                agents = list(self.db.agents)
                to_agent_id = to_wire("agt", agents[operand // 8 % len(agents)])
                wanted: Any = (("send_message", {"to_agent_id": to_agent_id, "body": operand}),)
            case _:
                wanted = CALLS[kind]
        number = held.progress.answers + 1
        calls = tuple(
            ToolCall(f"call_{number}_{place}", name, args)
            for place, (name, args) in enumerate(wanted, start=1)
        )
        tokens = step.tokens_max + 20_000 if kind == "costly" else 10
        return (ModelAnswered(cycle, "", calls, tokens),)

    def made(self, run_id: UUID, call_id: str) -> None:
        """The tool's own ledger has a line for every call that it carried out."""
        self.ledger.append((run_id, call_id))
        run, call = self.db.runs[run_id], self.db.calls[run_id, call_id]
        asked_at = run["cancel_requested_at"]
        if asked_at is not None and call["sent_at"] is not None and asked_at < call["sent_at"]:
            self.made_after_cancel.append((run_id, call_id))
