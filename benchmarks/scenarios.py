"""What is measured, scenario by scenario, and on what kind of runtime.

Each is a function of a runtime that adds figures; none of them judges a figure. How many of everything is
fixed here, so that two tables can be compared. Above it stands `__main__`, below it `runtime.py` and
`load.py`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from benchmarks.downloads import downloads
from benchmarks.memory import memory
from benchmarks.plans import COMPLETES, Plan, paced
from benchmarks.report import Taken
from benchmarks.runtime import WRITES, Clocks, Runtime
from benchmarks.tools import tools

ROUNDS: Final = 3
OURS: Final = ("gateway", "worker")

# Runs to warm up with, and to measure, by number of clients.
NOOP: Final = {1: (50, 300), 16: (100, 480), 64: (150, 640)}
CALLS: Final = {1: (200, 1500), 16: (500, 4000)}
COUNTED: Final = (16, 100, 480)

IDLE_S: Final = 10.0
ALONE_S: Final = 5.0
FLUSH_S: Final = 11.0
"""Postgres' sessions hand in their counts of transactions at the latest after ten idle seconds."""

FOLLOWERS: Final = (50, 200, 1000)
FOLLOWERS_PER_S: Final = 200
"""How fast followers are expected to open their streams: so long the run waits with its first cycle."""

FOLLOWED_CYCLES: Final = 60
FOLLOWED_PAUSE_S: Final = 0.2
JOINERS: Final = 60
JOINED: Final = {"cycles": 100, "calls": 10}
JOINED_EVENTS_PER_CYCLE: Final = 22
JOINED_PER_S: Final = 240
"""Above what is wanted, because the joiners will slow the run down."""

JOINING_S: Final = 8.0
REPLAYED: Final = paced(83, calls=5, delay_s=0.0)
"""A thousand events."""

REPLAYS: Final = 9
READING_S_MAX: Final = 40.0
OPENING_S_MAX: Final = 10.0


@dataclass(frozen=True)
class Stage:
    """A kind of runtime, and the scenarios that are taken on one and the same of it, in order."""

    scenarios: Mapping[str, Callable[[Runtime, Taken], Awaitable[None]]]
    env: Mapping[str, str] = field(default_factory=dict)
    script: str = ""
    postgres_options: Mapping[str, str] = field(default_factory=dict)


# --- runs ------------------------------------------------------------------------------------------------

INCOMPLETE: Final = "select count(*) from runs where state <> 'complete'"


async def noop(runtime: Runtime, taken: Taken) -> None:
    """The shipped plan: create, one answer, complete. The numbers of clients take turns in each round."""
    for _ in range(ROUNDS):
        for clients, (warm, runs) in NOOP.items():
            figures, cpu = await runtime.measure("runs", clients=clients, warm=warm, runs=runs)
            who = _clients(clients)
            _latency(taken, who, figures, wanted=("at most 5", "at most 12") if clients == 1 else ("", ""))
            taken.add(
                f"{who}: completed", figures["per_s"], "runs/s", "at least 150" if clients == 16 else ""
            )
            _log(taken, who, figures)
            _cpu(taken, who, cpu, runs, "ms/run", wanted="at most 8")
    taken.add("runs that did not complete", await runtime.count(INCOMPLETE), "", "0")


async def complete(runtime: Runtime, taken: Taken) -> None:
    """The same, but the run ends by a call of `complete`, which is one commit more."""
    warm, runs = NOOP[1]
    for _ in range(ROUNDS):
        figures, cpu = await runtime.measure("runs", clients=1, warm=warm, runs=runs)
        _latency(taken, _clients(1), figures)
        _log(taken, _clients(1), figures)
        _cpu(taken, _clients(1), cpu, runs, "ms/run")
    taken.add("runs that did not complete", await runtime.count(INCOMPLETE), "", "0")


def _clients(count: int, kind: str = "client") -> str:
    return f"{count} {kind}" if count == 1 else f"{count} {kind}s"


def _log(taken: Taken, who: str, figures: Mapping[str, Any]) -> None:
    """A log is flawed if its reader did not see 1..n and `run.ended` as the last."""
    taken.add(f"{who}: runs with a flawed log", figures["flawed"], "", "0")
    taken.add(f"{who}: commits that wrote", figures["writes"] / figures["runs"], "per run")


def _latency(
    taken: Taken, who: str, figures: Mapping[str, Any], *, wanted: tuple[str, str] = ("", "")
) -> None:
    first, ended = wanted
    taken.add(f"{who}: create answered p50", figures["created_p50"], "ms")
    taken.add(f"{who}: create to first event p50", figures["first_p50"], "ms", first)
    taken.add(f"{who}: create to first event p99", figures["first_p99"], "ms")
    taken.add(f"{who}: create to run.ended p50", figures["ended_p50"], "ms", ended)
    taken.add(f"{who}: create to run.ended p99", figures["ended_p99"], "ms")


def _cpu(taken: Taken, who: str, cpu: Clocks, count: int, unit: str, *, wanted: str = "") -> None:
    """CPU per one of `count`: ours together, then every process apart."""
    taken.add(
        f"{who}: CPU of gateway and worker", sum(cpu[name] for name in OURS) / count * 1e3, unit, wanted
    )
    for name, spent in cpu.items():
        taken.add(f"{who}: CPU of {name}", spent / count * 1e3, unit)


async def rpc(runtime: Runtime, taken: Taken) -> None:
    for _ in range(ROUNDS):
        for clients, (warm, calls) in CALLS.items():
            figures, cpu = await runtime.measure("calls", clients=clients, warm=warm, calls=calls)
            who = _clients(clients, "connection")
            taken.add(f"{who}: agent.get", figures["per_s"], "calls/s")
            taken.add(f"{who}: agent.get p50", figures["p50"], "ms")
            taken.add(f"{who}: agent.get p99", figures["p99"], "ms")
            for name in ("gateway", "postgres", "load generator"):
                taken.add(f"{who}: CPU of {name}", cpu[name] / calls * 1e3, "ms/call")


# --- what the database does ------------------------------------------------------------------------------


COUNTERS: Final = {
    "commits": "select xact_commit from pg_stat_database where datname = current_database()",
    "commits that wrote": WRITES,
    "statements": "select sum(calls)::bigint from pg_stat_statements",
    "journal rows": "select count(*) from journal",
    "events": "select count(*) from events",
    "runs": "select count(*) from runs where state = 'complete'",
}
LOAD_STATEMENTS: Final = "create extension if not exists pg_stat_statements"

Counts = dict[str, float]


async def commits(runtime: Runtime, taken: Taken) -> None:
    """What a no-op run makes Postgres do, less what an idle runtime makes it do in the same time."""
    await runtime.sql.execute(LOAD_STATEMENTS)
    clients, warm, runs = COUNTED
    async with runtime.load("runs", clients=clients, warm=warm, runs=runs) as load:
        await anyio.sleep(FLUSH_S)
        idle = await _rates(runtime, IDLE_S)
        began, before = anyio.current_time(), await _counts(runtime)
        await load.go()
        await anyio.sleep(FLUSH_S)
        after, took_s = await _counts(runtime), anyio.current_time() - began
    ended = after["runs"] - before["runs"]
    taken.add("runs counted", ended, "runs")
    for name in ("commits", "commits that wrote", "statements", "journal rows", "events"):
        taken.add(name, (after[name] - before[name] - idle[name] * took_s) / ended, "per run")
        taken.add(f"{name} while idle, subtracted", idle[name], "per s")


async def idle(runtime: Runtime, taken: Taken) -> None:
    """What a runtime costs that has nothing to do. The worker is stopped to see the gateway's share."""
    await runtime.sql.execute(LOAD_STATEMENTS)
    before = runtime.clocks()
    rates = await _rates(runtime, IDLE_S)
    for name, after in runtime.clocks().items():
        taken.add(f"CPU of {name}", (after - before[name]) / IDLE_S * 1e3, "ms/s")
    for name in OURS:
        taken.add(f"resident memory of {name}", runtime.resident_bytes(name) / 2**20, "MiB")
    await runtime.local.workers[0].stop()
    alone = await _rates(runtime, ALONE_S)
    taken.add("statements of gateway", alone["statements"], "per s")
    taken.add("statements of worker", rates["statements"] - alone["statements"], "per s")


async def _rates(runtime: Runtime, seconds: float) -> Counts:
    """How fast each counter grows by itself."""
    began, before = anyio.current_time(), await _counts(runtime)
    await anyio.sleep(seconds)
    after, took_s = await _counts(runtime), anyio.current_time() - began
    return {name: (count - before[name]) / took_s for name, count in after.items()}


async def _counts(runtime: Runtime) -> Counts:
    return {name: await runtime.count(query) for name, query in COUNTERS.items()}


# --- streams ---------------------------------------------------------------------------------------------


async def followers(runtime: Runtime, taken: Taken) -> None:
    """Readers who are there before the run gets going."""
    for count in FOLLOWERS:
        opening_s = 1 + count / FOLLOWERS_PER_S
        plan = paced(FOLLOWED_CYCLES, calls=1, delay_s=FOLLOWED_PAUSE_S, first_s=opening_s)
        figures, cpu = await _read(runtime, count, plan, [runtime.local.base_url])
        who = f"{count:,} followers"
        _counted(taken, who, figures["rows"], await runtime.events_of(figures["run_id"]))
        _delivery(taken, who, figures)
        received = sum(row["received"] for row in figures["rows"])
        for name in ("gateway", "load generator"):
            taken.add(f"{who}: CPU of {name}", cpu[name] / max(1, received) * 1e6, "us/event")


async def joiners(runtime: Runtime, taken: Taken) -> None:
    """Readers who come at random moments of a busy run, to one of two gateways, and read it from seq 1.

    The run is lived once at full speed first, to see how long its cycles have to wait for the wanted rate.
    """
    async with runtime.second_gateway() as second:
        urls = [runtime.local.base_url, second]
        probe, _ = await _read(runtime, 1, paced(**JOINED, delay_s=0.0), urls)
        busy_s = JOINED_EVENTS_PER_CYCLE / probe["rate"]
        pause_s = max(0.0, JOINED_EVENTS_PER_CYCLE / JOINED_PER_S - busy_s)
        plan = paced(**JOINED, delay_s=pause_s)
        figures, _ = await _read(runtime, JOINERS, plan, urls, joining_s=JOINING_S)
    who = f"{JOINERS} joiners"
    _counted(taken, who, figures["rows"], await runtime.events_of(figures["run_id"]))
    taken.add(f"{who}: joined while it ran", figures["opened_live"], f"of {JOINERS}")
    _delivery(taken, who, figures, rate="200")


async def replay(runtime: Runtime, taken: Taken) -> None:
    """The log of a run that has ended, read from its beginning."""
    figures, cpu = await runtime.measure("replays", plan=REPLAYED, warm=2, repeats=REPLAYS)
    events = await runtime.events_of(figures["run_id"])
    taken.add("events of the run", events, "events")
    for per_s in figures["per_s"]:
        taken.add("replayed", per_s, "events/s", "at least 20,000")
    _counted(taken, f"{REPLAYS} replays", figures["rows"], events)
    for name in ("gateway", "postgres", "load generator"):
        taken.add(f"CPU of {name}", cpu[name] / REPLAYS / events * 1e6, "us/event")


async def _read(
    runtime: Runtime, count: int, plan: Plan, base_urls: Sequence[str], *, joining_s: float = 0.0
) -> tuple[dict[str, Any], Clocks]:
    return await runtime.measure(
        "followers",
        count=count,
        plan=plan,
        base_urls=base_urls,
        joining_s=joining_s,
        opening_s_max=OPENING_S_MAX,
        within_s=READING_S_MAX,
    )


def _counted(taken: Taken, who: str, rows: Sequence[Mapping[str, int]], events: int) -> None:
    """Compare the record of each reader with the number of events in Postgres."""
    whole = {"different": events, "received": events, "highest": events, "gaps": 0, "ended": 1}
    complete = sum(all(row[name] == count for name, count in whole.items()) for row in rows)
    taken.add(f"{who}: complete", complete, f"of {len(rows):,}", f"{len(rows):,}")
    taken.add(f"{who}: lost", sum(events - row["different"] for row in rows), "events", "0")
    taken.add(f"{who}: repeated", sum(row["received"] - row["different"] for row in rows), "events", "0")
    taken.add(f"{who}: gaps", sum(row["gaps"] for row in rows), "", "0")
    taken.add(f"{who}: streams resumed", sum(row["resumed"] for row in rows), "")
    taken.add(f"{who}: events in Postgres", events, "events")


def _delivery(taken: Taken, who: str, figures: Mapping[str, Any], *, rate: str = "") -> None:
    for refusal in figures["refusals"]:
        taken.add(f"{who}: refused with {refusal}", None, "")
    taken.add(f"{who}: rate of the run", figures["rate"], "events/s", rate)
    taken.add(f"{who}: all open after", figures["opening_s"], "s")
    taken.add(f"{who}: live deliveries", figures["deliveries"], "")
    taken.add(f"{who}: emitted_at to arrival p50", figures["delay_p50"], "ms")
    taken.add(f"{who}: emitted_at to arrival p99", figures["delay_p99"], "ms")
    taken.add(f"{who}: first to last follower p50", figures["skew_p50"], "ms")
    taken.add(f"{who}: first to last follower p99", figures["skew_p99"], "ms")


# What the benches need more of than an installation allows. Everything else is as it comes.
RAISED: Final = {
    "ESPALIER_RPC_RATE": "1000000",
    "ESPALIER_RPC_BURST": "1000000",
    "ESPALIER_STREAMS_PER_KEY": "2000",
}
PLANS_FROM_WIRE: Final = {"ESPALIER_MODELS_SCRIPTED": "on"}
STAGES: Final = (
    Stage({"noop": noop, "rpc": rpc}, RAISED),
    Stage({"complete": complete}, RAISED, script=COMPLETES),
    Stage({"tools": tools}, {**RAISED, **PLANS_FROM_WIRE}),
    Stage({"memory": memory, "downloads": downloads}, RAISED),
    Stage({"followers": followers, "joiners": joiners, "replay": replay}, {**RAISED, **PLANS_FROM_WIRE}),
    Stage(
        {"commits": commits, "idle": idle},
        RAISED,
        postgres_options={"shared_preload_libraries": "pg_stat_statements"},
    ),
)
