"""The names and slugs of an agent's attached servers, and what an update keeps of them."""

from typing import Any
from uuid import UUID

import pytest

from espalier_domain.errors import InvalidInput
from espalier_domain.mcp_servers import (
    SLUG_CHARS_MAX,
    KnownServer,
    PlacedServer,
    auth_place,
    placed_servers,
    slug,
)
from espalier_protocol.mcp_server import SERVERS_MAX, ExternalMcpServer

URL = "https://tools.example/mcp"


def server(name: str | None = None, url: str = URL, **more: Any) -> ExternalMcpServer:
    return ExternalMcpServer(url=url, name=name, **more)


def slugs(*servers: ExternalMcpServer, known: tuple[KnownServer, ...] = (), reserved: str = "") -> list[str]:
    return [each.slug for each in placed_servers(servers, known, set(reserved.split()))]


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("smoke-server", "smoke_server"),
        ("Git Hub (v2)", "git_hub_v2"),
        ("a.b--c__d", "a_b_c_d"),
        ("ÄÖ", ""),
        ("été", "t"),
        ("-", ""),
    ],
)
def test_a_slug_is_the_name_in_small_letters_digits_and_single_underscores(name: str, spelled: str) -> None:
    assert slug(name) == spelled


def test_a_server_without_a_name_is_called_like_its_host() -> None:
    wanted = [server(url="https://Tools.Example:8443/mcp"), server(url="http://[2001:db8::1]/mcp")]
    assert [(each.name, each.slug) for each in placed_servers(wanted, (), ())] == [
        ("tools.example", "tools_example"),
        ("2001:db8::1", "2001_db8_1"),
    ]


def test_two_servers_of_one_name_are_refused_and_so_are_two_of_one_host() -> None:
    for wanted in ([server("a"), server("b"), server("a")], [server(), server("x"), server()]):
        with pytest.raises(InvalidInput) as refused:
            placed_servers(wanted, (), ())
        assert refused.value.field == "external_mcp_servers.2.name"


def test_names_that_are_spelled_alike_get_different_slugs() -> None:
    assert slugs(server("Git Hub"), server("git-hub"), server("git_hub")) == [
        "git_hub",
        "git_hub_2",
        "git_hub_3",
    ]
    assert slugs(server("ä"), server("ö")) == ["server", "server_2"]


def test_the_slug_of_somebody_elses_server_is_never_given() -> None:
    assert slugs(server("git"), server("git 2"), reserved="git git_2") == ["git_3", "git_2_2"]


def test_a_long_slug_is_cut_and_still_unlike_the_others() -> None:
    long = [f"{'x' * 190}{number}" for number in range(SERVERS_MAX)]
    given = slugs(*map(server, long))
    assert len(set(given)) == SERVERS_MAX
    assert all(len(each) <= SLUG_CHARS_MAX for each in given)


def test_a_name_keeps_its_slug_whatever_becomes_of_the_others() -> None:
    known = (KnownServer("Git", "git", URL), KnownServer("git!", "git_2", URL))
    assert slugs(server("git!"), server("git?"), known=known) == ["git_2", "git"]
    assert slugs(server("git?"), server("git!"), server("Git"), known=known) == ["git_3", "git_2", "git"]
    assert slugs(server("git!"), known=known, reserved="git_2") == ["git_2"], "listed only afterwards"


@pytest.mark.parametrize(
    ("wanted", "keeps"),
    [
        (server("a"), True),
        (server("a", url="https://elsewhere.example/mcp"), False),
        (server("a", auth=None), False),
        (server("a", auth={}), False),
        (server("a", auth={"bearer": "t"}), False),
        (server("b"), False),
    ],
)
def test_a_credential_is_kept_only_for_the_url_that_it_was_given_for(
    wanted: ExternalMcpServer, keeps: bool
) -> None:
    (placed,) = placed_servers([wanted], [KnownServer("a", "a", URL)], ())
    assert wanted.name is not None
    assert placed == PlacedServer(wanted.name, wanted.name, wanted.url, keeps)


def test_a_credential_belongs_to_its_owner_and_its_url() -> None:
    one, other = UUID(int=1), UUID(int=2)
    places = {auth_place(one, URL), auth_place(other, URL), auth_place(one, URL + "/")}
    assert len(places) == 3
    assert auth_place(one, URL) in places
