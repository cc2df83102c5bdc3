"""Absence 9: Postgres alone is the truth.

What source can show: the rooms and modules that decide cannot see Redis at all, and rules decide from the
journal, never from events. That a run really continues from its rows is shown by the fault tests.
"""

import ast
from collections.abc import Iterator

from tests.architecture.sources import Source, findings, imports, report, source

REDIS_SIDE = ("espalier_eventlog", "espalier_jobs", "redis", "valkey", "arq")
# Where something is decided: whole rooms, and the modules of the services that hold control flow.
DECIDING = (
    "protocol/",
    "domain/",
    "store/",
    "acts/",
    "gateway/dispatcher",
    "gateway/methods",
    "gateway/auth",
    "gateway/errors",
    "run_worker/cycle",
    "run_worker/model_calls",
    "run_worker/tool_calls",
    "run_worker/self_tools",
    "run_worker/supervisor",
    "run_worker/models",
)
DECIDERS = frozenset(("next_step", "apply", "history"))


def decisions_that_see_redis(module: Source) -> Iterator[str]:
    if not module.name.startswith(DECIDING):
        return
    for statement, name, _ in imports(module.tree):
        if name.partition(".")[0] in REDIS_SIDE:
            escape = (
                "decide from rows; publishing and ringing come after the commit, in publisher and doorbell"
            )
            yield module.finding(statement, f"{module.name} decides and sees {name}", escape)


def decisions_from_events(module: Source) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if not (isinstance(node, ast.FunctionDef) and node.name in DECIDERS and module.room == "domain"):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            if argument.annotation and "event" in ast.unparse(argument.annotation).lower():
                escape = "read the journal's entries; events are only their projection"
                yield module.finding(argument, f"{node.name} decides from events", escape)


def test_what_decides_cannot_see_redis() -> None:
    found = findings(decisions_that_see_redis)
    assert not found, report(found)


def test_no_rule_decides_from_events() -> None:
    found = findings(decisions_from_events, ("domain",))
    assert not found, report(found)


def test_the_rules_find_decisions_on_the_wrong_side() -> None:
    bad = "from espalier_eventlog.tail import Tail\nimport redis.asyncio\nimport arq\n"
    assert len(list(decisions_that_see_redis(source("run_worker/cycle.py", bad)))) == 3
    assert len(list(decisions_that_see_redis(source("gateway/methods/run.py", bad)))) == 3
    assert (
        len(
            list(
                decisions_from_events(
                    source("domain/run.py", "def apply(state, entries: list[Event]): ...\n")
                )
            )
        )
        == 1
    )


def test_the_rules_leave_couriers_and_projections_alone() -> None:
    assert not list(decisions_that_see_redis(source("run_worker/publisher.py", "import espalier_eventlog\n")))
    good = "def events_of(entry: Entry) -> list[EventBody]: ...\ndef apply(state: State, entry: Entry): ...\n"
    assert not list(decisions_from_events(source("domain/run.py", good)))
