"""What can go wrong on the way out.

EgressError
├── EgressRefused        we may not go there: scheme, spelling, host, port, address, redirect
├── EgressUnreachable    no usable answer: no such name, closed, filtered, wrong TLS, not HTTP, cut short
├── EgressTooLarge       the answer's head or body is larger than allowed
└── EgressTooSlow        the server is there and takes too long

The texts are sentences for whoever chose the address, a tenant or a model. No text holds an address, a
banner or what a resolver said: that would make of this client a map of the network that it stands in. The
causes are chained for the operator's log. They are transport errors to whoever drives an httpx2 client.
"""

from typing import Final

import httpx2


class EgressError(httpx2.TransportError):
    """The request came to nothing. The text is for whoever chose the address."""


class EgressRefused(EgressError):
    """We may not go there; nothing was sent to the refused address."""


class EgressUnreachable(EgressError):
    def __init__(self) -> None:
        super().__init__(UNREACHABLE)


class EgressTooLarge(EgressError):
    def __init__(self) -> None:
        super().__init__(TOO_LARGE)


class EgressTooSlow(EgressError):
    def __init__(self) -> None:
        super().__init__(TOO_SLOW)


UNREACHABLE: Final = "No usable answer came from that address."
TOO_LARGE: Final = "The answer is larger than what is taken."
TOO_SLOW: Final = "The answer took too long."

NOT_A_URL: Final = "That is not an absolute http or https URL in its plain spelling."
HAS_USER: Final = "A URL with a user name or a password is not allowed."
NOT_ALLOWED: Final = "That host or port is not allowed: only public hosts on the usual web ports are."
NOT_ENCRYPTED: Final = "An encrypted exchange may not go on unencrypted; the redirect was not followed."
OTHER_ORIGIN: Final = "This connection is for one server only, and that URL is not on it."
REDIRECTED: Final = "The server answered with a redirect, which is not followed here; give the final URL."
REDIRECTED_TOO_OFTEN: Final = "The server redirects too often."
