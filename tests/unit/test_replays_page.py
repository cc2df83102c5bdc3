"""The page of replayed faults names tests that exist: a test that is renamed takes its line along."""

import ast
import re
from pathlib import Path

TREE = Path(__file__).parents[2]
PAGE = TREE / "docs/reliability/replays.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINE = re.compile(r"(?m)^\| .* \|$")
REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def named_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def test_every_test_that_the_page_names_exists() -> None:
    named = NAMED.findall(PAGE.read_text())
    assert len(named) > 50, "the page or its form has changed"
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (TREE / path).is_file() or name not in named_in(TREE / path)
    ]
    assert missing == []


def test_every_line_of_the_first_table_has_a_report_and_a_test() -> None:
    replayed, _, _ = PAGE.read_text().partition("## Not replayed")
    lines = [line for line in LINE.findall(replayed) if not line.startswith("| fault |")]
    assert [line for line in lines if not (REPORT.search(line) and NAMED.search(line))] == []


def test_every_test_of_a_replay_file_is_on_the_page() -> None:
    on_page = set(NAMED.findall(PAGE.read_text()))
    files = sorted((TREE / "tests/integration").glob("test_replays_*.py"))
    assert files
    written = {(str(file.relative_to(TREE)), name) for file in files for name in named_in(file)}
    assert written - on_page == set()
