"""Memory records of a tree, and the parameters of `memory.*` (AEP spec sections 5.4 and 6)."""

from typing import Annotated, Final

from pydantic import Field

from espalier_protocol.shapes import Id, JsonAny, Name, PageParams, Params, Resource, Timestamp

TTL_S_MAX: Final = 100 * 366 * 24 * 3600
QUERY_CHARS_MAX: Final = 1_000
FOUND_DEFAULT: Final = 10
FOUND_MAX: Final = 50


class MemoryRecord(Resource):
    """`created_by_agent_id` is who wrote the value that stands there, an embedder's write the tree root's.

    `created_at` is when the key began; later writes of it keep that and the id.
    """

    id: str
    tree_root_id: str
    namespace: str
    key: str
    value: JsonAny
    created_by_agent_id: str
    created_at: Timestamp
    embedding: list[float] | None
    subject_id: str | None
    ttl_seconds: int | None


class MemoryPage(Resource):
    items: list[MemoryRecord]
    cursor: str | None
    records: list[MemoryRecord]
    next_cursor: str | None


class MemoryMatch(MemoryRecord):
    """The whole part of `score` says how many words of the query the record has; higher is better."""

    score: float


class MemoryFound(Resource):
    items: list[MemoryMatch]
    records: list[MemoryMatch]


class MemoryDeleted(Resource):
    deleted: int


class MemoryWrite(Params):
    tree_root_id: Id
    namespace: Name
    key: Name
    value: JsonAny
    subject_id: Id | None = None
    ttl_seconds: Annotated[int, Field(ge=1, le=TTL_S_MAX)] | None = None


class MemoryRead(PageParams):
    tree_root_id: Id
    namespace: Name
    key: Name | None = None


class MemorySearch(Params):
    tree_root_id: Id
    namespace: Name
    query: Annotated[str, Field(max_length=QUERY_CHARS_MAX)]
    k: Annotated[int, Field(ge=1, le=FOUND_MAX)] | None = None

    def found_max(self) -> int:
        return self.k or FOUND_DEFAULT


class MemoryDelete(Params):
    id: Id | None = None
    tree_root_id: Id | None = None
    namespace: Name | None = None
    subject_id: Id | None = None
