"""Ports: a taken one is a sentence before anything has been started."""

import socket

import pytest

from espalier_local.errors import LocalError
from espalier_local.ports import FREE_PORTS, free_port, require_port


def test_a_taken_port_is_refused_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(LocalError) as caught:
            require_port("127.0.0.1", port)
    assert caught.value.sentence == (
        f"Port {port} on 127.0.0.1 is taken; stop what listens there or choose another with --port."
    )


def test_a_free_port_is_given_back_and_zero_becomes_one() -> None:
    port = free_port()
    assert require_port("127.0.0.1", port) == port
    assert require_port("127.0.0.1", 0) in FREE_PORTS


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(LocalError, match=r"This machine cannot listen on 192\.0\.2\.1 port \d+: "):
        require_port("192.0.2.1", free_port())
