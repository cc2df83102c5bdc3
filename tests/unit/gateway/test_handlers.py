"""The registry of handlers against the table of methods: there is no second list."""

import inspect
import typing
from pathlib import Path

from espalier_gateway import methods
from espalier_gateway.methods import HANDLERS
from espalier_gateway.methods.call import Call
from espalier_protocol.methods import METHODS


def test_every_method_of_the_table_has_its_handler_and_nothing_else_has_one() -> None:
    assert set(HANDLERS) == set(METHODS)


def test_a_handler_takes_and_gives_what_the_table_says() -> None:
    told = {name: list(typing.get_type_hints(handler).values()) for name, handler in HANDLERS.items()}
    assert told == {name: [Call, METHODS[name].params, METHODS[name].result] for name in HANDLERS}


def test_a_handler_stands_in_the_file_of_its_subject() -> None:
    folder = Path(inspect.getfile(methods)).parent
    for name, handler in HANDLERS.items():
        subject, _, act = name.rpartition(".")
        assert Path(inspect.getfile(handler)) == folder / f"{subject or 'session'}.py"
        assert handler.__name__.rstrip("_") == act
