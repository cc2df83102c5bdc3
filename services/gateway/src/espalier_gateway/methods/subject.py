"""`subject.read`, `subject.export`, `subject.erase`: what is held about a person, and its end."""

from espalier_acts.subject_records import read_subject
from espalier_gateway.erasing import erase_subject
from espalier_gateway.methods.call import Call
from espalier_protocol.subject import ErasureManifest, SubjectErase, SubjectRecords, SubjectRef
from espalier_store.pool import reading


async def read(call: Call, params: SubjectRef) -> SubjectRecords:
    async with reading(call.pool) as connection:
        return await read_subject(connection, call.owner_id, params.subject_id, whole_contents=False)


async def export(call: Call, params: SubjectRef) -> SubjectRecords:
    async with reading(call.pool) as connection:
        return await read_subject(connection, call.owner_id, params.subject_id, whole_contents=True)


async def erase(call: Call, params: SubjectErase) -> ErasureManifest:
    """As many transactions as it takes. One that takes too long is asked for again, and goes on."""
    return await erase_subject(call.desk, call.owner_id, params.subject_id, params.mode)
