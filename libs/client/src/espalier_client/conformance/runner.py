"""Tries requirements against a ground: a few at a time, each within its own time, none disturbing another.

Above: the command. Below: `checks`, which know the ground, and `attempts`, which take what they raise.
"""

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

import anyio

from espalier_client.conformance import checks
from espalier_client.conformance.attempts import attempted
from espalier_client.conformance.expected import allowed_skips
from espalier_client.conformance.ground import Ground, Trial
from espalier_client.conformance.verdicts import Requirement, Verdict

CHECK_S_MAX: Final = 45.0
TRIED_WITHOUT_SESSION: Final = ("ENVELOPE", "VERSION", "AUTH", "SESSION")
FULL: Final = "full"

Check = Callable[[Trial], Awaitable[None]]
_NAME: Final = re.compile(r"(?P<group>[a-z]+)_(?P<number>\d\d)_\w+")


@cache
def all_checks() -> dict[str, list[Check]]:
    """By requirement: every function `<group>_<number>_...` of every file in `checks`."""
    found: dict[str, list[Check]] = {}
    for module in iter_modules(checks.__path__):
        for name, value in vars(import_module(f"{checks.__name__}.{module.name}")).items():
            if (match := _NAME.fullmatch(name)) and callable(value):
                found.setdefault(f"{match['group'].upper()}-{match['number']}", []).append(value)
    return found


def chosen(requirements: Sequence[Requirement], only: Sequence[str]) -> list[Requirement]:
    """Those whose id, group or capability is named; all if nothing is."""
    wanted = {word.strip().lower() for part in only for word in part.split(",")}
    return [
        each
        for each in requirements
        if not wanted or wanted & {each.id.lower(), each.group.lower(), each.capability.lower()}
    ]


async def conduct(
    ground: Ground,
    requirements: Sequence[Requirement],
    *,
    profile: str,
    jobs: int,
    check_s: float = CHECK_S_MAX,
    on_verdict: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """One verdict for each requirement, in their order."""
    verdicts: dict[str, Verdict] = {}
    room = anyio.CapacityLimiter(jobs)

    async def tried(requirement: Requirement) -> None:
        async with room:
            verdict = await _try(ground, requirement, check_s)
        verdicts[requirement.id] = excused(verdict, profile)
        on_verdict(verdicts[requirement.id])

    async with anyio.create_task_group() as tasks:
        for requirement in requirements:
            tasks.start_soon(tried, requirement)
    return [verdicts[requirement.id] for requirement in requirements]


async def _try(ground: Ground, requirement: Requirement, check_s: float) -> Verdict:
    if ground.trouble and requirement.group not in TRIED_WITHOUT_SESSION:
        return Verdict(requirement, "failed", f"not tried, for no session could be had: {ground.trouble}")
    if reason := ground.why_not(requirement):
        return Verdict(requirement, "skipped", reason)
    (check,) = all_checks()[requirement.id]
    began, trial = time.monotonic(), Trial(ground)
    outcome, reason = await attempted(check(trial), trial.notes, check_s)
    return Verdict(requirement, outcome, reason, time.monotonic() - began)


def excused(verdict: Verdict, profile: str) -> Verdict:
    """A full runtime may leave out what a committed list says, a smaller one whatever it does not offer."""
    if verdict.outcome != "skipped":
        return verdict
    if profile == FULL:
        return replace(verdict, excused=allowed_skips(FULL).get(verdict.requirement.id, ""))
    return replace(verdict, excused="A runtime of this profile may leave it out.")


def is_passed(verdicts: Sequence[Verdict]) -> bool:
    return not any(counts_against(verdict) for verdict in verdicts)


def counts_against(verdict: Verdict) -> bool:
    """A MUST or SHOULD that fails, or any skip that nothing excuses."""
    if verdict.outcome == "skipped":
        return not verdict.excused
    return verdict.outcome == "failed" and verdict.requirement.level != "MAY"
