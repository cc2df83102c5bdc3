"""`rpc.discover`: the methods, described."""

from espalier_gateway.methods.call import Call
from espalier_protocol.openrpc import document
from espalier_protocol.session import Document
from espalier_protocol.shapes import NoParams


async def discover(call: Call, _: NoParams) -> Document:
    """Every method that this runtime offers, whatever the session has negotiated of it."""
    return document(call.session.protocol_version, call.desk.build, call.desk.capabilities)
