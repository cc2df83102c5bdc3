"""Where the way out leads: the operator's list, and the check of URLs and of resolved addresses. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Final

import httpx2
from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from espalier_egress.addresses import Address, Network, is_plain, is_public
from espalier_egress.errors import HAS_USER, NOT_A_URL, NOT_ALLOWED, EgressRefused

URL_CHARS_MAX: Final = 8192
PORT_MAX: Final = 65535
Port = Annotated[int, Field(ge=1, le=PORT_MAX)]
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
ENTRY: Final = re.compile(
    r"\[(?P<bracketed>[^\[\]]+)\](?::(?P<port6>[0-9]{1,5}))?"
    r"|(?P<plain>[^:\[\]]+)(?::(?P<port>[0-9]{1,5}))?"
    r"|(?P<bare6>[^\[\]]+)"
)


class EgressSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ESPALIER_", use_attribute_docstrings=True, frozen=True)

    egress_allow: Annotated[tuple[str, ...], NoDecode] = ()
    """Hosts and networks that may be reached although they are not public, or although the port is unusual,
    separated by commas: `host`, `host:port`, `10.1.0.0/16`, `10.1.0.0/16:8000`, `[fd00::/8]:8000`. Without a
    port, those of `ESPALIER_EGRESS_PORTS`. Plain `http` to MCP servers is only spoken with what is listed."""
    egress_ports: Annotated[tuple[Port, ...], NoDecode] = (80, 443)
    """Ports that may be reached on public hosts, separated by commas."""
    egress_ca_file: Path | None = None
    """Certificates (PEM) to trust besides those of the system."""

    @field_validator("egress_allow", "egress_ports", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        return tuple(part for each in value.split(",") if (part := each.strip()))

    @field_validator("egress_allow")
    @classmethod
    def _readable(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            read_entry(entry)
        return entries


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the operator's list: a host's name or a network, on one port or on the usual ones."""

    place: str | Network
    port: int | None

    def covers(self, host: str, address: Address) -> bool:
        return self.place == host if isinstance(self.place, str) else address in self.place


def read_entry(text: str) -> Entry:
    """Raises ValueError for what is neither a host nor a network, or has an impossible port."""
    match = ENTRY.fullmatch(text.lower())
    if match is None:
        raise ValueError(f"{text!r} is not a host, a network, or one of them with a port")
    place = match["bracketed"] or match["plain"] or match["bare6"]
    digits = match["port6"] or match["port"]
    port = int(digits) if digits else None
    if port is not None and not 0 < port <= PORT_MAX:
        raise ValueError(f"{text!r} has a port that does not exist")
    return Entry(_read_place(place), port)


def _read_place(text: str) -> str | Network:
    try:
        return ip_network(text)
    except ValueError:
        if not is_plain(text):
            raise ValueError(f"{text!r} is neither a host nor a network") from None
        return text


@dataclass(frozen=True, slots=True)
class Policy:
    """Which addresses may be connected to. Without public ports, only what the operator listed."""

    entries: tuple[Entry, ...]
    usual_ports: frozenset[int]
    public_ports: frozenset[int]

    @classmethod
    def of(cls, settings: EgressSettings) -> "Policy":
        ports = frozenset(settings.egress_ports)
        return cls(tuple(map(read_entry, settings.egress_allow)), ports, ports)

    def listed_only(self) -> "Policy":
        return replace(self, public_ports=frozenset())

    def check(self, host: str, port: int, addresses: Sequence[Address]) -> None:
        """Raises EgressRefused unless every address that a host has may be connected to.

        Every one: of a public and a private answer the next look at the name could take the private one.
        """
        if not all(self._permits(host, port, address) for address in addresses):
            raise EgressRefused(NOT_ALLOWED)

    def _permits(self, host: str, port: int, address: Address) -> bool:
        if port in self.public_ports and is_public(address):
            return True
        return any(
            entry.covers(host, address) and (port == entry.port if entry.port else port in self.usual_ports)
            for entry in self.entries
        )


def read_url(text: str) -> httpx2.URL:
    """An absolute URL that may be asked for as far as its text tells. Raises EgressRefused.

    The parser is the one that makes the request, so that there are no two readings of one text.
    """
    if len(text) > URL_CHARS_MAX:
        raise EgressRefused(NOT_A_URL)
    try:
        url = httpx2.URL(text)
    except (httpx2.InvalidURL, ValueError) as error:
        raise EgressRefused(NOT_A_URL) from error
    check_url(url)
    return url


def check_url(url: httpx2.URL) -> None:
    """Raises EgressRefused for another scheme than the two, a user, an odd host or an impossible port."""
    if url.scheme not in DEFAULT_PORTS or not is_plain(host_of(url)) or not 0 < port_of(url) <= PORT_MAX:
        raise EgressRefused(NOT_A_URL)
    if url.userinfo:
        raise EgressRefused(HAS_USER)


def host_of(url: httpx2.URL) -> str:
    """As it goes over the wire: a name in ASCII, or an address without brackets."""
    return url.raw_host.decode("ascii")


def port_of(url: httpx2.URL) -> int:
    return DEFAULT_PORTS[url.scheme] if url.port is None else url.port


def origin_of(url: httpx2.URL) -> tuple[str, str, int]:
    return url.scheme, host_of(url), port_of(url)
