"""TCP ports: whether one can be had, and one that is free. Nothing is held; the server itself binds later."""

import errno
import random
import socket

from espalier_local.errors import LocalError

LOOPBACK = "127.0.0.1"
FREE_PORTS = range(20_000, 32_000)  # below the range from which systems take ports for outgoing connections
TRIES_MAX = 200


def require_port(host: str, port: int) -> int:
    """The port, if a server could bind it now (0: a free one); otherwise one sentence why not."""
    if port == 0:
        return free_port()
    try:
        _bind(host, port)
    except OSError as err:
        raise LocalError(_sentence(host, port, err)) from err
    return port


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    for _ in range(TRIES_MAX):
        port = random.choice(FREE_PORTS)  # noqa: S311 - not a secret, only unlikely to meet another launcher's
        try:
            _bind(LOOPBACK, port)
        except OSError:
            continue
        return port
    raise LocalError(
        f"No free port was found on {LOOPBACK} between {FREE_PORTS.start} and {FREE_PORTS.stop}."
    )


def _bind(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT can be had
        probe.bind(address)


def _sentence(host: str, port: int, err: OSError) -> str:
    if err.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is taken; stop what listens there or choose another with --port."
    if err.errno == errno.EACCES:
        return f"Port {port} on {host} is reserved for root; choose one above 1023 with --port."
    return f"This machine cannot listen on {host} port {port}: {err.strerror or err}."
