"""What the architecture tests look at: the parsed sources of every room, and how a finding reads.

Not a linter framework: each test file holds one rule as a plain function from a `Source` to findings,
runs it over the tree, and feeds it a small bad source to prove that it can fail.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOM_GLOBS = ("libs/*/src/espalier_*", "services/*/src/espalier_*", "deploy/*/src/espalier_*")
PURE_ROOMS = ("protocol", "domain")
WORDLESS_ROOMS = ("domain", "store", "eventlog", "jobs", "acts")

Rule = Callable[["Source"], Iterable[str]]


@dataclass(frozen=True)
class Source:
    """One module. `name` is `<room>/<path below the package>`, the key of all lists of exceptions."""

    path: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return self.path.partition("/src/espalier_")[2]

    @property
    def room(self) -> str:
        return self.name.partition("/")[0]

    @property
    def comments(self) -> dict[int, str]:
        """Comment text by line number."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}

    def finding(self, node: ast.AST | None, reason: str, escape: str) -> str:
        line = getattr(node, "lineno", 1)
        return f"{self.path}:{line}: {reason} -> {escape}"


def source(name: str, text: str) -> Source:
    """A made-up module at `<room>/<file>`: how the self-tests feed a rule."""
    room = name.partition("/")[0]
    return Source(f"libs/{room}/src/espalier_{name}", text, ast.parse(text))


@cache
def tree() -> tuple[Source, ...]:
    """Every module of every room."""
    packages = sorted(package for pattern in ROOM_GLOBS for package in ROOT.glob(pattern))
    return tuple(
        Source(path.relative_to(ROOT).as_posix(), path.read_text(), ast.parse(path.read_text()))
        for package in packages
        for path in sorted(package.rglob("*.py"))
    )


def findings(rule: Rule, rooms: Iterable[str] | None = None) -> list[str]:
    """All findings of one rule over the tree (or over some rooms of it)."""
    sources = [each for each in tree() if rooms is None or each.room in rooms]
    return [finding for each in sources for finding in rule(each)]


def stale(exceptions: Iterable[str], rule: Rule) -> list[str]:
    """Exceptions that no module needs any more: a list that only grows explains nothing.

    `rule` must be the one that knows no exceptions.
    """
    needed = {each.name for each in tree() if any(True for _ in rule(each))}
    return sorted(set(exceptions) - needed)


def report(found: list[str]) -> str:
    return "\n" + "\n".join(found)


# -------------------------------------------------------------------- reading a tree


def prose(module: ast.Module) -> set[int]:
    """Ids of the string constants that stand alone as a statement: docstrings, which speak to people."""
    return {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def literals(module: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """String literals that are not prose; an f-string comes whole, with `{}` for its values."""
    inside = {
        id(part) for node in ast.walk(module) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    skipped = prose(module) | inside
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node, "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node, node.value


def imports(module: ast.AST) -> Iterator[tuple[ast.stmt, str, tuple[str, ...]]]:
    """(statement, module, names taken from it); `import a.b` takes no names."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node, node.module or "", tuple(alias.name for alias in node.names)


def calls(module: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """(call, last part of what is called): `a.b.c[T](...)` is `c`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            yield node, called(node)


def called(node: ast.Call) -> str:
    return last_name(node.func)


def last_name(node: ast.expr) -> str:
    match node:
        case ast.Subscript(value=inner):
            return last_name(inner)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def keyword(node: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in node.keywords if each.arg == name), None)


SQL = re.compile(
    r"""
      ^\s*(?: select\s+(?:\$\d|\d|.*\bfrom\b|\w+\() | insert\s+into\b | update\s+\S+\s+(?:\w+\s+)?set\b
            | delete\s+from\b | with\s+(?:recursive\s+)?\w+\s+as\b | truncate\s | lock\s+table
            | (?:create|alter|drop)\s+(?:table|index|unique|database|role|schema|extension|function|type)\b
            | (?:begin|commit|rollback|savepoint)\s*;?\s*$
            | set\s+(?:local|session)\s | (?:un)?listen\s+\w+\s*$ )
    | \b(?-i:SELECT\s.*\sFROM|INSERT\s+INTO|DELETE\s+FROM|UPDATE\s+\S+\s+SET|RETURNING\s+\w
            |FOR\s+(?:NO\s+KEY\s+)?UPDATE|SKIP\s+LOCKED|ON\s+CONFLICT)\b
    | \bpg_(?:try_)?advisory_\w+
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
