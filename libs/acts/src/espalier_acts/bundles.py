"""A subject's bundle: its lines, and taking them in under another owner or in another runtime.

The first line says what follows, one line a record in the order of `subject_records.KINDS`, an artifact
followed by its bytes, and the last line counts them. Every id becomes a new one, the same one wherever it
stands. What a record points at and the bundle does not have (a shared agent of its tree) becomes a husk that
takes no run. Runs arrive ended and messages read: nothing that is taken in is carried out.
"""

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, get_args
from uuid import UUID

from espalier_acts.memory import write_memory
from espalier_acts.subject_records import KINDS
from espalier_acts.subjects import admit_subjects
from espalier_domain.errors import InvalidInput, TreeBoundary
from espalier_protocol.agent import AgentCreate, Budgets, Ceilings, Constitution
from espalier_protocol.ids import IdPrefix, from_wire, to_wire
from espalier_protocol.memory import MemoryWrite
from espalier_protocol.message import BODY_BYTES_MAX
from espalier_protocol.run import EndState, RunCreate
from espalier_protocol.shapes import (
    ID_CHARS_MAX,
    NAME_CHARS_MAX,
    TEXT_CHARS_MAX,
    Resource,
    timestamp,
)
from espalier_protocol.strict_json import JsonError, dumps, loads
from espalier_protocol.subject import (
    METADATA_BYTES_MAX,
    PORTABLE_FORMAT_VERSION,
    Subject,
    SubjectCounts,
    SubjectImported,
)
from espalier_store.artifacts import CHUNK_BYTES, NewArtifact, insert_artifact
from espalier_store.bundles import (
    NewAgent,
    NewHistoryEntry,
    NewMessage,
    begin_blob,
    date_record,
    insert_agent,
    insert_ended_run,
    insert_history_entry,
    insert_read_message,
    put_chunk,
    size_blob,
)
from espalier_store.ids import new_id
from espalier_store.pool import Connection
from espalier_store.subjects import get_subject, insert_subject

BUNDLE: Final = "espalier.subject"
CHUNK_LINE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of a line, which holds a record or a chunk of bytes."""

IMPORTED_ARTIFACT_BYTES_MAX: Final = 50 * 1000 * 1000
RECORDS_IN_BUNDLE_MAX: Final = 200_000
NOBODY: Final = "[not in the bundle]"
HUSK_CEILINGS: Final = Ceilings(max_cycles=1, max_subagents=0, max_tool_calls_per_cycle=1, max_wall_seconds=1)
HUSK_BUDGETS: Final = Budgets(tokens_per_cycle=1, tool_calls_per_cycle=1, seconds_per_cycle=1)


# ------------------------------------------------------------------ writing


def head_line(subject: Subject) -> bytes:
    return _line(
        {
            "bundle": BUNDLE,
            "portable_format_version": PORTABLE_FORMAT_VERSION,
            "exported_at": timestamp(datetime.now(UTC)),
            "subject": {"subject_id": subject.id, "metadata": subject.metadata},
        }
    )


def record_line(kind: str, record: Resource) -> bytes:
    return _line({"kind": kind, "record": record.model_dump(mode="json")})


def bytes_line(piece: bytes) -> bytes:
    """A chunk of the artifact in the line before."""
    return _line({"kind": "bytes", "base64": b64encode(piece).decode()})


def end_line(counts: Mapping[str, int]) -> bytes:
    return _line({"kind": "end", "counts": dict(counts)})


def _line(value: dict[str, Any]) -> bytes:
    return dumps(value) + b"\n"


# ------------------------------------------------------------------ reading


@dataclass(slots=True)
class _OpenArtifact:
    """An artifact whose bytes are still coming. `fresh`: the owner does not have them yet."""

    record: dict[str, Any]
    sha256: str
    fresh: bool
    size: int = 0
    chunks: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    whole: bool = True


class BundleReader:
    """`take` the lines in their order, then `finish`; all on one transaction, which the first error ends.

    Raises InvalidInput with one sentence about what is wrong, and LifecycleConflict when the subject was
    erased here or a limit is reached.
    """

    def __init__(self, connection: Connection, owner_id: UUID) -> None:
        self._connection, self._owner_id = connection, owner_id
        self._subject_id = ""
        self._ids: dict[str, UUID] = {}
        self._here: set[UUID] = set()
        self._roots: set[str] = set()
        self._counts = dict.fromkeys((kind for kind, _, _ in KINDS), 0)
        self._place = -1
        self._artifact: _OpenArtifact | None = None
        self._ended = False

    async def take(self, line: bytes) -> None:
        value = _read(line)
        if self._ended:
            raise _bad("goes on after its last line")
        if not self._subject_id:
            await self._begin(value)
            return
        kind = value.get("kind")
        if kind == "bytes":
            await self._take_bytes(value)
            return
        await self._close_artifact()
        if kind == "end":
            self._end(value)
            return
        await self._take_record(kind, value.get("record"))

    async def finish(self) -> SubjectImported:
        """What is there now. Raises InvalidInput when the last line is missing."""
        if not self._ended:
            raise _bad("ends in the middle: its last line is missing")
        for root in self._roots:
            await self._agent(root)
        ids = {old: to_wire(_PREFIX_OF[old[:3]], new) for old, new in self._ids.items()}
        return SubjectImported(subject_id=self._subject_id, counts=SubjectCounts(**self._counts), ids=ids)

    async def _begin(self, head: dict[str, Any]) -> None:
        if head.get("bundle") != BUNDLE:
            raise _bad("is no bundle of a subject")
        version = head.get("portable_format_version")
        if version != PORTABLE_FORMAT_VERSION:
            told = version if isinstance(version, str) and len(version) <= ID_CHARS_MAX else "another"
            raise _bad(f"has the format version {told}; this runtime reads {PORTABLE_FORMAT_VERSION}")
        subject = head.get("subject")
        match subject:
            case {"subject_id": str(subject_id), "metadata": dict(metadata)} if (
                0 < len(subject_id) <= ID_CHARS_MAX and len(dumps(metadata)) <= METADATA_BYTES_MAX
            ):
                pass
            case _:
                raise _bad("does not say whose it is")
        if await get_subject(self._connection, self._owner_id, subject_id) is None:
            await insert_subject(self._connection, self._owner_id, subject_id, metadata, legal_hold=False)
        await admit_subjects(self._connection, self._owner_id, [subject_id])
        self._subject_id = subject_id

    def _end(self, value: dict[str, Any]) -> None:
        if value.get("counts") != self._counts:
            raise _bad("does not have as many records as its last line says")
        self._ended = True

    async def _take_record(self, kind: Any, record: Any) -> None:
        places = [name for name, _, _ in KINDS]
        if kind not in places or not isinstance(record, dict) or places.index(kind) < self._place:
            raise _bad("has a line that does not belong there")
        self._place = places.index(kind)
        if sum(self._counts.values()) >= RECORDS_IN_BUNDLE_MAX:
            raise _bad(f"has more than {RECORDS_IN_BUNDLE_MAX} records")
        try:  # what does not fit a shape is a ValueError too
            await getattr(self, f"_take_{kind}")(record)
        except (KeyError, TypeError, ValueError, TreeBoundary) as error:
            raise _bad(f"has a record of {kind} that is damaged or beyond a limit") from error
        self._counts[kind] += 1

    # -------------------------------------------------------------- one kind after the other

    async def _take_agents(self, record: dict[str, Any]) -> None:
        given = ("name", "constitution", "toolset", "ceilings", "budgets", "metadata", "max_live_runs")
        wanted = AgentCreate.model_validate({name: record[name] for name in given})
        parent = record.get("parent_agent_id")
        self._roots.add(record["root_agent_id"])
        closed = record.get("lifecycle_state")
        agent = NewAgent(
            self._new("agt", record["id"]),
            self._id("agt", record["root_agent_id"]),
            None if parent is None else self._id("agt", parent),
            wanted,
            closed if closed in ("cancelled", "archived") else "active",
            [self._subject_id],
            _moment(record["created_at"]),
        )
        await insert_agent(self._connection, self._owner_id, agent)

    async def _take_runs(self, record: dict[str, Any]) -> None:
        agent_id = await self._agent(record["agent_id"])
        wanted = RunCreate.model_validate(
            {"agent_id": record["agent_id"], "goal": record["goal"], "inputs": record["metadata"]}
        )
        cycles = record["cycle_count"]
        if not isinstance(cycles, int) or not 0 <= cycles < 2**31:
            raise ValueError("no count of cycles")
        ended: EndState = record["state"] if record["state"] in get_args(EndState) else "cancelled"
        await insert_ended_run(
            self._connection,
            self._owner_id,
            self._new("run", record["id"]),
            agent_id,
            wanted,
            state=ended,
            result=record["result"],
            cycles=cycles,
            subject_ids=[self._subject_id],
            began_at=_moment(record["started_at"]),
        )

    async def _take_artifacts(self, record: dict[str, Any]) -> None:
        """The record is kept when all its bytes are there."""
        sha256, size = record["sha256"], record["size_bytes"]
        if not isinstance(sha256, str) or len(sha256) != 64 or not isinstance(size, int) or size < 0:
            raise ValueError("no hash or no size")
        if size > IMPORTED_ARTIFACT_BYTES_MAX:
            raise ValueError("too large")
        if not 0 < len(record["name"]) <= NAME_CHARS_MAX or len(record["mime_type"]) > NAME_CHARS_MAX:
            raise ValueError("no name or no type")
        _checked_text(record["name"], record["mime_type"])
        fresh = await begin_blob(self._connection, self._owner_id, sha256, size)
        self._artifact = _OpenArtifact(record, sha256, fresh)

    async def _take_memory(self, record: dict[str, Any]) -> None:
        root_id = await self._agent(record["tree_root_id"])
        given = ("namespace", "key", "value", "ttl_seconds")
        members = {name: record[name] for name in given if name in record}
        wanted = MemoryWrite.model_validate(
            {**members, "tree_root_id": to_wire("agt", root_id), "subject_id": self._subject_id}
        )
        author = await self._agent(record["created_by_agent_id"])
        self._new("mem", record["id"])
        written = await write_memory(self._connection, self._owner_id, wanted, author)
        kept = from_wire("mem", written.id)
        assert kept is not None, "the act made it"
        self._ids[record["id"]] = kept
        self._here.add(kept)
        await date_record(self._connection, self._owner_id, kept, _moment(record["created_at"]))

    async def _take_messages(self, record: dict[str, Any]) -> None:
        body = dumps(record["body"])
        if len(body) > BODY_BYTES_MAX:
            raise ValueError("too large")
        message = NewMessage(
            self._new("msg", record["id"]),
            await self._agent(record["tree_root_id"]),
            await self._agent(record["from_agent_id"]),
            await self._agent(record["to_agent_id"]),
            "embedder" if record["sender"]["kind"] == "embedder" else "agent",
            body.decode(),
            [self._subject_id],
            _moment(record["sent_at"]),
        )
        await insert_read_message(self._connection, self._owner_id, message)

    async def _take_prompt_history(self, record: dict[str, Any]) -> None:
        diff, reason = record["diff"], record["reason"]
        if len(diff) > 4 * TEXT_CHARS_MAX or len(reason) > TEXT_CHARS_MAX:
            raise ValueError("too large")
        _checked_text(diff, reason)
        entry = NewHistoryEntry(
            self._new("phe", record["id"]),
            await self._agent(record["agent_id"]),
            diff,
            reason,
            None,  # whoever it was, it was no key of this owner
            [self._subject_id],
            _moment(record["applied_at"]),
        )
        await insert_history_entry(self._connection, self._owner_id, entry)

    # -------------------------------------------------------------- bytes

    async def _take_bytes(self, value: dict[str, Any]) -> None:
        open_ = self._artifact
        try:
            piece = b64decode(value["base64"], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise _bad("has bytes that are damaged") from error
        if open_ is None or not open_.whole or not 0 < len(piece) <= CHUNK_BYTES:
            raise _bad("has bytes that do not belong there")
        open_.whole = len(piece) == CHUNK_BYTES  # only the last one is shorter
        open_.size += len(piece)
        open_.digest.update(piece)
        if open_.size > open_.record["size_bytes"]:
            raise _bad("has more bytes than the artifact says")
        if open_.fresh:
            await put_chunk(self._connection, self._owner_id, open_.sha256, open_.chunks, piece)
        open_.chunks += 1

    async def _close_artifact(self) -> None:
        open_, self._artifact = self._artifact, None
        if open_ is None:
            return
        record = open_.record
        known = await size_blob(self._connection, self._owner_id, open_.sha256)
        sizes = {open_.size, record["size_bytes"], known}
        if open_.digest.hexdigest() != open_.sha256 or len(sizes) != 1:
            raise _bad("has an artifact whose bytes are not those that its hash names")
        try:
            artifact = NewArtifact(
                self._new("art", record["id"]),
                await self._agent(record["created_by"]["agent_id"]),
                self._id("run", record["run_id"]),
                record["name"],
                record["mime_type"],
                open_.sha256,
                open_.size,
                metadata=_object(record["metadata"]),
                subject_id=self._subject_id,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _bad("has a record of artifacts that is damaged or beyond a limit") from error
        await insert_artifact(self._connection, self._owner_id, artifact)

    # -------------------------------------------------------------- ids

    def _id(self, prefix: IdPrefix, old: Any) -> UUID:
        """The new id of an old one, wherever it stands."""
        if not isinstance(old, str) or from_wire(prefix, old) is None:
            raise ValueError("no id")
        return self._ids.setdefault(old, new_id())

    def _new(self, prefix: IdPrefix, old: Any) -> UUID:
        """For the one record that has this id."""
        fresh = self._id(prefix, old)
        if fresh in self._here:
            raise ValueError("an id twice")
        self._here.add(fresh)
        return fresh

    async def _agent(self, old: Any) -> UUID:
        """An agent that is there; one that the bundle does not have becomes a husk."""
        agent_id = self._id("agt", old)
        if agent_id not in self._here:
            self._here.add(agent_id)
            nobody = AgentCreate(
                name=NOBODY,
                constitution=Constitution(
                    immutable_directives="", mutable_prompt="", mutable_prompt_policy="locked"
                ),
                toolset=[],
                ceilings=HUSK_CEILINGS,
                budgets=HUSK_BUDGETS,
            )
            husk = NewAgent(agent_id, agent_id, None, nobody, "archived", [], datetime.now(UTC))
            await insert_agent(self._connection, self._owner_id, husk)
        return agent_id


_PREFIX_OF: Final[dict[str, IdPrefix]] = {
    "agt": "agt",
    "run": "run",
    "art": "art",
    "mem": "mem",
    "msg": "msg",
    "phe": "phe",
}


def _read(line: bytes) -> dict[str, Any]:
    try:
        value = loads(line)
    except JsonError as error:
        raise _bad(f"has a line that is no JSON: {error.reason}") from error
    if not isinstance(value, dict):
        raise _bad("has a line that is no object")
    return value


def _moment(text: Any) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("a time without an offset")
    return moment


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _checked_text(*texts: Any) -> None:
    if any(not isinstance(text, str) or "\x00" in text for text in texts):
        raise ValueError("no text that can be kept")


def _bad(what: str) -> InvalidInput:
    return InvalidInput("bundle", what)
