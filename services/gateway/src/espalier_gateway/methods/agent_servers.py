"""The `external_mcp_servers` of `agent.create` and `agent.update`: credentials are sealed before all else
sees them. Whether a server is there and takes them shows when a run needs it; nobody is asked here.
"""

from collections.abc import Sequence
from uuid import UUID

from espalier_acts.agent_servers import WantedServer
from espalier_domain.mcp_servers import FIELD, auth_place
from espalier_gateway.errors import WireError
from espalier_gateway.methods.call import Call
from espalier_protocol.errors import ErrorCode
from espalier_protocol.mcp_server import ExternalMcpServer
from espalier_secrets.sealing import Sealer, SealingOff, place_of


def sealed_servers(call: Call, servers: Sequence[ExternalMcpServer]) -> list[WantedServer]:
    """Raises WireError for a credential that this runtime cannot keep."""
    sealed = []
    for number, server in enumerate(servers):
        try:
            sealed.append(WantedServer(server, _sealed_auth(call.desk.sealer, call.owner_id, server)))
        except SealingOff as off:
            code, field = ErrorCode.capability_not_supported, f"{FIELD}.{number}.auth"
            raise WireError(code, str(off), field=field) from off
    return sealed


def _sealed_auth(sealer: Sealer, owner_id: UUID, server: ExternalMcpServer) -> bytes | None:
    if server.auth is None or not server.auth.to_send():
        return None
    plain = server.auth.model_dump_json(exclude_defaults=True).encode()
    return sealer.seal(plain, place_of(*auth_place(owner_id, server.url)))
