"""Hunting for a violation with schedules of a seed: fast, repeatable, and without Hypothesis, which has its
own way of choosing and shrinks what it finds.
"""

from random import Random
from typing import Final

from tests.simulation.database import Guard
from tests.simulation.machine import Simulator

BYTES_MIN: Final = 80
BYTES_MAX: Final = 160
"""Of a schedule: two for each rule."""


def hunted(
    simulator: Simulator,
    *,
    seed: int,
    schedules_max: int,
    mood: int | None = None,
    without: frozenset[Guard] = frozenset(),
) -> tuple[bytes, str] | None:
    """The first schedule (of `mood`, if it is given) that breaks something, and what; None if none does."""
    random = Random(seed)
    for _ in range(schedules_max):
        schedule = random.randbytes(random.randint(BYTES_MIN, BYTES_MAX))
        if mood is not None:
            schedule = bytes([mood]) + schedule[1:]
        if found := simulator.breaks(schedule, without):
            return schedule, found
    return None
