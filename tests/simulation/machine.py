"""The machine: a schedule is a text of bytes, and every two of them are one rule and what it is about.

The first byte is the mood: which answers a model likes, and which kinds of trouble there are (a schedule that
has everything reaches nothing in depth). A rule that has nothing to act on does nothing, and so does the byte
0: so Hypothesis can shrink a schedule by taking rules out. At the end the world heals, and is judged.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import CRITICAL
from typing import Final

import structlog
from tests.simulation.connections import Trouble
from tests.simulation.database import LIVE, Guard
from tests.simulation.invariants import check_healed, check_rows, check_story
from tests.simulation.world import AnswerKind, Violation, World

HEAL_TURNS_MAX: Final = 400
HEAL_STEP_S: Final = 0.35
A_SECOND: Final = 3
"""Turns after which look-outs and sweepers come round again."""


Rule = Callable[[World, int], Awaitable[None]]


# ---------------------------------------------------------------- the rules


async def nothing_happens(_: World, _operand: int) -> None:
    pass


async def time_passes(world: World, operand: int) -> None:
    world.db.now += (0.05, 0.3, 0.6, 1.1)[operand % 4]


async def a_lease_passes(world: World, operand: int) -> None:
    world.db.now += (4.1, 5.5)[operand % 2]


async def long_passes(world: World, operand: int) -> None:
    world.db.now += (16.0, 70.0, 310.0)[operand % 3]


async def an_embedder_creates(world: World, operand: int) -> None:
    await world.create(operand)


async def an_embedder_cancels(world: World, operand: int) -> None:
    await world.cancel(operand)


async def an_embedder_sends(world: World, operand: int) -> None:
    await world.message(operand)


async def an_embedder_continues(world: World, operand: int) -> None:
    await world.proceed(operand)


async def cancels_are_forced(world: World, _operand: int) -> None:
    await world.force()


async def a_worker_hears_a_ring(world: World, operand: int) -> None:
    if world.bells.rung:
        await world.workers[operand % 2].claim(world.bells.rung.popleft())


async def a_ring_is_lost(world: World, _operand: int) -> None:
    if world.bells.rung:
        world.bells.rung.popleft()


async def a_ring_is_doubled(world: World, _operand: int) -> None:
    if world.bells.rung:
        world.bells.rung.append(world.bells.rung[0])


async def a_worker_looks_out(world: World, operand: int) -> None:
    await world.workers[operand % 2].look_out()


async def a_worker_goes_on(world: World, operand: int) -> None:
    first, second = world.workers
    worker = world.workers[operand % 2]
    if not worker.holds:
        worker = second if worker is first else first
    await worker.go_on(world, operand // 2 % 3, operand // 4)


async def a_worker_supervises(world: World, operand: int) -> None:
    await world.workers[operand % 2].supervise()


async def a_worker_sweeps(world: World, operand: int) -> None:
    await world.workers[operand % 2].sweep(operand // 2)


async def a_worker_dies(world: World, operand: int) -> None:
    world.workers[operand % 2].die()


async def a_worker_dies_of_a_run(world: World, operand: int) -> None:
    """It claims, and dies before anything else; and the lease passes."""
    worker = world.workers[operand % 2]
    await worker.look_out()
    worker.die()
    world.db.now += 4.1


async def a_worker_hands_over(world: World, operand: int) -> None:
    world.workers[operand % 2].hand_over()


async def a_promise_is_kept(world: World, operand: int) -> None:
    await world.processes()[operand % 3].keep_promise()


async def an_act_is_carried(world: World, operand: int) -> None:
    world.processes()[operand % 3].courier.carry()


async def acts_are_acknowledged(world: World, operand: int) -> None:
    await world.processes()[operand % 3].acknowledge()


async def a_commit_breaks(world: World, operand: int) -> None:
    troubles: tuple[Trouble, Trouble] = ("before", "after")
    pools = [each.model_pool for each in world.processes()] + [world.broker.pool]
    pools[operand // 2 % 4].trouble = troubles[operand % 2]


async def redis_is_flushed(world: World, _operand: int) -> None:
    world.streams.flush()


async def redis_goes_or_comes(world: World, _operand: int) -> None:
    world.streams.away = not world.streams.away


async def the_gateway_dies(world: World, _operand: int) -> None:
    world.gateway_dies()


async def somebody_follows(world: World, operand: int) -> None:
    world.follow(operand)


async def a_follower_reads(world: World, operand: int) -> None:
    if not world.readers:
        return
    reader = world.readers[operand // 8 % len(world.readers)]
    match operand % 8:
        case 0:
            reader.cut()
        case 1 | 2:
            await reader.open(world)
        case 3 | 4:
            reader.hear(world)
        case 5:
            await reader.check(world)
        case _:
            await reader.take()


async def the_broker_flies(world: World, operand: int) -> None:
    await world.broker.fly(world, operand)


async def the_broker_says_it_lives(world: World, _operand: int) -> None:
    await world.broker.say_alive()


async def the_broker_dies(world: World, operand: int) -> None:
    world.broker.die()
    if operand % 2:
        await world.broker.say_alive()


CALM: Final[dict[Rule, int]] = {
    nothing_happens: 1,
    a_worker_goes_on: 56,
    a_worker_hears_a_ring: 8,
    a_worker_looks_out: 6,
    a_worker_supervises: 6,
    a_promise_is_kept: 9,
    an_act_is_carried: 5,
    acts_are_acknowledged: 2,
    time_passes: 8,
    a_worker_sweeps: 5,
}
EMBEDDERS: Final[dict[Rule, int]] = {
    an_embedder_creates: 3,
    an_embedder_sends: 5,
    an_embedder_continues: 2,
    long_passes: 3,
    a_ring_is_doubled: 1,
    a_ring_is_lost: 2,
}
DEATHS: Final[dict[Rule, int]] = {
    a_worker_dies: 5,
    a_worker_dies_of_a_run: 3,
    a_lease_passes: 7,
    a_commit_breaks: 4,
    a_worker_hands_over: 1,
    the_gateway_dies: 1,
}
CANCELS: Final[dict[Rule, int]] = {
    an_embedder_cancels: 4,
    cancels_are_forced: 4,
    a_lease_passes: 2,
    a_worker_goes_on: 8,
}
FOLLOWERS: Final[dict[Rule, int]] = {
    somebody_follows: 6,
    a_follower_reads: 24,
    an_act_is_carried: 8,
    redis_is_flushed: 2,
    redis_goes_or_comes: 2,
    the_gateway_dies: 1,
}
TOOLS: Final[dict[Rule, int]] = {
    the_broker_flies: 22,
    the_broker_says_it_lives: 8,
    the_broker_dies: 5,
    a_worker_goes_on: 16,
}

MENUS: Final[tuple[tuple[AnswerKind, ...], ...]] = (
    ("complete", "sleep", "continue", "inbox", "send", "spawn", "act", "empty"),
    ("act", "act", "act twice", "too many acts", "continue", "complete"),
    ("send", "inbox", "inbox and sleep", "empty", "sleep", "send"),
    ("spawn", "spawn much", "empty", "inbox", "continue", "complete", "spawn"),
    ("fail", "fail", "fail", "continue", "fail for good", "costly", "fail"),
)


@dataclass(frozen=True)
class Mood:
    menu: tuple[AnswerKind, ...]
    rules: tuple[Rule, ...]
    """The rule of each byte; a rule that is wanted more often stands there more often."""


def mood(byte: int) -> Mood:
    menu = byte % len(MENUS)
    kinds = byte // len(MENUS)
    weights = dict(CALM)
    wanted = [EMBEDDERS] * (kinds % 4 != 3) + [DEATHS] * (kinds // 4 % 4 != 3)
    wanted += [CANCELS] * (kinds // 16 % 2) + [FOLLOWERS] * (kinds // 32 % 2) + [TOOLS] * (menu in (0, 1))
    for each in wanted:
        for rule, weight in each.items():
            weights[rule] = weights.get(rule, 0) + weight
    total = sum(weights.values())
    rules = [rule for rule, weight in weights.items() for _ in range(max(1, weight * 256 // total))]
    return Mood(MENUS[menu], tuple(rules))


MOODS: Final = tuple(mood(byte) for byte in range(256))


# ---------------------------------------------------------------- one schedule


async def conduct(schedule: bytes, world: World, story: list[str]) -> None:
    """Raises Violation; an assertion of the product is one too. `story` gets the rules that were applied."""
    chosen = MOODS[schedule[0]] if schedule else MOODS[0]
    world.menu = chosen.menu
    await world.create(0)
    for code, operand in zip(schedule[1::2], schedule[2::2], strict=False):
        rule = chosen.rules[code % len(chosen.rules)]
        story.append(f"{rule.__name__} {operand}")
        await rule(world, operand)
        check_rows(world)
    story.append("the world heals")
    await heal(world)
    check_story(world)
    check_healed(world)


async def heal(world: World) -> None:
    """Nothing goes wrong any more, everybody does what is to be done, and time passes."""
    world.streams.away = False
    for pool in [each.model_pool for each in world.processes()] + [world.broker.pool]:
        pool.trouble = ""
    for turn in range(HEAL_TURNS_MAX):
        world.db.now += HEAL_STEP_S
        await world.broker.say_alive()
        for operand in range(4):
            await world.broker.fly(world, operand)
        for worker in world.workers:
            await worker.supervise()
            for place in range(len(worker.holds)):
                _choose_an_end(world, place, worker is world.workers[0])
                await worker.go_on(world, place, 0)
            while world.bells.rung:
                await worker.claim(world.bells.rung.popleft())
        if turn % A_SECOND == 0:
            await world.workers[0].look_out()
            for what in range(4):
                await world.workers[1].sweep(what)
        for process in world.processes():
            while process.promised:
                await process.keep_promise()
            while process.courier.acts:
                process.courier.carry()
            await process.acknowledge()
        await world.force()
        check_rows(world)
        if _quiet(world) and not _skip_to_the_next_timer(world):
            break
    for reader in world.readers:
        await reader.open(world)
        reader.hear(world)
        await reader.check(world)
        await reader.take()


def _choose_an_end(world: World, place: int, first: bool) -> None:
    """A model that reads what it is told of, waits for its helpers, and completes."""
    holds = world.workers[0 if first else 1].holds
    if place >= len(holds):
        return
    held = holds[place].held
    cycle = held.progress.cycle
    if cycle is not None and cycle.woken and not cycle.turns:
        world.menu = ("inbox",)
    else:
        world.menu = ("empty",) if held.facts.children else ("complete",)


def _quiet(world: World) -> bool:
    live = [run for run in world.db.runs.values() if run["state"] in LIVE]
    due = any(run["due_at"] <= world.db.now or run["lease_until"] is not None for run in live)
    busy = any(worker.holds for worker in world.workers) or world.forced or world.db.outbox
    unsettled = world.broker.flights or any(call["state"] == "sent" for call in world.db.calls.values())
    return not due and not busy and not unsettled


def _skip_to_the_next_timer(world: World) -> bool:
    """Whether there is one before the wall of its run, which only ends what nobody wakes."""
    dues = [
        run["due_at"]
        for run in world.db.runs.values()
        if run["state"] in LIVE and run["due_at"] < run["wall_at"]
    ]
    if dues:
        world.db.now = max(world.db.now, min(dues))
    return bool(dues)


# ---------------------------------------------------------------- running many


class Skipping(selectors.SelectSelector):
    """Where an event loop would wait for time to pass, it has passed."""

    world: World | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0 and self.world is not None:
            assert timeout is not None, "a half-step waits for what never comes"
            self.world.db.now += timeout
            return []
        return super().select(timeout)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is the world's."""

    def __init__(self) -> None:
        self._skipping = Skipping()
        super().__init__(self._skipping)

    def live_in(self, world: World | None) -> None:
        self._skipping.world = world

    def time(self) -> float:
        world = self._skipping.world
        return world.db.now if world else super().time()


class Simulator:
    """Runs schedules, one after the other, each in a new world."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.story: list[str] = []
        self.ran = 0

    def run(self, schedule: bytes, without: frozenset[Guard] = frozenset()) -> World:
        """Raises Violation, with the story so far in the notes."""
        world, self.story = World(without), []
        self._loop.live_in(world)
        self.ran += 1
        try:
            self._loop.run_until_complete(conduct(schedule, world, self.story))
        except Exception as failure:
            failure.add_note(f"schedule {schedule.hex()}\n" + "\n".join(self.story))
            raise
        finally:
            self._loop.live_in(None)
        return world

    def breaks(self, schedule: bytes, without: frozenset[Guard] = frozenset()) -> str:
        """What the schedule finds; empty if all holds. A bug of the product counts as found."""
        try:
            self.run(schedule, without)
        except Violation as violation:
            return str(violation)
        except Exception as bug:
            return f"{type(bug).__name__}: {bug}"
        return ""


@contextmanager
def simulator() -> Iterator[Simulator]:
    """What the product would log is not heard meanwhile: here everything goes wrong, all the time."""
    heard = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))
    loop = VirtualLoop()
    try:
        yield Simulator(loop)
    finally:
        loop.close()
        structlog.configure(**heard)
