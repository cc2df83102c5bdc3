"""Which addresses are public, and which spellings of a host are plain. Pure.

Only global unicast counts as public. The tables are written out, because what `ipaddress` calls global
differs between versions of Python and counts some addresses in that lead back inside.
"""

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

HOST_CHARS_MAX: Final = 253
LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A last label of this kind makes resolvers read the whole name as an IPv4 address, however spelled."""

NOT_PUBLIC_4: Final = tuple(
    IPv4Network(each)
    for each in """
    0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24
    192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4
    168.63.129.16/32
    """.split()
)
"""The special-purpose registry, multicast, and the last one: a cloud's host agent at a public address."""

GLOBAL_6: Final = IPv6Network("2000::/3")
"""All of IPv6's global unicast. Loopback, mapped IPv4, NAT64, ULA, link-local and multicast lie outside."""

NOT_PUBLIC_6: Final = tuple(
    IPv6Network(each) for each in "2001::/23 2001:db8::/32 2002::/16 3ffe::/16 3fff::/20".split()
)
"""Protocol assignments with Teredo, documentation, 6to4, and what was given back."""

ISATAP: Final = (0x00005EFE, 0x02005EFE)
"""Third quarter of an IPv6 address whose last one is an IPv4 address behind a tunnel."""


def is_public(address: Address) -> bool:
    """Whether an address is global unicast and is sure not to lead back into the network that we stand in."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in NOT_PUBLIC_4)
    if address.scope_id or address not in GLOBAL_6 or any(address in each for each in NOT_PUBLIC_6):
        return False
    return (int(address) >> 32) & 0xFFFFFFFF not in ISATAP


def literal(host: str) -> Address | None:
    """The address that a host is, without brackets; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_plain(host: str) -> bool:
    """Whether a host is a name or an address that every parser and resolver reads the same way.

    Refused are zones, numbers in place of an IPv4 address (decimal, octal, hexadecimal, shortened), a dot at
    the end, escapes, and anything but lower-case letters, digits, hyphens and underscores.
    """
    if address := literal(host):
        return isinstance(address, IPv4Address) or address.scope_id is None
    labels = host.split(".")
    return (
        len(host) <= HOST_CHARS_MAX
        and all(LABEL.fullmatch(label) for label in labels)
        and not NUMBER.fullmatch(labels[-1])
    )
