"""The check of URLs and addresses: what is public, what the operator's list opens, and what nothing opens."""

from ipaddress import ip_address

import pytest
from pydantic import ValidationError
from tests.unit.egress.spellings import FORBIDDEN, resolved_like_libc

from espalier_egress.addresses import is_public, literal
from espalier_egress.errors import HAS_USER, NOT_A_URL, NOT_ALLOWED, EgressRefused
from espalier_egress.policy import EgressSettings, Policy, host_of, port_of, read_url

PORT = 8080
PUBLIC_4, PUBLIC_6 = "93.184.216.34", "2606:4700:4700::1111"


def policy(*allow: str, ports: tuple[int, ...] = (80, 443)) -> Policy:
    return Policy.of(EgressSettings(egress_allow=allow, egress_ports=ports))


def go(checking: Policy, url: str) -> None:
    """Everything that is checked before a connection is made."""
    read = read_url(url)
    host = host_of(read)
    address = literal(host)
    checking.check(host, port_of(read), [address] if address else resolved_like_libc(host))


def permits(checking: Policy, host: str, port: int, *addresses: str) -> bool:
    try:
        checking.check(host, port, [ip_address(each) for each in addresses])
    except EgressRefused:
        return False
    return True


def test_the_table_is_long_enough_to_mean_something() -> None:
    assert len(set(FORBIDDEN)) == len(FORBIDDEN) > 150


@pytest.mark.parametrize("url", FORBIDDEN)
def test_a_forbidden_spelling_is_refused(url: str) -> None:
    with pytest.raises(EgressRefused) as refused:
        go(policy(ports=(80, 443, PORT)), url.replace("PORT", str(PORT)))
    assert str(refused.value) in {NOT_A_URL, HAS_USER, NOT_ALLOWED}


@pytest.mark.parametrize(
    "url",
    [
        f"http://{PUBLIC_4}/",
        f"HTTPS://{PUBLIC_4}:443/a?b=c#d",
        f"http://{PUBLIC_4}:443/",
        f"http://[{PUBLIC_6}]/",
        "https://[2606:4700:4700:0:0:0:0:1111]:443",
        "http://9.255.255.255/",
        "http://11.0.0.0/",
        "http://172.15.255.255/",
        "http://172.32.0.0/",
        "http://100.63.255.255/",
        "http://100.128.0.0/",
        "http://169.253.255.255/",
        "http://223.255.255.255/",
        "http://[2001:200::1]/",
        "http://[2001:4860:4860::8888]/",
        "http://[2003::1]/",
    ],
)
def test_a_public_address_is_let_through(url: str) -> None:
    go(policy(), url)


def test_every_address_of_a_name_must_be_permitted() -> None:
    assert permits(policy(), "both.example", 443, PUBLIC_4, PUBLIC_6)
    assert not permits(policy(), "both.example", 443, PUBLIC_4, "127.0.0.1")
    assert not permits(policy(), "both.example", 443, "::1", PUBLIC_4)
    assert not permits(policy("127.0.0.0/8"), "both.example", 443, "127.0.0.1", "::1")


def test_a_listed_host_opens_that_name_on_the_usual_ports() -> None:
    opened = policy("tools.internal")
    assert permits(opened, "tools.internal", 443, "10.1.2.3")
    assert not permits(opened, "tools.internal", 8000, "10.1.2.3")
    assert not permits(opened, "sub.tools.internal", 443, "10.1.2.3")
    assert not permits(opened, "10.1.2.3", 443, "10.1.2.3")


def test_a_listed_host_with_a_port_opens_that_port_alone() -> None:
    opened = policy("Tools.Internal:8000")
    assert permits(opened, "tools.internal", 8000, "10.1.2.3")
    assert permits(opened, "tools.internal", 8000, PUBLIC_4)
    assert not permits(opened, "tools.internal", 443, "10.1.2.3")
    assert not permits(opened, "other.internal", 8000, PUBLIC_4)


@pytest.mark.parametrize(
    ("entry", "address", "port"),
    [
        ("10.1.0.0/16", "10.1.2.3", 443),
        ("10.1.0.0/16:8000", "10.1.2.3", 8000),
        ("127.0.0.1", "127.0.0.1", 80),
        ("127.0.0.1:9000", "127.0.0.1", 9000),
        ("fd00::/8", "fd12::1", 443),
        ("::1", "::1", 443),
        ("[::1]:9000", "::1", 9000),
        ("[fd00::/8]:8000", "fd12::1", 8000),
    ],
)
def test_a_listed_network_opens_its_addresses_whatever_their_names(
    entry: str, address: str, port: int
) -> None:
    assert permits(policy(entry), "any.internal", port, address)
    assert not permits(policy(entry), "any.internal", port + 1, address)
    assert not permits(policy(entry), "any.internal", port, "192.168.0.1")
    assert not permits(policy(), "any.internal", port, address)


def test_a_listed_ipv4_network_does_not_open_its_forms_in_ipv6() -> None:
    assert not permits(policy("127.0.0.0/8"), "any.internal", 443, "::ffff:127.0.0.1")


def test_usual_ports_can_be_others() -> None:
    assert permits(policy(ports=(8443,)), "a.example", 8443, PUBLIC_4)
    assert not permits(policy(ports=(8443,)), "a.example", 443, PUBLIC_4)


def test_a_policy_of_what_is_listed_lets_no_other_public_host_through() -> None:
    listed = policy("tools.example").listed_only()
    assert permits(listed, "tools.example", 80, PUBLIC_4)
    assert not permits(listed, "other.example", 80, PUBLIC_4)


def test_settings_come_from_the_environment_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_EGRESS_ALLOW", " tools.internal:8000, 10.0.0.0/8,[::1]:9000 ,")
    monkeypatch.setenv("ESPALIER_EGRESS_PORTS", "443, 8443")
    settings = EgressSettings()
    assert settings.model_dump() == {
        "egress_allow": ("tools.internal:8000", "10.0.0.0/8", "[::1]:9000"),
        "egress_ports": (443, 8443),
        "egress_ca_file": None,
    }


def test_by_default_nothing_is_listed() -> None:
    assert EgressSettings().egress_allow == ()


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        EgressSettings().egress_allow = ("localhost",)  # type: ignore[misc]


@pytest.mark.parametrize(
    "entry",
    ["http://a.example", "a.example/path", "10.1.2.3/8", "a b", "*", "*.a.example", "a:b", "a:0", "a:70000"],
)
def test_an_unreadable_entry_of_the_list_is_an_error_at_start(entry: str) -> None:
    with pytest.raises(ValidationError, match="egress_allow"):
        EgressSettings(egress_allow=(entry,))


def test_what_ipaddress_calls_global_is_not_enough() -> None:
    """Addresses that this or another version of the standard library lets through."""
    leading_back = ["64:ff9b::7f00:1", "2002:7f00:1::", "192.88.99.1", "168.63.129.16", "::ffff:8.8.8.8"]
    assert [each for each in leading_back if is_public(ip_address(each))] == []
