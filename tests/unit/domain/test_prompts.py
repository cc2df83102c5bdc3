"""Prompts that change: a diff says all that a change did, and applies exactly where it says or not at all."""

import random
import time

import pytest

from espalier_domain.errors import InvalidInput
from espalier_domain.prompts import COMPARED_LINES_MAX, TOLD_CHARS_MAX, patched, told, unified_diff

TEXT = "one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\n"
PIECES = [
    "a",
    "b",
    "\n",
    "\n",
    "\r\n",
    "\u2028",
    "\x0b",
    "--- x",
    "+++ y",
    "@@ -1 +1 @@",
    "\\ No",
    " ",
    "-",
    "+",
]
LONG_S = 2.0


def test_a_diff_reads_as_diff_u_writes_it() -> None:
    assert unified_diff(TEXT, TEXT.replace("four", "4").removesuffix("\n")) == (
        "--- before\n+++ after\n@@ -1,8 +1,8 @@\n one\n two\n three\n-four\n+4\n five\n six\n seven\n"
        "-eight\n+eight\n\\ No newline at end of file\n"
    )
    assert unified_diff(TEXT, TEXT) == ""
    assert unified_diff("", "new") == (
        "--- before\n+++ after\n@@ -0,0 +1 @@\n+new\n\\ No newline at end of file\n"
    )


def test_every_change_can_be_done_again_from_its_diff() -> None:
    """Also of lines that look like parts of a diff, and with ends of lines that only Unicode knows."""
    chance = random.Random(5)
    for _ in range(3000):
        before, after = ("".join(chance.choices(PIECES, k=chance.randrange(30))) for _ in range(2))
        if chance.random() < 0.5:  # a small change in a long text
            cut = chance.randrange(len(before) + 1)
            after = before[:cut] + after[:3] + before[cut:]
        diff = unified_diff(before, after)
        assert (patched(before, diff) == after) if before != after else diff == ""


def test_far_apart_texts_get_one_hunk_in_bounded_time_and_it_applies() -> None:
    lines = [f"{number % 97}\n" for number in range(4 * COMPARED_LINES_MAX)]
    shuffled = random.Random(5).sample(lines, len(lines))
    before, after = (f"same\n{''.join(middle)}same\nsame" for middle in (lines, shuffled))
    began_at = time.monotonic()
    diff = unified_diff(before, after)
    assert time.monotonic() - began_at < LONG_S, "comparing line by line takes the square of this"
    assert diff.count("@@ -") == 1 and "same" not in diff
    assert patched(before, diff) == after


def test_what_an_event_tells_of_a_long_diff_is_its_beginning() -> None:
    assert told("x" * TOLD_CHARS_MAX) == "x" * TOLD_CHARS_MAX
    assert told("x" * (TOLD_CHARS_MAX + 1)) == "x" * TOLD_CHARS_MAX + " [shortened]"


def test_several_hunks_without_a_heading_and_with_lost_blanks_are_applied() -> None:
    diff = "@@ -1,2 +1,2 @@ anything\n-one\n+1\n two\n@@ -7,2 +7,3 @@\n seven\n+7.5\n eight"
    assert patched(TEXT, diff) == TEXT.replace("one", "1").replace("eight", "7.5\neight")
    assert patched("a\n\nb\n", "@@ -1,3 +1,3 @@\n-a\n+A\n\n b\n") == "A\n\nb\n"


HEAD = "@@ -2,2 +2,2 @@\n"
REFUSED = {
    "plain text": ("Be brief.", "it is no unified diff: 'Be brief.' should be a hunk's @@ -a,b +c,d @@"),
    "nothing": ("", "there is no hunk in it"),
    "a heading alone": ("--- a\n+++ b\n", "there is no hunk in it"),
    "another line": (
        HEAD + "-TWO\n+2\n three\n",
        "hunk 1 is refused: at line 2 it has 'TWO\\n', the prompt has",
    ),
    "another context": (HEAD + "-two\n+2\n THREE\n", "hunk 1 is refused: at line 3 it has 'THREE\\n'"),
    "another place": ("@@ -3,2 +3,2 @@\n-two\n+2\n three\n", "hunk 1 is refused: at line 3"),
    "beyond the end": (
        "@@ -8,2 +8,1 @@\n eight\n-nine\n",
        "hunk 1 is refused: at line 9 it has 'nine\\n', the",
    ),
    "far beyond the end": (
        "@@ -99 +99 @@\n-x\n+y\n",
        "hunk 1 is refused: it begins at line 99, out of its place",
    ),
    "line 0": ("@@ -0 +1 @@\n-x\n+y\n", "hunk 1 is refused: it begins at line 0, out of its place"),
    "a hunk twice": (
        (HEAD + "-two\n+2\n three\n") * 2,
        "hunk 2 is refused: it begins at line 2, out of its place",
    ),
    "too few lines": (HEAD + "-two\n+2\n", "a hunk has other lines than its heading counts"),
    "too many lines": (HEAD + "-two\n+2\n three\n four\n", "it is no unified diff: ' four' should be"),
    "an end that is none": (
        HEAD + "-two\n+2\n\\ No newline at end of file\n three\n",
        "a line that ends without a line feed",
    ),
    "no end where there is one": (
        "@@ -8 +8 @@\n-eight\n\\ No newline at end of file\n+8\n",
        "hunk 1 is refused: at line 8 it has 'eight', the prompt has 'eight\\n'",
    ),
}


@pytest.mark.parametrize(("diff", "why"), REFUSED.values(), ids=REFUSED)
def test_a_diff_that_does_not_fit_is_refused_and_says_where(diff: str, why: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        patched(TEXT, diff)
    assert refused.value.field == "content"
    assert refused.value.reason.startswith(f"cannot be applied: {why}")
