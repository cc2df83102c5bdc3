"""How a connection is made: resolve, check every answer, connect to a checked address, meter what comes back.

This is httpcore2's seam for networks. The host's name goes on into the Host header and the TLS handshake;
only the connection itself is made to an address. A kept connection needs no second look: it goes where it
went. A new one is resolved anew, whatever was learned before.
"""

import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import ip_address
from typing import Any, Final, TypeAlias

import anyio
import httpcore2

from espalier_egress.addresses import Address, literal
from espalier_egress.errors import EgressTooLarge, EgressUnreachable
from espalier_egress.policy import Policy

Resolver: TypeAlias = Callable[[str], Awaitable[Sequence[Address]]]
"""Gives all addresses of a name, or raises EgressUnreachable. The outside thing that a test may bring."""

CONNECT_WAIT_S: Final = 8.0
"""For the name and all its addresses together."""
ADDRESS_WAIT_S: Final = 3.0
ADDRESSES_TRIED_MAX: Final = 4
CLOSE_WAIT_S: Final = 1.0
HEAD_BYTES_MAX: Final = 64 * 1024


async def resolve(host: str) -> Sequence[Address]:
    """What the system's resolver answers, each address once."""
    try:
        answers = await anyio.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise EgressUnreachable from error
    return list(dict.fromkeys(ip_address(where[0]) for *_, where in answers))


class CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Connects to what the policy permits. Raises EgressRefused before a byte leaves for what it does not."""

    def __init__(self, policy: Policy, resolver: Resolver) -> None:
        self._policy = policy
        self._resolver = resolver
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the seam's signature
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        assert local_address is None, "the pool is never given one"
        try:
            with anyio.fail_after(min(timeout or CONNECT_WAIT_S, CONNECT_WAIT_S)):
                addresses = await self._addresses(host)
                self._policy.check(host, port, addresses)
                return MeteredStream(await self._first(addresses, port, socket_options))
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout from error

    async def _addresses(self, host: str) -> Sequence[Address]:
        if address := literal(host):
            return [address]
        addresses = await self._resolver(host)
        if not addresses:
            raise EgressUnreachable
        return addresses

    async def _first(
        self,
        addresses: Sequence[Address],
        port: int,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None,
    ) -> httpcore2.AsyncNetworkStream:
        """The first address that takes a connection. One after the other: most names have one that works."""
        for address in addresses[:ADDRESSES_TRIED_MAX]:
            try:
                return await self._network.connect_tcp(
                    str(address), port, timeout=ADDRESS_WAIT_S, socket_options=socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        raise httpcore2.ConnectError


class MeteredStream(httpcore2.AsyncNetworkStream):
    """Counts what comes in after each request until its head is complete: endless headers, or an endless row
    of interim answers, end here. The body is counted where it is decoded."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream = stream
        self._head_bytes_left: int | None = None

    def head_is_complete(self) -> None:
        self._head_bytes_left = None

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - see above
        left = self._head_bytes_left
        if left is None:
            return await self._stream.read(max_bytes, timeout)
        if left == 0:
            raise EgressTooLarge
        chunk = await self._stream.read(min(max_bytes, left), timeout)
        self._head_bytes_left = left - len(chunk)
        return chunk

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - see above
        self._head_bytes_left = HEAD_BYTES_MAX
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - see above
    ) -> httpcore2.AsyncNetworkStream:
        try:
            return MeteredStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))
        except BaseException:
            # A deadline that ends in mid-handshake: nobody above knows of the connection yet.
            with anyio.move_on_after(CLOSE_WAIT_S, shield=True):
                await self._stream.aclose()
            raise

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
