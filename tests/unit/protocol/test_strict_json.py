"""The door for JSON: what gets in, what is turned away, and that what we write can be read again."""

import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from espalier_protocol.strict_json import (
    DEPTH_MAX,
    INTEGER_MAX,
    KEYS_MAX,
    STRING_BYTES_MAX,
    JsonError,
    JsonValue,
    dumps,
    loads,
    one_line,
)

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-INTEGER_MAX, INTEGER_MAX)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
json_values: st.SearchStrategy[JsonValue] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)
# Pieces that meet often enough to form almost-JSON: escapes cut short, brackets in strings, broken UTF-8.
json_pieces = rb"""[ ] { } " \ , : \u d800 0000 1 - e9 . 99 null NaN "a":""".split()
byte_pieces = [b" ", b"\n", b"\x00", b"\xc3", b"\xef\xbb\xbf", b"\xed\xa0\x80"]
json_like_bytes = st.lists(st.sampled_from(json_pieces + byte_pieces), max_size=40).map(b"".join)

REFUSED = {
    "an empty body": b"",
    "only blanks": b" \r\n\t",
    "no-break space as blank": b"\xc2\xa01",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a byte order mark after a blank": b" \xef\xbb\xbf{}",
    "UTF-16 with its mark": '{"a":1}'.encode("utf-16"),
    "UTF-16 without a mark": '{"a":1}'.encode("utf-16-le"),
    "UTF-32": '{"a":1}'.encode("utf-32-be"),
    "a broken sequence": b'"\xc3"',
    "a stray continuation byte": b'"\x80"',
    "an overlong slash": b'"\xc0\xaf"',
    "an overlong NUL": b'"\xc0\x80"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "a code point beyond Unicode": b'"\xf4\x90\x80\x80"',
    "a duplicate key": b'{"method":"agent.list","method":"run.create"}',
    "a duplicate key deep inside": b'{"params":[{"a":{"b":1,"b":1}}]}',
    "a duplicate key by an escape": b'{"method":"agent.list","\\u006dethod":"run.create"}',
    "NaN": b"NaN",
    "Infinity inside": b'{"a":[Infinity]}',
    "minus Infinity": b"-Infinity",
    "a float that overflows": b"1e999",
    "a negative float that overflows": b"[-1e999]",
    "an exponent of 5,000 digits": b"1e" + b"9" * 5_000,
    "an integer beyond 2^53 - 1": b"9007199254740992",
    "an integer beyond -(2^53 - 1)": b"-9007199254740992",
    "2^64": b'{"a":18446744073709551616}',
    "an integer of 5,000 digits": b"1" * 5_000,
    "a negative integer of 5,000 digits": b"[-" + b"1" * 5_000 + b"]",
    "a leading zero": b"01",
    "a leading plus": b"+1",
    "a bare point": b"1.",
    "hexadecimal": b"0x10",
    "digits that are not ASCII": "\u0661".encode(),
    "a high surrogate alone": b'"\\ud800"',
    "a low surrogate alone": b'"\\udc00"',
    "surrogates the wrong way round": b'"\\udc00\\ud800"',
    "surrogates with a backslash between": b'"\\ud83d\\\\\\ude00"',
    "half of a second pair": b'["\\ud83d\\ude00\\ud83d"]',
    "a surrogate in a key": b'{"\\ud800":1}',
    "a surrogate deep inside": b'{"a":[1,{"b":"x\\uDFFF"}]}',
    "NUL by an escape": b'"a\\u0000b"',
    "NUL in a key": b'[{"\\u0000":1}]',
    "a raw NUL": b'"\x00"',
    "a raw newline in a string": b'"a\nb"',
    "an unknown escape": b'"\\x41"',
    "a cut escape": b'"\\u12"',
    "an unfinished string": b'"abc',
    "an unfinished array": b"[1,",
    "a trailing comma": b"[1,]",
    "single quotes": b"{'a':1}",
    "a key without quotes": b"{a:1}",
    "a comment": b"{} // no",
    "garbage after the value": b"{} x",
    "two values": b"{}{}",
    "a mismatched bracket": b"[}",
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_strict_json_is_refused_with_one_sentence(body: bytes) -> None:
    with pytest.raises(JsonError) as refusal:
        loads(body)
    reason = refusal.value.reason
    assert str(refusal.value) == reason
    assert reason.startswith("Expected")
    assert reason.endswith(".")


ACCEPTED: dict[str, tuple[bytes, JsonValue]] = {
    "blanks around": (b' \r\n\t{"a" : [ 1 , 2 ] } \n', {"a": [1, 2]}),
    "a bare scalar": (b"null", None),
    "the largest integer": (b"9007199254740991", 2**53 - 1),
    "the smallest integer": (b"-9007199254740991", -(2**53 - 1)),
    "a large float": (b"1e300", 1e300),
    "a float that underflows": (b"1e-999", 0.0),
    "an emoji, raw and as a pair": (b'["\xf0\x9f\x98\x80","\\ud83d\\ude00"]', ["\U0001f600", "\U0001f600"]),
    "an escaped backslash before u0000": (b'"\\\\u0000"', "\\u0000"),
    "an escaped backslash before ud800": (b'"\\\\ud800"', "\\ud800"),
    "bidi and a mark inside a string": (b'"\xe2\x80\xae\xef\xbb\xbf"', "\u202e\ufeff"),
    "equal keys in different objects": (b'[{"a":1},{"a":{"a":2}}]', [{"a": 1}, {"a": {"a": 2}}]),
    "an empty key": (b'{"":0}', {"": 0}),
    "magic keys as plain data": (
        b'{"__proto__":1,"$ref":"x","a.b":2}',
        {"__proto__": 1, "$ref": "x", "a.b": 2},
    ),
}


@pytest.mark.parametrize(("body", "value"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_unusual_but_sound_json_is_read(body: bytes, value: JsonValue) -> None:
    assert loads(body) == value


def test_a_reason_repeats_nothing_of_the_input_and_holds_no_cause_that_does() -> None:
    for body in (
        b'{"sk-secret":1,"sk-secret":2}',
        b'{"a" sk-secret',
        b'"sk-secret\xff"',
        b'"sk-secret\\ud800"',
    ):
        with pytest.raises(JsonError) as refusal:
            loads(body)
        assert "secret" not in repr(refusal.value)
        assert refusal.value.__cause__ is None
        assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * depth + b"1" + closing * depth


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"]":', b"}]")])
def test_nesting_is_bounded_exactly(opening: bytes, closing: bytes) -> None:
    step = opening.count(b"[") + opening.count(b"{")
    loads(nested(DEPTH_MAX // step, opening, closing))
    with pytest.raises(JsonError, match="64 deep"):
        loads(nested(DEPTH_MAX // step + 1, opening, closing))


@pytest.mark.parametrize("depth", [1_000, 20_000, 1_000_000])
def test_a_depth_bomb_is_refused_before_the_parser_sees_it(depth: int) -> None:
    for bomb in (nested(depth), b"[" * depth, b'{"a":' * depth, b"[" * depth + b'"'):
        with pytest.raises(JsonError, match="64 deep"):
            loads(bomb)


def test_brackets_inside_strings_are_not_nesting() -> None:
    for inside in ("[" * 200, '\\"' + "[" * 200, "\\\\\\\\" + "{" * 200, "[" * 200 + "\\\\"):
        assert loads(f'["{inside}", 1]'.encode()) == json.loads(f'["{inside}", 1]')


def test_nesting_that_hides_behind_escapes_is_counted() -> None:
    deep = nested(65)
    for prefix in (b'"\\\\"', b'"\\""', b'"\\\\\\""', b'"["'):
        with pytest.raises(JsonError, match="64 deep"):
            loads(b"[" + prefix + b"," + deep + b"]")


def depth_of(value: JsonValue) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


bracket_texts = st.text('[]{}"\\,:a', max_size=6)


@settings(deadline=None, max_examples=200)
@given(
    st.recursive(
        bracket_texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(bracket_texts, inner, max_size=3),
        max_leaves=12,
    )
)
def test_the_depth_counted_is_the_depth_of_the_value_whatever_its_strings_hold(value: JsonValue) -> None:
    depth = depth_of(value)
    assert same(loads(dumps(value), depth_max=depth), value)
    if depth > 0:
        with pytest.raises(JsonError, match="deep"):
            loads(dumps(value), depth_max=depth - 1)


def test_many_flat_brackets_are_not_nesting() -> None:
    assert loads(b"[" + b"[]," * 10_000 + b"[]]") == [[]] * 10_001


def test_keys_are_counted_over_all_objects_of_the_body() -> None:
    def body(keys: int) -> bytes:
        return json.dumps([{f"k{i}": 0} for i in range(keys)]).encode()

    loads(body(KEYS_MAX))
    with pytest.raises(JsonError, match="10000 object keys"):
        loads(body(KEYS_MAX + 1))


@pytest.mark.parametrize("wrap", ['"%s"', '[1,"%s"]', '{"%s":1}'])
def test_strings_and_keys_are_bounded_in_bytes(wrap: str) -> None:
    half = "é" * (STRING_BYTES_MAX // 2)
    loads((wrap % half).encode())
    with pytest.raises(JsonError, match="524288 bytes"):
        loads((wrap % (half + "a")).encode())


def test_a_string_counts_as_sent_with_its_escapes_and_without_its_quotes() -> None:
    for inside in ("\\u00e9ab", '\\"\\"\\"\\"', "\\\\" * 4, "12345678"):
        body = f'["", {{"b":"{inside}"}}, 1000000000, "a"]'.encode()
        assert loads(body, string_bytes_max=8) == json.loads(body)
        with pytest.raises(JsonError, match="7 bytes"):
            loads(body, string_bytes_max=7)


surrogate_pieces = st.lists(
    st.sampled_from(
        ["\\ud83d", "\\uDE00", "\\uDBff", "\\udc00", "\\\\", "\\u0000", "\\u00e9", "\\n", "ud800", "a"]
    ),
    max_size=6,
).map("".join)


@settings(deadline=None, max_examples=300)
@given(surrogate_pieces)
def test_exactly_the_strings_that_cannot_be_stored_are_refused(inside: str) -> None:
    body = f'["{inside}"]'
    [meant] = json.loads(body)
    if "\0" in meant or any("\ud800" <= character <= "\udfff" for character in meant):
        with pytest.raises(JsonError, match=r"U\+0000|surrogates"):
            loads(body.encode())
    else:
        assert loads(body.encode()) == [meant]


def test_limits_can_be_set_by_the_caller() -> None:
    assert loads(b'[{"a":"b"}]', depth_max=2, keys_max=1, string_bytes_max=1) == [{"a": "b"}]
    for tighter in ({"depth_max": 1}, {"keys_max": 0}, {"string_bytes_max": 0}):
        with pytest.raises(JsonError):
            loads(b'[{"a":"b"}]', **tighter)


def same(left: JsonValue, right: JsonValue) -> bool:
    """Equality as JSON sees it: 1, 1.0 and true differ, and so do 0.0 and -0.0."""
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return type(left) is type(right) and left == right


@settings(deadline=None, max_examples=100)
@given(json_values)
@example({"\u2028": ["\u2029", "\x85", "\r\n", "\x7f", '"\\', -0.0, 5e-324, 1e16, True, 1]})
def test_whatever_we_write_we_read_back_unchanged(value: JsonValue) -> None:
    assert same(loads(dumps(value)), value)


@settings(deadline=None, max_examples=100)
@given(json_values, st.sampled_from([None, 1]))
def test_whatever_others_write_within_the_rules_is_read_as_they_meant_it(
    value: JsonValue, indent: int | None
) -> None:
    for ensure_ascii in (True, False):
        body = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent).encode()
        assert same(loads(body), value)


@settings(deadline=None, max_examples=300)
@given(json_like_bytes | st.binary(max_size=40))
def test_any_bytes_either_load_or_raise_the_one_error(body: bytes) -> None:
    try:
        value = loads(body, depth_max=5)
    except JsonError:
        return
    assert same(loads(dumps(value)), value)
    assert same(value, json.loads(body.decode()))


@settings(deadline=None, max_examples=100)
@given(json_values)
def test_what_we_write_is_one_line_for_every_reader(value: JsonValue) -> None:
    written = dumps(value)
    assert len(written.decode().splitlines()) == 1
    assert one_line(written) == written


def test_json_serialised_elsewhere_is_put_on_one_line_without_changing_it() -> None:
    text = "a\u2028b\u2029c\x85d\u0085é€\u20ac"
    raw = json.dumps({text: text}, ensure_ascii=False).encode()
    written = one_line(raw)
    assert len(raw.decode().splitlines()) > 1
    assert len(written.decode().splitlines()) == 1
    assert loads(written) == {text: text}


def test_output_is_compact_utf_8_that_escapes_only_what_it_must() -> None:
    assert dumps({"é": [1, True, None], "/<": '"\n\r\u2028'}) == (
        '{"é":[1,true,null],"/<":"\\"\\n\\r\\u2028"}'.encode()
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], {"a": "\ud800"}])
def test_what_json_cannot_say_is_not_written(value: JsonValue) -> None:
    with pytest.raises(ValueError, match=r"not JSON compliant|surrogates not allowed"):
        dumps(value)
