"""Every statement on rows of an owner names the owner: a foreign id must answer exactly like an unknown one.

A statement without the predicate works in every test that has one owner. The exceptions are few and each has
its reason; `store/fleet.py` is the worker fleet's own, whose caller is the owner of the row that it claimed.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import ROOT, SQL, Source, findings, literals, report, source, tree

EXEMPT_FILES: dict[str, str] = {
    "store/fleet.py": "claim, renew, sweep, publish and retention serve all owners",
    "store/pool.py": "connection set-up touches no rows",
    "store/migrate.py": "the migrate job reads the schema's revision and lock",
}
# `<file>:<constant>`: statements that find out who the owner is, or that have none.
EXEMPT_STATEMENTS: dict[str, str] = {
    "store/keys.py:FIND_KEY": "a key's hash is what proves the owner",
    "store/keys.py:LIST_KEYS": "an operator's act, which serves all owners; no gateway can do it",
    "store/keys.py:REVOKE_KEY": "likewise; a key's id is shown to the operator alone",
    "store/owners.py:ENSURE_OWNER": "an owner's row is the owner, and an operator names it",
    "store/providers.py:LOCK_OWNER": "the lock of a caller's own row, which is the owner",
    "store/pool.py:REVISION": "the schema belongs to nobody",
}
TOUCHES_ROWS = re.compile(r"\b(from|into|update|delete\s+from|join)\s+[a-z_{]", re.IGNORECASE)
# A parameter, not a join: that two rows have the same owner does not say that it is the caller.
PREDICATE = re.compile(r"\bowner_id\s*=\s*\$\d", re.IGNORECASE)
INSERT = re.compile(r"^\s*insert\s+into\b[^(]*\([^)]*\bowner_id\b", re.IGNORECASE | re.DOTALL)


def names_the_owner(statement: str) -> bool:
    return bool(PREDICATE.search(statement) or INSERT.match(statement))


def constants(module: Source) -> dict[str, ast.expr]:
    """Names and values of the module's own assignments."""
    return {
        target.id: node.value
        for node in module.tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def whole(node: ast.expr, known: dict[str, str]) -> str:
    """The text of a string or f-string with the module's constants filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(whole(part, known) for part in parts)
        case ast.FormattedValue(value=ast.Name(id=name)):
            return known.get(name, "{}")
        case _:
            return "{}"


def statements(module: Source) -> Iterator[tuple[ast.expr, str, str]]:
    """(node, name, text). A constant that only other constants use is a part, and seen in them."""
    named = constants(module)
    texts: dict[str, str] = {}
    for name, node in named.items():
        texts[name] = whole(node, texts)
    functions = [
        node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    run = {each.id for function in functions for each in ast.walk(function) if isinstance(each, ast.Name)}
    parts = {each.id for node in named.values() for each in ast.walk(node) if isinstance(each, ast.Name)}
    yield from ((node, name, texts[name]) for name, node in named.items() if name in run or name not in parts)
    at_top = {id(each) for node in named.values() for each in ast.walk(node)}
    yield from ((node, "a statement", text) for node, text in literals(module.tree) if id(node) not in at_top)


def ownerless(module: Source) -> Iterator[str]:
    if module.name in EXEMPT_FILES or module.name.startswith("store/migrations/"):
        return
    for node, name, text in statements(module):
        exempt = f"{module.name}:{name}" in EXEMPT_STATEMENTS
        if SQL.search(text) and TOUCHES_ROWS.search(text) and not exempt and not names_the_owner(text):
            escape = "add `owner_id = $n` to its WHERE (or the column to its INSERT)"
            yield module.finding(node, f"{name} does not ask for the owner", escape)


def ownerless_file(path: Path) -> bool:
    text = path.read_text()
    return bool(TOUCHES_ROWS.search(text)) and not names_the_owner(text)


def test_every_statement_names_the_owner() -> None:
    found = findings(ownerless, ("store",))
    assert not found, report(found)


def test_every_statement_in_a_file_names_the_owner() -> None:
    package = ROOT / "libs/store/src/espalier_store"
    files = [
        path
        for path in package.rglob("*.sql")
        if path.name != "schema.sql" and "migrations" not in path.parts
    ]
    assert [path.name for path in files if not path.name.startswith("fleet") and ownerless_file(path)] == []


def test_every_exempt_statement_exists() -> None:
    existing = {f"{each.name}:{name}" for each in tree() for name in constants(each)}
    assert sorted(set(EXEMPT_STATEMENTS) - existing) == [], "remove them from EXEMPT_STATEMENTS"


def test_the_rule_finds_statements_without_the_owner() -> None:
    bad = source(
        "store/runs.py",
        "_A = 'SELECT owner_id FROM runs WHERE id = $1'\n"
        "_B = f'UPDATE runs SET state = $2 WHERE id = $1 RETURNING {C}'\n"
        "_C = 'INSERT INTO runs (id) VALUES ($1)'\n"
        "_ALL = 'SELECT * FROM runs r JOIN agents a ON r.owner_id = a.owner_id'\n"
        "_ONE = f'{_ALL} WHERE r.id = $1'\n"
        "async def f(c): return await c.fetch('DELETE FROM runs WHERE id = $1')\n",
    )
    names = [finding.partition(": ")[2].partition(" ")[0] for finding in ownerless(bad)]
    assert names == ["_A", "_B", "_C", "_ONE", "a"]


def test_the_rule_leaves_statements_with_the_owner_alone() -> None:
    good = source(
        "store/runs.py",
        "_A = 'SELECT id FROM runs WHERE id = $1 AND owner_id = $2'\n_NOW = 'SELECT clock_timestamp()'\n"
        "_C = 'INSERT INTO runs (id, owner_id) VALUES ($1, $2)'\n"
        "_ALL = 'SELECT * FROM runs'\n_ONE = f'{_ALL} WHERE owner_id = $1'\n",
    )
    assert not list(ownerless(good))
    assert not list(ownerless(source("store/fleet.py", "_A = 'SELECT id FROM runs'\n")))
