"""What an embedder may rely on, as data: every requirement that this runtime answers for on its wire.

MUST: a published client, smoke or schema depends on it. SHOULD: published texts disagree or are silent, and
this is what we promise. `later` names what a requirement waits for; until then its test shows what the
runtime answers today, so that building the thing breaks the test and takes the mark away. A known gap is a
line in this list, never a skipped test.

Not here: how a requirement is shown. Each one has exactly one test, which names it with `@requirement`;
`test_the_list.py` proves that list and tests agree.
"""

from dataclasses import dataclass
from typing import Final, Literal

import pytest

Grade = Literal["MUST", "SHOULD"]
Later = Literal["auth.oauth2",]


@dataclass(frozen=True, slots=True)
class Requirement:
    """`later` is the capability that it waits for, None for what belongs to this wire."""

    id: str
    grade: Grade
    sentence: str
    later: Later | None = None


REQUIREMENTS: Final = (
    # --- the envelope
    Requirement(
        "AEP-ENVELOPE-01", "MUST", "What is not JSON is a parse_error with a null id, under HTTP 500."
    ),
    Requirement("AEP-ENVELOPE-02", "MUST", "What is no request is an invalid_request, under HTTP 500."),
    Requirement("AEP-ENVELOPE-03", "MUST", "A response repeats its request's id with the same JSON type."),
    Requirement("AEP-ENVELOPE-04", "SHOULD", "A method that nobody knows is method_not_found."),
    Requirement("AEP-ENVELOPE-05", "SHOULD", "Params without a required member are invalid_params."),
    Requirement("AEP-ENVELOPE-06", "SHOULD", "A notification is answered without a body."),
    Requirement("AEP-ENVELOPE-07", "SHOULD", "A batch is answered with an array, in the order sent."),
    # --- versions
    Requirement("AEP-VERSION-01", "MUST", "Asking for unknown versions only is a version_mismatch."),
    Requirement("AEP-VERSION-02", "MUST", "An unknown version in the header is a version_mismatch."),
    Requirement("AEP-VERSION-03", "SHOULD", "Every answer, of every endpoint, names the version it speaks."),
    # --- who is calling
    Requirement("AEP-AUTH-01", "MUST", "A token that nobody holds is authn_failed, under HTTP 500."),
    Requirement("AEP-AUTH-02", "SHOULD", "Such a token gets HTTP 401 from an event stream."),
    Requirement("AEP-AUTH-03", "SHOULD", "Such a token gets HTTP 401 from an artifact's bytes."),
    Requirement("AEP-AUTH-04", "MUST", "A key without the scope is authz_denied, an error of its own kind."),
    # --- sessions and capabilities
    Requirement("AEP-SESSION-01", "MUST", "initialize says server, version, capabilities and session."),
    Requirement("AEP-SESSION-02", "MUST", "A session id starts with ses_ and has at most 64 characters."),
    Requirement("AEP-SESSION-03", "MUST", "A session that nobody began is session_expired."),
    Requirement("AEP-SESSION-04", "SHOULD", "A call without a session is session_expired."),
    Requirement("AEP-SESSION-05", "SHOULD", "initialize works under a stale session id, which it ignores."),
    Requirement("AEP-CAPABILITY-01", "MUST", "A method without its capability is capability_not_supported."),
    Requirement("AEP-CAPABILITY-02", "SHOULD", "All nine published capabilities are answered, as booleans."),
    Requirement("AEP-CAPABILITY-03", "SHOULD", "Streaming is agreed on also when nobody asked for it."),
    # --- agents
    Requirement("AEP-AGENT-01", "MUST", "A created agent is answered as an Agent, with what was sent."),
    Requirement("AEP-AGENT-02", "MUST", "An agent that no agent made is the root of its own tree."),
    Requirement("AEP-AGENT-03", "MUST", "An agent can be read back, with its prompt history when asked."),
    Requirement("AEP-AGENT-04", "SHOULD", "An agent that does not exist is tool_not_found."),
    Requirement("AEP-AGENT-05", "MUST", "Agents are listed page by page in a published dialect."),
    Requirement("AEP-AGENT-06", "SHOULD", "Agents are listed in both published dialects at once."),
    Requirement("AEP-AGENT-07", "MUST", "An update answers the Agent, changed where it was asked to."),
    Requirement("AEP-AGENT-08", "MUST", "Widening a ceiling while a run lives is a lifecycle_conflict."),
    Requirement("AEP-AGENT-09", "SHOULD", "Shrinking a ceiling while a run lives is done."),
    Requirement("AEP-AGENT-10", "SHOULD", "Cancelling answers the Agent with ok, and ends its live runs."),
    Requirement("AEP-AGENT-11", "SHOULD", "A run for a cancelled agent is a lifecycle_conflict."),
    Requirement("AEP-AGENT-12", "SHOULD", "Archiving answers the Agent with ok, and it can still be read."),
    Requirement("AEP-AGENT-13", "SHOULD", "Directives may change before the agent's first run only."),
    # --- runs
    Requirement("AEP-RUN-01", "MUST", "A created run is answered at once as a Run that is running."),
    Requirement("AEP-RUN-02", "MUST", "A run that has nothing to wait for ends by itself."),
    Requirement("AEP-RUN-03", "MUST", "An ended run tells its end, its time and its cycles."),
    Requirement("AEP-RUN-04", "MUST", "Continuing a run that does not sleep is a lifecycle_conflict."),
    Requirement("AEP-RUN-05", "MUST", "Runs are listed page by page in a published dialect."),
    Requirement("AEP-RUN-06", "SHOULD", "Runs are listed in both published dialects at once."),
    Requirement("AEP-RUN-07", "SHOULD", "Cancelling a run answers the Run with ok, and the run ends."),
    Requirement("AEP-RUN-08", "SHOULD", "Continuing a sleeping run answers the Run with ok, and wakes it."),
    # --- the event stream
    Requirement("AEP-STREAM-01", "MUST", "Without our extensions only published event types are heard."),
    Requirement("AEP-STREAM-02", "MUST", "A run's first event is run.started, its last run.ended."),
    Requirement("AEP-STREAM-03", "MUST", "Every event has an id, its run, its type, its time and a payload."),
    Requirement("AEP-STREAM-04", "MUST", "The ids of a run's events increase and never repeat."),
    Requirement("AEP-STREAM-05", "MUST", "Cycles begin and end in turn, and none is left open."),
    Requirement("AEP-STREAM-06", "MUST", "?since= resumes right after that event: nothing lost or repeated."),
    Requirement("AEP-STREAM-07", "MUST", "A stream is text/event-stream with HTTP 200."),
    Requirement("AEP-STREAM-08", "MUST", "Frames are separated by two line feeds; there is no CR."),
    Requirement("AEP-STREAM-09", "SHOULD", "Every event's frame has its id in an id: line."),
    Requirement("AEP-STREAM-10", "SHOULD", "Last-Event-ID resumes like since."),
    Requirement("AEP-STREAM-11", "SHOULD", "The stream of an ended run ends by itself."),
    Requirement("AEP-STREAM-12", "MUST", "The stream of a run that does not exist is HTTP 404."),
    # --- artifacts
    Requirement("AEP-ARTIFACT-01", "MUST", "Artifacts are listed page by page in a published dialect."),
    Requirement("AEP-ARTIFACT-02", "SHOULD", "Artifacts are listed in both published dialects at once."),
    Requirement("AEP-ARTIFACT-03", "MUST", "An artifact can be read back as a record that says who made it."),
    Requirement("AEP-ARTIFACT-04", "MUST", "Its bytes have the size, media type and hash of the record."),
    Requirement("AEP-ARTIFACT-05", "MUST", "The bytes of an artifact that does not exist are HTTP 404."),
    Requirement("AEP-ARTIFACT-06", "SHOULD", "Deleting answers both dialects, and the artifact is gone."),
    # --- the published smokes
    Requirement("AEP-SMOKE-01", "MUST", "aep-smoke: an agent is made, given a goal, and heard to end."),
    Requirement("AEP-SMOKE-02", "MUST", "mcp-smoke: an agent keeps a server."),
    Requirement("AEP-SMOKE-03", "MUST", "gdpr-smoke: a subject is read and erased."),
    Requirement("AEP-SMOKE-04", "MUST", "byo-llm-smoke: an agent runs on an own model."),
    Requirement("AEP-SMOKE-05", "MUST", "oauth-smoke: a granted token drives a run.", "auth.oauth2"),
    # --- servers that the embedder attaches
    Requirement("AEP-MCP-01", "MUST", "An agent may have an external MCP server."),
    Requirement("AEP-MCP-02", "MUST", "A server is shown without its secret."),
    # --- memory
    Requirement("AEP-MEMORY-01", "MUST", "A write answers the record, which a read of its key answers too."),
    Requirement("AEP-MEMORY-02", "MUST", "A second write of a key keeps the id and replaces the value."),
    Requirement("AEP-MEMORY-03", "MUST", "Records are read page by page in a published dialect."),
    Requirement("AEP-MEMORY-04", "SHOULD", "A search answers records with their scores, best first."),
    Requirement("AEP-MEMORY-05", "MUST", "A tree that is not one's own is a tree_boundary_violation."),
    Requirement("AEP-MEMORY-06", "MUST", "A deletion counts what it deleted."),
    Requirement("AEP-MEMORY-07", "SHOULD", "A record is gone after its ttl_seconds."),
    Requirement("AEP-MEMORY-08", "SHOULD", "Records are read and found in both published dialects at once."),
    Requirement("AEP-MEMORY-09", "SHOULD", "An agent's write is told by memory.written, without the value."),
    # --- messages, providers, prompts
    Requirement("AEP-MESSAGE-01", "SHOULD", "An embedder may send to an agent it owns."),
    Requirement("AEP-MESSAGE-02", "MUST", "Messages are listed page by page in a published dialect."),
    Requirement("AEP-MESSAGE-03", "SHOULD", "Messages are listed in both published dialects at once."),
    Requirement(
        "AEP-MESSAGE-04", "SHOULD", "An inbox is what its agent has not read; looking reads nothing."
    ),
    Requirement("AEP-MESSAGE-05", "MUST", "A message wakes a sleeping agent, which is told and reads it."),
    Requirement("AEP-MESSAGE-06", "SHOULD", "A message into another tree is a tree_boundary_violation."),
    Requirement("AEP-PROVIDER-01", "MUST", "Providers are listed, without their keys."),
    Requirement("AEP-PROMPT-01", "SHOULD", "An unknown prompt change is not found."),
    Requirement("AEP-PROMPT-02", "MUST", "Under auto a prompt is changed, told and kept in its history."),
    Requirement("AEP-PROMPT-03", "MUST", "Under approval_required a change waits until it is approved."),
    Requirement("AEP-PROMPT-04", "MUST", "A rejected change leaves the prompt and its history."),
    Requirement("AEP-PROMPT-05", "MUST", "A locked prompt stays, and the event stream has the code."),
    Requirement("AEP-PROMPT-06", "SHOULD", "An embedder's own change of a prompt is in its history."),
    # --- sub-agents
    Requirement("AEP-SPAWN-01", "MUST", "A spawned agent is told by subagent.spawned and is of its tree."),
    Requirement("AEP-SPAWN-02", "MUST", "Spawning above the headroom is ceiling_exceeded, told by an event."),
    Requirement("AEP-SPAWN-03", "MUST", "A tool that the spawner lacks is tool_not_found, told by an event."),
    Requirement("AEP-SPAWN-04", "SHOULD", "A sub-agent's end wakes its spawner, which is told the result."),
    Requirement("AEP-SPAWN-05", "SHOULD", "A run that is cancelled takes its sub-agents' runs with it."),
    # --- data subjects
    Requirement("AEP-SUBJECT-01", "MUST", "An unknown subject is subject_not_found."),
    Requirement("AEP-SUBJECT-02", "SHOULD", "POST /api/me/subjects makes a subject."),
    Requirement("AEP-SUBJECT-03", "MUST", "A read counts and shows what is tagged."),
    Requirement("AEP-SUBJECT-04", "MUST", "An export is of portable format 1."),
    Requirement("AEP-SUBJECT-05", "SHOULD", "An export has the clients' members too."),
    Requirement("AEP-SUBJECT-06", "MUST", "A redaction lists what it did, by kind."),
    Requirement("AEP-SUBJECT-07", "SHOULD", "The manifest speaks both dialects."),
    Requirement("AEP-SUBJECT-08", "MUST", "A redacted agent has lost its name."),
    # --- OAuth
    Requirement("AEP-OAUTH-01", "MUST", "The authorization server's document is served.", "auth.oauth2"),
    Requirement("AEP-OAUTH-02", "SHOULD", "The protected resource's document is served.", "auth.oauth2"),
)

BY_ID: Final = {each.id: each for each in REQUIREMENTS}


def requirement(requirement_id: str) -> pytest.MarkDecorator:
    """What a test shows. Raises KeyError at import for an id that is not in the list."""
    return pytest.mark.requirement(BY_ID[requirement_id].id)
