"""`initialize`: agree on a version and capabilities, and begin a session."""

import secrets
from typing import Any

from espalier_gateway.errors import WireError
from espalier_gateway.methods.call import Call
from espalier_protocol.access import negotiate
from espalier_protocol.errors import ErrorCode
from espalier_protocol.ids import session_id
from espalier_protocol.session import InitializeParams, InitializeResult, ServerInfo
from espalier_protocol.shapes import NAME_CHARS_MAX
from espalier_protocol.versions import choose_version
from espalier_secrets import fingerprint
from espalier_store.idempotency import KEPT_S
from espalier_store.pool import transaction
from espalier_store.sessions import AepSession, insert_session

SESSION_ID_BITS = 128


async def initialize(call: Call, params: InitializeParams) -> InitializeResult:
    """The session id is a secret and answered once; only its hash is kept."""
    chosen = choose_version(params.requested_versions, call.desk.versions)
    if chosen is None:
        message = "None of the requested versions is served here."
        raise WireError(ErrorCode.version_mismatch, message, supported_versions=list(call.desk.versions))
    answers = negotiate(params.requested_capabilities, call.desk.capabilities)
    session = AepSession(chosen, frozenset(name for name, agreed in answers.items() if agreed))
    secret = session_id(secrets.randbits(SESSION_ID_BITS))
    async with transaction(call.pool) as connection:
        await insert_session(
            connection, call.owner_id, fingerprint(secret), session, _kept(params.client_info)
        )
    return InitializeResult(
        server_info=ServerInfo(name="espalier", version=call.desk.build),
        protocol_version=chosen,
        capabilities=answers,
        session_id=secret,
        session_ttl_seconds=call.desk.session_ttl_s,
        idempotency_ttl_seconds=KEPT_S,
    )


def _kept(client_info: dict[str, Any]) -> dict[str, str]:
    """Its name and version, shortened: the rest is nobody's concern and has no bound."""
    told = {name: client_info.get(name) for name in ("name", "version")}
    return {name: text[:NAME_CHARS_MAX] for name, text in told.items() if isinstance(text, str)}
