"""Absence 5: neither store nor acts commit; one request or one step is one transaction, opened at its edge.

An act that opened its own transaction could not be part of a larger one, and half of a step would survive.
"""

import re
from collections.abc import Iterator

from tests.architecture.sources import Source, calls, findings, literals, report, source, stale

ROOMS = ("protocol", "domain", "store", "eventlog", "jobs", "secrets", "telemetry", "acts")
ENDINGS = frozenset("transaction commit rollback begin savepoint".split())
STATEMENT = re.compile(
    r"^\s*(begin|commit|rollback|savepoint|start\s+transaction)\b[^()]*;?\s*$", re.IGNORECASE
)

# The two files of store that are edges themselves.
EDGES: dict[str, str] = {
    "store/pool.py": "offers the edge its transaction as a context manager; calls no statement of ours",
    "store/migrate.py": "the migrate job is a process of its own and this is its edge",
}


def endings_anywhere(module: Source) -> Iterator[str]:
    escape = "take the caller's connection; the request or the step opens and ends the transaction"
    for call, name in calls(module.tree):
        if name in ENDINGS:
            yield module.finding(call, f"{module.room} calls {name}()", escape)
    for literal, text in literals(module.tree):
        if STATEMENT.match(text):
            yield module.finding(literal, f"{module.room} says {text.strip()!r} to the database", escape)


def endings_below_the_edge(module: Source) -> Iterator[str]:
    exempt = module.name in EDGES or module.name.startswith("store/migrations/")
    return iter(()) if exempt else endings_anywhere(module)


def test_store_and_acts_work_in_the_callers_transaction() -> None:
    found = findings(endings_below_the_edge, ROOMS)
    assert not found, report(found)


def test_every_listed_edge_still_ends_transactions() -> None:
    assert stale(EDGES, endings_anywhere) == [], "remove them from EDGES"


def test_the_rule_finds_a_transaction_of_its_own() -> None:
    bad = source(
        "acts/bad.py",
        "async def f(c):\n    async with c.transaction(): ...\n"
        "    await c.execute('COMMIT')\n    await c.commit()\n",
    )
    assert len(list(endings_below_the_edge(bad))) == 3


def test_the_rule_leaves_plain_statements_alone() -> None:
    good = "async def f(c):\n    await c.execute('SELECT 1')\n    log('committed')\n"
    assert not list(endings_below_the_edge(source("acts/good.py", good)))
