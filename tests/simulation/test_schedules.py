"""Schedules: what two workers, a gateway, a broker and Redis can do to each other, thousands of times.

Hypothesis draws a schedule as bytes and shrinks one that breaks something; what it prints (the bytes, and the
rules that were applied) can be given to `python -m tests.simulation HEX` or be kept in `schedules.yaml`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.simulation.database import LIVE
from tests.simulation.hunting import BYTES_MAX, BYTES_MIN
from tests.simulation.machine import Simulator, simulator

FEW: Final = 100
MANY: Final = 10_000
KEPT: Final = Path(__file__).with_name("schedules.yaml")
SCHEDULES: Final = st.binary(min_size=BYTES_MIN, max_size=BYTES_MAX)
BY_SEED: Final = settings(
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def machine() -> Iterator[Simulator]:
    with simulator() as machine:
        yield machine


@settings(BY_SEED, max_examples=FEW)
@given(schedule=SCHEDULES)
def test_some_schedules_break_nothing(machine: Simulator, schedule: bytes) -> None:
    machine.run(schedule)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(BY_SEED, max_examples=MANY)
@given(schedule=SCHEDULES)
def test_ten_thousand_schedules_break_nothing(machine: Simulator, schedule: bytes) -> None:
    machine.run(schedule)


@pytest.mark.parametrize("kept", yaml.safe_load(KEPT.read_text()), ids=lambda kept: kept["about"])
def test_a_schedule_that_was_kept_breaks_nothing(machine: Simulator, kept: dict[str, str]) -> None:
    machine.run(bytes.fromhex(kept["schedule"]))


def test_a_schedule_without_rules_heals_to_a_run_that_is_complete(machine: Simulator) -> None:
    world = machine.run(b"")
    assert [run["state"] for run in world.db.runs.values()] == ["complete"]
    (told,) = world.db.events.values()
    assert [type_ for _, type_, _ in told] == ["run.started", "cycle.started", "cycle.ended", "run.ended"]


def test_schedules_reach_what_they_are_to_reach(machine: Simulator) -> None:
    """Or ten thousand of them would prove nothing."""
    reached = dict.fromkeys(("helpers", "made", "doubts", "cancelled", "error", "asleep", "read", "taken"), 0)
    for number in range(FEW):
        world = machine.run(bytes([number * 89 % 256]) + _spread(number))
        runs = world.db.runs.values()
        reached["helpers"] += sum(run["parent_id"] is not None for run in runs)
        reached["made"] += len(world.ledger)
        reached["doubts"] += len(world.db.approvals)
        reached["cancelled"] += sum(run["state"] == "cancelled" for run in runs)
        reached["error"] += sum(run["state"] == "error" for run in runs)
        reached["asleep"] += sum(run["state"] in LIVE for run in runs)
        reached["read"] += sum(message["read_at"] is not None for message in world.db.messages.values())
        reached["taken"] += sum(len(reader.got) for reader in world.readers)
    assert all(reached.values()), reached


def _spread(number: int) -> bytes:
    """Bytes that look like chance, and are always the same."""
    state, drawn = number + 1, bytearray()
    for _ in range(BYTES_MAX):
        state = (state * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) % 2**64
        drawn.append(state >> 56)
    return bytes(drawn)
