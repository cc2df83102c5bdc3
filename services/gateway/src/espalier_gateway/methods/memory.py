"""`memory.write`, `memory.read`, `memory.search`, `memory.delete`: what the owner's trees remember."""

from espalier_acts.memory import delete_memory, meaning_of, read_memory, search_memory, write_memory
from espalier_gateway.methods.call import Call
from espalier_protocol.memory import (
    MemoryDelete,
    MemoryDeleted,
    MemoryFound,
    MemoryPage,
    MemoryRead,
    MemoryRecord,
    MemorySearch,
    MemoryWrite,
)
from espalier_store.pool import reading, transaction


async def write(call: Call, params: MemoryWrite) -> MemoryRecord:
    meaning = await meaning_of(call.desk.embedder, params)
    async with transaction(call.pool) as connection:
        return await write_memory(connection, call.owner_id, params, meaning=meaning)


async def read(call: Call, params: MemoryRead) -> MemoryPage:
    async with reading(call.pool) as connection:
        page = await read_memory(connection, call.owner_id, params)
    cursor = page.items[-1].id if page.more else None
    return MemoryPage(items=page.items, cursor=cursor, records=page.items, next_cursor=cursor)


async def search(call: Call, params: MemorySearch) -> MemoryFound:
    meaning = await meaning_of(call.desk.embedder, params)
    async with transaction(call.pool) as connection:
        return await search_memory(connection, call.owner_id, params, meaning)


async def delete(call: Call, params: MemoryDelete) -> MemoryDeleted:
    async with transaction(call.pool) as connection:
        return MemoryDeleted(deleted=await delete_memory(connection, call.owner_id, params))
