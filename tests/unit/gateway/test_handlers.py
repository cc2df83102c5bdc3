"""The registry of handlers against the table of methods: there is no second list."""

import inspect
import typing
from pathlib import Path

from espalier_gateway import methods
from espalier_gateway.methods import HANDLERS
from espalier_protocol.access import SUPPORTED
from espalier_protocol.methods import METHODS

# The first slice of the wire; the next ones add to the registry, not to this.
BUILT = {
    "initialize",
    "agent.create",
    "agent.get",
    "agent.list",
    "run.create",
    "run.get",
    "run.list",
    "run.cancel",
    "run.continue",
}


def test_every_handler_is_of_a_method_that_the_table_knows() -> None:
    assert set(HANDLERS) <= set(METHODS)
    assert set(HANDLERS) >= BUILT


def test_a_handler_takes_and_gives_what_the_table_says() -> None:
    told = {name: typing.get_type_hints(handler) for name, handler in HANDLERS.items()}
    assert {name: (hints["params"], hints["return"]) for name, hints in told.items()} == {
        name: (METHODS[name].params, METHODS[name].result) for name in HANDLERS
    }


def test_a_handler_stands_in_the_file_of_its_subject() -> None:
    folder = Path(inspect.getfile(methods)).parent
    for name, handler in HANDLERS.items():
        subject, _, act = name.rpartition(".")
        assert Path(inspect.getfile(handler)) == folder / f"{subject or 'session'}.py"
        assert handler.__name__.rstrip("_") == act


def test_a_capability_is_advertised_only_when_all_its_methods_are_built() -> None:
    missing = {
        method.name
        for name, method in METHODS.items()
        if method.capability in SUPPORTED and name not in HANDLERS
    }
    assert missing == set()
