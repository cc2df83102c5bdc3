"""The handlers, by method. What a method takes, needs and answers stands in `espalier_protocol.methods`.

Each method of that table has its handler here.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from espalier_gateway.methods import (
    agent,
    approval,
    artifact,
    memory,
    message,
    provider,
    rpc,
    run,
    session,
    subject,
)
from espalier_gateway.methods.call import Call
from espalier_protocol.shapes import Resource

Handler = Callable[[Call, Any], Awaitable[Resource]]

HANDLERS: Final[Mapping[str, Handler]] = {
    "initialize": session.initialize,
    "rpc.discover": rpc.discover,
    "agent.create": agent.create,
    "agent.get": agent.get,
    "agent.list": agent.list_,
    "agent.update": agent.update,
    "agent.cancel": agent.cancel,
    "agent.archive": agent.archive,
    "agent.approve_prompt_change": agent.approve_prompt_change,
    "run.create": run.create,
    "run.get": run.get,
    "run.list": run.list_,
    "run.cancel": run.cancel,
    "run.continue": run.continue_,
    "run.subscribe": run.subscribe,
    "run.unsubscribe": run.unsubscribe,
    "artifact.get": artifact.get,
    "artifact.list": artifact.list_,
    "artifact.delete": artifact.delete,
    "memory.write": memory.write,
    "memory.read": memory.read,
    "memory.search": memory.search,
    "memory.delete": memory.delete,
    "message.send": message.send,
    "message.inbox": message.inbox,
    "message.list": message.list_,
    "subject.read": subject.read,
    "subject.export": subject.export,
    "subject.erase": subject.erase,
    "provider.list": provider.list_,
    "approval.list": approval.list_,
    "approval.get": approval.get,
    "approval.resolve": approval.resolve_,
}
