"""The canary: a word that stands in every field that can hold one, and after an erasure nowhere.

It is planted through the public surface alone: by an embedder, by scripted agents, by a tool and its answer.
It is looked for in every column of every table, in all of Redis and in what the processes logged.
"""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import anyio
import httpx2
import pytest
from forked import Service
from redis.asyncio import Redis
from tests.integration.conftest import GatewayProcess, Start, StartBroker, StartGateway, Stores
from tests.integration.tools import Ledger, calls, record
from tests.integration.wire import AGENT, ANSWER_WAIT_S, Wire

from espalier_domain.erasure import RULES, Becomes
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

SUBJECT = "sub_canary_bird"
SUBJECTS = "/api/me/subjects"
WAIT_S = 120.0
POLL_S = 0.05
LATER_S = 60.0
"""What some process still held in its memory has been written by then, if it ever is."""

CANNOT_HOLD_IT = {
    ("idempotency", "method"),
    ("idempotency", "params_hash"),
    ("artifacts", "sha256"),
    ("blobs", "sha256"),
    ("blob_chunks", "sha256"),
    ("agent_servers", "sealed_auth"),
    ("artifacts", "metadata"),
    ("memory_records", "embedding"),
    ("memory_records", "embedding_model"),
}
"""Columns that are erased all the same, and hold hashes, numbers, sealed or fixed words, or nothing yet."""


@dataclass
class Runtime:
    """A gateway, a worker and a tool broker as processes, and one embedder."""

    wire: Wire
    pool: Pool
    redis: Redis
    services: list[Service]
    canary: str

    async def where(self) -> set[tuple[str, str]]:
        """Everywhere the canary is: (table, column), (Redis, key) and (log, process)."""
        return {*await self._in_tables(), *await self._in_redis(), *self._in_logs()}

    async def _in_tables(self) -> set[tuple[str, str]]:
        tables = await self.pool.fetch("select tablename as name from pg_tables where schemaname = 'public'")
        found = set()
        for (table,) in tables:
            for row in await self.pool.fetch(f'select * from "{table}"'):
                found |= {(table, name) for name, value in row.items() if self._is_in(value)}
        return found

    async def _in_redis(self) -> set[tuple[str, str]]:
        found = set()
        async for key in self.redis.scan_iter(count=1000):
            read: dict[bytes, Callable[[Any], Any]] = {
                b"stream": self.redis.xrange,
                b"string": self.redis.get,
                b"list": lambda k: self.redis.lrange(k, 0, -1),
                b"set": self.redis.smembers,
                b"zset": lambda k: self.redis.zrange(k, 0, -1),
                b"hash": self.redis.hgetall,
            }
            kind = await self.redis.type(key)
            if kind == b"none":
                continue  # it expired just now
            if self._is_in((key, await read[kind](key))):
                found.add(("redis", key.decode()))
        return found

    def _in_logs(self) -> set[tuple[str, str]]:
        return {("log", service.log.name) for service in self.services if self._is_in(service.output())}

    def _is_in(self, value: Any) -> bool:
        """Bytes are looked into as they are; all else as it is printed."""
        text = value if isinstance(value, bytes) else str(value).encode()
        return self.canary.encode() in text.lower()

    async def until(self, run_id: str, *states: str) -> None:
        with anyio.fail_after(WAIT_S):
            while (await self.wire.call("run.get", run_id=run_id))["state"] not in states:
                await anyio.sleep(POLL_S)

    async def goes_on(self, at_least_s: float = 0.0) -> None:
        """Somebody else's runs sleep, wake and end, while sweepers and publishers do their rounds."""
        until = anyio.current_time() + at_least_s
        nap = {"calls": [{"tool": "sleep", "args": {"duration_seconds": 2}}]}
        while True:  # bounded: a turn takes two seconds
            run_id = await self.wire.run(inputs=plan(nap, {"text": "done"}))
            await self.until(run_id, "complete")
            if anyio.current_time() >= until:
                return

    async def erase(self, mode: str, subject_id: str = SUBJECT) -> dict[str, Any]:
        """As an embedder does who is told to come again."""
        with anyio.fail_after(WAIT_S):
            while True:  # bounded by the scope
                answer = await self.wire.answer("subject.erase", {"subject_id": subject_id, "mode": mode})
                if "result" in answer:
                    result: dict[str, Any] = answer["result"]
                    return result
                assert answer["error"]["data"]["symbol"] == "unavailable", answer


def plan(*answers: dict[str, Any]) -> dict[str, Any]:
    return {"espalier.script": {"answers": list(answers)}}


@pytest.fixture
async def runtime(
    start: Start,
    start_gateway: StartGateway,
    start_broker: StartBroker,
    stores: Stores,
    pool: Pool,
    api_key: str,
    tmp_path: Any,
) -> AsyncIterator[Runtime]:
    canary = f"canary{uuid4().hex}"
    ledger = Ledger(tmp_path / "ledger")
    broker = await start_broker({"ledger": ledger.server()})
    worker = start(
        "worker", ESPALIER_MODELS_SCRIPTED="on", ESPALIER_LOG_LEVEL="debug", **broker.worker_settings
    )
    gateway: GatewayProcess = await start_gateway(
        ESPALIER_RPC_RATE="1000", ESPALIER_RPC_BURST="1000", ESPALIER_LOG_LEVEL="debug"
    )
    timeout = httpx2.Timeout(ANSWER_WAIT_S)
    async with (
        httpx2.AsyncClient(base_url=gateway.base_url, timeout=timeout, trust_env=False) as http,
        Redis.from_url(stores.redis_url) as redis,
    ):
        wire = Wire(http, api_key)
        await wire.begin()
        yield Runtime(wire, pool, redis, [gateway.service, worker, broker.service], canary)


async def created(runtime: Runtime, method: str, **params: Any) -> str:
    """The id of what a create made that named a key."""
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    headers = runtime.wire.headers(Idempotency_Key=f"{runtime.canary}-{uuid4().hex}")
    answer = (await runtime.wire.post(request, headers)).json()
    assert "result" in answer, answer
    return str(answer["result"]["id"])


def canary_agent(canary: str, **changes: Any) -> dict[str, Any]:
    """An agent that is made of the canary."""
    return {
        **AGENT,
        "name": canary,
        "constitution": {
            "immutable_directives": canary,
            "mutable_prompt": canary,
            "mutable_prompt_policy": "auto",
        },
        "toolset": ["mcp.ledger.*", canary],
        "ceilings": {
            "max_cycles": 500,
            "max_subagents": 5,
            "max_tool_calls_per_cycle": 20,
            "max_wall_seconds": 3600,
        },
        "budgets": {"tokens_per_cycle": 400_000, "tool_calls_per_cycle": 20, "seconds_per_cycle": 120},
        "metadata": {canary: canary},
        "subject_ids": [SUBJECT],
        **changes,
    }


ABOUT_NOBODY: dict[str, Any] = {
    "constitution": AGENT["constitution"],
    "metadata": {},
    "toolset": [],
    "subject_ids": [],
}


def doing_everything(canary: str, agent_id: str) -> dict[str, Any]:
    """A plan in which every tool is called with the canary."""
    child = {
        "name": canary,
        "constitution": {"immutable_directives": canary, "mutable_prompt": canary},
        "toolset_subset": [],
        "initial_goal": canary,
        "ceilings": {
            "max_cycles": 2,
            "max_subagents": 0,
            "max_tool_calls_per_cycle": 2,
            "max_wall_seconds": 60,
        },
        "budgets": {"tokens_per_cycle": 20_000, "tool_calls_per_cycle": 2, "seconds_per_cycle": 30},
    }
    everything = calls(
        ("artifact_create", {"name": canary, "content": canary, "mime_type": f"text/{canary}"}),
        ("learning_memory_write", {"namespace": canary, "key": canary, "value": {canary: canary}}),
        ("learning_memory_search", {"namespace": canary, "query": canary}),
        ("send_message", {"to_agent_id": agent_id, "body": {canary: canary}}),
        ("modify_own_prompt", {"mode": "replace", "content": f"{canary} anew", "reason": canary}),
        ("spawn_subagent", child),
        record(canary),
        (f"mcp.ledger.{canary}", {}),
        (canary, {canary: canary}),
        ("continue_now", {}),
    )
    rest = calls(("inbox_read", {}), ("sleep", {"duration_seconds": 3600, "reason": canary}))
    return plan({"text": canary, **everything}, rest)


async def plant(runtime: Runtime) -> None:
    """The canary in every field, all of it about one subject."""
    canary, wire = runtime.canary, runtime.wire
    await wire.http.post(
        SUBJECTS,
        json={"aepId": SUBJECT, "metadata": {canary: canary}},
        headers={"Authorization": f"Bearer {wire.key}"},
    )
    servers = [{"url": f"https://{canary}.invalid/mcp", "name": canary, "auth": {"bearer": canary}}]
    await created(
        runtime,
        "agent.create",
        **canary_agent(canary, external_mcp_servers=servers, runner={"model": canary}),
    )
    agent_id = await created(runtime, "agent.create", **canary_agent(canary))
    run_id = await created(
        runtime,
        "run.create",
        agent_id=agent_id,
        goal=canary,
        inputs={**doing_everything(canary, agent_id), canary: canary},
    )
    await runtime.until(run_id, "sleeping")
    done = plan({"text": "", **calls(("complete", {"result": {canary: canary}}))})
    await runtime.until(await wire.run(agent_id, inputs=done), "complete")
    fails = plan({"fault": {"reason": canary, "retryable": False}})
    await runtime.until(await wire.run(agent_id, inputs=fails), "error")
    await created(runtime, "message.send", to_agent_id=agent_id, body={canary: canary})
    await ask_a_person(runtime)
    await spread_to_a_stranger(runtime)


async def ask_a_person(runtime: Runtime) -> None:
    """One change of a prompt waits for a person, another was refused with a comment."""
    canary, wire = runtime.canary, runtime.wire
    constitution = {**AGENT["constitution"], "mutable_prompt_policy": "approval_required"}
    agent_id = await wire.agent(**canary_agent("careful", constitution=constitution, metadata={}))
    for number in range(2):
        asks = calls(
            ("modify_own_prompt", {"mode": "replace", "content": f"{canary}{number}", "reason": canary})
        )
        await runtime.until(await wire.run(agent_id, inputs=plan(asks, {"text": "done"})), "complete")
    found = await wire.call("agent.get", agent_id=agent_id, include=["pending_prompt_changes"])
    await wire.call(
        "agent.approve_prompt_change",
        agent_id=agent_id,
        pending_change_id=found["pending_prompt_changes"][0]["id"],
        approve=False,
        comment=canary,
    )


async def spread_to_a_stranger(runtime: Runtime) -> None:
    """A run that nobody tagged reads what is tagged, and from then on all it does is about the subject."""
    canary, wire = runtime.canary, runtime.wire
    agent_id = await wire.agent(**canary_agent("stranger", **ABOUT_NOBODY))
    await wire.call(
        "memory.write", tree_root_id=agent_id, namespace="n", key="k", value=canary, subject_id=SUBJECT
    )
    reads = calls(("learning_memory_read", {"namespace": "n"}), ("continue_now", {}))
    tells = calls(
        ("artifact_create", {"name": "told", "content": f"{canary} told"}),
        ("learning_memory_write", {"namespace": "n", "key": "own", "value": canary}),
        ("send_message", {"to_agent_id": agent_id, "body": canary}),
        ("modify_own_prompt", {"mode": "replace", "content": canary, "reason": canary}),
        ("complete", {"result": canary}),
    )
    run_id = await wire.run(agent_id, inputs=plan(reads, tells))
    await runtime.until(run_id, "complete")
    assert (await wire.call("run.get", run_id=run_id))["subject_ids"] == [SUBJECT]


@pytest.mark.parametrize("mode", ["redact", "hard_delete"])
async def test_after_an_erasure_no_byte_of_a_canary_is_left_anywhere(runtime: Runtime, mode: str) -> None:
    await plant(runtime)
    planted = await runtime.where()
    ruled = {
        (table, column)
        for table, columns in RULES.items()
        for column, rule in columns.items()
        if isinstance(rule, Becomes) and (table, column) not in CANNOT_HOLD_IT
    }
    assert sorted(ruled - planted) == [], "the canary has to stand in every field that an erasure clears"
    assert [each for each in planted if each[0] == "redis"], "and in the streams of its runs"
    assert [each for each in planted if each[0] == "log"] == []

    await runtime.erase(mode)

    assert await runtime.where() == set()
    await runtime.goes_on(LATER_S)
    assert await runtime.where() == set()
    assert await runtime.erase(mode) | {"generated_at": 0, "performed_at": 0} == {
        "subject_id": SUBJECT,
        "mode": mode,
        "deleted": [],
        "redacted": [],
        "stripped": [],
        "retained": [],
        "entries_left_out": 0,
        "generated_at": 0,
        "performed_at": 0,
    }


@pytest.mark.parametrize("mode", ["redact", "hard_delete"])
async def test_a_run_that_writes_all_the_while_leaves_nothing_behind(runtime: Runtime, mode: str) -> None:
    canary, wire = runtime.canary, runtime.wire
    agent_id = await wire.agent(**canary_agent(canary))
    restless = [
        {
            "text": canary,
            **calls(
                ("artifact_create", {"name": canary, "content": f"{canary} {number}"}),
                ("learning_memory_write", {"namespace": "n", "key": f"{canary}{number}", "value": canary}),
                ("send_message", {"to_agent_id": agent_id, "body": canary}),
                ("continue_now", {}),
            ),
        }
        for number in range(400)
    ]
    neighbour = await writing_all_the_while(runtime)
    slow = calls(record(canary, delay_s=8.0))
    run_ids = [await wire.run(agent_id, goal=canary, inputs=plan(*restless))]
    with anyio.fail_after(WAIT_S):
        while (await wire.call("run.get", run_id=run_ids[0]))["cycle_count"] < 3:
            await anyio.sleep(POLL_S)
    run_ids.append(await wire.run(agent_id, goal=canary, inputs=plan(slow)))
    with anyio.fail_after(WAIT_S):
        while not await runtime.pool.fetchval("select true from tool_calls where state = 'sent'"):
            await anyio.sleep(POLL_S)
    heard: list[str] = []

    async def follow() -> None:
        path = f"/aep/v1/runs/{run_ids[0]}/events"
        async with wire.http.stream("GET", path, headers=wire.headers()) as response:
            async for line in response.aiter_lines():
                heard.append(line)  # noqa: PERF401

    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            while not heard:
                await anyio.sleep(POLL_S)
            await runtime.erase(mode)
    assert any(line.startswith("event: run.ended") for line in heard) or any(
        "pruned" in line for line in heard
    )

    assert await runtime.where() == set()
    lived = (await wire.call("run.get", run_id=neighbour))["cycle_count"]
    await runtime.goes_on(LATER_S)
    assert await runtime.where() == set()
    still = await wire.call("run.get", run_id=neighbour)
    assert (still["ended_at"], still["cycle_count"] > lived) == (None, True), "it wrote all the while"
    for run_id in run_ids:
        replay = await wire.get(f"/aep/v1/runs/{run_id}/events")
        assert replay.status_code == (200 if mode == "redact" else 404)
        assert canary not in replay.text


async def writing_all_the_while(runtime: Runtime) -> str:
    """A run of the same owner that is about nobody and writes every second, for longer than a test lasts.

    It sends itself no message: that would end its sleeps, and its plan with them.
    """
    agent_id = await runtime.wire.agent(**canary_agent("neighbour", **ABOUT_NOBODY))
    return await runtime.wire.run(
        agent_id,
        inputs=plan(
            *(
                calls(
                    ("artifact_create", {"name": f"a{number}", "content": f"mine {number}"}),
                    ("learning_memory_write", {"namespace": "n", "key": f"k{number}", "value": number}),
                    ("sleep", {"duration_seconds": 1}),
                )
                for number in range(400)
            )
        ),
    )


async def test_what_is_shared_loses_the_subjects_id_in_redis_and_stays_whole_in_its_log(
    runtime: Runtime,
) -> None:
    """The run knows of another subject too, so it is stripped; its stream is a copy of what it was.

    Its subject is its own: other tests of this process leave streams about theirs in the same Redis.
    """
    wire, subject_id = runtime.wire, f"sub_{uuid4().hex}"
    agent_id = await wire.agent(
        **canary_agent("shared", **{**ABOUT_NOBODY, "subject_ids": [subject_id, "sub_other"]})
    )
    writes = ("learning_memory_write", {"namespace": "n", "key": "k", "value": 1, "subject_id": subject_id})
    run_id = await wire.run(agent_id, inputs=plan(calls(writes, ("complete", {"result": "done"}))))
    await runtime.until(run_id, "complete")
    named = replace(runtime, canary=subject_id)
    before = await _envelopes(wire, run_id)
    assert [place for place, _ in await named.where()].count("redis") == 1, "in the stream of the run"

    done = await runtime.erase("hard_delete", subject_id)

    assert ("run", run_id) in [(each["kind"], each["id"]) for each in done["stripped"]]
    assert [each for each in await named.where() if each[0] in ("redis", "log")] == []
    after = await _envelopes(wire, run_id)
    assert [each["event_id"] for each in after] == [each["event_id"] for each in before]
    assert [each["payload"] for each in after if each["type"] == "memory.written"] == [
        {**each["payload"], "subject_id": None} for each in before if each["type"] == "memory.written"
    ]


async def test_a_redacted_log_has_the_same_events_in_the_same_order(runtime: Runtime) -> None:
    wire, canary = runtime.wire, runtime.canary
    agent_id = await wire.agent(**canary_agent(canary))
    said = calls(("artifact_create", {"name": canary, "content": canary}), ("complete", {"result": canary}))
    run_id = await wire.run(agent_id, goal=canary, inputs=plan(said))
    await runtime.until(run_id, "complete")
    before = await _envelopes(wire, run_id)
    await runtime.erase("redact")
    after = await _envelopes(wire, run_id)
    names = ("event_id", "run_id", "type", "emitted_at")
    assert [[each[name] for name in names] for each in after] == [
        [each[name] for name in names] for each in before
    ]
    assert all(each["payload"]["redacted"] is True for each in after)
    assert [list(each["payload"])[1:] for each in after] == [list(each["payload"]) for each in before]
    assert after[-1]["payload"]["final_state"] == "complete"


async def _envelopes(wire: Wire, run_id: str) -> list[dict[str, Any]]:
    with anyio.fail_after(WAIT_S):
        stream = await wire.get(f"/aep/v1/runs/{run_id}/events")
    return [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: ")]
