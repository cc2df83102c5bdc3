"""Data subjects, the parameters of `subject.*`, and the REST surface beside it (AEP spec sections 10 and 12).

A subject's id is whatever the embedder calls a person: a pseudonym, because it stays when all else is erased.
Results are the union of both published dialects, so most things stand in them twice.
"""

from typing import Final, Literal

from espalier_protocol.agent import Change
from espalier_protocol.shapes import Id, JsonObject, Params, Resource, Timestamp

PORTABLE_FORMAT_VERSION: Final = "1"
PREVIEW_CHARS_MAX: Final = 200
METADATA_BYTES_MAX: Final = 64 * 1024

ErasureMode = Literal["hard_delete", "redact"]
ErasureAction = Literal["deleted", "redacted", "stripped", "retained"]


class SubjectRef(Params):
    subject_id: Id


class SubjectErase(Params):
    subject_id: Id
    mode: ErasureMode


class Subject(Resource):
    """`id` and `subject_id` are the same. `erased_at`, our extension, is when its erasure began."""

    id: str
    subject_id: str
    metadata: JsonObject
    legal_hold: bool
    created_at: Timestamp
    updated_at: Timestamp
    erased_at: Timestamp | None


class Subjects(Resource):
    """Newest first. `next_cursor` is the id to go on after, null at the end."""

    subjects: list[Subject]
    next_cursor: str | None


class SubjectCreate(Params):
    """`aepId` is the id that it gets, one of ours if it is absent. The names are published ones."""

    metadata: JsonObject = {}
    aepId: Id | None = None  # noqa: N815
    legalHold: bool = False  # noqa: N815


class SubjectChange(Params):
    """What is absent stays as it is; `metadata` is replaced as a whole."""

    metadata: Change[JsonObject] = None
    legalHold: Change[bool] = None  # noqa: N815


class SubjectEraseMode(Params):
    mode: ErasureMode = "redact"


class SubjectRecordSet(Resource):
    """Records by kind, each the wire's resource with its id again as `aepId`."""

    agents: list[JsonObject]
    runs: list[JsonObject]
    artifacts: list[JsonObject]
    memory: list[JsonObject]
    messages: list[JsonObject]
    prompt_history: list[JsonObject]


class SubjectCounts(Resource):
    """How many records there are, also those that an answer has no room for."""

    agents: int
    runs: int
    artifacts: int
    memory: int
    messages: int
    prompt_history: int


class SubjectRecords(Resource):
    """Everything tagged with the subject, the newest of each kind as far as it fits.

    `left_out` (our extension) says how many records of each kind `counts` has beyond those shown; the REST
    export has all of them.
    """

    subject_id: str
    metadata: JsonObject
    legal_hold: bool
    portable_format_version: Literal["1"]
    generated_at: Timestamp
    fetched_at: Timestamp
    exported_at: Timestamp
    counts: SubjectCounts
    left_out: SubjectCounts
    records: SubjectRecordSet
    agents: list[JsonObject]
    runs: list[JsonObject]
    artifacts: list[JsonObject]
    memory_records: list[JsonObject]
    messages: list[JsonObject]
    prompt_history: list[JsonObject]


class ErasedRecord(Resource):
    """`kind` and `resource` are the same; `id` and `aepId` are the wire id."""

    kind: str
    resource: str
    id: str
    aepId: str  # noqa: N815
    reason: str | None


class ErasureManifest(Resource):
    """What was done, by wire ids.

    `entries_left_out` (our extension) counts those beyond what an answer lists.
    """

    subject_id: str
    mode: ErasureMode
    deleted: list[ErasedRecord]
    redacted: list[ErasedRecord]
    stripped: list[ErasedRecord]
    retained: list[ErasedRecord]
    entries_left_out: int
    generated_at: Timestamp
    performed_at: Timestamp


class SubjectImported(Resource):
    """`ids` says which id of the bundle became which."""

    subject_id: str
    counts: SubjectCounts
    ids: dict[str, str]
