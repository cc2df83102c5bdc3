"""Envelopes: every shape a client can send gets its class, and every answer is a whole JSON-RPC response."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_protocol.jsonrpc import (
    Batch,
    Malformed,
    Request,
    RequestId,
    Single,
    batch_body,
    error_body,
    read_message,
    result_body,
)
from espalier_protocol.strict_json import INTEGER_MAX, JsonValue, dumps, loads

CALL: dict[str, JsonValue] = {"jsonrpc": "2.0", "id": 7, "method": "run.get"}

good_ids = st.integers(-INTEGER_MAX, INTEGER_MAX) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=128
)
bad_ids = st.one_of(
    st.booleans(),
    st.floats(allow_nan=False),
    st.text(min_size=129, max_size=140),
    st.integers(min_value=INTEGER_MAX + 1),
    st.integers(max_value=-INTEGER_MAX - 1),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)


def entry_of(value: JsonValue) -> Request | Malformed:
    message = read_message(value)
    assert isinstance(message, Single)
    return message.entry


def malformed_id_of(value: JsonValue) -> RequestId | None:
    entry = entry_of(value)
    assert isinstance(entry, Malformed)
    assert entry.reason.startswith("Expected")
    assert entry.reason.endswith(".")
    return entry.id


def test_a_whole_request_is_read() -> None:
    assert entry_of({**CALL, "params": {"run_id": "run_1"}}) == Request(7, "run.get", {"run_id": "run_1"})


def test_params_may_be_absent_empty_or_positional() -> None:
    assert entry_of(CALL) == Request(7, "run.get", None)
    assert entry_of({**CALL, "params": {}}) == Request(7, "run.get", {})
    assert entry_of({**CALL, "params": [1, "a"]}) == Request(7, "run.get", [1, "a"])


def test_a_request_without_an_id_or_with_null_is_a_notification() -> None:
    absent: dict[str, JsonValue] = {"jsonrpc": "2.0", "method": "run.get"}
    for value in (absent, {**CALL, "id": None}):
        assert entry_of(value) == Request(None, "run.get", None)


@settings(deadline=None)
@given(good_ids)
def test_a_good_id_comes_back_with_its_type_in_results_and_errors(request_id: RequestId) -> None:
    entry = entry_of({**CALL, "id": request_id})
    assert isinstance(entry, Request)
    assert entry.id is not None
    for body in (result_body(entry.id, b"null"), error_body(entry.id, -32603, "no")):
        answer = loads(body)
        assert isinstance(answer, dict)
        assert type(answer["id"]) is type(request_id)
        assert answer["id"] == request_id


@settings(deadline=None)
@given(bad_ids)
def test_a_bad_id_is_malformed_and_never_echoed(request_id: JsonValue) -> None:
    assert malformed_id_of({**CALL, "id": request_id}) is None


@pytest.mark.parametrize("version", ["2.1", "2", "1.0", "", 2, 2.0, None, ["2.0"]])
def test_only_version_2_0_is_read_and_the_id_is_still_echoed(version: JsonValue) -> None:
    assert malformed_id_of({**CALL, "jsonrpc": version}) == 7


@pytest.mark.parametrize("missing", ["jsonrpc", "method"])
def test_a_missing_member_is_malformed_and_the_id_is_echoed(missing: str) -> None:
    assert malformed_id_of({name: member for name, member in CALL.items() if name != missing}) == 7


@pytest.mark.parametrize("method", [1, None, True, ["run.get"], {}, "m" * 129])
def test_a_method_that_is_not_a_short_string_is_malformed(method: JsonValue) -> None:
    assert malformed_id_of({**CALL, "method": method}) == 7


def test_a_method_may_have_128_characters() -> None:
    assert entry_of({**CALL, "method": "m" * 128}) == Request(7, "m" * 128, None)


@pytest.mark.parametrize("params", [None, 0, "", False, 1.5])
def test_params_that_are_no_object_or_array_are_malformed(params: JsonValue) -> None:
    assert malformed_id_of({**CALL, "params": params}) == 7


@pytest.mark.parametrize("member", ["result", "error", "Params", "meta", ""])
def test_an_unknown_member_of_the_envelope_is_malformed(member: str) -> None:
    assert malformed_id_of({**CALL, member: 1}) == 7


def test_a_malformed_notification_is_still_answered() -> None:
    assert malformed_id_of({"jsonrpc": "2.0", "method": 1}) is None


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "run.get", {}])
def test_a_body_that_is_no_request_is_one_malformed_answer(value: JsonValue) -> None:
    assert malformed_id_of(value) is None


def test_a_batch_keeps_its_order_and_judges_each_entry_alone() -> None:
    message = read_message(
        [
            {**CALL, "id": "a"},
            1,
            [CALL],
            [],
            {**CALL, "id": None},
            {**CALL, "id": 3, "method": 0},
            {**CALL, "id": 1.5},
        ]
    )
    assert isinstance(message, Batch)
    assert [(type(entry), entry.id) for entry in message.entries] == [
        (Request, "a"),
        (Malformed, None),
        (Malformed, None),
        (Malformed, None),
        (Request, None),
        (Malformed, 3),
        (Malformed, None),
    ]


def test_a_batch_of_one_is_still_a_batch() -> None:
    assert read_message([CALL]) == Batch((Request(7, "run.get", None),))


def test_an_empty_batch_is_one_malformed_answer() -> None:
    assert malformed_id_of([]) is None


def test_a_batch_beyond_the_limit_is_one_malformed_answer_and_none_of_it_is_read() -> None:
    within = read_message([CALL] * 20)
    assert isinstance(within, Batch)
    assert len(within.entries) == 20
    assert malformed_id_of([CALL] * 21) is None
    assert malformed_id_of([CALL] * 10_000) is None
    assert isinstance(read_message([CALL] * 2, batch_max=1), Single)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["jsonrpc", "id", "method", "params", "x"]), inner, max_size=4)
        ),
        max_leaves=15,
    )
)
def test_any_value_is_classified_and_every_entry_gets_its_place(value: JsonValue) -> None:
    message = read_message(value)
    if isinstance(message, Batch):
        assert isinstance(value, list)
        assert len(message.entries) == len(value)
    else:
        assert isinstance(message.entry, Request | Malformed)


def test_a_result_that_is_json_already_is_passed_through_untouched() -> None:
    serialised = '{"name": "100%b é", "list":[1,2]}'.encode()
    assert result_body("a\n", serialised) == b'{"jsonrpc":"2.0","id":"a\\n","result":' + serialised + b"}"
    assert loads(result_body(0, b"null")) == {"jsonrpc": "2.0", "id": 0, "result": None}


def test_an_error_has_data_only_when_there_is_some() -> None:
    assert loads(error_body(None, -32700, "Parse error")) == {
        "jsonrpc": "2.0",
        "id": None,
        "error": {"code": -32700, "message": "Parse error"},
    }
    assert loads(error_body(9, -32008, "Unknown run", {"symbol": "tool_not_found", "id": "é"})) == {
        "jsonrpc": "2.0",
        "id": 9,
        "error": {"code": -32008, "message": "Unknown run", "data": {"symbol": "tool_not_found", "id": "é"}},
    }


def test_empty_data_is_still_data() -> None:
    answer = loads(error_body(1, -32603, "no", {}))
    assert answer == {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "no", "data": {}}}


def test_a_batch_of_answers_is_one_array_in_order() -> None:
    bodies = [result_body(1, b"[]"), error_body(None, -32600, "Invalid request"), result_body("2", b"{}")]
    assert loads(batch_body(bodies)) == [loads(body) for body in bodies]
    assert loads(batch_body(bodies[:1])) == [loads(bodies[0])]


def test_no_answers_is_not_an_empty_array() -> None:
    with pytest.raises(AssertionError):
        batch_body([])


def test_a_request_we_write_ourselves_is_read_back() -> None:
    assert read_message(loads(dumps(CALL))) == Single(Request(7, "run.get", None))
