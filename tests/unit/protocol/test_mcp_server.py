"""What may be said of an MCP server that is attached, and that no mistake repeats a secret."""

from typing import Any

import pytest
from pydantic import ValidationError

from espalier_protocol.mcp_server import (
    HEADERS_MAX,
    URL_CHARS_MAX,
    ExternalMcpServer,
    McpServerAuth,
)

URL = "https://tools.example/mcp"
SECRET = "hunter2-canary"


def mistake(**members: Any) -> tuple[str, str]:
    """Where the one mistake is, and what is said of it."""
    with pytest.raises(ValidationError) as refused:
        ExternalMcpServer(**{"url": URL, **members})
    (error,) = refused.value.errors(include_input=False, include_url=False, include_context=False)
    return ".".join(map(str, error["loc"])), error["msg"]


@pytest.mark.parametrize(
    "url",
    [
        URL,
        "http://10.0.0.1/",
        "HTTPS://tools.example:8443/mcp?key=a%20b",
        "http://[::1]:1/mcp",
        "http://localhost",
    ],
)
def test_an_absolute_url_of_the_web_is_taken_wherever_it_leads(url: str) -> None:
    assert ExternalMcpServer(url=url).url == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "tools.example/mcp",
        "//tools.example/mcp",
        "ftp://tools.example/mcp",
        "file:///etc/passwd",
        "unix:/run/a.sock",
        "https://",
        "https://:443/mcp",
        "https://user@tools.example/mcp",
        f"https://user:{SECRET}@tools.example/mcp",
        "https://tools.example/mcp#part",
        "https://tools.example/mcp#",
        "https://tools.example/a b",
        "https://tools.example/\n",
        " https://tools.example/",
        "https://tools.example:0/",
        "https://tools.example:99999/",
        "https://[::1/",
        "https://tools.example/" + "x" * URL_CHARS_MAX,
    ],
)
def test_any_other_url_is_refused_without_being_repeated(url: str) -> None:
    field, told = mistake(url=url)
    assert field == "url"
    assert SECRET not in told and "example" not in told


@pytest.mark.parametrize(
    ("auth", "field"),
    [
        (SECRET, "auth"),
        ({"token": SECRET}, "auth.token"),
        ({"bearer": ""}, "auth.bearer"),
        ({"bearer": f"{SECRET} {SECRET}"}, "auth.bearer"),
        ({"bearer": f"{SECRET}\r\nX-Other: 1"}, "auth.bearer"),
        ({"bearer": SECRET + "é"}, "auth.bearer"),
        ({"bearer": SECRET * 1000}, "auth.bearer"),
        ({"bearer": 1}, "auth.bearer"),
        ({"headers": None}, "auth.headers"),
        ({"headers": {"X-Key": 1}}, "auth.headers.X-Key"),
        ({"headers": {SECRET + ":": "x"}}, "auth.headers"),
        ({"headers": {"": SECRET}}, "auth.headers"),
        ({"headers": {"X" * 129: SECRET}}, "auth.headers"),
        ({"headers": {"X-Key": ""}}, "auth.headers"),
        ({"headers": {"X-Key": f" {SECRET}"}}, "auth.headers"),
        ({"headers": {"X-Key": f"{SECRET}\nX-Other: 1"}}, "auth.headers"),
        ({"headers": {"X-Key": SECRET * 1000}}, "auth.headers"),
        ({"headers": {"X-Key": SECRET, "x-key": SECRET}}, "auth.headers"),
        ({"headers": {f"X-{n}": SECRET for n in range(HEADERS_MAX + 1)}}, "auth.headers"),
        ({"headers": {"Authorization": f"Basic {SECRET}"}, "bearer": SECRET}, "auth"),
    ],
)
def test_a_credential_of_another_shape_is_refused_without_being_repeated(auth: Any, field: str) -> None:
    where, told = mistake(auth=auth)
    assert where == field
    assert SECRET not in told


RESERVED = """
Host content-length Content-Type Transfer-Encoding connection Keep-Alive TE trailer upgrade Expect
accept Accept-Encoding mcp-session-id Mcp-Protocol-Version MCP-Anything proxy-authorization last-event-id
"""


@pytest.mark.parametrize("name", RESERVED.split())
def test_a_header_that_the_runtime_sets_itself_is_refused(name: str) -> None:
    assert mistake(auth={"headers": {name: SECRET}})[0] == "auth.headers"


def test_a_bearer_and_headers_go_out_together() -> None:
    auth = McpServerAuth(bearer=SECRET, headers={"X-Tenant": "a b"})
    assert auth.to_send() == {"authorization": f"Bearer {SECRET}", "X-Tenant": "a b"}
    assert McpServerAuth(headers={"Authorization": "Basic x"}).to_send() == {"Authorization": "Basic x"}
    assert McpServerAuth().to_send() == {}


def test_no_representation_shows_a_credential() -> None:
    server = ExternalMcpServer(url=URL, auth=McpServerAuth(bearer=SECRET, headers={"X-Key": SECRET}))
    assert SECRET not in repr(server) + str(server) + repr(server.auth)
