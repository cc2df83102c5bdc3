"""Whether a chaotic run kept what is promised: one pure function for each invariant, over what is `Seen`.

docs/reliability/invariants.md says each in plain words, and which are not looked for here.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tests.chaos import on_effects, on_owners, on_runs, on_services, on_the_log
from tests.chaos.history import Dump, Record
from tests.chaos.seen import Seen, Violation

__all__ = ["CHECKER_VERSION", "CHECKS", "Violation", "check"]

CHECKER_VERSION: Final = 1

CHECKS: Final[dict[str, Callable[[Seen], Iterator[Violation]]]] = {
    "INV-1": on_the_log.numbered,
    "INV-2": on_the_log.followed,
    "INV-3": on_the_log.ended_once,
    "INV-4": on_runs.lives_for_a_reason,
    "INV-5": on_runs.one_authority,
    "INV-6": on_effects.called_once,
    "INV-7": on_effects.paid_for,
    "INV-8": on_runs.cancelled_in_time,
    "INV-9": on_effects.created_once,
    "INV-10": on_effects.delivered_once,
    "INV-11": on_runs.families,
    "INV-12": on_runs.slept,
    "INV-13": on_owners.erased,
    "INV-14": on_owners.kept_apart,
    "INV-15": on_services.let_go,
    "INV-16": on_services.told_the_truth,
    "INV-19": on_the_log.kept,
}


def check(records: Sequence[Record], dump: Dump) -> list[Violation]:
    """Every violation, in the order of the invariants. The history is whole: from Began to Ended."""
    seen = Seen(records, dump)
    return [violation for judge in CHECKS.values() for violation in judge(seen)]
