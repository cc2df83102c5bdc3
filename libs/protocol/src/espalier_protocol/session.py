"""`initialize`: versions and capabilities are agreed, a session begins (AEP spec section 3)."""

from typing import Annotated

from pydantic import Field

from espalier_protocol.shapes import JsonObject, Params, Resource

NAMES_MAX = 64


class InitializeParams(Params):
    """`client_info` and `requested_capabilities` are open objects: unknown names are answered false."""

    client_info: JsonObject
    requested_versions: Annotated[list[str], Field(min_length=1, max_length=NAMES_MAX)]
    requested_capabilities: Annotated[dict[str, bool], Field(max_length=NAMES_MAX)]


class ServerInfo(Resource):
    name: str
    version: str


class InitializeResult(Resource):
    """`session_ttl_seconds` is the idle time after which the session expires (our extension)."""

    server_info: ServerInfo
    protocol_version: str
    capabilities: dict[str, bool]
    session_id: str
    session_ttl_seconds: int
