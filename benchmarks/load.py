"""The load generator, a process of its own: `python -m benchmarks.load`.

A job comes in as one line of JSON on standard input. When all is connected and warm it says
`{"ready": true}`, waits for a second line, does what is measured, and prints the figures as one line of JSON.
Between the two lines whoever started it reads the processes' clocks. Times are seconds inside and
milliseconds in figures.
"""

import itertools
import random
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import anyio
import orjson
from benchmarks.follower import Emitted, Seen, follow
from benchmarks.report import quantile, said
from benchmarks.wire import Caller, address_of

OPENING_MAX: Final = 64
"""Streams that are being opened at once: fewer than a listening socket keeps waiting."""

CALLS_PER_CYCLE: Final = 50
AGENT: Final = {
    "name": "bench",
    "constitution": {"immutable_directives": "", "mutable_prompt": "", "mutable_prompt_policy": "auto"},
    "toolset": [],
    "ceilings": {
        "max_cycles": 10_000,
        "max_subagents": 0,
        "max_tool_calls_per_cycle": CALLS_PER_CYCLE,
        "max_wall_seconds": 600,
    },
    "budgets": {
        "tokens_per_cycle": 20_000,
        "tool_calls_per_cycle": CALLS_PER_CYCLE,
        "seconds_per_cycle": 60,
    },
}

Job = dict[str, Any]
Figures = dict[str, Any]


class Watch:
    """Marks what is measured: tells the starter before, and counts our own CPU until `stop`."""

    def __init__(self) -> None:
        self._began = self._took = 0.0

    def start(self) -> None:
        _say({"ready": True})
        sys.stdin.readline()  # nothing is under way that this could hold up
        self._began = time.process_time()

    def stop(self) -> None:
        """What comes after is not measured; the first call counts."""
        self._took = self._took or time.process_time() - self._began

    @property
    def cpu_s(self) -> float:
        return self._took


@asynccontextmanager
async def client(job: Job) -> AsyncIterator[tuple[Caller, str]]:
    """A connection with a session, and an agent of its own."""
    async with Caller(job["base_urls"][0], job["key"]) as caller:
        await caller.begin()
        yield caller, (await caller.call("agent.create", AGENT))["id"]


# --- runs ------------------------------------------------------------------------------------------------


@dataclass
class Lived:
    """How long after `run.create` was sent each run was created, told of first, and at its end."""

    created: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    flawed: int = 0

    async def live(self, caller: Caller, agent_id: str) -> None:
        """One run from its creation to its end, its events read over the connection that created it."""
        began = time.monotonic()
        run = await caller.call("run.create", {"agent_id": agent_id, "goal": "nothing"})
        created = time.monotonic()
        arrivals = [each async for each in caller.events(run["id"])]
        if not arrivals:
            raise RuntimeError("a stream ended before its first event")
        seqs = [seq for _, part, _ in arrivals for seq in part]
        self.flawed += seqs != list(range(1, len(seqs) + 1)) or not arrivals[-1][2]
        self.created.append(created - began)
        self.first.append(arrivals[0][0] - began)
        self.ended.append(arrivals[-1][0] - began)

    def figures(self, took_s: float) -> Figures:
        return {
            "created_p50": quantile(self.created, 0.5) * 1e3,
            "first_p50": quantile(self.first, 0.5) * 1e3,
            "first_p99": quantile(self.first, 0.99) * 1e3,
            "ended_p50": quantile(self.ended, 0.5) * 1e3,
            "ended_p99": quantile(self.ended, 0.99) * 1e3,
            "per_s": len(self.ended) / took_s,
            "runs": len(self.ended),
            "flawed": self.flawed,
        }


async def runs(job: Job, watch: Watch) -> Figures:
    """`runs` runs by `clients` clients, each of which starts its next one when the last has ended."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(job)) for _ in range(job["clients"])]
        await _share(job["warm"], [partial(Lived().live, *each) for each in clients])
        watch.start()
        lived, began = Lived(), time.monotonic()
        await _share(job["runs"], [partial(lived.live, *each) for each in clients])
        return lived.figures(time.monotonic() - began)


async def calls(job: Job, watch: Watch) -> Figures:
    """`calls` calls of `agent.get` over `clients` connections."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(job)) for _ in range(job["clients"])]
        took: list[float] = []

        async def get(caller: Caller, agent_id: str) -> None:
            began = time.monotonic()
            await caller.call("agent.get", {"agent_id": agent_id})
            took.append(time.monotonic() - began)

        gets = [partial(get, *each) for each in clients]
        await _share(job["warm"], gets)
        watch.start()
        took.clear()
        began = time.monotonic()
        await _share(job["calls"], gets)
        per_s = len(took) / (time.monotonic() - began)
        return {"p50": quantile(took, 0.5) * 1e3, "p99": quantile(took, 0.99) * 1e3, "per_s": per_s}


async def _share(count: int, doers: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Do something `count` times in all; whoever is free does the next one, so that all end together."""
    tickets = iter(range(count))

    async def work(do: Callable[[], Awaitable[None]]) -> None:
        for _ in tickets:
            await do()

    async with anyio.create_task_group() as group:
        for do in doers:
            group.start_soon(work, do)


# --- streams ---------------------------------------------------------------------------------------------


async def followers(job: Job, watch: Watch) -> Figures:
    """`count` readers of one run that follows `plan`, spread over the gateways.

    They come at once, or each at a random moment of the first `joining_s` seconds of the run. After
    `within_s` those that still read are given up, and what they have seen until then is reported.
    """
    dice = random.Random(job["count"])  # noqa: S311 - the same moments each time
    addresses = [address_of(url) for url in job["base_urls"]]
    readers, emitted = [Seen() for _ in range(job["count"])], Emitted()
    opening = anyio.Semaphore(OPENING_MAX)
    async with client(job) as (caller, agent_id):
        watch.start()
        run_id = await _start_run(caller, agent_id, job["plan"])
        request, began = partial(caller.events_request, run_id), time.time()

        async def read(seen: Seen, address: tuple[str, int]) -> None:
            await anyio.sleep(dice.uniform(0, job["joining_s"]))
            try:
                async with anyio.create_task_group() as group, opening:
                    group.start_soon(follow, address, request, seen, emitted)
                    with anyio.move_on_after(job["opening_s_max"]):
                        await seen.answered.wait()
            except* OSError as refused:
                seen.refusal = said(refused)

        with anyio.move_on_after(job["within_s"]):
            async with anyio.create_task_group() as group:
                for seen, address in zip(readers, itertools.cycle(addresses)):
                    group.start_soon(read, seen, address)
        watch.stop()
    return {"run_id": run_id, **_seen_of_a_run(readers, emitted, began)}


def _seen_of_a_run(readers: list[Seen], emitted: Emitted, began: float) -> Figures:
    """The record of each reader in a row of counts, and how long events took to reach them.

    An event counts as delivered live if it was written after the reader's stream had opened, and for the
    skew if all streams had.
    """
    opened = [seen.opened_at for seen in readers if seen.opened_at]
    all_open = max(opened, default=0.0)
    delays = array("d")
    arrivals: dict[int, list[float]] = {}
    for seen in readers:
        for seq, moment in zip(seen.seqs, seen.moments, strict=True):
            if emitted[seq] >= seen.opened_at:
                delays.append(moment - emitted[seq])
            if emitted[seq] >= all_open:
                arrivals.setdefault(seq, []).append(moment)
    skews = [max(moments) - min(moments) for moments in arrivals.values()]
    ended_at = max(emitted.values(), default=0.0)
    return {
        "rows": [_row(seen) for seen in readers],
        "opened": len(opened),
        "opened_live": sum(moment < ended_at for moment in opened),
        "opening_s": all_open - began if opened else None,
        "deliveries": len(delays),
        "delay_p50": _ms(delays, 0.5),
        "delay_p99": _ms(delays, 0.99),
        "skew_p50": _ms(skews, 0.5),
        "skew_p99": _ms(skews, 0.99),
        "rate": _rate(emitted),
        "refusals": sorted({seen.refusal for seen in readers if seen.refusal})[:3],
    }


def _row(seen: Seen) -> dict[str, int]:
    """What is counted of one reader. A gap is a step forward by more than one."""
    steps = zip([0, *seen.seqs], seen.seqs, strict=False)
    return {
        "different": len(set(seen.seqs)),
        "received": len(seen.seqs),
        "highest": max(seen.seqs, default=0),
        "gaps": sum(after > before + 1 for before, after in steps),
        "ended": int(seen.ended),
        "resumed": seen.resumed,
    }


def _rate(emitted: Emitted) -> float | None:
    """Events per second over the middle half of the run: pauses at its beginning do not count."""
    moments = sorted(emitted.values())
    first, last = len(moments) // 4, len(moments) * 3 // 4
    if first == last or moments[first] == moments[last]:
        return None
    return (last - first) / (moments[last] - moments[first])


def _ms(values: Sequence[float], share: float) -> float | None:
    return quantile(values, share) * 1e3 if values else None


async def replays(job: Job, watch: Watch) -> Figures:
    """The whole log of a run that has ended, read `repeats` times from its beginning, one after the other."""
    async with client(job) as (caller, agent_id):
        run_id = await _start_run(caller, agent_id, job["plan"])
        request, address = partial(caller.events_request, run_id), address_of(job["base_urls"][0])
        emitted = Emitted()
        for _ in range(1 + job["warm"]):  # the first one waits for the end
            await follow(address, request, Seen(), emitted)
        watch.start()
        took, readers = [], []
        for _ in range(job["repeats"]):
            readers.append(Seen())
            began = time.monotonic()
            await follow(address, request, readers[-1], emitted)
            took.append(time.monotonic() - began)
    per_s = [len(seen.seqs) / each for seen, each in zip(readers, took, strict=True)]
    return {"run_id": run_id, "rows": [_row(seen) for seen in readers], "per_s": per_s}


async def _start_run(caller: Caller, agent_id: str, plan: list[Any]) -> str:
    inputs = {"espalier.script": {"answers": plan}}
    run = await caller.call("run.create", {"agent_id": agent_id, "goal": "to be read", "inputs": inputs})
    return str(run["id"])


# --- the process -----------------------------------------------------------------------------------------

JOBS: Final = {"runs": runs, "calls": calls, "followers": followers, "replays": replays}


async def work(job: Job) -> None:
    watch = Watch()
    try:
        figures = await JOBS[job["kind"]](job, watch)
        watch.stop()
        _say({**figures, "cpu_s": watch.cpu_s})
    except Exception as error:
        _say({"error": said(error)})


def _say(members: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(members).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(work, orjson.loads(sys.stdin.readline()), backend_options={"use_uvloop": True})
