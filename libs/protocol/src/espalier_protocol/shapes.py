"""The two base shapes of the wire, and the types that several resources share.

`Params` refuse unknown members and never coerce: a misspelt ceiling must not become no ceiling.
`Resource` is what the runtime answers; clients accept members they do not know.
"""

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

JsonAny = Any
"""A JSON value of an open object (`metadata`, `inputs`, `value`, `body`); decoded strictly before."""

NAME_CHARS_MAX = 200
TEXT_CHARS_MAX = 262_144
ID_CHARS_MAX = 64
LIST_ENTRIES_MAX = 256
PAGE_DEFAULT = 50
PAGE_MAX = 200


class Params(BaseModel):
    """Parameters of a method and the fixed objects inside them: closed, strict, frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NoParams(Params):
    """A method without parameters."""


class Resource(BaseModel):
    """An object in a result. Open for readers; the runtime builds it whole."""

    model_config = ConfigDict(extra="allow", frozen=True)


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC with milliseconds and `Z`, the one spelling of time on the wire."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


Timestamp = Annotated[datetime, PlainSerializer(timestamp, return_type=str)]
Id = Annotated[str, Field(max_length=ID_CHARS_MAX)]
"""Opaque to clients. A string of another shape is simply unknown, so only its length is checked."""

Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
Text = Annotated[str, Field(max_length=TEXT_CHARS_MAX)]
JsonObject = dict[str, JsonAny]
Limit = Annotated[int, Field(ge=1)]
SubjectIds = Annotated[list[Id], Field(max_length=LIST_ENTRIES_MAX)]


class PageParams(Params):
    """Newest first. `limit` beyond 200 is clamped; `cursor` is opaque, -32602 when unknown."""

    cursor: Id | None = None
    limit: Limit | None = None

    def page_size(self) -> int:
        return min(self.limit or PAGE_DEFAULT, PAGE_MAX)
