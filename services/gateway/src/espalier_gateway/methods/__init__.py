"""The handlers, by method. What a method takes, needs and answers stands in `espalier_protocol.methods`.

A method of that table which is missing here is not built yet and answers `capability_not_supported`.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from espalier_gateway.methods import agent, artifact, memory, message, run, session
from espalier_gateway.methods.call import Call
from espalier_protocol.shapes import Resource

Handler = Callable[[Call, Any], Awaitable[Resource]]

HANDLERS: Final[Mapping[str, Handler]] = {
    "initialize": session.initialize,
    "agent.create": agent.create,
    "agent.get": agent.get,
    "agent.list": agent.list_,
    "agent.update": agent.update,
    "agent.cancel": agent.cancel,
    "agent.archive": agent.archive,
    "run.create": run.create,
    "run.get": run.get,
    "run.list": run.list_,
    "run.cancel": run.cancel,
    "run.continue": run.continue_,
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
}
