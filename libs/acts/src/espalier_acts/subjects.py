"""Acts on data subjects: tagging, reading what is theirs, and erasing it.

Whoever writes a record about a subject comes by `admit_subjects` in the same transaction; a run that reads
one comes by `spread_subjects`. An erasure is begun in one transaction and carried on in many, each of which
may be repeated: what is done is found in the rows, and nothing in this process.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from espalier_domain.errors import InvalidInput, LifecycleConflict, SubjectNotFound
from espalier_protocol.ids import to_wire
from espalier_protocol.shapes import JsonObject
from espalier_protocol.strict_json import dumps
from espalier_protocol.subject import (
    METADATA_BYTES_MAX,
    ErasedRecord,
    ErasureManifest,
    ErasureMode,
    Subject,
    SubjectChange,
    SubjectCreate,
)
from espalier_store.erasure import (
    Erased,
    Erasure,
    bury_subject,
    close_erasure,
    erase_agents,
    erase_artifacts,
    erase_changes,
    erase_history,
    erase_lines,
    erase_memory,
    erase_messages,
    erase_prompts,
    erase_run,
    forget_answers,
    live_runs,
    note_erased,
    open_erasure,
    pick_run,
    read_erasure,
    strip_records,
    strip_runs,
)
from espalier_store.ids import new_id
from espalier_store.pool import Connection
from espalier_store.runs import LockedRun, lock_run, request_cancels
from espalier_store.subjects import (
    change_subject,
    count_records,
    delete_subject,
    get_subject,
    insert_subject,
    lock_subject,
    register_subjects,
    subjects_of_agent,
    subjects_of_run,
    tag_live_runs,
    tag_run,
)

LIVE_RUNS_MAX: Final = 200
"""Runs that one look at what still lives of a subject finds."""

RUNS_MAX: Final = 20
"""Runs that one part of an erasure takes on."""

MANIFEST_ENTRIES_MAX: Final = 10_000


# ------------------------------------------------------------------ tags


async def admit_subjects(connection: Connection, owner_id: UUID, subject_ids: Iterable[str]) -> None:
    """Make the subjects known, and keep them from being erased until the transaction ends.

    Raises LifecycleConflict for one that has been erased, InvalidInput for an id of no characters.
    """
    wanted = sorted(set(subject_ids))
    if "" in wanted:
        raise InvalidInput("subject_id", "should have at least one character")
    erased = await register_subjects(connection, owner_id, wanted)
    if erased:
        raise LifecycleConflict(f"The subject {erased[0]} has been erased; nothing about it is kept.")


async def spread_subjects(connection: Connection, run: LockedRun, subject_ids: Collection[str]) -> None:
    """The locked run has got to know of these subjects. Raises like `admit_subjects`."""
    if subject_ids:
        await admit_subjects(connection, run.owner_id, subject_ids)
        await tag_run(connection, run.owner_id, run.run_id, subject_ids)


async def known_subjects(connection: Connection, owner_id: UUID, run_id: UUID) -> list[str]:
    """Whom the run knows of, each still there. Raises LifecycleConflict for one that has been erased."""
    subject_ids = await subjects_of_run(connection, owner_id, run_id)
    await admit_subjects(connection, owner_id, subject_ids)
    return subject_ids


async def subject_of_writing(connection: Connection, run: LockedRun, named: str | None) -> str | None:
    """Whom a record is about that the locked run writes: the one that it names, or its only subject.

    Such a record has room for one: of several subjects, and none named, it carries none. The run then knows
    of the named one too. Raises like `admit_subjects`.
    """
    if named is not None:
        await spread_subjects(connection, run, [named])
    known = await known_subjects(connection, run.owner_id, run.run_id)
    return named or (known[0] if len(known) == 1 else None)


async def subjects_of_message(
    connection: Connection, owner_id: UUID, from_run_id: UUID | None, to_agent_id: UUID
) -> list[str]:
    """Whom a message is about: whom its sender's run knows of; an embedder's is about the recipient's."""
    if from_run_id is not None:
        return await known_subjects(connection, owner_id, from_run_id)
    subject_ids = await subjects_of_agent(connection, owner_id, to_agent_id)
    await admit_subjects(connection, owner_id, subject_ids)
    return subject_ids


async def spread_to_siblings(connection: Connection, owner_id: UUID, agent_id: UUID, run_id: UUID) -> None:
    """A prompt that the run wrote is its agent's from now on: all live runs of it know whom the run knows.

    The agent is locked. Raises LifecycleConflict for a subject that has been erased.
    """
    subject_ids = await known_subjects(connection, owner_id, run_id)
    if subject_ids:
        await tag_live_runs(connection, owner_id, agent_id, subject_ids)


# ------------------------------------------------------------------ subjects


async def create_subject(connection: Connection, owner_id: UUID, wanted: SubjectCreate) -> Subject:
    """A new subject, or one that was erased and may be named again from now on.

    Raises LifecycleConflict when it is known, InvalidInput for metadata that is too large.
    """
    subject_id = to_wire("sub", new_id()) if wanted.aepId is None else wanted.aepId
    if not subject_id:
        raise InvalidInput("aepId", "should have at least one character")
    _require_small(wanted.metadata)
    made = await insert_subject(
        connection, owner_id, subject_id, wanted.metadata, legal_hold=wanted.legalHold
    )
    if made is None:
        raise LifecycleConflict("There is a subject with this id already.")
    return made


async def update_subject(
    connection: Connection, owner_id: UUID, subject_id: str, change: SubjectChange
) -> Subject:
    """Raises SubjectNotFound, LifecycleConflict for metadata of an erased one, or InvalidInput."""
    subject = await _lock(connection, owner_id, subject_id)
    if change.metadata is not None:
        _require_small(change.metadata)
        if subject.erased_at is not None:
            raise LifecycleConflict("The subject has been erased; nothing about it is kept.")
    changed = await change_subject(connection, owner_id, subject_id, change.metadata, change.legalHold)
    assert changed is not None, "it is locked"
    return changed


async def forget_subject(connection: Connection, owner_id: UUID, subject_id: str) -> None:
    """Delete the subject itself, of which nothing else is left.

    Raises SubjectNotFound, or LifecycleConflict while records are tagged with it or a legal hold is on it:
    without the row nobody could find them any more.
    """
    subject = await _lock(connection, owner_id, subject_id)
    if subject.legal_hold:
        raise LifecycleConflict("A legal hold is on the subject.")
    counts = await count_records(connection, owner_id, subject_id)
    if any(counts.model_dump().values()):
        raise LifecycleConflict("There are records of the subject; erase them first.")
    await delete_subject(connection, owner_id, subject_id)


async def find_subject(connection: Connection, owner_id: UUID, subject_id: str) -> Subject:
    """Raises SubjectNotFound."""
    subject = await get_subject(connection, owner_id, subject_id)
    if subject is None:
        raise SubjectNotFound(subject_id)
    return subject


def _require_small(metadata: JsonObject) -> None:
    if len(dumps(metadata)) > METADATA_BYTES_MAX:
        raise InvalidInput("metadata", f"should have at most {METADATA_BYTES_MAX} bytes as JSON")


async def _lock(connection: Connection, owner_id: UUID, subject_id: str) -> Subject:
    subject = await lock_subject(connection, owner_id, subject_id)
    if subject is None:
        raise SubjectNotFound(subject_id)
    return subject


# ------------------------------------------------------------------ erasure


@dataclass(frozen=True, slots=True)
class Begun:
    """An erasure that is on record. `held` by law: it is over, and nothing was touched."""

    erasure: Erasure
    held: bool


async def begin_erasure(connection: Connection, owner_id: UUID, subject_id: str, mode: ErasureMode) -> Begun:
    """Put the erasure on record and let nobody name the subject any more; or find the one that is under way.

    Raises SubjectNotFound.
    """
    subject = await _lock(connection, owner_id, subject_id)
    erasure_id = await open_erasure(connection, owner_id, new_id(), (subject_id, mode))
    erasure = Erasure(erasure_id, subject_id, mode)
    if subject.legal_hold:
        await _retain(connection, owner_id, erasure)
        return Begun(erasure, held=True)
    await bury_subject(connection, owner_id, subject_id)
    return Begun(erasure, held=False)


async def ask_runs_to_end(connection: Connection, owner_id: UUID, subject_id: str) -> list[UUID]:
    """Raise the flag of live runs that know of the subject, LIVE_RUNS_MAX at most. Those runs."""
    found = await live_runs(connection, owner_id, subject_id, LIVE_RUNS_MAX)
    for run_id in found:
        await lock_run(connection, owner_id, run_id)
    await request_cancels(connection, owner_id, found)
    return found


async def erase_a_part(connection: Connection, owner_id: UUID, erasure: Erasure) -> bool:
    """The next bounded part of the erasure, in a transaction of its own. Whether there may be more.

    No run of the subject lives any more. A legal hold that came meanwhile ends it; then nothing is left to
    do.
    """
    subject = await _lock(connection, owner_id, erasure.subject_id)
    if subject.legal_hold:
        await _retain(connection, owner_id, erasure)
        return False
    erased: list[Erased] = []
    more = False
    for erase in WHAT_RUNS_TELL_OF:
        erased = erased or await erase(connection, owner_id, erasure.subject_id, erasure.mode)
    if not erased:
        erased, more = await _erase_runs(connection, owner_id, erasure)
    for erase in WHAT_IS_LEFT:
        if not erased and not more:
            erased = await erase(connection, owner_id, erasure.subject_id, erasure.mode)
    await forget_answers(connection, owner_id, [each.record_id for each in erased if _was_created(each)])
    await note_erased(connection, owner_id, erasure.erasure_id, erased)
    return more or bool(erased)


def _was_created(each: Erased) -> bool:
    """Whether the record's own words are gone, which the kept answer to its create still holds."""
    gone = each.action in ("deleted", "redacted") and each.reason != "prompt_only"
    return gone and each.kind in ("agent", "run", "message")


async def end_erasure(connection: Connection, owner_id: UUID, erasure: Erasure) -> ErasureManifest:
    """Say that all is done, and what that was."""
    await close_erasure(connection, owner_id, erasure.erasure_id)
    return await manifest(connection, owner_id, erasure)


async def manifest(connection: Connection, owner_id: UUID, erasure: Erasure) -> ErasureManifest:
    row, erased, left_out = await read_erasure(connection, owner_id, erasure.erasure_id, MANIFEST_ENTRIES_MAX)
    lists: dict[str, list[ErasedRecord]] = {
        action: [_told(each) for each in erased if each.action == action]
        for action in ("deleted", "redacted", "stripped", "retained")
    }
    return ErasureManifest(
        subject_id=erasure.subject_id,
        mode=row["mode"],
        entries_left_out=left_out,
        generated_at=row["performed_at"],
        performed_at=row["performed_at"],
        **lists,
    )


def _told(each: Erased) -> ErasedRecord:
    return ErasedRecord(
        kind=each.kind, resource=each.kind, id=each.record_id, aepId=each.record_id, reason=each.reason
    )


async def _retain(connection: Connection, owner_id: UUID, erasure: Erasure) -> None:
    held = Erased("retained", "subject", erasure.subject_id, "legal_hold")
    await note_erased(connection, owner_id, erasure.erasure_id, [held])
    await close_erasure(connection, owner_id, erasure.erasure_id)


async def _erase_runs(connection: Connection, owner_id: UUID, erasure: Erasure) -> tuple[list[Erased], bool]:
    """Runs with their logs. A log that does not fit into one part is gone on with in the next."""
    erased: list[Erased] = []
    for _ in range(RUNS_MAX):
        run_id = await pick_run(connection, owner_id, erasure.subject_id, erasure.mode)
        if run_id is None:
            return erased, False
        if not await erase_lines(connection, owner_id, run_id, erasure.mode):
            return erased, True
        erased.append(await erase_run(connection, owner_id, run_id, erasure.mode))
    return erased, True


Erase = Callable[[Connection, UUID, str, ErasureMode], Awaitable[list[Erased]]]

WHAT_RUNS_TELL_OF: Final[tuple[Erase, ...]] = (
    erase_prompts,  # first: a change of the prompt that this waits for puts the old one into the history
    erase_artifacts,
    erase_memory,
    erase_messages,
    erase_history,
    erase_changes,
)
"""What is erased before runs and agents: these tell whose some of it is."""

WHAT_IS_LEFT: Final[tuple[Erase, ...]] = (erase_agents, strip_runs, strip_records)
