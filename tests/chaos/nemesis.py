"""Who does the harm: a schedule of faults that is a function of its seed, and the hands that carry it out.

Each kind of fault comes at its own pace, with gaps that chance chooses, so that kinds mix in every order.
Which of several processes is meant is drawn with the schedule too; of those that are alive at that moment.
"""

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Final
from uuid import UUID, uuid4

import anyio
import psutil
from redis.asyncio import Redis
from redis.exceptions import RedisError
from tests.chaos.cluster import AWAY, PREFIX, Cluster, Place
from tests.chaos.history import Fault
from tests.chaos.model_server import TROUBLES, ModelServer
from tests.chaos.proxies import Proxy

from espalier_jobs import Doorbell, QueueNames, open_queue

ACT_S_MAX: Final = 45.0
FIRST_S: Final = 2.0
REDIS_S: Final = 1.0
TERMINATED_MAX: Final = 8
RINGS_MAX: Final = 50
TOUCHED_MAX: Final = 5
COMMITS_S: Final = 8.0
"""For so long a line waits for a COMMIT to be cut at."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault: its line in the failure matrix, seconds between two, and how long one lasts."""

    row: str
    every_s: float
    lasts_s: tuple[float, float] = (0.0, 0.0)


KINDS: Final[dict[str, Kind]] = {
    "worker.kill": Kind("F1", 4.0),
    "worker.term": Kind("F4", 35.0),
    "worker.freeze": Kind("F5", 25.0, (1.0, 7.0)),
    "gateway.kill": Kind("F3", 75.0),
    "gateway.term": Kind("F4", 90.0),
    "gateway.freeze": Kind("F6", 60.0, (1.0, 6.0)),
    "broker.kill": Kind("F1", 30.0),
    "broker.term": Kind("F4", 90.0),
    "broker.freeze": Kind("F5", 90.0, (1.0, 6.0)),
    "redis.kill": Kind("F7", 36.0, (0.2, 3.0)),
    "redis.flush": Kind("F8", 18.0),
    "redis.trim": Kind("F8", 12.0),
    "redis.hang": Kind("F10", 60.0, (1.0, 5.0)),
    "postgres.crash": Kind("F12", 72.0, (0.2, 3.0)),
    "postgres.terminate": Kind("F13", 14.0),
    "postgres.hang": Kind("F13", 90.0, (0.5, 3.0)),
    "line.black_hole": Kind("F13", 30.0, (1.0, 6.0)),
    "line.commit_cut": Kind("F14", 7.0),
    "line.answers_cut": Kind("F14", 15.0),
    "line.reset": Kind("F13", 20.0),
    "line.delay": Kind("F13", 60.0, (1.0, 4.0)),
    "model.trouble": Kind("F22", 15.0, (0.5, 4.0)),
    "ledger.kill": Kind("F24", 75.0),
    "ledger.reset": Kind("F24", 30.0),
    "doorbell.rings": Kind("F26", 12.0),
}
MOMENTS: Final = {
    "worker": ("commit", "publish", "ring", "wake", "ask", "carry"),
    "gateway": ("commit", "publish", "ring", "wake"),
    "broker": ("sent", "settle"),
}
"""Places in a service at which it can kill itself, see tests/support/dying.py."""

ARMED: Final = {"worker": 0.3, "gateway": 0.7, "broker": 0.4}
"""Of processes that are started after a kill, the share that kills itself at a named moment."""

MOMENT_MAX: Final = 12


@dataclass(frozen=True)
class Act:
    """One fault that is to happen. `pick`, `seconds` and `moment` are for whoever needs them."""

    at_s: float
    kind: str
    pick: int
    seconds: float
    moment: str = ""


def schedule(seed: int, seconds: float) -> tuple[Act, ...]:
    """Every fault of a storm, in order of time. Each kind comes at least once if the storm has 30 s."""
    acts = [act for name, kind in KINDS.items() for act in _of_kind(seed, name, kind, seconds)]
    return tuple(sorted(acts, key=lambda act: (act.at_s, act.kind)))


def _of_kind(seed: int, name: str, kind: Kind, seconds: float) -> list[Act]:
    chance = Random(f"{seed}/{name}")
    acts: list[Act] = []
    at_s = chance.uniform(FIRST_S, min(1.5 * kind.every_s, max(FIRST_S, 0.7 * seconds)))
    while at_s < seconds:
        service = name.partition(".")[0]
        moment = ""
        if name.endswith(".kill") and service in MOMENTS and chance.random() < ARMED[service]:
            place = chance.choice(MOMENTS[service])
            moment = f"{place}.{chance.choice(['before', 'after'])}:{chance.randint(1, MOMENT_MAX)}"
        acts.append(Act(at_s, name, chance.randrange(1 << 30), chance.uniform(*kind.lasts_s), moment))
        at_s += kind.every_s * chance.uniform(0.5, 1.5)
    return acts


class Nemesis:
    """Carries out a schedule; what it did to whom is recorded."""

    def __init__(self, cluster: Cluster, model: ModelServer) -> None:
        self._cluster, self._model = cluster, model
        self._locks: dict[str, anyio.Lock] = {}
        self._hands: dict[str, Callable[[Act], Any]] = {
            "worker": self._to_service,
            "gateway": self._to_service,
            "broker": self._to_service,
            "redis": self._to_redis,
            "postgres": self._to_postgres,
            "line": self._to_a_line,
            "model": self._to_the_model,
            "ledger": self._to_the_ledger,
            "doorbell": self._to_the_doorbell,
        }

    async def rage(self, acts: tuple[Act, ...]) -> None:
        """The whole schedule; on leaving, every fault that lasts is over."""
        began = anyio.current_time()
        async with anyio.create_task_group() as group:
            for act in acts:
                await anyio.sleep_until(began + act.at_s)
                group.start_soon(self._do, act)

    async def heal(self) -> None:
        """Undo whatever lasts; everything that is down comes back by itself."""
        for place in self._cluster.places.values():
            place.next_dies_at = ""
            place.signal(signal.SIGCONT)
        for proxy in self._cluster.proxies.values():
            await proxy.heal()
        self._model.trouble = None
        for server in (self._cluster.postgres, self._cluster.redis):
            await server.wait_back()

    async def _do(self, act: Act) -> None:
        """One that cannot be done now, because its victim is away, is left out."""
        with (
            anyio.move_on_after(ACT_S_MAX),
            suppress(*AWAY, RedisError, psutil.Error, ProcessLookupError),
        ):
            await self._hands[act.kind.partition(".")[0]](act)

    def _note(self, act: Act, target: str, **detail: Any) -> None:
        if act.seconds:
            detail["seconds"] = round(act.seconds, 3)
        at = self._cluster.recorder.now()
        self._cluster.recorder.note(Fault(at, KINDS[act.kind].row, act.kind, target, detail))

    @asynccontextmanager
    async def _alone(self, victim: str) -> AsyncIterator[None]:
        """What lasts happens to one victim one after the other."""
        async with self._locks.setdefault(victim, anyio.Lock()):
            yield

    # ---- processes

    async def _to_service(self, act: Act) -> None:
        service, _, what = act.kind.partition(".")
        living = [place for place in self._cluster.of(service) if place.lives]
        if not living:
            return
        place = living[act.pick % len(living)]
        match what:
            case "kill":
                await self._kill(place, act)
            case "term":
                if service == "worker":
                    await self._cluster.note_death(place, "stopped")
                if place.signal(signal.SIGTERM):
                    self._note(act, place.name)
            case "freeze":
                await self._freeze(place, act)

    async def _kill(self, place: Place, act: Act) -> None:
        place.killed, place.next_dies_at = True, act.moment
        if not place.signal(signal.SIGKILL):
            return
        self._note(act, place.name, **({"next_dies_at": act.moment} if act.moment else {}))
        if place.service == "worker":
            await self._cluster.note_death(place, "killed")

    async def _freeze(self, place: Place, act: Act) -> None:
        if not place.signal(signal.SIGSTOP):
            return
        self._note(act, place.name)
        running = place.running
        await anyio.sleep(act.seconds)
        if place.running is running:
            place.signal(signal.SIGCONT)

    # ---- servers

    async def _to_redis(self, act: Act) -> None:
        server = self._cluster.redis
        async with self._alone("redis"):
            match act.kind:
                case "redis.kill":
                    await server.crash(away_s=act.seconds)
                    self._note(act, "redis")
                    await server.wait_back()
                case "redis.hang":
                    with server.hanging():
                        self._note(act, "redis")
                        await anyio.sleep(act.seconds)
                case _:
                    await self._to_what_redis_holds(act)

    async def _to_what_redis_holds(self, act: Act) -> None:
        async with Redis.from_url(self._cluster.redis.url, socket_timeout=REDIS_S) as asked:
            if act.kind == "redis.flush":
                await asked.flushall()
                return self._note(act, "redis")
            streams = sorted(await asked.keys(f"{PREFIX}run:*"))
            chosen = Random(act.pick).sample(streams, min(len(streams), TOUCHED_MAX))
            for place, stream in enumerate(chosen):
                if place % 2:
                    await asked.delete(stream)
                else:
                    await asked.xtrim(stream, maxlen=1, approximate=False)
            return self._note(act, "redis", streams=len(chosen))

    async def _to_postgres(self, act: Act) -> None:
        server = self._cluster.postgres
        async with self._alone("postgres"):
            match act.kind:
                case "postgres.crash":
                    await server.crash(away_s=act.seconds)
                    self._note(act, "postgres")
                    await server.wait_back()
                case "postgres.hang":
                    with server.hanging():
                        self._note(act, "postgres")
                        await anyio.sleep(act.seconds)
                case "postgres.terminate":
                    many = 1 + act.pick % TERMINATED_MAX
                    async with self._cluster.database() as connection:
                        ended = await connection.fetch(TERMINATE, many)
                    self._note(act, "postgres", sessions=len(ended))

    # ---- lines

    async def _to_a_line(self, act: Act) -> None:
        names = [name for name in self._cluster.proxies if name.startswith(("postgres/", "redis/"))]
        if act.kind in ("line.commit_cut", "line.answers_cut"):
            names = [name for name in names if name.startswith("postgres/")]
        if act.kind == "line.commit_cut":  # whatever a broker writes is one statement, and commits by itself
            names = [name for name in names if "broker" not in name]
        name = names[act.pick % len(names)]
        proxy = self._cluster.proxies[name]
        match act.kind:
            case "line.commit_cut":
                sent = bool(act.pick & 16)
                async with self._alone(f"{name}/commit"):
                    if await proxy.cut_at_commit(sent=sent, within_s=COMMITS_S):
                        self._note(act, name, sent=sent)
            case "line.answers_cut":
                await proxy.cut_answers_after(act.pick % 2000)
                self._note(act, name, after_bytes=act.pick % 2000)
            case "line.reset":
                self._note(act, name, lines=await proxy.reset())
            case "line.black_hole" | "line.delay":
                await self._muffle(proxy, act, name)

    async def _muffle(self, proxy: Proxy, act: Act, name: str) -> None:
        async with self._alone(name):
            if act.kind == "line.delay":
                await proxy.delay(0.02 + act.pick % 100 / 400)
            else:
                await proxy.black_hole()
            self._note(act, name)
            await anyio.sleep(act.seconds)
            await proxy.heal()

    # ---- those whom the runtime asks

    async def _to_the_model(self, act: Act) -> None:
        async with self._alone("model"):
            self._model.trouble = TROUBLES[act.pick % len(TROUBLES)]
            self._note(act, "model", trouble=self._model.trouble)
            await anyio.sleep(act.seconds)
            self._model.trouble = None

    async def _to_the_ledger(self, act: Act) -> None:
        if act.kind == "ledger.reset":
            return self._note(act, "ledger", lines=await self._cluster.proxies["ledger"].reset())
        if self._cluster.ledger.pid is not None:
            psutil.Process(self._cluster.ledger.pid).kill()
            self._note(act, "ledger")
        return None

    async def _to_the_doorbell(self, act: Act) -> None:
        """Rings that mean nothing: for runs that ended, that somebody holds, or that never were."""
        async with self._cluster.database() as connection:
            rows = await connection.fetch(
                "select id from runs order by md5(id::text || $1) limit 5", str(act.pick)
            )
        asked: list[UUID] = [*(row["id"] for row in rows), uuid4()]
        rings = 1 + act.pick % RINGS_MAX
        async with open_queue(self._cluster.redis.url) as queue:
            doorbell = Doorbell(queue, QueueNames(PREFIX))
            for number in range(rings):
                await doorbell.ring(asked[number % len(asked)])
        self._note(act, "doorbell", rings=rings)


TERMINATE: Final = """
select pg_terminate_backend(pid) from pg_stat_activity
where application_name = 'espalier' and pid <> pg_backend_pid() order by random() limit $1
"""
