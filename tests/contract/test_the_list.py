"""The list of requirements and the tests of the contract are one thing: neither says more than the other."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.contract.requirements import BY_ID, REQUIREMENTS

FOLDER = Path(__file__).parent
NOT_BUILT_YET = "test_not_built_yet"


def requirements_shown() -> Iterator[tuple[str, str, list[str]]]:
    """(file, test, the ids that it is marked with) of every test; one with parameters counts as several."""
    for path in sorted(FOLDER.glob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        for name, test in vars(import_module(f"tests.contract.{path.stem}")).items():
            if name.startswith("test_"):
                yield from ((path.stem, *case) for case in _cases(name, getattr(test, "pytestmark", [])))


def _cases(name: str, marks: list[Any]) -> Iterator[tuple[str, list[str]]]:
    own = _ids(marks)
    parameters = [case for mark in marks if mark.name == "parametrize" for case in mark.args[1]]
    if not parameters:
        yield name, own
    for case in parameters:
        yield f"{name}[{case.id}]", own + _ids(case.marks)


def _ids(marks: Iterable[Any]) -> list[str]:
    return [each.args[0] for each in marks if each.name == "requirement"]


def test_every_requirement_has_exactly_one_test_and_every_test_one_requirement() -> None:
    shown = list(requirements_shown())
    assert [test for _, test, ids in shown if len(ids) != 1] == []
    assert sorted(ids[0] for _, _, ids in shown) == sorted(each.id for each in REQUIREMENTS)
    assert len(BY_ID) == len(REQUIREMENTS), "two requirements have one id"


def test_what_is_not_built_yet_is_exactly_what_the_list_says_so_of() -> None:
    waiting = {ids[0] for file, _, ids in requirements_shown() if file == NOT_BUILT_YET}
    assert waiting == {each.id for each in REQUIREMENTS if each.later is not None}
