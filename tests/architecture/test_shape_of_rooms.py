"""How a room looks from outside: every module says what it is, every file and class has a telling name, every
statement stands above the function that runs it, and a room imports only what its pyproject.toml declares.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions

from tests.architecture.sources import ROOT, SQL, Source, findings, imports, literals, report, source

SAY_NOTHING = ("utils", "util", "common", "helpers", "helper", "misc", "base", "manager", "service", "stuff")
EMPTY_ENDINGS = ("Manager", "Service", "Helper", "Helpers", "Utils", "Base", "Data", "Info")


def modules_without_a_word(module: Source) -> Iterator[str]:
    if not (ast.get_docstring(module.tree) or "").strip():
        escape = "begin with a docstring: what it is, what it is not, who stands above and below"
        yield module.finding(None, "the module does not say what it is", escape)


def names_that_say_nothing(module: Source) -> Iterator[str]:
    empty = {part.removesuffix(".py") for part in module.name.split("/")[1:]} & set(SAY_NOTHING)
    if empty:
        yield module.finding(
            None, f"a file named {empty.pop()}", "name the thing and put it beside its first user"
        )
    for node in ast.walk(module.tree):
        # The protocols' words are theirs, so the wire's types keep them.
        if isinstance(node, ast.ClassDef) and node.name.endswith(EMPTY_ENDINGS) and module.room != "protocol":
            yield module.finding(
                node, f"{node.name} does not say what it does", "name it for its act or its role"
            )


def statement_constants(module: Source) -> dict[str, int]:
    """Names of module-level constants that hold SQL -> their place in the body."""
    found: dict[str, int] = {}
    for place, node in enumerate(module.tree.body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            holder = ast.Module(body=[node], type_ignores=[])
            if any(SQL.search(text) for _, text in literals(holder)):
                found[node.targets[0].id] = place
    return found


def names_in(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {
        each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)
    }


def statements_away_from_their_function(module: Source) -> Iterator[str]:
    """Between the two only other statements and the shape of the answer may stand."""
    constants = statement_constants(module)
    assignments = [node for node in module.tree.body if isinstance(node, ast.Assign)]
    parts = {part for node in assignments for part in names_in(node, ast.Load)}
    for name, place in constants.items():
        if name in parts:
            continue  # a fragment that statements below are put together from
        below = module.tree.body[place + 1 :]
        between = (ast.Assign, ast.AnnAssign, ast.ClassDef, ast.Expr)
        function = next((node for node in below if not isinstance(node, between)), None)
        used = names_in(function, ast.Load) if function else set()
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or name not in used:
            escape = "one statement, one function: put the text directly above the function that runs it"
            yield module.finding(module.tree.body[place], f"{name} is not above its function", escape)


@cache
def declared(room: str) -> frozenset[str]:
    """Import names that the room's pyproject.toml pays for."""
    (file,) = [
        path for top in ("libs", "services", "deploy") for path in ROOT.glob(f"{top}/{room}/pyproject.toml")
    ]
    project = tomllib.loads(file.read_text())["project"]
    optional = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *(each for extra in optional for each in extra)]
    wanted = {normal(re.split(r"[^A-Za-z0-9._-]", each, maxsplit=1)[0]) for each in requirements}
    installed = packages_distributions()
    third = {name for name, owners in installed.items() if wanted & {normal(owner) for owner in owners}}
    ours = {each.replace("-", "_") for each in wanted if each.startswith("espalier-")}
    return frozenset(third | ours | {f"espalier_{room}"})


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def undeclared_imports(module: Source) -> Iterator[str]:
    for statement, name, _ in imports(module.tree):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in declared(module.room):
            escape = "declare it in the room's pyproject.toml (and argue for it), or do without"
            yield module.finding(statement, f"{module.room} imports {top} without declaring it", escape)


def test_every_module_says_what_it_is() -> None:
    found = findings(modules_without_a_word)
    assert not found, report(found)


def test_names_say_something() -> None:
    found = findings(names_that_say_nothing)
    assert not found, report(found)


def test_every_statement_stands_above_its_function() -> None:
    found = findings(statements_away_from_their_function, ("store",))
    assert not found, report(found)


def test_a_room_imports_what_it_declares() -> None:
    found = findings(undeclared_imports)
    assert not found, report(found)


def test_every_room_is_typed() -> None:
    packages = [
        path for top in ("libs", "services", "deploy") for path in ROOT.glob(f"{top}/*/src/espalier_*")
    ]
    assert packages
    assert [path.name for path in packages if not (path / "py.typed").exists()] == []


def test_every_room_is_under_contract_and_type_checked() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packages = [
        path for top in ("libs", "services", "deploy") for path in ROOT.glob(f"{top}/*/src/espalier_*")
    ]
    assert sorted(tool["importlinter"]["root_packages"]) == sorted(path.name for path in packages)
    sources = {f"$MYPY_CONFIG_FILE_DIR/{path.parent.relative_to(ROOT).as_posix()}" for path in packages}
    assert sources <= set(tool["mypy"]["mypy_path"])


def test_the_rules_find_what_says_nothing() -> None:
    assert len(list(modules_without_a_word(source("acts/bad.py", "x = 1\n")))) == 1
    assert len(list(names_that_say_nothing(source("acts/utils.py", "class RunManager: ...\n")))) == 2


def test_the_rules_find_strayed_statements_and_imports() -> None:
    strayed = (
        "_A = 'SELECT id FROM runs'\n_B = 'DELETE FROM runs'\nasync def f(c): return await c.fetch(_A)\n"
    )
    (finding,) = statements_away_from_their_function(source("store/runs.py", strayed))
    assert "_B is not above its function" in finding
    assert (
        len(
            list(
                undeclared_imports(
                    source("domain/bad.py", "import json\nimport httpx2\nimport espalier_store\n")
                )
            )
        )
        == 2
    )


def test_the_rules_leave_good_rooms_alone() -> None:
    good = (
        '"""The rows of runs."""\n_A = "SELECT id FROM runs"\nasync def find(c): return await c.fetch(_A)\n'
    )
    module = source("store/runs.py", good)
    rules = (
        modules_without_a_word,
        names_that_say_nothing,
        statements_away_from_their_function,
        undeclared_imports,
    )
    assert [finding for rule in rules for finding in rule(module)] == []
