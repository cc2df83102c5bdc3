"""YAML read the way JSON would be: plain values and the place of each, nothing that grows or is made.

`true`, `false`, `null` and JSON's numbers are what they look like; every other scalar is text, so dates and
`yes` arrive as written. Anchors, aliases, tags, a second document and duplicate keys are refused; strings,
numbers and depth obey the limits of `strict_json`. Not here: what the value means. Above: `plan`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import yaml
from yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from espalier_protocol import strict_json
from espalier_protocol.strict_json import JsonValue

_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS: Final[dict[str, bool | None]] = {"true": True, "false": False, "null": None, "~": None, "": None}
_SHORT_CHARS_MAX: Final = strict_json.STRING_BYTES_MAX // 4
"""Text up to here cannot be too long in UTF-8."""

_FORBIDDEN: Final = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What YAML allows nowhere. Both parsers refuse it too, but each counts the place differently."""

Location = tuple[str | int, ...]
"""Keys and indexes from the root to a value."""


class YamlRefused(Exception):
    """Not YAML that we accept. The text begins with the place."""


class _Mark(Protocol):
    """The parsers' two classes of marks. Both count from 0."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Document:
    value: JsonValue
    places: dict[Location, _Mark | None]

    def place(self, location: Location) -> str:
        """Where the value stands, or the nearest one around it that exists."""
        for length in range(len(location), 0, -1):
            if mark := self.places.get(location[:length]):
                return _place(mark)
        return _place(self.places.get(()))


def read_yaml(text: str) -> Document:
    """One document. Raises YamlRefused; the time is linear in the text."""
    if forbidden := _FORBIDDEN.search(text):
        lines = text[: forbidden.start()].split("\n")
        raise YamlRefused(
            f"line {len(lines)}, column {len(lines[-1]) + 1}: a character that YAML does not allow"
        )
    # The C parser makes the same events some twenty times faster, but is not in every build of the library.
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    try:
        return _Reader(yaml.parse(text, Loader=loader)).document()
    except yaml.MarkedYAMLError as error:
        raise YamlRefused(f"{_place(error.problem_mark)}: {error.problem or 'not YAML'}") from error


@dataclass(slots=True)
class _Reader:
    """Builds values straight from the parser's events, so that what is refused is never composed."""

    events: Iterator[Event]
    places: dict[Location, _Mark | None] = field(default_factory=dict)

    def document(self) -> Document:
        value: JsonValue = None
        documents = 0
        for event in self.events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _refused(event, "a second document begins")
                value = self.value(next(self.events), ())
        return Document(value, self.places)

    def value(self, event: Event, location: Location) -> JsonValue:
        _refuse_growth(event)
        self.places[location] = event.start_mark
        if isinstance(event, CollectionStartEvent) and len(location) >= strict_json.DEPTH_MAX:
            raise _refused(event, f"nested more than {strict_json.DEPTH_MAX} deep")
        match event:
            case ScalarEvent():
                return _scalar(event)
            case SequenceStartEvent():
                return self.items(location)
            case MappingStartEvent():
                return self.members(location)
        raise AssertionError(f"{event!r} begins no value")

    def items(self, location: Location) -> list[JsonValue]:
        items: list[JsonValue] = []
        while not isinstance(event := next(self.events), SequenceEndEvent):
            items.append(self.value(event, (*location, len(items))))
        return items

    def members(self, location: Location) -> dict[str, JsonValue]:
        members: dict[str, JsonValue] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            _refuse_growth(event)
            if not isinstance(event, ScalarEvent):
                raise _refused(event, "a key that is not text")
            key = _text(event)
            if key in members:
                raise _refused(event, f"the key {key[:50]!r} is there twice")
            members[key] = self.value(next(self.events), (*location, key))
        return members


def _refuse_growth(event: Event) -> None:
    if isinstance(event, AliasEvent) or (isinstance(event, NodeEvent) and event.anchor is not None):
        raise _refused(event, "anchors and aliases are not read")
    if isinstance(event, ScalarEvent | CollectionStartEvent) and event.tag is not None:
        raise _refused(event, "tags are not read")


def _scalar(event: ScalarEvent) -> JsonValue:
    plain = event.implicit[0]
    if plain and event.value in _WORDS:
        return _WORDS[event.value]
    if plain and _NUMBER.fullmatch(event.value):
        return _strictly(event, event.value.encode())
    return _text(event)


def _text(event: ScalarEvent) -> str:
    """Escapes can smuggle in what no store takes: NUL and halves of surrogate pairs."""
    if event.style != '"' and len(event.value) <= _SHORT_CHARS_MAX:
        return event.value
    try:
        body = strict_json.dumps(event.value)
    except UnicodeEncodeError:
        raise _refused(event, "an unpaired surrogate") from None
    _strictly(event, body)
    return event.value


def _strictly(event: Event, body: bytes) -> JsonValue:
    try:
        return strict_json.loads(body)
    except strict_json.JsonError as error:
        raise _refused(event, error.reason) from None


def _refused(event: Event, problem: str) -> YamlRefused:
    return YamlRefused(f"{_place(event.start_mark)}: {problem}")


def _place(mark: _Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "line 1, column 1"
