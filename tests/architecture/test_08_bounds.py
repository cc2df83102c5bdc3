"""Absence 8: every queue, loop, buffer, body and wait has a named bound.

What has no bound is bounded by memory or by patience, and found out at night. A name says what the number is
for and lets a test reach it.
"""

import ast
import re
from collections.abc import Iterator

from tests.architecture.sources import Source, called, calls, findings, keyword, last_name, report, source

# Container -> (position, keyword) of its bound.
BUFFERS = {
    "create_memory_object_stream": (0, "max_buffer_size"),
    "deque": (1, "maxlen"),
    "Queue": (0, "maxsize"),
    "LifoQueue": (0, "maxsize"),
    "PriorityQueue": (0, "maxsize"),
    "SimpleQueue": (9, "none"),  # has no bound at all
}
RENDEZVOUS = (0, 1)  # hand-over and one slot explain themselves, where zero does not mean "endless"
WAITS = frozenset("sleep sleep_until fail_after move_on_after wait_for timeout".split())
MARK = re.compile(r"\bbound(ed)?\b")


def number(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def endless(node: ast.expr | None) -> bool:
    """Nothing, None, `math.inf` or `float("inf")`."""
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return True
    return last_name(node) == "inf" or (isinstance(node, ast.Call) and called(node) == "float")


def bound_of(call: ast.Call, position: int, name: str) -> ast.expr | None:
    return call.args[position] if len(call.args) > position else keyword(call, name)


def unbounded_buffers(module: Source) -> Iterator[str]:
    for call, name in calls(module.tree):
        if name not in BUFFERS:
            continue
        bound = bound_of(call, *BUFFERS[name])
        if endless(bound):
            yield module.finding(call, f"{name} without a bound", "give it a named ..._max")
        elif isinstance(bound, ast.Constant) and not small_enough(name, bound.value):
            yield module.finding(
                call, f"{name} with a bare number", "name the bound as a constant or a setting"
            )


def small_enough(name: str, value: object) -> bool:
    return value in RENDEZVOUS and not (value == 0 and name.endswith("Queue"))


def unbounded_caches(module: Source) -> Iterator[str]:
    """A cache on a function with parameters is a buffer; without parameters it holds one value."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not ast.unparse(node.args):
            continue
        for decorator in node.decorator_list:
            call = decorator if isinstance(decorator, ast.Call) else None
            name = last_name(call.func if call else decorator)
            if name == "cache" or (name == "lru_cache" and call and endless(bound_of(call, 0, "maxsize"))):
                yield module.finding(
                    decorator, f"{node.name} remembers without end", "lru_cache(maxsize=A_NAME)"
                )


def unbounded_loops(module: Source) -> Iterator[str]:
    """`while True` and loops over `count()` must say in a comment what the most is."""
    comments = module.comments
    for node in ast.walk(module.tree):
        forever = (
            isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and bool(node.test.value)
        )
        counting = (
            isinstance(node, ast.For | ast.AsyncFor)
            and isinstance(node.iter, ast.Call)
            and called(node.iter) == "count"
        )
        if not (forever or counting):
            continue
        assert isinstance(node, ast.While | ast.For | ast.AsyncFor)
        near = (comments.get(line, "") for line in range(node.lineno - 2, node.body[0].lineno))
        if not any(MARK.search(comment) for comment in near):
            escape = "loop over a range, or say what ends it and what a turn costs: `# bounded by ...`"
            yield module.finding(node, "a loop without a stated bound", escape)


def unbounded_waits(module: Source) -> Iterator[str]:
    for call, name in calls(module.tree):
        if name in WAITS:
            durations = [*call.args[:1], keyword(call, "delay")]
            if any(number(each) and each.value != 0 for each in durations if isinstance(each, ast.Constant)):
                yield module.finding(
                    call, f"{name} with a bare number", "name it: ..._s, a constant or a setting"
                )
        timeout = keyword(call, "timeout")
        if timeout is not None and endless(timeout):
            yield module.finding(call, "a wait without an end", "give it a named timeout")


def test_every_buffer_has_a_named_bound() -> None:
    found = [*findings(unbounded_buffers), *findings(unbounded_caches)]
    assert not found, report(found)


def test_every_endless_loop_states_its_bound() -> None:
    found = findings(unbounded_loops)
    assert not found, report(found)


def test_every_wait_has_a_named_end() -> None:
    found = findings(unbounded_waits)
    assert not found, report(found)


def test_the_rules_find_what_has_no_bound() -> None:
    buffers = (
        "create_memory_object_stream[int]()\ncreate_memory_object_stream(math.inf)\n"
        "deque()\nQueue(0)\ndeque(maxlen=500)\n"
    )
    assert len(list(unbounded_buffers(source("gateway/bad.py", buffers)))) == 5
    caches = "@cache\ndef f(x): ...\n@lru_cache(maxsize=None)\ndef g(x): ...\n"
    assert len(list(unbounded_caches(source("gateway/bad.py", caches)))) == 2
    loops = "while True:\n    step()\nfor n in itertools.count():\n    step()\n"
    assert len(list(unbounded_loops(source("gateway/bad.py", loops)))) == 2
    waits = "anyio.sleep(2)\nanyio.fail_after(0.5)\nClient(timeout=None)\n"
    assert len(list(unbounded_waits(source("gateway/bad.py", waits)))) == 3


def test_the_rules_leave_named_bounds_alone() -> None:
    good = source(
        "gateway/good.py",
        "create_memory_object_stream[int](BUFFER_EVENTS_MAX)\ndeque(maxlen=TAIL_MAX)\ncreate_memory_object_stream(0)\n"
        "@cache\ndef table(): ...\nanyio.sleep(0)\nanyio.sleep(settings.poll_s)\n"
        "# bounded by the task group, one turn per poll_s\nwhile True:\n    step()\n"
        "while True:  # bounded by the stream\n    step()\nwhile not done:\n    step()\n",
    )
    rules = (unbounded_buffers, unbounded_caches, unbounded_loops, unbounded_waits)
    assert [finding for rule in rules for finding in rule(good)] == []
