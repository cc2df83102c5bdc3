"""How a client gets to know a runtime: `initialize` (AEP spec section 3) and our `rpc.discover`."""

from typing import Annotated, Any

from pydantic import Field

from espalier_protocol.shapes import JsonObject, Params, Resource

NAMES_MAX = 64


class InitializeParams(Params):
    """`client_info` and `requested_capabilities` are open objects: unknown names are answered false."""

    client_info: JsonObject
    requested_versions: Annotated[list[str], Field(min_length=1, max_length=NAMES_MAX)]
    requested_capabilities: Annotated[dict[str, bool], Field(max_length=NAMES_MAX)]


class Document(Resource):
    """An OpenRPC document; its members are OpenRPC's own."""

    openrpc: str
    info: dict[str, str]
    methods: list[dict[str, Any]]
    components: dict[str, Any]


class ServerInfo(Resource):
    name: str
    version: str


class InitializeResult(Resource):
    """Our extensions: `session_ttl_seconds` is the idle time after which the session expires, and
    `idempotency_ttl_seconds` how long the first answer to a create is kept under its `Idempotency-Key`. A
    runtime that does not say it keeps none.
    """

    server_info: ServerInfo
    protocol_version: str
    capabilities: dict[str, bool]
    session_id: str
    session_ttl_seconds: int
    idempotency_ttl_seconds: int | None = None
