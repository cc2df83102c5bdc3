"""The scripted model: whatever it says is in the plan or in the run, and nothing else decides it."""

import json
import re
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier_domain.decisions import ContinueNow
from espalier_domain.journal import CycleEnded, CycleStarted, ModelAnswered, ToolCall, ToolReturned
from espalier_domain.progress import Progress, apply
from espalier_domain.run import RunFacts
from espalier_domain.tool_results import SHOWN_BYTES_MAX
from espalier_protocol.agent import Budgets, Ceilings, Constitution
from espalier_protocol.strict_json import INTEGER_MAX, JsonValue, dumps
from espalier_run_worker.models.model import ModelAnswer, ModelFault, ModelRequest, WantedCall
from espalier_run_worker.models.plain_yaml import YamlRefused, read_yaml
from espalier_run_worker.models.plan import (
    ANSWERS_MAX,
    CALLS_MAX,
    DELAY_S_MAX,
    FILE_BYTES_MAX,
    WIRE_YAML_CHARS_MAX,
    Plan,
    PlanInvalid,
    load_plan,
    read_wire_plan,
)
from espalier_run_worker.models.scripted import (
    CUT,
    EXCERPT_BYTES_MAX,
    REASON_CHARS_MAX,
    SUBSTITUTED_BYTES_MAX,
    ScriptedModel,
)

pytestmark = pytest.mark.anyio

BUDGETS = Budgets(tokens_per_cycle=10_000, tool_calls_per_cycle=10, seconds_per_cycle=60)
PATIENCE_S = 10


def facts(
    goal: str = "Write it down.",
    inputs: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
) -> RunFacts:
    return RunFacts(
        run_id="run_1",
        agent_id="agt_1",
        root_agent_id="agt_1",
        toolset=(),
        constitution=Constitution(
            immutable_directives="Be kind.", mutable_prompt="", mutable_prompt_policy="auto"
        ),
        goal=goal,
        inputs=inputs or {},
        agent_metadata=metadata or {},
        ceilings=Ceilings(max_cycles=10, max_subagents=0, max_tool_calls_per_cycle=10, max_wall_seconds=1000),
        budgets=BUDGETS,
    )


def lived(*cycles: list[tuple[str, list[str]]]) -> Progress:
    """A run whose answers are (text, contents of the tool results); the last cycle is still open."""
    progress = Progress()
    for number, turns in enumerate(cycles, start=1):
        progress = apply(progress, CycleStarted(number, 0.0, 0, BUDGETS))
        for text, contents in turns:
            calls = tuple(ToolCall(f"c{place}", "look", {}) for place in range(len(contents)))
            progress = apply(progress, ModelAnswered(number, text, calls, 1))
            for call, content in zip(calls, contents, strict=True):
                returned = ToolReturned(number, call.call_id, call.name, ok=True, content=content)
                progress = apply(progress, returned)
        if number < len(cycles):
            progress = apply(progress, CycleEnded(number, ContinueNow(), 0, 0))
    return progress


def asked(
    run: RunFacts | None = None,
    progress: Progress | None = None,
    *,
    attempt: int = 1,
    tokens_max: int = 1000,
) -> ModelRequest:
    return ModelRequest(
        run=run or facts(),
        progress=progress or lived([]),
        messages=(),
        tools=(),
        tokens_max=tokens_max,
        attempt=attempt,
    )


def plan(*answers: JsonValue) -> Plan:
    return read_wire_plan({"answers": list(answers)})


async def say(answer: JsonValue, request: ModelRequest) -> ModelAnswer:
    """What a fresh model says whose plan has this answer where the run stands."""
    return await ScriptedModel(plan_at(request, answer), plans_from_wire=False).answer(request)


def plan_at(request: ModelRequest, answer: JsonValue) -> Plan:
    earlier: list[JsonValue] = [{"text": "an earlier one"}]
    return plan(*earlier * request.progress.answers, answer)


async def fails(model: ScriptedModel, request: ModelRequest) -> ModelFault:
    with pytest.raises(ModelFault) as caught:
        await model.answer(request)
    return caught.value


# --- answers ---------------------------------------------------------------------------------------------


async def test_an_answer_is_the_planned_text_and_calls() -> None:
    answer = await say(
        {"text": "Done.", "calls": [{"tool": "complete", "args": {"result": [1, None]}}], "tokens": 7},
        asked(),
    )
    assert answer == ModelAnswer("Done.", (WantedCall("complete", {"result": [1, None]}),), 7)


async def test_the_position_is_the_number_of_answers_in_the_run() -> None:
    model = ScriptedModel(plan({"text": "a"}, {"text": "b"}, {"text": "c"}), plans_from_wire=False)
    states = [lived([]), lived([("a", [])]), lived([("a", [])], [("b", [])])]
    told = [(await model.answer(asked(progress=state))).text for state in [*states, *reversed(states)]]
    assert told == ["a", "b", "c", "c", "b", "a"]


async def test_beyond_the_end_of_a_plan_the_answer_is_ok() -> None:
    model = ScriptedModel(plan({"text": "only"}), plans_from_wire=False)
    assert await model.answer(asked(progress=lived([("only", [])]))) == ModelAnswer("ok", (), 1)


async def test_the_default_plan_answers_ok() -> None:
    assert await ScriptedModel(None, plans_from_wire=False).answer(asked()) == ModelAnswer("ok", (), 1)


async def test_an_answer_without_tokens_costs_a_third_of_its_bytes_rounded_up() -> None:
    calls: JsonValue = [{"tool": "look", "args": {"a": "é"}}]
    assert (await say({"text": "€uro"}, asked())).tokens == 2
    assert (await say({"text": "€uro", "calls": calls}, asked())).tokens == 6
    assert (await say({}, asked())).tokens == 0


@pytest.mark.parametrize("answer", [{"text": "x" * 400}, {"text": "x", "tokens": 400}])
async def test_an_answer_never_costs_more_than_was_reserved(answer: JsonValue) -> None:
    assert (await say(answer, asked(tokens_max=100))).tokens == 100


async def test_a_delay_is_waited_for_and_can_be_cancelled() -> None:
    answer: JsonValue = {"text": "late", "delay_s": 0.02}
    with anyio.fail_after(PATIENCE_S):
        began = anyio.current_time()
        assert (await say(answer, asked())).text == "late"
        assert anyio.current_time() - began >= 0.02
        with anyio.move_on_after(0.02) as patience:
            await say({"delay_s": DELAY_S_MAX}, asked())
    assert patience.cancelled_caught


# --- faults ----------------------------------------------------------------------------------------------


async def test_a_fault_fails_the_first_attempts_and_then_the_answer_comes() -> None:
    answer: JsonValue = {
        "text": "at last",
        "fault": {"reason": "overloaded", "times": 2, "tokens": 30},
    }
    model = ScriptedModel(plan(answer), plans_from_wire=False)
    for attempt in (1, 2):
        fault = await fails(model, asked(attempt=attempt))
        assert (fault.reason, fault.retryable, fault.tokens) == ("overloaded", True, 30)
    assert (await model.answer(asked(attempt=3))).text == "at last"


async def test_a_fault_can_be_final_and_costs_at_most_the_reservation() -> None:
    answer: JsonValue = {"fault": {"reason": "refused", "retryable": False, "tokens": 500}}
    fault = await fails(ScriptedModel(plan(answer), plans_from_wire=False), asked(tokens_max=100))
    assert (fault.reason, fault.retryable, fault.tokens) == ("refused", False, 100)


# --- pointers --------------------------------------------------------------------------------------------

RUN = facts(
    goal="Sort it.",
    inputs={
        "n": 3,
        "who": "Bo",
        "list": [{"é": True}, None],
        "a/b": {"m~n": "odd"},
        "": "nameless",
        "~1": "tilde one",
    },
)
PROGRESS = lived([("first", ['{"id": "art_1"}', "plain words"]), ("", ["42"])], [("third", ["[1, 2]"])])


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("${/goal}", "Sort it."),
        ("${/inputs/n}", 3),
        ("${/inputs/list}", [{"é": True}, None]),
        ("${/inputs/a~1b/m~0n}", "odd"),
        ("${/inputs/}", "nameless"),
        ("${/inputs/~01}", "tilde one"),
        ("${/results}", [{"id": "art_1"}, "plain words", 42, [1, 2]]),
        ("${/results/0/id}", "art_1"),
        ("${/results/3/1}", 2),
        ("${/texts}", ["first", "", "third"]),
        ("${/cycle}", {"results": [[1, 2]], "excerpts": ["[1, 2]"]}),
        ("${/cycle/results/0/1}", 2),
        ("n is ${/inputs/n} for ${/inputs/who}: ${/inputs/list}", 'n is 3 for Bo: [{"é":true},null]'),
        ("$${/goal} ${/inputs/who}", "${/goal} Bo"),
        ("$${", "${"),
        ("$5 {x} $", "$5 {x} $"),
    ],
)
async def test_a_pointer_becomes_what_the_run_knows(template: str, value: JsonValue) -> None:
    args: JsonValue = {"deep": [{"in": template}], "n": 1}
    answer = await say({"text": "", "calls": [{"tool": "look", "args": args}]}, asked(RUN, PROGRESS))
    assert answer.calls == (WantedCall("look", {"deep": [{"in": value}], "n": 1}),)


async def test_in_the_text_every_value_becomes_text() -> None:
    answer = await say({"text": "${/inputs/list}"}, asked(RUN, PROGRESS))
    assert answer.text == '[{"é":true},null]'


async def test_a_cycle_begins_without_results_and_counts_those_of_all_its_turns() -> None:
    template: JsonValue = {"calls": [{"tool": "look", "args": {"x": "${/cycle/results}"}}]}
    began = await say(template, asked(progress=lived([("first", ["1"])], [])))
    later = await say(template, asked(progress=lived([("first", ["1"])], [("", ["2"]), ("", ["3"])])))
    assert [answer.calls[0].args["x"] for answer in (began, later)] == [[], [2, 3]]


@pytest.mark.parametrize("character", ["x", "\n", "é", "\x1b", "🌱"])
async def test_an_excerpt_is_cut_where_three_of_them_still_fit_into_one_call(character: str) -> None:
    content = character * SHOWN_BYTES_MAX
    pointer = "${/cycle/excerpts/0}"
    template: JsonValue = {"calls": [{"tool": "look", "args": {"one": pointer, "three": pointer * 3}}]}
    answer = await say(template, asked(progress=lived([("", [content])])))
    one = answer.calls[0].args["one"]
    assert answer.calls[0].args["three"] == one * 3
    assert one.endswith(CUT) and content.startswith(one.removesuffix(CUT))
    assert EXCERPT_BYTES_MAX - len(json.dumps(character)) < len(dumps(one)) <= EXCERPT_BYTES_MAX


async def test_keys_of_arguments_are_left_alone() -> None:
    answer = await say({"calls": [{"tool": "look", "args": {"${/goal}": 1}}]}, asked(RUN))
    assert answer.calls == (WantedCall("look", {"${/goal}": 1}),)


async def test_what_is_filled_in_is_not_filled_in_again() -> None:
    run = facts(goal="${/inputs/secret}", inputs={"secret": "s"})
    assert (await say({"text": "goal: ${/goal}"}, asked(run))).text == "goal: ${/inputs/secret}"


async def test_arguments_are_a_copy_of_what_the_run_holds() -> None:
    run = facts(inputs={"list": [1]})
    answer = await say({"calls": [{"tool": "look", "args": {"x": "${/inputs/list}"}}]}, asked(run))
    answer.calls[0].args["x"].append(2)
    assert run.inputs == {"list": [1]}


@pytest.mark.parametrize(
    "pointer",
    [
        "/nowhere",
        "/goal/x",
        "/results/9",
        "/inputs/who/0",
        "/inputs/list/2",
        "/inputs/list/-",
        "/inputs/list/00",
        "/inputs/list/-1",
        "/inputs/list/²",
        "/inputs/list/" + "9" * 5000,
    ],
)
async def test_a_pointer_to_nothing_fails_the_run_and_is_named(pointer: str) -> None:
    request = asked(RUN, PROGRESS)
    plan_ = plan_at(request, {"text": f"${{{pointer}}}"})
    fault = await fails(ScriptedModel(plan_, plans_from_wire=False), request)
    assert (fault.reason, fault.retryable, fault.tokens) == (
        f"script_error: there is nothing at {pointer}"[:REASON_CHARS_MAX],
        False,
        0,
    )


@pytest.mark.parametrize("member", ["text", "args"])
async def test_a_short_plan_cannot_become_a_huge_answer(member: str) -> None:
    run = facts(inputs={"big": "x" * (SUBSTITUTED_BYTES_MAX // 4)})
    pointers: list[JsonValue] = ["${/inputs/big}"] * 5
    answers: dict[str, JsonValue] = {
        "text": {"text": "${/inputs/big}" * 5},
        "args": {"calls": [{"tool": "look", "args": {"x": pointers}}]},
    }
    model = ScriptedModel(plan(answers[member]), plans_from_wire=False)
    fault = await fails(model, asked(run))
    assert fault.reason == f"script_error: the pointers bring in more than {SUBSTITUTED_BYTES_MAX} bytes"


async def test_filled_in_arguments_keep_the_limits_of_all_json() -> None:
    deep: JsonValue = "bottom"
    for _ in range(60):
        deep = [deep]
    args: JsonValue = {"x": [[[[[["${/inputs/deep}"]]]]]]}
    model = ScriptedModel(plan({"calls": [{"tool": "look", "args": args}]}), plans_from_wire=False)
    fault = await fails(model, asked(facts(inputs={"deep": deep})))
    assert fault.reason.startswith("script_error: filled-in arguments: ")
    assert not fault.retryable


# --- where a plan comes from -----------------------------------------------------------------------------


def script(text: str) -> dict[str, JsonValue]:
    return {"espalier.script": {"answers": [{"text": text}]}}


@pytest.mark.parametrize(
    ("run", "plans_from_wire", "text"),
    [
        (facts(inputs=script("run's"), metadata=script("agent's")), True, "run's"),
        (facts(metadata=script("agent's")), True, "agent's"),
        (facts(), True, "operator's"),
        (facts(inputs=script("run's"), metadata=script("agent's")), False, "operator's"),
        (facts(inputs={"espalier.script": "not a plan"}), False, "operator's"),
    ],
)
async def test_the_nearest_plan_that_is_allowed_counts(
    run: RunFacts, plans_from_wire: bool, text: str
) -> None:
    model = ScriptedModel(plan({"text": "operator's"}), plans_from_wire=plans_from_wire)
    assert (await model.answer(asked(run))).text == text


async def test_a_plan_from_the_wire_may_be_yaml_text() -> None:
    run = facts(inputs={"espalier.script": "answers:\n- text: ${/goal}\n"})
    answer = await ScriptedModel(None, plans_from_wire=True).answer(asked(run))
    assert answer.text == "Write it down."


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "the plan: expected a mapping"),
        ({"answers": [{"txt": "a"}]}, "answers[0].txt: is not known here"),
        ({"answers": [{"text": "${goal}"}]}, "answers[0].text: ${goal} is not a JSON pointer"),
        ("answers:\n- tokens: many\n", "line 2, column 11: answers[0].tokens: "),
        ("answers: [" + " " * WIRE_YAML_CHARS_MAX, "YAML text of at most "),
    ],
)
async def test_a_bad_plan_from_the_wire_fails_the_run(value: JsonValue, reason: str) -> None:
    run = facts(inputs={"espalier.script": value})
    fault = await fails(ScriptedModel(None, plans_from_wire=True), asked(run))
    assert fault.reason.startswith(f"script_invalid: {reason}")
    assert len(fault.reason) <= REASON_CHARS_MAX
    assert not fault.retryable


# --- what a plan may be ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("text", "answers[0]: expected a mapping"),
        ({"text": 5}, "answers[0].text: "),
        ({"text": "${/a"}, "answers[0].text: a ${ is never closed"),
        ({"text": "${}"}, "answers[0].text: ${} is not a JSON pointer"),
        ({"text": "${/~2}"}, "answers[0].text: ${/~2} is not a JSON pointer"),
        ({"calls": [{}]}, "answers[0].calls[0].tool: is missing"),
        ({"calls": [{"tool": "a", "args": {"b": [{"c": "${d}"}]}}]}, "answers[0].calls[0].args: ${d} "),
        ({"calls": [{"tool": "a"}] * (CALLS_MAX + 1)}, "answers[0].calls: "),
        ({"delay_s": DELAY_S_MAX + 1}, "answers[0].delay_s: "),
        ({"delay_s": -1}, "answers[0].delay_s: "),
        ({"delay_s": "1"}, "answers[0].delay_s: "),
        ({"tokens": -1}, "answers[0].tokens: "),
        ({"tokens": True}, "answers[0].tokens: "),
        ({"fault": {}}, "answers[0].fault.reason: is missing"),
        ({"fault": {"reason": "x", "times": 0}}, "answers[0].fault.times: "),
        ({"two\nlines": 1}, "answers[0]['two\\nlines']: is not known here"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_place(answer: JsonValue, problem: str) -> None:
    with pytest.raises(PlanInvalid) as caught:
        plan(answer)
    assert str(caught.value).startswith(problem)


def test_a_plan_has_a_most_of_answers() -> None:
    assert len(plan(*[{}] * ANSWERS_MAX).answers) == ANSWERS_MAX
    with pytest.raises(PlanInvalid, match="answers"):
        plan(*[{}] * (ANSWERS_MAX + 1))


# --- files -----------------------------------------------------------------------------------------------


def test_a_file_is_read_with_every_member_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "answers:\n"
        "  - text: |\n      Zwei\n      Zeilen\n"
        "    calls: [{tool: sleep, args: {until: 2030-01-01T00:00:00Z, yes: no, n: 007, f: 1e3, x: ~}}]\n"
        "    delay_s: 1\n"
        "    tokens: 5\n"
        "    fault: {reason: overloaded, times: 2, retryable: false, tokens: 1}\n"
    )
    args: JsonValue = {"until": "2030-01-01T00:00:00Z", "yes": "no", "n": "007", "f": 1000.0, "x": None}
    assert load_plan(path) == plan(
        {
            "text": "Zwei\nZeilen\n",
            "calls": [{"tool": "sleep", "args": args}],
            "delay_s": 1,
            "tokens": 5,
            "fault": {"reason": "overloaded", "times": 2, "retryable": False, "tokens": 1},
        }
    )


async def test_the_plan_of_the_documentation_does_what_the_page_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "scripted-models.md").read_text()
    path = tmp_path / "plan.yaml"
    path.write_text(page.split("```yaml\n")[1].split("```")[0])
    model = ScriptedModel(load_plan(path), plans_from_wire=False)
    run = facts(goal="Tides", inputs={"reader": "Bo"})
    note = {"name": "note.md", "mime_type": "text/markdown", "content": "# Tides\n\nFor Bo."}
    first = await model.answer(asked(run))
    assert (first.text, first.calls) == ("Writing the note.", (WantedCall("artifact_create", note),))
    later = lived([(first.text, ['{"artifact_id":"art_1","size_bytes":16}'])])
    assert (await fails(model, asked(run, later))).reason == "overloaded"
    end = {"final_message": "Wrote a note for Bo.", "artifact_ids": ["art_1"]}
    second = await model.answer(asked(run, later, attempt=2))
    assert (second.text, second.calls) == ("", (WantedCall("complete", end),))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "line 1, column 1: the plan: expected a mapping"),
        (b"answers:\n- text: a\n  txt: b\n", "line 3, column 8: answers[0].txt: is not known here"),
        (b"answers:\n- calls:\n  - args: {}\n", "line 3, column 5: answers[0].calls[0].tool: is missing"),
        (b"answers: [\n", "line 2, column 1: "),
        (b"answers:\n- text: a\n  text: b\n", "line 3, column 3: the key 'text' is there twice"),
        (b"answers: []\n---\nanswers: []\n", "line 2, column 1: a second document begins"),
        (b"answers: [&a {}, *a]\n", "line 1, column 11: anchors and aliases are not read"),
        (b"answers: *a\n", "line 1, column 10: anchors and aliases are not read"),
        (b"answers: [{? &a text : x}]\n", "line 1, column 14: anchors and aliases are not read"),
        (b"answers: !!python/object:os.system []\n", "line 1, column 10: tags are not read"),
        (b"answers: [{? [a] : b}]\n", "line 1, column 14: a key that is not text"),
        (b'answers: [{text: "\\0"}]\n', "line 1, column 18: "),
        (b"answers:\n- text: a\x07\n", "line 2, column 10: a character that YAML does not allow"),
        (b"answers: [{tokens: " + b"9" * 5000 + b"}]\n", "line 1, column 20: "),
        (b"answers: " + b"[" * 500, "line 1, column 73: nested more than 64 deep"),
        (b"answers: \xff\n", "byte 9: not UTF-8 text"),
        (b"#" * (FILE_BYTES_MAX + 1), "the file is larger than "),
    ],
)
@pytest.mark.parametrize("c_parser", [True, False])
def test_a_bad_file_is_one_line_with_the_file_and_the_place(
    body: bytes, problem: str, c_parser: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", c_parser and yaml.__with_libyaml__)
    path = tmp_path / "plan.yaml"
    path.write_bytes(body)
    with pytest.raises(PlanInvalid) as caught:
        load_plan(path)
    assert str(caught.value).startswith(f"{path}: {problem}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.yaml"):
        with pytest.raises(PlanInvalid) as caught:
            load_plan(path)
        assert str(caught.value).startswith(f"{path}: cannot be read: ")


plain_text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-INTEGER_MAX, INTEGER_MAX) | plain_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(plain_text, inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, max_examples=150)
@given(plain_values)
def test_json_is_yaml_that_means_the_same(value: JsonValue) -> None:
    assert read_yaml(json.dumps(value, ensure_ascii=False)).value == value


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=40) | st.text("-:[]{}?!&*#|>'\"%@`\\, \n\tab01", max_size=40))
def test_any_text_is_read_or_refused_with_its_place(text: str) -> None:
    try:
        read_yaml(text)
    except YamlRefused as error:
        refused = str(error)
    else:
        refused = "line 1, column 1: not at all"
    assert re.match(r"line [0-9]+, column [0-9]+: .", refused)
