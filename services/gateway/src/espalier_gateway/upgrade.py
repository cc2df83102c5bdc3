"""The request that opens a WebSocket: the same header values as any call, or what a browser can send instead.

A browser's WebSocket sets no headers but offers subprotocols, so version and token may come as such: the
version's name, and `aep.bearer.` with the token. The token is never answered. Not here: whether the values
are good enough (`auth`). Above: `ws` and `server`.
"""

from dataclasses import dataclass, replace
from typing import Final

from starlette.datastructures import Headers

from espalier_domain.errors import InvalidInput
from espalier_gateway.auth import CallContext
from espalier_gateway.idempotency import FIELD
from espalier_protocol.versions import Versions, choose_version

WEBSOCKET_PATH: Final = "/aep/v1/ws"
BEARER: Final = "aep.bearer."


@dataclass(frozen=True, slots=True)
class Handshake:
    """`subprotocol` is what the answer selects: the version if it was offered, nothing otherwise."""

    context: CallContext
    subprotocol: str | None


def handshake_of(headers: Headers, context: CallContext, served: Versions) -> Handshake:
    """Raises InvalidInput for a key that could only mean every create of the connection.

    Two tokens are no token, as everywhere. A version in the header counts; without it the first one that was
    offered and is served.
    """
    if context.idempotency_key is not None:
        raise InvalidInput(FIELD, "cannot be used with a WebSocket: it names one call")
    offered = [name.strip() for each in headers.getlist("sec-websocket-protocol") for name in each.split(",")]
    tokens = [f"Bearer {name.removeprefix(BEARER)}" for name in offered if name.startswith(BEARER)]
    if context.authorization is not None:
        tokens.insert(0, context.authorization)
    version = context.version or choose_version(offered, served)
    context = replace(context, authorization=", ".join(tokens) or None, version=version)
    return Handshake(context, version if version in offered else None)
