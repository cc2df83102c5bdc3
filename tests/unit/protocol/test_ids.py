"""Ids: in order, unique, and with exactly one spelling."""

import secrets
from functools import reduce
from itertools import pairwise
from operator import and_, or_
from typing import get_args
from uuid import RFC_4122, UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from espalier_protocol.ids import (
    IdPrefix,
    IdSequence,
    event_id,
    from_wire,
    parse_event_id,
    session_id,
    to_wire,
)

PREFIXES: tuple[IdPrefix, ...] = get_args(IdPrefix)
ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

prefixes = st.sampled_from(PREFIXES)
LARGEST = UUID(int=2**128 - 1)


def unix_ms_of(uuid: UUID) -> int:
    return uuid.int >> 80


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**47), st.integers(0, 2**74 - 1)), min_size=1, max_size=50))
@example([(1_000, 0)] * 50)
@example([(1_000, 2**74 - 1)] * 50)
@example([(1_000, 7), (999, 5), (0, 3), (1_000, 2), (1_001, 1)])
def test_ids_rise_whatever_the_clock_and_the_dice_do_and_stay_version_7(draws: list[tuple[int, int]]) -> None:
    sequence = IdSequence()
    uuids = [sequence.next(unix_ms, random_bits) for unix_ms, random_bits in draws]
    assert all(left < right for left, right in pairwise(uuids))
    assert all((uuid.version, uuid.variant) == (7, RFC_4122) for uuid in uuids)


def test_a_clock_that_moves_on_sets_the_time_of_the_id() -> None:
    sequence = IdSequence()
    times = list(range(1_700_000_000_000, 1_700_000_001_000, 10))
    assert [unix_ms_of(sequence.next(unix_ms, 2**74 - 1)) for unix_ms in times] == times


def test_all_random_bits_are_in_the_id() -> None:
    made = {IdSequence().next(1_000, bits) for bits in (0, *(1 << place for place in range(74)))}
    assert len(made) == 75
    assert {unix_ms_of(uuid) for uuid in made} == {1_000}


def test_a_forked_sequence_does_not_repeat_its_twin() -> None:
    left, right = IdSequence(), IdSequence()
    assert left.next(1_000, 2**73) == right.next(1_000, 2**73)
    assert left.next(1_000, 5) != right.next(1_000, 6)


@settings(deadline=None)
@given(prefixes, st.uuids())
@example("agt", UUID(int=0))
@example("own", LARGEST)
def test_a_wire_form_is_read_back_and_has_its_fixed_shape(prefix: IdPrefix, uuid: UUID) -> None:
    wire = to_wire(prefix, uuid)
    assert wire[:4] == f"{prefix}_"
    assert len(wire) == 30
    assert set(wire[4:]) <= set(ALPHABET)
    assert from_wire(prefix, wire) == uuid


def test_the_wire_form_is_crockford_with_the_most_significant_bits_first() -> None:
    assert to_wire("run", UUID(int=0)) == "run_" + "0" * 26
    assert to_wire("run", UUID(int=31)) == "run_" + "0" * 25 + "Z"
    assert to_wire("run", UUID(int=32 * 18 + 20)) == "run_" + "0" * 24 + "JM"
    assert to_wire("run", LARGEST) == "run_7" + "Z" * 25
    assert to_wire("mem", UUID("01563df3-6481-5a42-8adb-9a8cb5b15a2b")) == "mem_01ARYZ6S41B918NPWTHJTV2PHB"


WIRE = to_wire("run", UUID("01890a5d-ac96-774b-bcce-b302099a8057"))
NOT_CANONICAL = {
    "nothing": "",
    "only the prefix": "run_",
    "no prefix": WIRE[4:],
    "another prefix": "agt_" + WIRE[4:],
    "the prefix twice": "run_" + WIRE,
    "the prefix in upper case": "RUN_" + WIRE[4:],
    "no underscore": "run" + WIRE[4:],
    "lower case": "run_" + WIRE[4:].lower(),
    "one lower-case letter": WIRE[:-1] + "z",
    "one character short": WIRE[:-1],
    "one character long": WIRE + "0",
    "a newline at the end": WIRE + "\n",
    "a newline as the last character": WIRE[:-1] + "\n",
    "a blank before": " " + WIRE,
    "a first character above 7": "run_8" + WIRE[5:],
    "a first letter": "run_Z" + WIRE[5:],
    "I": WIRE[:-1] + "I",
    "L": WIRE[:-1] + "L",
    "O": WIRE[:-1] + "O",
    "U": WIRE[:-1] + "U",
    "a hyphen": WIRE[:-1] + "-",
    "an underscore between digits": WIRE[:10] + "_" + WIRE[11:],
    "a full-width digit": WIRE[:-1] + "\uff11",
    "an Arabic digit": WIRE[:-1] + "\u0661",
    "NUL": WIRE[:-1] + "\0",
    "the uuid itself": "01890a5d-ac96-774b-bcce-b302099a8057",
}


@pytest.mark.parametrize("text", NOT_CANONICAL.values(), ids=NOT_CANONICAL.keys())
def test_any_other_spelling_is_not_an_id(text: str) -> None:
    assert from_wire("run", text) is None


@settings(deadline=None)
@given(prefixes, prefixes, st.text(max_size=32) | st.text(ALPHABET + "ILOUabc", min_size=25, max_size=27))
def test_what_is_read_is_exactly_what_is_written(prefix: IdPrefix, other: IdPrefix, digits: str) -> None:
    text = f"{other}_{digits}"
    uuid = from_wire(prefix, text)
    assert uuid is None or to_wire(prefix, uuid) == text


def test_session_ids_are_random_and_well_formed() -> None:
    made = [session_id(secrets.randbits(128)) for _ in range(1_000)]
    numbers = [uuid.int for uuid in (from_wire("ses", text) for text in made) if uuid is not None]
    assert len(set(numbers)) == 1_000
    # Every bit is seen set and unset: none is fixed, not even where a uuid has its version.
    assert reduce(or_, numbers) == 2**128 - 1
    assert reduce(and_, numbers) == 0


@settings(deadline=None)
@given(st.integers(0, 10**16 - 1), st.integers(0, 10**16 - 1))
def test_event_ids_are_16_digits_that_sort_like_their_numbers(left: int, right: int) -> None:
    assert len(event_id(left)) == 16
    assert (event_id(left) < event_id(right)) == (left < right)
    assert parse_event_id(event_id(left)) == left
    assert parse_event_id(str(left)) == left


def test_an_event_id_is_padded_with_zeros() -> None:
    assert [event_id(0), event_id(1), event_id(10**16 - 1)] == ["0" * 16, "0" * 15 + "1", "9" * 16]


@pytest.mark.parametrize("seq", [-1, 10**16])
def test_a_number_that_does_not_fit_makes_no_event_id(seq: int) -> None:
    with pytest.raises(AssertionError):
        event_id(seq)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-1",
        "+1",
        "1.0",
        "1e3",
        "1_0",
        "0x1",
        "0;",
        " 1",
        "1 ",
        "1\n",
        "0" * 17,
        "1" * 5_000,
        "1-0",
        "\u0663",
        "²",
    ],
)
def test_a_cursor_that_is_not_a_plain_number_is_none(text: str) -> None:
    assert parse_event_id(text) is None
