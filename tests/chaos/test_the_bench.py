"""The bench itself: what a seed gives, what a proxy does to a line, what a report counts, and one storm.

That the checker finds what is broken is shown beside it, in `test_the_checker.py`.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from tests.chaos.history import (
    Began,
    Dump,
    Ended,
    Fault,
    Frame,
    Orphaned,
    Process,
    Record,
    read_dump,
    read_history,
)
from tests.chaos.invariants import check
from tests.chaos.nemesis import KINDS, MOMENTS, schedule
from tests.chaos.proxies import FaultProxy, fault_proxy, proxy_process
from tests.chaos.report import figures, spread
from tests.chaos.stories import OWNERS, SCRIPT, canary, story
from tests.chaos.storm import Plan, storm

from espalier_protocol.ids import to_wire

SEED = 20260301
LONG_S = 25 * 60.0
STORIES = 400
WAIT_S = 5.0
SILENT_S = 0.3


# --- the schedule ----------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_faults_and_another_seed_gives_others() -> None:
    assert schedule(SEED, 60) == schedule(SEED, 60)
    assert schedule(SEED, 60) != schedule(SEED + 1, 60)
    assert schedule(SEED, 60) == tuple(sorted(schedule(SEED, 60), key=lambda act: act.at_s))


@pytest.mark.parametrize("seed", range(5))
def test_a_short_storm_has_every_kind_of_fault(seed: int) -> None:
    assert {act.kind for act in schedule(seed, 45)} == set(KINDS)


@pytest.mark.parametrize("seed", range(5))
def test_three_long_storms_have_the_faults_that_a_release_asks_for(seed: int) -> None:
    """A thousand, a hundred and fifty in three storms; a few may come to nothing, so there are more."""
    counted = Counter(act.kind for act in schedule(seed, LONG_S))
    assert counted["worker.kill"] >= 345
    assert counted["redis.kill"] + counted["redis.flush"] >= 100
    assert counted["redis.kill"] >= 36
    assert counted["postgres.crash"] >= 18
    assert counted["gateway.kill"] + counted["gateway.term"] >= 30
    assert min(counted[kind] for kind in ("gateway.kill", "broker.kill")) >= 17


def test_armed_processes_die_at_moments_that_there_are() -> None:
    moments = {
        (act.kind.partition(".")[0], act.moment.partition(".")[0])
        for seed in range(3)
        for act in schedule(seed, LONG_S)
        if act.moment
    }
    assert moments == {(service, place) for service, places in MOMENTS.items() for place in places}


# --- the stories -----------------------------------------------------------------------------------------


def test_a_story_is_a_function_of_its_seed_and_number() -> None:
    assert [story(SEED, number) for number in range(20)] == [story(SEED, number) for number in range(20)]
    assert story(SEED, 1) != story(SEED + 1, 1)


def test_stories_mix_owners_and_everything_that_an_agent_or_an_embedder_does() -> None:
    stories = [story(SEED, number) for number in range(STORIES)]
    tools = {call["tool"] for each in stories for step in each.plan for call in step.get("calls", ())}
    assert {each.owner for each in stories} == set(OWNERS)
    assert tools >= {
        *("sleep", "continue_now", "complete", "artifact_create", "spawn_subagent", "send_message"),
        *("inbox_read", "learning_memory_write", "mcp.ledger.record", "mcp.ledger.fail", "mcp.desk.record"),
    }
    assert {each.cancel_method for each in stories if each.cancel_at_s} == {"run.cancel", "agent.cancel"}
    for does in ("repeats", "other_params", "peeks", "joins_at_s", "messages_at_s", "on_provider"):
        assert STORIES / 20 < sum(bool(getattr(each, does)) for each in stories) < STORIES / 1.2, does


def test_a_call_with_a_ledger_is_told_the_name_that_the_runtime_gives_it() -> None:
    plans = [story(SEED, number).plan for number in range(STORIES)]
    plans += [
        call["args"]["metadata"][SCRIPT]["answers"]
        for plan in plans
        for step in plan
        for call in step.get("calls", ())
        if call["tool"] == "spawn_subagent"
    ]
    told = [
        (call["args"]["text"], f"call_{answer}_{place}")
        for plan in plans
        for answer, step in enumerate(plan, start=1)
        for place, call in enumerate(step.get("calls", ()), start=1)
        if call["tool"].startswith("mcp.")
    ]
    assert len(told) > STORIES
    assert [text for text, name in told if text != name] == []


def test_nothing_of_a_story_names_another_owner() -> None:
    for number in range(STORIES):
        each = story(SEED, number)
        others = [canary(owner) for owner in OWNERS if owner != each.owner]
        assert not [text for text in others if text in json.dumps([each.agent, each.goal, each.inputs])]


# --- the proxy -------------------------------------------------------------------------------------------


@asynccontextmanager
async def answering(heard: list[bytes]) -> AsyncIterator[int]:
    """A server that repeats what it hears; its port."""

    async def repeat(stream: SocketStream) -> None:
        async with stream:
            try:
                async for piece in stream:
                    heard.append(piece)
                    await stream.send(piece)
            except anyio.BrokenResourceError:
                return

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, repeat)
        yield listener.extra(SocketAttribute.local_port)  # noqa: S610 - no database
        group.cancel_scope.cancel()


Line = tuple[FaultProxy, SocketStream, list[bytes]]


@pytest.fixture
async def line(anyio_backend: object) -> AsyncIterator[Line]:
    """A proxy, a connection through it that works, and what the server heard."""
    heard: list[bytes] = []
    async with (
        answering(heard) as port,
        fault_proxy(port) as proxy,
        await anyio.connect_tcp("127.0.0.1", proxy.port) as stream,
    ):
        with anyio.fail_after(WAIT_S):
            await stream.send(b"hello")
            assert await stream.receive() == b"hello"
        heard.clear()
        yield proxy, stream, heard


async def broken(stream: SocketStream) -> bytes:
    """What still comes before the connection breaks. It is reset and not closed in order."""
    got = b""
    with anyio.fail_after(WAIT_S):
        try:
            while True:  # bounded by the scope
                got += await stream.receive()
        except anyio.BrokenResourceError:
            return got


@asynccontextmanager
async def cutting(proxy: FaultProxy, *, sent: bool) -> AsyncIterator[None]:
    """Meanwhile the proxy waits for a COMMIT; at the end it has met one."""
    cut: list[bool] = []

    async def wait() -> None:
        cut.append(await proxy.cut_at_commit(sent=sent, within_s=WAIT_S))

    with anyio.fail_after(2 * WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            yield
    assert cut == [True]


async def eventually(question: Callable[[], bool]) -> None:
    with anyio.fail_after(WAIT_S):
        while not question():
            await anyio.sleep(0.01)


@pytest.mark.anyio
async def test_a_black_hole_takes_everything_and_hands_on_nothing_until_it_is_healed(line: Line) -> None:
    proxy, stream, heard = line
    proxy.black_hole()
    await stream.send(b"anybody?")
    async with await anyio.connect_tcp("127.0.0.1", proxy.port) as late:
        await late.send(b"me too")
        with anyio.move_on_after(SILENT_S) as waited:
            await stream.receive()
        assert waited.cancelled_caught
        assert heard == []

        proxy.heal()
        with anyio.fail_after(WAIT_S):
            assert (await stream.receive(), await late.receive()) == (b"anybody?", b"me too")


@pytest.mark.anyio
@pytest.mark.parametrize("sent", [True, False])
async def test_a_line_is_cut_at_the_next_commit_after_or_before_the_server_has_it(
    line: Line, sent: bool
) -> None:
    proxy, stream, heard = line
    async with cutting(proxy, sent=sent):
        await stream.send(b"BEGIN")
        assert await stream.receive() == b"BEGIN"
        await stream.send(b"Q\0COMMIT;\0")
        await broken(stream)
    assert heard == [b"BEGIN", b"Q\0COMMIT;\0"][: 2 if sent else 1]


@pytest.mark.anyio
async def test_the_next_connection_after_a_cut_may_commit(line: Line) -> None:
    proxy, stream, _ = line
    async with cutting(proxy, sent=False):
        await stream.send(b"COMMIT")
        await broken(stream)
    async with await anyio.connect_tcp("127.0.0.1", proxy.port) as again:
        with anyio.fail_after(WAIT_S):
            await again.send(b"COMMIT")
            assert await again.receive() == b"COMMIT"


@pytest.mark.anyio
async def test_a_line_that_meets_no_commit_in_time_is_left_alone(line: Line) -> None:
    proxy, stream, _ = line
    assert not await proxy.cut_at_commit(sent=True, within_s=SILENT_S)
    with anyio.fail_after(WAIT_S):
        await stream.send(b"COMMIT")
        assert await stream.receive() == b"COMMIT"


@pytest.mark.anyio
async def test_a_process_of_proxies_carries_and_obeys(anyio_backend: object) -> None:
    async with answering([]) as port, proxy_process({"one": port, "two": port}) as proxies:
        streams = [await anyio.connect_tcp("127.0.0.1", each.port) for each in proxies.values()]
        with anyio.fail_after(WAIT_S):
            for stream in streams:
                await stream.send(b"hello")
                assert await stream.receive() == b"hello"
            assert await proxies["one"].reset() == 1
            await broken(streams[0])
            assert not await proxies["two"].cut_at_commit(sent=True, within_s=0.01)
            await streams[1].send(b"still there")
            assert await streams[1].receive() == b"still there"
        for stream in streams:
            await stream.aclose()


@pytest.mark.anyio
async def test_answers_are_cut_off_after_so_many_bytes(line: Line) -> None:
    proxy, stream, heard = line
    proxy.cut_answers_after(3)
    await stream.send(b"question")
    assert b"question".startswith(await broken(stream)), "a reset may overtake what was sent before it"
    assert heard == [b"question"]


@pytest.mark.anyio
async def test_all_open_lines_are_reset_and_the_server_hears_of_it(line: Line) -> None:
    proxy, stream, _ = line
    assert proxy.reset() == 1
    await broken(stream)
    await eventually(lambda: proxy.reset() == 0)


@pytest.mark.anyio
async def test_a_delay_is_borne_by_question_and_answer(line: Line) -> None:
    proxy, stream, _ = line
    proxy.delay(SILENT_S)
    began = anyio.current_time()
    await stream.send(b"slowly")
    with anyio.fail_after(WAIT_S):
        assert await stream.receive() == b"slowly"
    assert anyio.current_time() - began >= 2 * SILENT_S


# --- the report ------------------------------------------------------------------------------------------

RUN = UUID(int=7)
RUN_ID = to_wire("run", RUN)
CLOCK = 1_767_225_600.0
"""2026-01-01T00:00:00Z, when the bench's clock shows 0."""


def moment(seconds: float) -> str:
    return f"2026-01-01T00:{int(seconds) // 60:02}:{seconds % 60:09.6f}+00:00"


def dump(**tables: list[dict[str, Any]]) -> Dump:
    return {"runs": [], "events": [], "journal": [], "tool_calls": [], **tables}


def frame(follower: str, seq: int) -> Frame:
    return Frame(1.0, follower, "run_x", 1, f"{seq:016}", "x", "")


def test_a_report_counts_what_followers_missed_and_saw_twice() -> None:
    seen = {"a": [1, 2, 3], "b": [1, 4, 4, 5], "c": [2, 1, 3]}
    records: list[Record] = [frame(name, seq) for name, seqs in seen.items() for seq in seqs]
    told = figures(records, dump())
    assert (told["gaps"], told["duplicates"], told["frames"]) == (2 + 1, 1 + 1, 10)


def test_a_report_counts_faults_and_what_so_many_without_a_violation_support() -> None:
    records: list[Record] = [Fault(1.0, "F1", "worker.kill", "worker-0")] * 300
    told = figures(records, dump())
    assert (told["n"], told["bound_95"], told["faults"]) == (300, 0.01, {"worker.kill": 300})
    assert figures([], dump())["bound_95"] is None


def test_recovery_is_from_a_death_to_the_next_thing_written_of_the_run_by_the_databases_clock() -> None:
    other = to_wire("run", UUID(int=8))
    records: list[Record] = [
        Began(0.0, 1, {"lease_ttl_s": 3.0}),
        *(Process(1.0, f"worker-{number}", number, "ready") for number in range(2)),
        Orphaned(100.0, CLOCK + 100, "worker-0", "killed", [RUN_ID]),
        Orphaned(200.0, CLOCK + 200, "worker-1", "killed", [RUN_ID, other]),
        Orphaned(300.0, CLOCK + 300, "worker-1", "stopped", [RUN_ID]),
        Orphaned(400.0, CLOCK + 400, "worker-1", "killed", [RUN_ID]),
        Fault(199.0, "F12", "postgres.crash", "postgres", {"seconds": 1.0}),
        *(Process(402.0, f"worker-{number}", number, "exited", -9) for number in range(2)),
    ]
    written = [50.0, 103.5, 203.0, 260.0, 300.25, 409.0]
    events = [{"run_id": str(RUN), "emitted_at": moment(at)} for at in written[::2]]
    journal = [{"run_id": str(RUN), "created_at": moment(at)} for at in written[1::2]]

    told = figures(records, dump(events=events, journal=journal))["recovery_s"]

    assert told == {
        "after_sigkill": {"count": 1, "p50": 3.5, "p99": 3.5, "max": 3.5},
        "after_sigterm": {"count": 1, "p50": 0.25, "p99": 0.25, "max": 0.25},
        "after_sigkill_disturbed": {"count": 2, "p50": 6.0, "p99": 8.94, "max": 9.0},
        "after_sigterm_disturbed": spread([]),
    }


def test_a_cancel_takes_from_the_wish_to_the_end_and_counts_as_live_where_nothing_was_wrong() -> None:
    runs: list[dict[str, Any]] = [
        {"state": "cancelled", "cancel_requested_at": moment(10), "ended_at": moment(10.5), "result": None},
        {"state": "cancelled", "cancel_requested_at": moment(40), "ended_at": moment(45), "result": None},
        {"state": "error", "cancel_requested_at": None, "ended_at": moment(45), "result": {"reason": "no"}},
    ]
    records: list[Record] = [Fault(41.0, "F1", "worker.kill", "worker-0"), Ended(60.0, CLOCK + 60)]
    told = figures(records, dump(runs=runs))
    assert told["cancel_s"]["live"] == {"count": 1, "p50": 0.5, "p99": 0.5, "max": 0.5}
    assert (told["cancel_s"]["all"]["count"], told["cancel_s"]["all"]["max"]) == (2, 5.0)
    assert (told["runs"], told["run_errors"]) == ({"cancelled": 2, "error": 1}, {"no": 1})


# --- a storm ---------------------------------------------------------------------------------------------

STORM_S = 45.0
MAIN: dict[str, int] = {
    "worker.kill": 6,
    "worker.term": 1,
    "worker.freeze": 1,
    "gateway.kill": 1,
    "broker.kill": 1,
    "redis.kill": 1,
    "redis.flush": 1,
    "postgres.crash": 1,
    "postgres.terminate": 1,
    "line.commit_cut": 1,
    "model.trouble": 1,
    "ledger.kill": 1,
}
"""What a storm of STORM_S does at least."""

MOSTLY = 0.6
"""Of runs that nobody cancelled; the others end too, but in `error`."""


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.timeout(400)
async def test_a_storm_violates_nothing_and_every_run_ends(tmp_path: Path) -> None:
    outcome = await storm(Plan(SEED, STORM_S, at_once=8), tmp_path)

    told = outcome.report
    assert [violation.sentence for violation in outcome.violations] == []
    assert outcome.open_runs == ()
    done = told["faults"]
    assert {kind: done.get(kind, 0) for kind, least in MAIN.items() if done.get(kind, 0) < least} == {}
    assert (told["gaps"], told["duplicates"]) == (0, 0)
    assert told["runs"]["complete"] >= MOSTLY * (
        sum(told["runs"].values()) - told["runs"].get("cancelled", 0)
    )
    records = list(read_history(tmp_path / "history.jsonl.gz"))
    assert check(records, read_dump(tmp_path / "dump.json.gz")) == [], "what was kept is what was judged"
    assert json.loads((tmp_path / "reliability-report.json").read_text()) == told
