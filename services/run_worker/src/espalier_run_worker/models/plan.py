"""Plans of the scripted model: their shape, and reading one strictly from a file or from the wire.

A plan is data. It has no conditions, loops or templates; the one thing that is filled in later is
`${/pointer}`, whose spelling is checked here so that a typo is found before a run lives by it.

Not here: which plan a run follows, and what its pointers find (`scripted`). Below: `plain_yaml`.
"""

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from espalier_protocol.agent import INT_MAX
from espalier_protocol.shapes import Name
from espalier_protocol.strict_json import STRING_BYTES_MAX
from espalier_run_worker.models.plain_yaml import Document, Location, YamlRefused, read_yaml

ANSWERS_MAX: Final = 10_000
CALLS_MAX: Final = 100
DELAY_S_MAX: Final = 600
FAULT_TIMES_MAX: Final = 1_000
FAULT_REASON_CHARS_MAX: Final = 100
FILE_BYTES_MAX: Final = 1024 * 1024
WIRE_YAML_CHARS_MAX: Final = 64 * 1024
"""Smaller than a request may be: a megabyte of YAML takes seconds to read, and is read at every answer."""

SUBSTITUTION: Final = re.compile(r"\$\$\{|\$\{([^}]*)\}|\$\{")
"""An escape, a pointer (its group is set), or a `${` that is never closed and so refused."""

_SHOWN_CHARS_MAX: Final = 100
_PROBLEMS: Final = {
    "model_type": "expected a mapping",
    "missing": "is missing",
    "extra_forbidden": "is not known here",
}
"""Where pydantic's own words would name our classes."""


class PlanInvalid(Exception):
    """Not a plan. The text is one line for whoever wrote it, and says where."""


# --- shape -----------------------------------------------------------------------------------------------


def _well_formed(text: str) -> str:
    for found in SUBSTITUTION.finditer(text):
        pointer = found[1]
        if found[0] == "$${":
            continue
        if pointer is None:
            raise ValueError("a ${ is never closed; write $${ for the text itself")
        if not pointer.startswith("/") or re.search(r"~(?![01])", pointer):
            raise ValueError(f"${{{pointer[:_SHOWN_CHARS_MAX]}}} is not a JSON pointer")
    return text


def _well_formed_everywhere(args: dict[str, JsonValue]) -> dict[str, JsonValue]:
    waiting: list[JsonValue] = [args]
    while waiting:
        match waiting.pop():
            case str(text):
                _well_formed(text)
            case list(items):
                waiting.extend(items)
            case dict(members):
                waiting.extend(members.values())
    return args


FilledText = Annotated[str, Field(max_length=STRING_BYTES_MAX), AfterValidator(_well_formed)]
FilledArgs = Annotated[dict[str, JsonValue], AfterValidator(_well_formed_everywhere)]
Tokens = Annotated[int, Field(ge=0, le=INT_MAX)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PlannedCall(_Part):
    tool: Name
    args: FilledArgs = {}


class PlannedFault(_Part):
    """The first `times` attempts at the answer fail."""

    reason: Annotated[str, Field(min_length=1, max_length=FAULT_REASON_CHARS_MAX)]
    times: Annotated[int, Field(ge=1, le=FAULT_TIMES_MAX)] = 1
    retryable: bool = True
    tokens: Tokens = 0


class PlannedAnswer(_Part):
    """`tokens` is what the answer is said to have cost; counted when absent."""

    text: FilledText = ""
    calls: Annotated[list[PlannedCall], Field(max_length=CALLS_MAX)] = []
    delay_s: Annotated[float, Field(ge=0, le=DELAY_S_MAX)] = 0.0
    tokens: Tokens | None = None
    fault: PlannedFault | None = None


class Plan(_Part):
    answers: Annotated[list[PlannedAnswer], Field(max_length=ANSWERS_MAX)]

    def at(self, position: int) -> PlannedAnswer:
        """The answer at a position; beyond the end it is one that completes the run."""
        return self.answers[position] if position < len(self.answers) else PlannedAnswer(text="ok")


# --- sources ---------------------------------------------------------------------------------------------


@cache
def default_plan() -> Plan:
    """The packaged plan."""
    return _from_yaml(resources.files(__package__).joinpath("default_plan.yaml").read_text("utf-8"))


def load_plan(path: Path) -> Plan:
    """The operator's plan. Raises PlanInvalid with the file and the place in it; blocks: for a start only."""
    try:
        with path.open("rb") as file:
            body = file.read(FILE_BYTES_MAX + 1)
        if len(body) > FILE_BYTES_MAX:
            raise PlanInvalid(f"the file is larger than {FILE_BYTES_MAX} bytes")
        return _from_yaml(body.decode("utf-8"))
    except OSError as error:
        raise PlanInvalid(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanInvalid(f"{path}: byte {error.start}: not UTF-8 text") from error
    except PlanInvalid as error:
        raise PlanInvalid(f"{path}: {error}") from error


def read_wire_plan(value: JsonValue) -> Plan:
    """A plan that came with a run or an agent: an object, or YAML as text."""
    if not isinstance(value, str):
        return _from_value(value)
    if len(value) > WIRE_YAML_CHARS_MAX:
        raise PlanInvalid(f"YAML text of at most {WIRE_YAML_CHARS_MAX} characters is read; send an object")
    return _from_yaml(value)


def _from_yaml(text: str) -> Plan:
    try:
        document = read_yaml(text)
    except YamlRefused as error:
        raise PlanInvalid(str(error)) from error
    return _from_value(document.value, document)


def _from_value(value: JsonValue, written: Document | None = None) -> Plan:
    try:
        return Plan.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        location = first["loc"]
        problem = _PROBLEMS.get(first["type"], first["msg"]).removeprefix("Value error, ")
        named = f"{_spelled(location)}: {problem}"
        raise PlanInvalid(f"{written.place(location)}: {named}" if written else named) from error


def _spelled(location: Location) -> str:
    """`answers[0].calls[1].tool`, cut and on one line: it can hold a key of the writer's."""
    steps = (f".{step}" if str(step).isidentifier() else f"[{step!r}]" for step in location)
    return "".join(steps).removeprefix(".")[:_SHOWN_CHARS_MAX] or "the plan"
