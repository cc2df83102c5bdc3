"""Absence 1: no `async def`, no I/O and no clock in protocol and domain.

An agent's whole behaviour is testable with lists only as long as its rules wait for nothing and ask nothing.
"""

import ast
from collections.abc import Iterator

from tests.architecture.sources import PURE_ROOMS, Source, calls, findings, imports, report, source

# The standard library without I/O, clocks, threads or randomness. A list of what is allowed, because a
# list of what is forbidden forgets.
PURE_STDLIB = frozenset(
    """__future__ abc base64 binascii bisect collections copy dataclasses datetime decimal difflib enum
    fractions functools graphlib hashlib heapq hmac itertools json math operator re string struct textwrap
    types typing unicodedata urllib.parse uuid""".split()
)
CLOCKS_AND_DICE = frozenset("now utcnow today uuid1 uuid4 uuid6 uuid7 urandom getrandbits".split())
DOORS = frozenset(("open", "print", "input", "exec", "eval", "__import__"))
WAITING = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
ESCAPE = "take the value as a parameter; the act or step that calls this has the connection and the clock"


def impure(module: Source) -> Iterator[str]:
    allowed = PURE_STDLIB | {"pydantic", "pydantic_core", "espalier_protocol", f"espalier_{module.room}"}
    for node in ast.walk(module.tree):
        if isinstance(node, WAITING):
            yield module.finding(node, f"{module.room} waits for something", ESCAPE)
    for statement, name, _ in imports(module.tree):
        if not {name, name.partition(".")[0]} & allowed:
            yield module.finding(statement, f"{module.room} imports {name}, which is not pure", ESCAPE)
    for call, name in calls(module.tree):
        if name in CLOCKS_AND_DICE | DOORS:
            yield module.finding(call, f"{module.room} calls {name}()", ESCAPE)


def test_protocol_and_domain_wait_for_nothing_and_ask_nothing() -> None:
    found = findings(impure, PURE_ROOMS)
    assert not found, report(found)


def test_the_rule_finds_waiting_io_clocks_and_dice() -> None:
    bad = source(
        "domain/bad.py",
        "import time\nfrom pathlib import Path\nimport redis\n"
        "async def rule():\n    return datetime.now(UTC), uuid.uuid4(), open('x')\n",
    )
    lines = [finding.partition(": ")[0].rpartition(":")[2] for finding in impure(bad)]
    assert lines == ["4", "1", "2", "3", "5", "5", "5"]


def test_the_rule_leaves_pure_code_alone() -> None:
    good = (
        "from datetime import datetime\nfrom espalier_protocol.run import Run\ndef due(now: datetime): ...\n"
    )
    assert not list(impure(source("domain/good.py", good)))
    assert not list(impure(source("protocol/good.py", "from pydantic import BaseModel\n")))
