"""The whole contract in one screen: every method, its parameters and result, and what a caller needs.

The dispatcher, the scope matrix and the generated documents are driven by this table; there is no second
list of methods.
"""

from dataclasses import dataclass

from espalier_protocol import agent, approval, artifact, memory, message, provider, run, session, subject
from espalier_protocol.access import Capability, Scope
from espalier_protocol.shapes import NoParams, Params, Resource


@dataclass(frozen=True, slots=True)
class Method:
    """`capability` must be negotiated by the session, `scope` held by the key; None asks for nothing.

    A `keyed` method heeds an `Idempotency-Key`. A `duplex` one is only there on a connection on which the
    runtime may speak unasked (WebSocket).
    """

    name: str
    params: type[Params]
    result: type[Resource]
    scope: Scope | None
    capability: Capability | None = None
    keyed: bool = False
    duplex: bool = False


# One line a method, so that the table can be read as one.
# fmt: off
_TABLE = (
    Method("initialize", session.InitializeParams, session.InitializeResult, None),
    Method("rpc.discover", NoParams, session.Document, None),
    Method("agent.create", agent.AgentCreate, agent.Agent, "agent.write", keyed=True),
    Method("agent.get", agent.AgentGet, agent.AgentInFull, "agent.read"),
    Method("agent.list", agent.AgentList, agent.AgentPage, "agent.read"),
    Method("agent.update", agent.AgentUpdate, agent.Agent, "agent.write"),
    Method("agent.approve_prompt_change", agent.ApprovePromptChange, agent.PromptChangeResult,
           "agent.write", "self.modify_prompt"),
    Method("agent.cancel", agent.AgentRef, agent.AgentDone, "agent.write"),
    Method("agent.archive", agent.AgentRef, agent.AgentDone, "agent.write"),
    Method("run.create", run.RunCreate, run.Run, "run.create", keyed=True),
    Method("run.get", run.RunRef, run.Run, "run.read"),
    Method("run.list", run.RunList, run.RunPage, "run.read"),
    Method("run.cancel", run.RunRef, run.RunDone, "run.cancel"),
    Method("run.continue", run.RunRef, run.RunDone, "run.create"),
    Method("run.subscribe", run.RunSubscribe, run.RunSubscribed, "stream.subscribe", "streaming.sse",
           duplex=True),
    Method("run.unsubscribe", run.RunUnsubscribe, run.RunUnsubscribed, "stream.subscribe", "streaming.sse",
           duplex=True),
    Method("artifact.get", artifact.ArtifactRef, artifact.Artifact, "run.read"),
    Method("artifact.list", artifact.ArtifactList, artifact.ArtifactPage, "run.read"),
    Method("artifact.delete", artifact.ArtifactRef, artifact.ArtifactDeleted, "run.create"),
    Method("memory.write", memory.MemoryWrite, memory.MemoryRecord, "memory.write", "self.learning_memory"),
    Method("memory.read", memory.MemoryRead, memory.MemoryPage, "memory.read", "self.learning_memory"),
    Method("memory.search", memory.MemorySearch, memory.MemoryFound, "memory.read", "self.learning_memory"),
    Method("memory.delete", memory.MemoryDelete, memory.MemoryDeleted, "memory.write", "self.learning_memory"),
    Method("message.send", message.MessageSend, message.Message, "run.create", "messaging.peer",
           keyed=True),
    Method("message.inbox", message.MessageInbox, message.Inbox, "run.read", "messaging.peer"),
    Method("message.list", message.MessageList, message.MessagePage, "run.read", "messaging.peer"),
    Method("subject.read", subject.SubjectRef, subject.SubjectRecords, "subject.read", "compliance.gdpr"),
    Method("subject.export", subject.SubjectRef, subject.SubjectRecords, "subject.export", "compliance.gdpr"),
    Method("subject.erase", subject.SubjectErase, subject.ErasureManifest, "subject.erase", "compliance.gdpr"),
    Method("provider.list", NoParams, provider.Providers, "provider.read", "runner.byo_llm"),
    Method("approval.list", approval.ApprovalList, approval.ApprovalPage, "agent.write", "espalier.approvals"),
    Method("approval.get", approval.ApprovalRef, approval.Approval, "agent.write", "espalier.approvals"),
    Method("approval.resolve", approval.ApprovalResolve, approval.Approval, "agent.write", "espalier.approvals"),
)
# fmt: on

METHODS = {method.name: method for method in _TABLE}
