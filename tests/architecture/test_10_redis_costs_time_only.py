"""Absence 10: losing a job, repeating it, or losing all of Redis costs time and nothing else.

What source can show: no transaction waits for Redis, timers lie only in Postgres, and a job carries nothing
that would be missed. That a flushed or stopped Redis loses nothing is shown by the fault tests.
"""

import ast
from collections.abc import Iterator

from tests.architecture.sources import Source, calls, findings, keyword, last_name, report, source

COURIER_CALLS = frozenset(
    "publish publish_events ring ring_doorbell enqueue enqueue_job xadd lpush rpush".split()
)
ARQ_TIMERS = ("_defer_until", "_defer_by", "defer_by", "defer_until")
ARQ_RESULTS = frozenset(("result_info", "abort", "all_job_results"))
WORKER_SETTINGS: dict[str, object] = {"keep_result": 0, "handle_signals": False}


def transactions(module: Source) -> Iterator[ast.AsyncWith]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AsyncWith):
            opened = [name for item in node.items for _, name in calls(item.context_expr)]
            if any(name.endswith("transaction") for name in opened):
                yield node


def couriers_inside_transactions(module: Source) -> Iterator[str]:
    for block in transactions(module):
        for statement in block.body:
            for call, name in calls(statement):
                if name in COURIER_CALLS:
                    escape = "write an outbox row here; publish and ring after the block"
                    yield module.finding(call, f"a transaction waits for {name}()", escape)


def timers_in_redis(module: Source) -> Iterator[str]:
    for call, _ in calls(module.tree):
        for name in ARQ_TIMERS:
            if keyword(call, name) is not None:
                yield module.finding(call, f"{name} puts a timer into Redis", "write the run's due_at")


def answers_from_jobs(module: Source) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if (
            module.room in ("jobs", "run_worker")
            and isinstance(node, ast.Attribute)
            and last_name(node) in ARQ_RESULTS
        ):
            yield module.finding(node, f"{node.attr} asks a job for more than its ring", "read the run's row")


def careless_workers(module: Source) -> Iterator[str]:
    """arq's Worker must keep no result and leave the process's signals alone."""
    for call, name in calls(module.tree):
        if module.room not in ("jobs", "run_worker") or not (name == "Worker" or name.endswith("ArqWorker")):
            continue
        for setting, wanted in WORKER_SETTINGS.items():
            value = keyword(call, setting)
            if not (isinstance(value, ast.Constant) and value.value == wanted):
                yield module.finding(
                    call, f"arq's worker without {setting}={wanted}", f"pass {setting}={wanted}"
                )


def test_no_transaction_waits_for_redis() -> None:
    found = findings(couriers_inside_transactions)
    assert not found, report(found)


def test_timers_lie_in_postgres_alone() -> None:
    found = findings(timers_in_redis)
    assert not found, report(found)


def test_a_job_only_rings() -> None:
    found = [*findings(answers_from_jobs), *findings(careless_workers)]
    assert not found, report(found)


def test_the_rules_find_what_would_be_missed() -> None:
    inside = (
        "async def f():\n    async with pool.transaction() as c:\n"
        "        await store(c)\n        await bell.ring(run)\n"
    )
    assert len(list(couriers_inside_transactions(source("gateway/bad.py", inside)))) == 1
    assert len(list(timers_in_redis(source("jobs/bad.py", "pool.enqueue_job('ring', _defer_by=5)\n")))) == 1
    assert len(list(answers_from_jobs(source("jobs/bad.py", "await job.abort()\n")))) == 1
    assert (
        len(list(careless_workers(source("jobs/bad.py", "Worker(functions=[f], keep_result=3600)\n")))) == 2
    )


def test_the_rules_leave_couriers_after_the_commit_alone() -> None:
    after = (
        "async def f():\n    async with pool.transaction() as c:\n"
        "        await store(c)\n    await bell.ring(run)\n"
    )
    assert not list(couriers_inside_transactions(source("gateway/good.py", after)))
    pipe = "async def f():\n    async with redis.pipeline(transaction=False) as p:\n        p.xadd(key, {})\n"
    assert not list(couriers_inside_transactions(source("eventlog/good.py", pipe)))
    worker = "Worker(functions=[f], keep_result=0, handle_signals=False)\n"
    assert not list(careless_workers(source("jobs/good.py", worker)))
