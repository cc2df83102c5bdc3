"""The patches fit the product as it stands, and mutants are judged by what they fail.

No mutant runs here; `make mutants` runs them.
"""

import ast

import pytest
from tests.mutants.__main__ import SMOKE, judged
from tests.mutants.patches import ROOT, DoesNotApply, Edit, Patch, all_patches

from espalier_client.conformance.expected import requirements
from espalier_client.conformance.verdicts import Outcome, Verdict

PATCHES_MIN = 25
BY_ID = {each.id: each for each in requirements()}
PATCH = Patch("a guard", (Edit("x.py", "if True:", "if False:"),), ("RUN-01", "RUN-02"))


@pytest.mark.parametrize("patch", all_patches(), ids=lambda patch: patch.guard)
def test_a_patch_applies_and_leaves_a_program(patch: Patch) -> None:
    texts = {edit.path: (ROOT / edit.path).read_text() for edit in patch.edits}
    for edit in patch.edits:
        texts[edit.path] = edit.applied_to(texts[edit.path])
    for path, text in texts.items():
        ast.parse(text, path)
    assert patch.fails and set(patch.fails) <= BY_ID.keys() - {SMOKE}


def test_there_are_enough_guards_and_none_twice() -> None:
    edits = [patch.edits for patch in all_patches()]
    assert len({patch.guard for patch in all_patches()}) == len(set(edits)) == len(edits) >= PATCHES_MIN


@pytest.mark.parametrize("text", ["", "if True:\nif True:\n"])
def test_a_patch_that_does_not_fit_is_told(text: str) -> None:
    with pytest.raises(DoesNotApply, match=r"x\.py: expected once"):
        PATCH.edits[0].applied_to(text)


@pytest.mark.parametrize(
    ("outcomes", "why"),
    [
        (("passed", "failed", "failed"), ""),
        (("failed", "failed", "failed"), "the mutant fails the first program: because"),
        (("passed", "failed", "passed"), "RUN-02 should fail and passed. because"),
        (("passed", "skipped", "failed"), "RUN-01 should fail and skipped. because"),
    ],
)
def test_a_mutant_is_killed_by_failing_all_that_its_patch_names(
    outcomes: tuple[Outcome, ...], why: str
) -> None:
    names = (SMOKE, "RUN-01", "RUN-02")
    verdicts = [
        Verdict(BY_ID[name], outcome, "because") for name, outcome in zip(names, outcomes, strict=True)
    ]
    assert judged(PATCH, {each.requirement.id: each for each in verdicts}) == why
