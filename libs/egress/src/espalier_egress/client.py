"""The door: pages are fetched through it, and clients for one server each are made at it."""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio
import httpx2

from espalier_egress.connections import CONNECT_WAIT_S, Resolver, resolve
from espalier_egress.errors import (
    NOT_ENCRYPTED,
    REDIRECTED_TOO_OFTEN,
    EgressRefused,
    EgressTooSlow,
    EgressUnreachable,
)
from espalier_egress.policy import EgressSettings, Policy, origin_of, read_url
from espalier_egress.transport import BODY_BYTES_MAX, REDIRECTS, CheckedTransport

REDIRECTS_MAX: Final = 3
DEADLINE_S: Final = 30.0
READ_WAIT_S: Final = 300.0
"""How long a server may be silent in a stream; calls have deadlines of their own."""
SEND_WAIT_S: Final = 30.0
KEEP_S: Final = 2.0
"""Life of an idle connection, well below the 5 s after which common servers close one: of a request that
crosses with the close nobody knows whether it arrived."""

TELLS_NOTHING: Final = frozenset(("accept", "accept-language", "user-agent"))
"""The headers that may go to another origin. Any other could be a credential."""


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer, unpacked. Header names are in lower case; `url` is where it came from in the end."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str


class Egress:
    """One per process: what tells one tenant from another is not kept here, cookies and connections least."""

    def __init__(
        self, policy: Policy, resolver: Resolver, ssl_context: ssl.SSLContext, transport: CheckedTransport
    ) -> None:
        self._policy = policy
        self._resolver = resolver
        self._ssl_context = ssl_context  # reading the system's certificates takes long enough to do it once
        self._transport = transport

    async def get(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body_bytes_max: int = BODY_BYTES_MAX,
        deadline_s: float = DEADLINE_S,
    ) -> Response:
        """Fetch a whole answer within a deadline for everything. Raises EgressError.

        At most three redirects are followed, each checked like the first URL. What was encrypted stays so,
        and of the headers another origin hears only those that tell nothing.
        """
        progress = _Progress()
        with anyio.move_on_after(deadline_s):
            return await self._follow(read_url(url), dict(headers or {}), body_bytes_max, progress)
        # A filtered port must look like a closed one.
        raise EgressTooSlow if progress.connected else EgressUnreachable

    async def _follow(
        self, url: httpx2.URL, headers: dict[str, str], body_bytes_max: int, progress: "_Progress"
    ) -> Response:
        for _ in range(REDIRECTS_MAX + 1):
            progress.connected = False
            answer = await self._ask(url, headers, body_bytes_max, progress)
            if isinstance(answer, Response):
                return answer
            if url.scheme == "https" != answer.scheme:
                raise EgressRefused(NOT_ENCRYPTED)
            if origin_of(url) != origin_of(answer):
                headers = {name: headers[name] for name in headers if name.lower() in TELLS_NOTHING}
            url = answer
        raise EgressRefused(REDIRECTED_TOO_OFTEN)

    async def _ask(
        self, url: httpx2.URL, headers: dict[str, str], body_bytes_max: int, progress: "_Progress"
    ) -> Response | httpx2.URL:
        """The answer, or where it says to look instead."""
        waits = httpx2.Timeout(READ_WAIT_S, connect=CONNECT_WAIT_S).as_dict()
        request = httpx2.Request(
            "GET", url, headers=headers, extensions={"timeout": waits, "trace": progress.note}
        )
        async with aclosing(await self._transport.send(request, body_bytes_max)) as response:
            location = response.headers.get("location")
            if response.status_code in REDIRECTS and location is not None:
                return _joined(url, location)
            body = b"".join([piece async for piece in response.aiter_raw()])
        return Response(response.status_code, dict(response.headers), body, str(url.copy_with(fragment=None)))

    def checked_client(
        self, url: str, *, headers: Mapping[str, str] | None = None, body_bytes_max: int = BODY_BYTES_MAX
    ) -> httpx2.AsyncClient:
        """A client for the one server at `url`: what it sends to any other origin is refused.

        Plain http is only spoken with hosts and networks on the operator's list, because these clients carry
        credentials. Redirects are not followed by the client, and one of a POST is refused. `body_bytes_max`
        bounds each answer, a stream too. Whoever asks enters and leaves the client. Raises EgressRefused for
        a URL that can never be right; its requests raise EgressError.
        """
        only = read_url(url)
        policy = self._policy if only.scheme == "https" else self._policy.listed_only()
        transport = CheckedTransport(
            policy,
            self._resolver,
            self._ssl_context,
            keep_s=KEEP_S,
            only=only,
            body_bytes_max=body_bytes_max,
        )
        return httpx2.AsyncClient(
            transport=transport,
            headers=dict(headers or {}),
            timeout=httpx2.Timeout(SEND_WAIT_S, connect=CONNECT_WAIT_S, read=READ_WAIT_S),
            follow_redirects=False,
            max_redirects=REDIRECTS_MAX,
            trust_env=False,
        )


class _Progress:
    """Whether a request has got through to a server: what comes after is slowness, not absence."""

    def __init__(self) -> None:
        self.connected = False

    async def note(self, event: str, _: Mapping[str, Any]) -> None:
        if event == "http11.send_request_headers.started":
            self.connected = True


def _joined(url: httpx2.URL, location: str) -> httpx2.URL:
    """Where a redirect leads. Raises EgressRefused."""
    try:
        absolute = str(url.join(location))
    except (httpx2.InvalidURL, ValueError):
        absolute = location  # what cannot be joined is refused for what it is
    return read_url(absolute)


@asynccontextmanager
async def open_egress(settings: EgressSettings, *, resolver: Resolver = resolve) -> AsyncIterator[Egress]:
    """The way out of a process, for its life. A `resolver` other than the system's is for tests."""
    ssl_context = httpx2.create_ssl_context(trust_env=False)
    if settings.egress_ca_file:
        ssl_context.load_verify_locations(settings.egress_ca_file)
    policy = Policy.of(settings)
    # No connection is kept: it could be another tenant's.
    async with CheckedTransport(policy, resolver, ssl_context, keep_s=0) as transport:
        yield Egress(policy, resolver, ssl_context, transport)
