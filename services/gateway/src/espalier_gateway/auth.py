"""Who is calling, under which agreement, and whether that is enough: the rungs that every endpoint shares.

Answers that were found are believed for `cache_s` seconds; "no" is never remembered. A session id proves
nothing by itself: it is looked up together with the owner of the key. Above: the dispatcher and the two
endpoints that are not methods. Below: `store.keys` and `store.sessions`, which hold only hashes.
"""

import re
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar
from uuid import UUID

from espalier_gateway.errors import WireError
from espalier_gateway.rate_limits import RateLimit
from espalier_protocol.access import Capability, Scope
from espalier_protocol.errors import ErrorCode
from espalier_protocol.versions import Versions
from espalier_secrets import fingerprint
from espalier_store.keys import Caller, find_key
from espalier_store.pool import Pool, reading
from espalier_store.sessions import AepSession, find_session

REMEMBERED_MAX: Final = 10_000
TOKEN_CHARS_MAX: Final = 512
_BEARER: Final = re.compile(rf"(?i:bearer) +([A-Za-z0-9._~+/-]{{1,{TOKEN_CHARS_MAX}}}=*)")

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class CallContext:
    """The header values that matter to a call, whatever carried it.

    A repeated header is one value with commas, as HTTP reads it, and so neither a token nor a version, nor
    an idempotency key.
    """

    authorization: str | None
    version: str | None
    session_id: str | None
    idempotency_key: str | None = None


class Remembered(Generic[K, V]):
    """What was found, for a while. At most REMEMBERED_MAX entries; the oldest goes first."""

    def __init__(self, life_s: float) -> None:
        self._life_s = life_s
        self._found: dict[K, tuple[float, V]] = {}

    def get(self, key: K) -> V | None:
        until, value = self._found.get(key, (0.0, None))
        return value if time.monotonic() < until else None

    def put(self, key: K, value: V) -> None:
        if self._life_s <= 0:
            return
        self._found.pop(key, None)
        self._found[key] = (time.monotonic() + self._life_s, value)
        if len(self._found) > REMEMBERED_MAX:
            del self._found[next(iter(self._found))]


class Gatekeeper:
    """Looks up callers and sessions. One per process.

    A session has of what it negotiated only what is still `offered`: an operator may have switched it off.
    """

    def __init__(
        self,
        pool: Pool,
        rate: RateLimit,
        offered: frozenset[str],
        versions: Versions,
        *,
        session_ttl_s: float,
        cache_s: float,
    ) -> None:
        self._pool, self._offered, self.versions = pool, offered, versions
        self.rate = rate
        self._session_ttl_s = session_ttl_s
        self._callers: Remembered[bytes, Caller] = Remembered(cache_s)
        self._sessions: Remembered[tuple[UUID, bytes], AepSession] = Remembered(cache_s)

    def version(self, context: CallContext) -> str:
        """Raises -32009 unless the header names a version that is served."""
        if context.version is None:
            raise self._mismatch("This needs the header Agent-Protocol-Version.")
        if context.version not in self.versions:
            raise self._mismatch("Agent-Protocol-Version names a version that is not served here.")
        return context.version

    def _mismatch(self, message: str) -> WireError:
        return WireError(ErrorCode.version_mismatch, message, supported_versions=list(self.versions))

    async def caller(self, context: CallContext) -> Caller:
        """Raises -32000 for anything but one valid bearer token."""
        key_hash = fingerprint(_bearer_token(context.authorization))
        if (known := self._callers.get(key_hash)) is not None:
            return known
        async with reading(self._pool) as connection:
            caller = await find_key(connection, key_hash)
        if caller is None:
            raise WireError(ErrorCode.authn_failed, "The bearer token is not valid here.")
        self._callers.put(key_hash, caller)
        return caller

    def count_calls(self, caller: Caller, calls: int = 1) -> None:
        """Raises the refusal that says when to come again if the key has made too many; then none counts."""
        self.rate.take(caller.key_id, calls)

    async def session(self, context: CallContext, caller: Caller, version: str) -> AepSession:
        """Raises -32010 unless it lives and is the caller's, -32009 if it agreed on another version."""
        if context.session_id is None:
            message = "This needs the X-AEP-Session-Id that initialize answered."
            raise WireError(ErrorCode.session_expired, message, reason="missing_session")
        session = await self._find_session(caller.owner_id, fingerprint(context.session_id))
        if session.protocol_version != version:
            raise self._mismatch(f"This session agreed on {session.protocol_version}.")
        return session

    async def admit(
        self, context: CallContext, scopes: Iterable[Scope], capability: Capability | None = None
    ) -> tuple[Caller, AepSession]:
        """The same rungs in the same order, for endpoints that are not methods."""
        version = self.version(context)
        caller = await self.caller(context)
        self.count_calls(caller)
        return caller, await self._entitled(context, caller, version, scopes, capability)

    async def admit_again(
        self, context: CallContext, scopes: Iterable[Scope], capability: Capability | None = None
    ) -> None:
        """`admit` for what is open already. Our own looks at a caller's rights are no calls of the caller."""
        version = self.version(context)
        caller = await self.caller(context)
        await self._entitled(context, caller, version, scopes, capability)

    async def _entitled(
        self,
        context: CallContext,
        caller: Caller,
        version: str,
        scopes: Iterable[Scope],
        capability: Capability | None,
    ) -> AepSession:
        session = await self.session(context, caller, version)
        if capability is not None:
            require_capability(session, capability)
        for scope in scopes:
            require_scope(caller, scope)
        return session

    async def _find_session(self, owner_id: UUID, session_hash: bytes) -> AepSession:
        if (known := self._sessions.get((owner_id, session_hash))) is not None:
            return known
        async with reading(self._pool) as connection:
            session = await find_session(connection, owner_id, session_hash, self._session_ttl_s)
        if session is None:
            message = "The session has expired or is unknown; initialize again."
            raise WireError(ErrorCode.session_expired, message, reason="unknown_session")
        session = replace(session, capabilities=session.capabilities & self._offered)
        self._sessions.put((owner_id, session_hash), session)
        return session


def require_capability(session: AepSession, capability: Capability) -> None:
    if capability not in session.capabilities:
        message = f"This session has not negotiated {capability}."
        raise WireError(ErrorCode.capability_not_supported, message, capability=capability)


def require_scope(caller: Caller, scope: Scope) -> None:
    if scope not in caller.scopes:
        raise WireError(ErrorCode.authz_denied, f"The key lacks the scope {scope}.", required_scope=scope)


def _bearer_token(authorization: str | None) -> str:
    if authorization is None:
        raise WireError(ErrorCode.authn_failed, "This needs a bearer token in the header Authorization.")
    match = _BEARER.fullmatch(authorization)
    if match is None:
        raise WireError(ErrorCode.authn_failed, "Authorization should be Bearer and exactly one token.")
    return match[1]
