"""What becomes of each column when the subject of its row is erased, and of the payload of an event.

One rule for every column that could hold words about a person, as data: the store makes its statements of it,
and a test compares it with the real catalog, so that a new column without a rule fails. Records that have
another subject too are never touched by these rules; they lose the tag and nothing else. Not here: which rows
are a subject's. Above: `espalier_store.erasure`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

MARK: Final = "[REDACTED]"
MARKED: Final = {"redacted": True}
"""What stands in the place of a text, and of an open object."""


class Becomes(Enum):
    """What a column of a sole subject's row holds after `redact`. `hard_delete` leaves fewer rows."""

    MARK = auto()
    MARKED = auto()
    MARK_AND_ID = auto()  # where the place must stay unique
    EMPTY_OBJECT = auto()
    EMPTY_LIST = auto()
    NULL = auto()
    OCTETS = auto()  # a media type that says nothing
    HASH_OF_NOTHING = auto()
    BLANKED = auto()  # `blanked` says how
    DERIVED = auto()  # the database makes it of the other columns
    GONE = auto()  # the row is deleted in both modes


@dataclass(frozen=True, slots=True)
class Holds:
    """Why a column can hold no personal data, or none of a subject's; it stays."""

    reason: str


Rule = Becomes | Holds

TAG: Final = Holds("the subject's own id: a pseudonym by contract, and stripped with the tag")
FIXED: Final = Holds("one of a few fixed words")
OURS: Final = Holds("an id or a hash that the runtime made")
OWNERS: Final = Holds("the owner's own configuration, about no subject")

RULES: Final[Mapping[str, Mapping[str, Rule]]] = {
    "owners": {"name": OWNERS},
    "keys": {"key_hash": OURS, "scopes": FIXED},
    "sessions": {
        "session_hash": OURS,
        "protocol_version": FIXED,
        "capabilities": FIXED,
        "client_info": Holds("name and version of the embedder's program"),
    },
    "agents": {
        "name": Becomes.MARK,
        "immutable_directives": Becomes.MARK,
        "mutable_prompt": Becomes.MARK,
        "mutable_prompt_policy": FIXED,
        "toolset": Becomes.EMPTY_LIST,
        "ceilings": Holds("four numbers that limit a run"),
        "budgets": Holds("three numbers that limit a cycle"),
        "subject_ids": TAG,
        "prompt_subject_ids": TAG,
        "metadata": Becomes.EMPTY_OBJECT,
        "lifecycle_state": FIXED,
        "runner_model": Becomes.NULL,
    },
    "runs": {
        "goal": Becomes.MARK,
        "inputs": Becomes.EMPTY_OBJECT,
        "subject_ids": TAG,
        "state": FIXED,
        "wait_reason": FIXED,
        "result": Becomes.MARKED,
    },
    "journal": {"body": Becomes.GONE},
    "snapshots": {"body": Becomes.GONE},
    "events": {"type": FIXED, "payload": Becomes.BLANKED},
    "outbox": {"kind": FIXED},
    "tool_calls": {
        "call_id": OURS,
        "tool": Becomes.MARK,
        "args": Becomes.EMPTY_OBJECT,
        "state": FIXED,
        "result": Becomes.NULL,
    },
    "artifacts": {
        "name": Becomes.MARK,
        "mime_type": Becomes.OCTETS,
        "sha256": Becomes.HASH_OF_NOTHING,
        "subject_id": TAG,
        "metadata": Becomes.EMPTY_OBJECT,
    },
    "blobs": {"sha256": Becomes.GONE},
    "blob_chunks": {"sha256": Becomes.GONE, "bytes": Becomes.GONE},
    "memory_records": {
        "namespace": Becomes.MARK,
        "key": Becomes.MARK_AND_ID,
        "value": Becomes.MARKED,
        "subject_id": TAG,
        "words": Becomes.MARK,
        "embedding": Becomes.NULL,
        "embedding_model": Becomes.NULL,
        "search": Becomes.DERIVED,
    },
    "messages": {"sender": FIXED, "body": Becomes.MARKED, "subject_ids": TAG},
    "prompt_history": {
        "diff": Becomes.MARK,
        "reason": Becomes.MARK,
        "approved_by": OURS,
        "subject_ids": TAG,
    },
    "prompt_changes": {
        "proposal": Becomes.MARK,
        "diff": Becomes.MARK,
        "reason": Becomes.MARK,
        "subject_ids": TAG,
        "state": FIXED,
    },
    "approvals": {
        "kind": FIXED,
        "call_id": OURS,
        "resolution": FIXED,
        "comment": Becomes.NULL,
        "resolved_by": OURS,
    },
    "idempotency": {
        "method": Becomes.GONE,
        "key": Becomes.GONE,
        "params_hash": Becomes.GONE,
        "answer": Becomes.GONE,
    },
    "providers": {
        "name": OWNERS,
        "kind": FIXED,
        "base_url": OWNERS,
        "default_model": OWNERS,
        "sealed_key": OWNERS,
        "key_hint": OWNERS,
        "last_test_status": FIXED,
    },
    "provider_probes": {"state": FIXED, "outcome": FIXED, "message": OWNERS},
    "brokers": {"listed": Holds("names of the operator's servers")},
    "agent_servers": {
        "slug": Becomes.GONE,
        "name": Becomes.GONE,
        "url": Becomes.GONE,
        "sealed_auth": Becomes.GONE,
    },
    "subjects": {"id": TAG, "metadata": Becomes.EMPTY_OBJECT},
    "erasures": {"subject_id": TAG, "mode": FIXED},
    "erased_records": {"action": FIXED, "kind": FIXED, "record_id": OURS, "reason": FIXED},
    "schema_revision": {"version_num": FIXED},
}
"""By table and column. Columns of types that can hold no words (uuid, numbers, booleans, times) have none."""

KEPT_MEMBERS: Final = frozenset(
    """run_id agent_id child_agent_id child_run_id message_id from_agent_id to_agent_id artifact_id memory_id
    pending_change_id approval_id call_id final_state outcome symbol kind resolution""".split()
)
"""Texts of a payload that the runtime itself chose: ids and fixed words. Every other text is blanked."""

OPEN_MEMBERS: Final = frozenset({"args", "result"})
"""Members that hold whatever an agent put there, numbers included."""


def blanked(payload: Mapping[str, Any]) -> dict[str, Any]:
    """An event's payload with its shape and without its words. The mark comes first, so that it is found."""
    return {
        **MARKED,
        **{name: _blanked(name, value) for name, value in payload.items() if name != "redacted"},
    }


def _blanked(name: str, value: Any) -> Any:
    if name in OPEN_MEMBERS:
        return dict(MARKED) if name == "result" else {}
    match value:
        case str():
            return value if name in KEPT_MEMBERS else MARK
        case dict():
            return {member: _blanked(member, inner) for member, inner in value.items()}
        case list():
            return []
        case _:
            return value
