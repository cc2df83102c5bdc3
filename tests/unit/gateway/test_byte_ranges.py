"""What conditions and ranges of a request for bytes mean, as RFC 9110 has it."""

import pytest

from espalier_gateway.byte_ranges import Mismatched, OutOfRange, Part, Unchanged, wanted_part

ETAG = '"abc"'
SIZE = 10
PARTS: dict[str, tuple[int, int] | None] = {
    "bytes=0-9": (0, 10),
    "bytes=0-0": (0, 1),
    "bytes=3-": (3, 10),
    "bytes=9-9": (9, 10),
    "bytes=2-500": (2, 10),
    "bytes=-3": (7, 10),
    "bytes=-500": (0, 10),
    "Bytes = 1 - 2 ": (1, 3),
    "bytes=": None,
    "bytes=-": None,
    "bytes=5-4": None,
    "bytes=0-1,4-5": None,
    "items=0-1": None,
    "bytes=a-b": None,
    "bytes=+1-2": None,
    "bytes=1-" + "9" * 30: None,
    "": None,
}


@pytest.mark.parametrize("asked", PARTS)
def test_one_range_is_a_part_and_everything_else_the_whole(asked: str) -> None:
    expected = PARTS[asked]
    told = wanted_part({"range": asked}, ETAG, SIZE, may_be_part=True)
    assert told == (None if expected is None else Part(*expected))


@pytest.mark.parametrize("asked", ["bytes=10-", "bytes=10-20", "bytes=-0", "bytes=500-600"])
def test_a_range_behind_the_end_is_out_of_range(asked: str) -> None:
    with pytest.raises(OutOfRange):
        wanted_part({"range": asked}, ETAG, SIZE, may_be_part=True)


@pytest.mark.parametrize("asked", ["bytes=0-", "bytes=0-0", "bytes=-1"])
def test_nothing_has_no_range(asked: str) -> None:
    with pytest.raises(OutOfRange):
        wanted_part({"range": asked}, ETAG, 0, may_be_part=True)


def test_a_range_is_only_for_a_get_and_only_of_the_bytes_that_are_meant() -> None:
    asked = {"range": "bytes=0-1"}
    assert wanted_part(asked, ETAG, SIZE, may_be_part=False) is None
    told = {
        value: wanted_part({**asked, "if-range": value}, ETAG, SIZE, may_be_part=True) is not None
        for value in (ETAG, '"abd"', f"W/{ETAG}", "Tue, 01 Dec 2026 00:00:00 GMT")
    }
    assert list(told.values()) == [True, False, False, False]


@pytest.mark.parametrize("value", [ETAG, f"W/{ETAG}", f'"x", {ETAG}', "*", ' "x" , W/"abc"'])
def test_bytes_that_the_caller_has_are_unchanged(value: str) -> None:
    with pytest.raises(Unchanged):
        wanted_part({"if-none-match": value, "range": "bytes=0-1"}, ETAG, SIZE, may_be_part=True)


@pytest.mark.parametrize("value", ['"abd"', "abc", "", '"ABC"', f"W/{ETAG}"])
def test_other_bytes_than_the_caller_wants_are_a_mismatch(value: str) -> None:
    with pytest.raises(Mismatched):
        wanted_part({"if-match": value, "if-none-match": ETAG}, ETAG, SIZE, may_be_part=True)


@pytest.mark.parametrize(
    "headers",
    [{}, {"if-match": ETAG}, {"if-match": "*"}, {"if-match": f'"x",{ETAG}'}, {"if-none-match": '"x"'}],
)
def test_a_condition_that_holds_changes_nothing(headers: dict[str, str]) -> None:
    assert wanted_part(headers, ETAG, SIZE, may_be_part=True) is None
