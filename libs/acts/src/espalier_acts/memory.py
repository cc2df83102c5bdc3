"""Acts on what a tree of agents remembers, for its embedder and for its agents alike.

Params name the tree by its root; whoever acts for an agent names the agent's own. Every act raises
TreeBoundary for an agent that is not the root of a tree of the owner.
"""

from typing import Final
from uuid import UUID

from espalier_acts.subjects import admit_subjects
from espalier_domain.errors import InvalidInput, LifecycleConflict, TreeBoundary
from espalier_domain.words import normalise, passage, searchable, terms_of
from espalier_embeddings import Embedder
from espalier_protocol import strict_json
from espalier_protocol.ids import from_wire
from espalier_protocol.memory import (
    MemoryDelete,
    MemoryFound,
    MemoryRead,
    MemoryRecord,
    MemorySearch,
    MemoryWrite,
)
from espalier_store.ids import new_id
from espalier_store.memory import (
    Meaning,
    NewRecord,
    Query,
    RecordFilter,
    Shelf,
    delete_records,
    is_root,
    on_shelf,
    read_records,
    search_records,
    take_turns,
    write_record,
)
from espalier_store.paging import Page, Place
from espalier_store.pool import Connection

VALUE_BYTES_MAX: Final = 256 * 1024
RECORDS_MAX: Final = 10_000


async def meaning_of(embedder: Embedder | None, wanted: MemoryWrite | MemorySearch) -> Meaning | None:
    """What is to be written, or looked for, means; to be asked before a transaction begins."""
    if embedder is None:
        return None
    text = passage(wanted.key, wanted.value) if isinstance(wanted, MemoryWrite) else wanted.query
    vector = await embedder.vector(text)
    return None if vector is None else Meaning(embedder.model, vector)


async def write_memory(
    connection: Connection,
    owner_id: UUID,
    wanted: MemoryWrite,
    agent_id: UUID | None = None,
    meaning: Meaning | None = None,
) -> MemoryRecord:
    """Write under a key; `agent_id` is the agent that does, the root where it is none.

    Raises InvalidInput for a value beyond VALUE_BYTES_MAX, LifecycleConflict when the tree is full.
    """
    value = strict_json.dumps(wanted.value)
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidInput("value", f"should have at most {VALUE_BYTES_MAX} bytes as JSON")
    root_id = await _root(connection, owner_id, wanted.tree_root_id)
    if wanted.subject_id is not None:
        await admit_subjects(connection, owner_id, [wanted.subject_id])
    record = NewRecord(
        new_id(),
        root_id,
        wanted.namespace,
        wanted.key,
        value.decode(),
        agent_id or root_id,
        wanted.subject_id,
        wanted.ttl_seconds,
        searchable(wanted.key, wanted.value),
        meaning,
    )
    await take_turns(connection, root_id)
    written = await write_record(connection, owner_id, record, RECORDS_MAX)
    if written is None:
        raise LifecycleConflict(f"The tree has {RECORDS_MAX} memory records, which is the most it may have.")
    return written


async def read_memory(connection: Connection, owner_id: UUID, wanted: MemoryRead) -> Page[MemoryRecord]:
    """A page, newest first. Raises InvalidInput for a cursor that no page of the namespace answered."""
    shelf = Shelf(await _root(connection, owner_id, wanted.tree_root_id), wanted.namespace)
    place = Place(_cursor(wanted.cursor), wanted.page_size())
    page = await read_records(connection, owner_id, shelf, wanted.key, place)
    # Asked afterwards: a cursor that is still there was there for the page too.
    if place.after is not None and not await on_shelf(connection, owner_id, shelf, place.after):
        raise _unknown_cursor()
    return page


async def search_memory(
    connection: Connection, owner_id: UUID, wanted: MemorySearch, meaning: Meaning | None = None
) -> MemoryFound:
    """Best first; nothing for a query without a word.

    With its meaning, records that have one of the same model are ranked by it too. Raises Unavailable when it
    takes too long.
    """
    shelf = Shelf(await _root(connection, owner_id, wanted.tree_root_id), wanted.namespace)
    terms, found = terms_of(wanted.query), []
    if terms:
        query = Query(normalise(wanted.query), terms, meaning)
        found = await search_records(connection, owner_id, shelf, query, wanted.found_max())
    return MemoryFound(items=found, records=found, ranking="text" if meaning is None else "semantic")


async def delete_memory(connection: Connection, owner_id: UUID, wanted: MemoryDelete) -> int:
    """How many records are gone: those that have every member given. Raises InvalidInput for too few."""
    if wanted.id is None and wanted.tree_root_id is None:
        raise InvalidInput("id", "or tree_root_id is required")
    root_id = None
    if wanted.tree_root_id is not None:
        root_id = await _root(connection, owner_id, wanted.tree_root_id)
        await take_turns(connection, root_id)
    record_id = None if wanted.id is None else from_wire("mem", wanted.id)
    if wanted.id is not None and record_id is None:
        return 0
    wanted_records = RecordFilter(record_id, root_id, wanted.namespace, wanted.subject_id)
    return await delete_records(connection, owner_id, wanted_records)


async def _root(connection: Connection, owner_id: UUID, text: str) -> UUID:
    root_id = from_wire("agt", text)
    if root_id is None or not await is_root(connection, owner_id, root_id):
        raise TreeBoundary("No tree of yours has this agent at its root.", text)
    return root_id


def _cursor(text: str | None) -> UUID | None:
    after = None if text is None else from_wire("mem", text)
    if text is not None and after is None:
        raise _unknown_cursor()
    return after


def _unknown_cursor() -> InvalidInput:
    return InvalidInput("cursor", "should be one that an earlier page answered")
