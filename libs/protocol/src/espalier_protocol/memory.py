"""Memory records of a tree, and the parameters of `memory.*` (AEP spec sections 5.4 and 6)."""

from typing import Annotated

from pydantic import Field

from espalier_protocol.shapes import Id, JsonAny, Name, PageParams, Params, Resource, Text, Timestamp


class MemoryRecord(Resource):
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


class MemoryFound(Resource):
    items: list[MemoryRecord]
    records: list[MemoryRecord]


class MemoryDeleted(Resource):
    deleted: int


class MemoryWrite(Params):
    tree_root_id: Id
    namespace: Name
    key: Name
    value: JsonAny
    subject_id: Id | None = None
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None


class MemoryRead(PageParams):
    tree_root_id: Id
    namespace: Name
    key: Name | None = None


class MemorySearch(Params):
    tree_root_id: Id
    namespace: Name
    query: Text
    k: Annotated[int, Field(ge=1, le=50)] | None = None


class MemoryDelete(Params):
    id: Id | None = None
    tree_root_id: Id | None = None
    namespace: Name | None = None
    subject_id: Id | None = None
