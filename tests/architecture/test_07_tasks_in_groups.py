"""Absence 7: no `create_task`: tasks start inside a task group.

A task that nobody awaits outlives what it uses, and its exception is printed when nobody looks. Threads of
our own have the same flaw; anyio's worker threads do not.
"""

import ast
from collections.abc import Iterator

from tests.architecture.sources import Source, findings, imports, last_name, report, source

LOOSE = frozenset(
    """create_task ensure_future gather as_completed run_coroutine_threadsafe call_soon call_soon_threadsafe
    call_later call_at run_in_executor Thread Timer ThreadPoolExecutor ProcessPoolExecutor""".split()
)
LOOSE_MODULES = ("_thread", "concurrent", "multiprocessing")
ESCAPE = (
    "start_soon in an anyio task group whose owner waits for it; anyio.to_thread.run_sync for blocking calls"
)


def loose_tasks(module: Source) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute | ast.Name) and last_name(node) in LOOSE:
            yield module.finding(node, f"{last_name(node)} starts something that nobody waits for", ESCAPE)
    for statement, name, names in imports(module.tree):
        if name.partition(".")[0] in LOOSE_MODULES or LOOSE & set(names):
            yield module.finding(statement, f"{name} starts things outside of task groups", ESCAPE)


def test_tasks_start_inside_a_task_group() -> None:
    found = findings(loose_tasks)
    assert not found, report(found)


def test_the_rule_finds_loose_tasks_and_threads() -> None:
    bad = (
        "threading.Thread(target=f)\nfrom asyncio import gather\n"
        "asyncio.create_task(f())\nloop.call_later(1, f)\n"
    )
    assert len(list(loose_tasks(source("gateway/bad.py", bad)))) == 4


def test_the_rule_leaves_task_groups_alone() -> None:
    good = "async with anyio.create_task_group() as tasks:\n    tasks.start_soon(f)\n"
    assert not list(loose_tasks(source("gateway/good.py", good)))
