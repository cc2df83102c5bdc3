"""Every name has one spelling that providers accept, and every spelling one name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier_run_worker.models.tool_spelling import ToolSpelling

ACCEPTED = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Mostly the characters that clash with one another, and lengths around the limit.
NAMES = st.lists(
    st.one_of(
        st.text("ab._-", max_size=8),
        st.text("a._", min_size=60, max_size=70),
        st.text(max_size=80),
    ),
    max_size=20,
)


@given(NAMES)
def test_every_name_is_spelled_acceptably_and_comes_back(names: list[str]) -> None:
    spelling = ToolSpelling(names)
    spelled = [spelling.spelled(name) for name in names]

    assert all(ACCEPTED.fullmatch(each) for each in spelled)
    assert [spelling.meant(each) for each in spelled] == names


@given(NAMES)
def test_the_same_names_are_always_spelled_alike(names: list[str]) -> None:
    first, second = ToolSpelling(names), ToolSpelling([*names, *names])
    assert [first.spelled(name) for name in names] == [second.spelled(name) for name in names]


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("complete", "complete"),
        ("espalier.time", "espalier__time"),
        ("mcp.git.git_log", "mcp__git__git_log"),
        ("mcp.my-server.a_b-c", "mcp__my-server__a_b-c"),
    ],
)
def test_a_dot_is_written_as_two_underscores(name: str, spelling: str) -> None:
    assert ToolSpelling([name]).spelled(name) == spelling


def test_of_names_that_clash_the_first_stays_plain_and_the_other_ends_in_a_hash() -> None:
    spelling = ToolSpelling(["a.b", "a__b"])
    assert (spelling.spelled("a.b"), spelling.spelled("a__b")) == ("a__b", "a__b_b097b148")
    assert (spelling.meant("a__b"), spelling.meant("a__b_b097b148")) == ("a.b", "a__b")


def test_a_name_that_is_another_ones_hashed_spelling_does_not_take_its_place() -> None:
    long = "mcp.server." + "x" * 70
    hashed = ToolSpelling([long]).spelled(long)
    spelling = ToolSpelling([hashed, long])
    assert spelling.meant(spelling.spelled(long)) == long
    assert spelling.meant(spelling.spelled(hashed)) == hashed


def test_a_long_name_keeps_its_beginning() -> None:
    name = "mcp.server." + "x" * 70
    spelled = ToolSpelling([name]).spelled(name)
    assert spelled.startswith("mcp__server__xxx")
    assert len(spelled) == 64


def test_a_name_that_a_model_made_up_is_left_as_it_is() -> None:
    assert ToolSpelling(["mcp.git.git_log"]).meant("git_log") == "git_log"
