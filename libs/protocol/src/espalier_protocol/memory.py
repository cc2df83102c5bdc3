"""Memory records of a tree, and the parameters of `memory.*` (AEP spec sections 5.4 and 6)."""

from typing import Annotated, Final, Literal

from pydantic import Field

from espalier_protocol.shapes import Id, JsonAny, Name, PageParams, Params, Resource, Timestamp

TTL_S_MAX: Final = 100 * 366 * 24 * 3600
QUERY_CHARS_MAX: Final = 1_000
FOUND_DEFAULT: Final = 10
FOUND_MAX: Final = 50
Ranking = Literal["text", "semantic"]


class MemoryRecord(Resource):
    """`created_by_agent_id` is who wrote the value that stands there, an embedder's write the tree root's.

    `created_at` is when the key began; later writes of it keep that and the id. `embedding` is always null: a
    record's vector only serves the search of the runtime that made it, and is many times as large as a note.
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
    """`score` is 0 to 1, higher is better: which share of the query the record has, rare terms weighing more.

    Where it is ranked by meaning too, it is the mean of that and of how near the two meanings are.
    """

    score: float


class MemoryFound(Resource):
    """`ranking` says what the scores were made of: words alone, or words and meaning. It is ours: null where
    another runtime answers."""

    items: list[MemoryMatch]
    records: list[MemoryMatch]
    ranking: Ranking | None = None


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
