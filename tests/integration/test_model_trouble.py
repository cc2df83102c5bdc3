"""What comes of each trouble that a model can make: the table of docs/model-trouble.md, line by line.

A real worker lives every line as a run of its own, each on a provider of its own, because one in trouble has
few second attempts (see `sparing`). Waits are not slept through: the moment at which a run is due is moved.
"""

import json
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from time import time
from typing import Any, Final

import anyio
import pytest
from anyio.abc import SocketAttribute
from fake_openai import ChatRequest, FakeOpenAI, Reply, Told, answer, completion, failure, value
from scripted_runs import row_of
from tests.integration.conftest import Start
from tests.integration.wire import Wire

from espalier_domain.decisions import FORCED_SLEEP_S
from espalier_domain.history import BYTES_PER_TOKEN
from espalier_domain.run import MODEL_ATTEMPTS_MAX, SPREAD
from espalier_gateway import providers_rest
from espalier_gateway.settings import GatewaySettings
from espalier_local.ports import free_port
from espalier_protocol.ids import from_wire
from espalier_run_worker.model_calls import ANSWER_TOKENS_MAX
from espalier_run_worker.models.sparing import IN_HAND, SHARE
from espalier_store.pool import Pool

# A worker that asks a real model loads the SDK, which takes seconds, and some of the lines are about waiting.
pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "model-trouble.md"
KEY = "sk-test-0123456789abcdef"
WAIT_S = 150.0
POLL_S = 0.05
LATE_S = 1.0
PATIENCE_S = 4
"""Of a cycle whose provider keeps it waiting; the connection's own patience is longer."""

MIB = 1024 * 1024
LABEL: Final = re.compile(r"Goal: \[([\w ,.+-]+)\]")
HEALTHY = answer(None, ("complete", {"final_message": "done"}))
WHOLE = answer("half of it").body
HTML = b"<!doctype html><title>502 Bad Gateway</title>"
NOTE = ("artifact_create", {"name": "n", "content": "n"})
ODD = "a\u2028b\ud800c\x00d"


def finished(text: str | None, finish: str | None) -> Reply:
    body = completion(text)
    body["choices"][0]["finish_reason"] = finish
    return value(body, tokens=100)


def used(prompt: int, said: int, *, told: int) -> Reply:
    return value(completion("ok", usage=(prompt, said)), tokens=told)


def twice_used() -> Reply:
    body = json.dumps(completion("ok", usage=(1, 1)))
    last = '{"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42}'
    return Reply(f'{body[:-1]}, "usage": {last}}}'.encode(), tokens=42)


def same_ids() -> Reply:
    body = completion(None, NOTE, ("complete", {"final_message": "done"}))
    for call in body["choices"][0]["message"]["tool_calls"]:
        call["id"] = "c0"
    return value(body, tokens=100)


def date(in_s: float) -> str:
    return formatdate(time() + in_s, usegmt=True)


REPLIES: dict[str, Reply] = {
    "429": failure(429),
    "429, Retry-After in seconds": failure(429, Retry_After="7"),
    "429, Retry-After as a date": failure(429, Retry_After=date(3600)),
    "429, Retry-After in the past": failure(429, Retry_After=date(-3600)),
    "429, retry-after-ms": failure(429, retry_after_ms="2500"),
    "429, Retry-After of a day": failure(429, Retry_After="86400"),
    "429, Retry-After that is none": failure(429, Retry_After="soon"),
    "429, quota": failure(429, code="insufficient_quota"),
    "400": failure(400),
    "400, prompt too long": failure(400, code="context_length_exceeded"),
    "401": failure(401),
    "402": failure(402),
    "403": failure(403),
    "404": failure(404),
    "408": failure(408),
    "500": failure(500),
    "502": failure(502),
    "503": failure(503),
    "503, Retry-After in seconds": failure(503, Retry_After="20"),
    "529": failure(529),
    "redirect": Reply(status=302, headers=(("Location", "http://127.0.0.1:9/"),)),
    "first byte late": Reply(HEALTHY.body, tokens=HEALTHY.tokens, after_s=LATE_S),
    "first byte never": Reply(ending="silence"),
    "stall in the body": Reply(WHOLE, missing=1, ending="hang"),
    "reset in the body": Reply(WHOLE, missing=1, ending="reset"),
    "end in the body": Reply(WHOLE, missing=1),
    "truncated JSON": Reply(WHOLE[:40]),
    "empty body": Reply(),
    "wrong content type": Reply(HEALTHY.body, tokens=HEALTHY.tokens, content_type="text/plain"),
    "HTML page": Reply(HTML, content_type="text/html"),
    "broken gzip": Reply(WHOLE, headers=(("Content-Encoding", "gzip"),)),
    "200 with an error": value({"error": {"message": "no"}}),
    "200 with an error 429": value({"error": {"message": "no", "code": 429}}),
    "50 MB": Reply(b" " * MIB, times=50),
    "usage twice": twice_used(),
    "no usage": answer("ok", usage=None),
    "negative usage": used(-70, -30, told=0),
    "absurd usage": used(10**15, 1, told=2**31 - 1),
    "empty answer": answer(None),
    "finish length": finished("half of it", "length"),
    "finish MAX_TOKENS": finished("half of it", "MAX_TOKENS"),
    "finish content_filter": finished(None, "content_filter"),
    "finish error": finished("half of it", "error"),
    "finish unknown": finished("whole", "banana"),
    "finish absent": finished("whole", None),
    "unknown tool": answer(None, ("no_such_tool", {})),
    "tool name of 10 kB": answer(None, ("x" * 10_240, {})),
    "malformed arguments": answer(None, ("complete", '{"final_message": "do')),
    "arguments that are no object": answer(None, ("complete", "[1]")),
    "100 calls": answer(None, *[NOTE] * 100),
    "101 calls": answer(None, *[NOTE] * 101),
    "same call id twice": same_ids(),
    "U+2028, surrogate, NUL in text": answer(ODD),
    "U+2028 in arguments": answer(None, ("complete", {"final_message": "a\u2028b"})),
    "NUL in arguments": answer(None, ("complete", {"final_message": "a\x00b"})),
    "surrogate in arguments": answer(None, ("complete", {"final_message": "a\ud800b"})),
}
"""What the provider says to every request of the line's first cycle."""

UNREACHABLE: dict[str, str] = {
    "connection refused": "http://127.0.0.1:{free}/v1",
    "TLS error": "https://127.0.0.1:{fake}/v1",
    "DNS error": "https://nobody.invalid/v1",
    "connect hangs": "http://127.0.0.1:{full}/v1",
}
"""Lines whose provider is at an address where nobody answers."""

IMPATIENT = {"first byte never", "stall in the body"}


# --- the page --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """How one trouble ends; `wait` is the least before the second attempt, `costs` is for each attempt."""

    attempts: int
    reason: str
    wait: str
    costs: str
    ends: str


def page() -> dict[str, Line]:
    """The table of the page by its first column."""
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    start = rows.index(["case", "attempts", "reason", "wait", "costs", "ends"]) + 2
    cells = ([cell.strip("` ") for cell in row] for row in rows[start:] if len(row) == len(rows[start]))
    return {case: Line(int(attempts), *rest) for case, attempts, *rest in cells}


# --- what happened ---------------------------------------------------------------------------------------


@dataclass
class TroubleServer(FakeOpenAI):
    """Says to each run what its goal's label stands for, until it is well."""

    well: bool = False
    down: Reply | None = None
    asked: Counter[str] = field(default_factory=Counter)

    def reply_to(self, request: ChatRequest) -> Reply:
        told = "".join(message.content for message in request.messages if isinstance(message, Told))
        found = LABEL.search(told)
        assert found, told
        self.asked[found[1]] += 1
        return HEALTHY if self.well else self.down or REPLIES.get(found[1], HEALTHY)


@asynccontextmanager
async def trouble_server() -> AsyncIterator[TroubleServer]:
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610
        server = TroubleServer(KEY, "small", f"http://127.0.0.1:{port}/v1", [])
        group.start_soon(listener.serve, server.serve)
        yield server
        group.cancel_scope.cancel()


@dataclass
class Lived:
    """A line's run, and what its journal says of the first cycle."""

    run_id: str
    row: Any
    entries: list[dict[str, Any]]

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["kind"] in kinds and entry["cycle"] == 1]

    def attempts(self) -> list[dict[str, Any]]:
        return self.of("model_answered", "model_failed")

    def line(self, reply: Reply | None, promised: Line | None) -> Line:
        failures = self.of("model_failed")
        reserved = [entry["reserved"] for entry in self.of("model_call_started")]
        costs = {
            _cost(attempt["tokens"], most, reply)
            for attempt, most in zip(self.attempts(), reserved, strict=True)
        }
        return Line(
            attempts=len(self.attempts()),
            reason=", ".join(sorted({entry["reason"].split(":")[0] for entry in failures})) or "-",
            wait=self._wait(promised.wait if promised else ""),
            costs=", ".join(sorted(costs)),
            ends="sleeps" if self.row["state"] == "sleeping" else self.row["state"],
        )

    def _wait(self, promised: str) -> str:
        """What was promised, if it was kept and not by far exceeded."""
        waits = [entry["seconds"] for entry in self.of("parked")]
        if not waits:
            return "-"
        least = re.fullmatch(r"([\d.]+) s", promised)
        kept = least and float(least[1]) <= waits[0] < float(least[1]) * (1 + SPREAD)
        return promised if kept else f"{waits[0]:.2f} s"


def _cost(tokens: int, reserved: int, reply: Reply | None) -> str:
    if tokens in (0, reserved):
        return "reserved" if tokens else "nothing"
    if reply and reply.tokens == tokens:
        return "told"
    if reply and tokens == reserved - ANSWER_TOKENS_MAX + -(-_said_bytes(reply) // BYTES_PER_TOKEN):
        return "by size"
    return f"{tokens} of {reserved}"


def _said_bytes(reply: Reply) -> int:
    return len(json.loads(reply.body)["choices"][0]["message"]["content"])


async def journal(pool: Pool, run_id: str) -> list[dict[str, Any]]:
    query = "select body from journal where run_id = $1 order by entry_no"
    return [json.loads(row["body"]) for row in await pool.fetch(query, from_wire("run", run_id))]


MOVE = "update runs set due_at = now() where state = 'sleeping' and wait_reason = 'retry'"
UNDER_WAY = "select count(*) from runs where state = 'running' or wait_reason = 'retry'"


async def until_at_rest(pool: Pool) -> None:
    """Until every run has ended, or has given up for a while; no wait within a cycle is waited for."""
    with anyio.fail_after(WAIT_S):
        while await pool.fetchval(UNDER_WAY):
            await pool.execute(MOVE)
            await anyio.sleep(POLL_S)


@contextmanager
def full_port() -> Iterator[int]:
    """A port where connecting never ends: nobody accepts, and its queue is full."""
    with socket.socket() as listening, socket.socket() as first, socket.socket() as second:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for each in (first, second):
            each.setblocking(False)
            each.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]


def budgets(**changes: int) -> dict[str, int]:
    return {"tokens_per_cycle": 100_000, "tool_calls_per_cycle": 3, "seconds_per_cycle": 60, **changes}


LIMITS = {"max_cycles": 5, "max_subagents": 0, "max_tool_calls_per_cycle": 3, "max_wall_seconds": 600}


@pytest.fixture
def gateway_settings(gateway_settings: GatewaySettings) -> GatewaySettings:
    return gateway_settings.model_copy(update={"rpc_rate": 1000.0, "rpc_burst": 1000})


async def provider(wire: Wire, name: str, base_url: str) -> str:
    given = {"name": name, "kind": "openai_compat", "api_key": KEY, "base_url": base_url}
    given["default_model"] = "small"
    response = await wire.http.post(
        providers_rest.PATH, headers={"Authorization": f"Bearer {wire.key}"}, json=given
    )
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


async def mended(wire: Wire, provider_id: str, base_url: str) -> None:
    moved = {"base_url": base_url, "api_key": KEY}
    headers = {"Authorization": f"Bearer {wire.key}"}
    response = await wire.http.patch(f"{providers_rest.PATH}/{provider_id}", headers=headers, json=moved)
    assert response.status_code == 200, response.text


async def begun(wire: Wire, case: str, provider_id: str) -> str:
    seconds = PATIENCE_S if case in IMPATIENT else 60
    agent = await wire.agent(
        toolset=[],
        ceilings=LIMITS,
        budgets=budgets(seconds_per_cycle=seconds),
        runner={"provider_id": provider_id},
    )
    return await wire.run(agent, goal=f"[{case}]")


def worker_settings(fake: FakeOpenAI, *ports: int, slots: int) -> dict[str, str]:
    """The SDK is loaded before the worker is ready, because it has a real model of its own."""
    own = fake.base_url.split(":")[2].split("/")[0]
    return {
        "ESPALIER_MODEL": fake.model,
        "OPENAI_BASE_URL": fake.base_url,
        "OPENAI_API_KEY": KEY,
        "ESPALIER_WORKER_SLOTS": str(slots),
        "ESPALIER_EGRESS_ALLOW": ",".join(f"127.0.0.1:{port}" for port in (own, *ports)),
    }


async def test_each_trouble_ends_as_the_page_says_and_its_cost_is_settled(
    pool: Pool, wire: Wire, start: Start
) -> None:
    with full_port() as full:
        async with trouble_server() as fake:
            free, own = free_port(), fake.base_url.split(":")[2].split("/")[0]
            places = {case: url.format(free=free, fake=own, full=full) for case, url in UNREACHABLE.items()}
            places |= dict.fromkeys(REPLIES, fake.base_url)
            # On a busy machine nobody is to lose a run in mid-attempt: that is another page.
            settings = worker_settings(fake, free, full, slots=len(places))
            start("worker", ESPALIER_LEASE_TTL_S="60", **settings)
            providers = {case: await provider(wire, case, url) for case, url in places.items()}
            runs = {case: await begun(wire, case, providers[case]) for case in places}

            await until_at_rest(pool)

            lived = {
                case: Lived(run, await row_of(pool, run), await journal(pool, run))
                for case, run in runs.items()
            }
            told = page()
            assert {
                case: each.line(REPLIES.get(case), told.get(case)) for case, each in lived.items()
            } == told
            for case, each in lived.items():
                check_settled(case, each)
                assert fake.asked[case] == (0 if case in UNREACHABLE else len(each.attempts())), case
            assert fake.refusals == [], "whatever a model said, what it is told next is well formed"

            fake.well = True
            for case in UNREACHABLE:
                await mended(wire, providers[case], fake.base_url)
            asleep = [runs[case] for case, line in told.items() if line.ends == "sleeps"]
            for run in asleep:
                await wire.call("run.continue", run_id=run)
            await until_at_rest(pool)
            ends = {run: (await row_of(pool, run))["state"] for run in asleep}
            assert ends == dict.fromkeys(asleep, "complete"), "no trouble outlives its cause"


def check_settled(case: str, lived: Lived) -> None:
    """Every reservation has its outcome, and the cycle counts what the outcomes cost and nothing else."""
    pairs = lived.of("model_call_started", "model_answered", "model_failed")
    assert [entry["kind"] == "model_call_started" for entry in pairs] == [True, False] * (len(pairs) // 2), (
        case
    )
    (ended,) = lived.of("cycle_ended")
    assert ended["tokens_used"] == sum(attempt["tokens"] for attempt in lived.attempts()), case


# --- a provider that is away for minutes -----------------------------------------------------------------

RUNS = 50
SLOTS = 16
SPEED = 15
"""The end of the sleeps is moved so near that their spread takes ten seconds and not minutes."""

WAITING = "select count(*) from runs where wait_reason = 'timer'"
ASLEEP = """
select extract(epoch from due_at - now()) as left_s from runs where wait_reason = 'timer' order by due_at
"""
NEARER = f"""
update runs set due_at = now() + (runs.due_at - first.due_at) / {SPEED}
from (select min(due_at) as due_at from runs where wait_reason = 'timer') as first
where wait_reason = 'timer'
"""


async def test_fifty_runs_outlive_a_provider_that_is_away_and_come_back_one_by_one(
    pool: Pool, wire: Wire, start: Start
) -> None:
    async with trouble_server() as fake:
        fake.down = failure(503)
        settings = worker_settings(fake, slots=SLOTS)
        worker = start("worker", **settings)
        agent = await wire.agent(toolset=[], ceilings=LIMITS, budgets=budgets(), max_live_runs=2 * RUNS)
        runs = [await wire.run(agent, goal=f"[{number}]") for number in range(RUNS)]
        with anyio.fail_after(WAIT_S):
            while fake.asked.total() < RUNS:
                await anyio.sleep(POLL_S)
        worker.kill()
        start("worker", **settings)
        await until_at_rest(pool)

        failed = [sum(entry["kind"] == "model_failed" for entry in await journal(pool, run)) for run in runs]
        assert failed == [MODEL_ATTEMPTS_MAX] * RUNS, "a death of the worker is no attempt, and forgets none"
        # Each of the two workers had its own few in hand.
        assert RUNS <= fake.asked.total() <= RUNS * (1 + SHARE) + 2 * IN_HAND + SLOTS
        left_s = [row["left_s"] for row in await pool.fetch(ASLEEP)]
        assert len(left_s) == RUNS, "none has ended"
        assert max(left_s) <= FORCED_SLEEP_S * (1 + SPREAD)
        assert max(left_s) - min(left_s) > 0.6 * SPREAD * FORCED_SLEEP_S

        fake.down = None
        other = await wire.run(agent, goal="[other]")
        await wire.call("run.continue", run_id=runs[0])
        for run in (other, runs[0]):
            await ended(pool, run)
        assert await pool.fetchval(WAITING) == RUNS - 1, "those who wait hold no slot"

        fake.asked_at.clear()
        await pool.execute(NEARER)
        for run in runs:
            await ended(pool, run)
        states = [(await row_of(pool, run))["state"] for run in runs]
        assert states == ["complete"] * RUNS
        assert len(fake.asked_at) == RUNS - 1
        assert most_within(1.0, fake.asked_at) <= RUNS / 3


async def ended(pool: Pool, run_id: str) -> None:
    with anyio.fail_after(WAIT_S):
        while (await row_of(pool, run_id))["ended_at"] is None:
            await anyio.sleep(POLL_S)


def most_within(seconds: float, moments: list[float]) -> int:
    """How many came together at the busiest time."""
    return max(sum(start <= other < start + seconds for other in moments) for start in moments)
