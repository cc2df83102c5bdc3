"""Without a guard, the simulation finds what the guard is for: or it would prove nothing.

Guards in statements are switches of the model; guards in the product's own code are taken away in a copy of
the tree, on which the simulation then runs as a program.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import pytest
import yaml
from tests.mutants.patches import ROOT, Edit, copy_sources, module_path
from tests.simulation.database import Guard
from tests.simulation.hunting import hunted
from tests.simulation.machine import (
    MOODS,
    Rule,
    Simulator,
    a_lease_passes,
    a_worker_goes_on,
    a_worker_looks_out,
    simulator,
)

SEED: Final = 1
SCHEDULES_MAX: Final = 1_500
"""Of the mood in which the guard is needed most."""

PATCH_S_MAX: Final = 120.0
PATCHES: Final[list[dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("patches.yaml").read_text())
TOKEN: Final[Guard] = "the token of a step"
GUARDS: Final[dict[Guard, tuple[str, int]]] = {
    "the wake counter at a sleep": ("INV-10", 62),
    "the planned state of a call": ("INV-6", 76),
    "the cancel flag at a call": ("INV-8", 156),
    "the cancel flag at a step": ("INV-8", 155),
    "one wake for one row": ("INV-", 62),
    "the token at a release": ("INV-5", 17),
}


@pytest.fixture(scope="module")
def machine() -> Iterator[Simulator]:
    with simulator() as machine:
        yield machine


def test_every_switch_of_the_model_is_tried() -> None:
    assert {*GUARDS, TOKEN} == set(get_args(Guard))


@pytest.mark.parametrize("without", [frozenset(), frozenset([TOKEN])], ids=["with it", "without it"])
def test_a_stalled_worker_writes_only_where_no_statement_checks_its_token(
    machine: Simulator, without: frozenset[Guard]
) -> None:
    """Chance finds this one rarely: between an answer and its self-tools no fence stands."""
    stall: list[tuple[Rule, int]] = [
        (a_worker_looks_out, 0),
        *[(a_worker_goes_on, 0)] * 2,  # asks, and is answered by a call of a self-tool
        (a_lease_passes, 0),
        (a_worker_looks_out, 1),
        (a_worker_goes_on, 0),
    ]
    chosen = MOODS[17]
    codes = [(chosen.rules.index(rule), operand) for rule, operand in stall]
    found = machine.breaks(bytes([17, *(byte for code in codes for byte in code)]), without)
    assert found.startswith("INV-5: ['token") if without else found == ""


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS)
def test_a_statement_without_its_guard_is_found_out(machine: Simulator, guard: Guard) -> None:
    fails, mood = GUARDS[guard]
    without = frozenset([guard])
    hit = hunted(machine, seed=SEED, schedules_max=SCHEDULES_MAX, mood=mood, without=without)
    assert hit is not None, "no schedule found it"
    schedule, found = hit
    assert found.startswith(fails)
    assert machine.breaks(schedule) == "", "with the guard the same schedule breaks nothing"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch["guard"])
def test_a_patch_applies_and_leaves_a_program(patch: dict[str, Any]) -> None:
    ast.parse(_edit(patch).applied_to((ROOT / patch["path"]).read_text()))


@pytest.mark.slow
@pytest.mark.timeout(PATCH_S_MAX)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch["guard"])
def test_a_product_without_a_guard_is_found_out(patch: dict[str, Any], tmp_path: Path) -> None:
    copy_sources(tmp_path)
    file = tmp_path / patch["path"]
    file.write_text(_edit(patch).applied_to(file.read_text()))
    path = os.pathsep.join((module_path(tmp_path), str(ROOT / "tests/support")))
    hunt = subprocess.run(
        [sys.executable, "-m", "tests.simulation", str(SCHEDULES_MAX), str(SEED), str(patch["mood"])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATCH_S_MAX,
        check=False,
    )
    assert hunt.returncode == 1, hunt.stdout[-400:] + hunt.stderr[-2_000:]
    assert f"\n{patch['fails']}" in hunt.stdout, hunt.stdout[-800:]


def _edit(patch: dict[str, Any]) -> Edit:
    return Edit(patch["path"], patch["old"], patch["new"])
