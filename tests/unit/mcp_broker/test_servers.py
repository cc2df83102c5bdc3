"""The operator's list of servers: what is understood, what each mistake says, and that no secret shows."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from espalier_mcp_broker.servers import (
    CALL_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    FILE_BYTES_MAX,
    SERVERS_MAX,
    HttpServer,
    ServersInvalid,
    StdioServer,
    load_servers,
    parse_servers,
)

STDIO: dict[str, Any] = {"command": "mcp-server-git"}
HTTP: dict[str, Any] = {"url": "https://example.com/mcp"}


def mistakes_of(servers: object) -> tuple[str, ...]:
    with pytest.raises(ServersInvalid) as raised:
        parse_servers(orjson.dumps({"mcpServers": servers}))
    assert str(raised.value) == "\n".join(raised.value.mistakes)
    return raised.value.mistakes


def test_a_list_becomes_values_in_the_order_of_their_names(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    file.write_bytes(
        orjson.dumps(
            {
                "mcpServers": {
                    "Search (web)": HTTP | {"headers": {"Authorization": "Bearer s"}, "type": "http"},
                    "git": STDIO
                    | {"args": ["--repository", ""], "env": {"A": ""}, "cwd": "/", "call_timeout_s": 5},
                    "local": {"url": "http://127.0.0.1:8000/mcp?key=s", "connect_timeout_s": 0.5},
                }
            }
        )
    )
    assert load_servers(file) == (
        StdioServer(
            name="git",
            command="mcp-server-git",
            args=("--repository", ""),
            env={"A": ""},
            cwd="/",
            call_timeout_s=5.0,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        ),
        HttpServer(
            name="local",
            url="http://127.0.0.1:8000/mcp?key=s",
            call_timeout_s=CALL_TIMEOUT_S,
            connect_timeout_s=0.5,
        ),
        HttpServer(name="search_web", url="https://example.com/mcp", headers={"Authorization": "Bearer s"}),
    )


ENTRIES: list[tuple[dict[str, Any] | object, str]] = [
    (7, "mcpServers.x: must be an object."),
    ({}, "mcpServers.x: needs either a command or a url."),
    (STDIO | HTTP, "mcpServers.x: needs either a command or a url."),
    (STDIO | {"headers": {}}, "mcpServers.x.headers: is not known here."),
    (HTTP | {"args": []}, "mcpServers.x.args: is not known here."),
    (STDIO | {"type": "http"}, "mcpServers.x.type: must be stdio where there is a command."),
    (HTTP | {"type": "sse"}, "mcpServers.x.type: must be http where there is a url."),
    ({"command": ""}, "mcpServers.x.command: must not be empty."),
    ({"command": "a\0b"}, "mcpServers.x.command: must be a text without a NUL."),
    (STDIO | {"args": "-v"}, "mcpServers.x.args: must be a list of texts."),
    (STDIO | {"args": ["a", 1]}, "mcpServers.x.args[1]: must be a text without a NUL."),
    (STDIO | {"env": []}, "mcpServers.x.env: must be an object of texts."),
    (STDIO | {"env": {"A": 1}}, "mcpServers.x.env.A: must be a text without a NUL."),
    (STDIO | {"env": {"A=B": "c"}}, "mcpServers.x.env.A=B: is not a variable's name."),
    (STDIO | {"cwd": "here"}, "mcpServers.x.cwd: must be an absolute path."),
    *[
        (
            {"url": url},
            "mcpServers.x.url: must be an http or https address without user, password and fragment.",
        )
        for url in (
            "ftp://example.com",
            "file:///etc/passwd",
            "example.com",
            "http://",
            "http://user:secret@example.com",
            "http://@example.com",
            "https://example.com/#part",
            "http://example.com:99999",
            "http://[::1",
            "http://example.com/a b",
            "http://example.com/a\nb",
        )
    ],
    (HTTP | {"headers": {"A b": "c"}}, "mcpServers.x.headers.A b: is not a header's name."),
    (
        HTTP | {"headers": {"A": "b\r\nC: d"}},
        "mcpServers.x.headers.A: must be plain ASCII text in one line.",
    ),
    (HTTP | {"headers": {"A": "ä"}}, "mcpServers.x.headers.A: must be plain ASCII text in one line."),
    (HTTP | {"headers": {"Mcp-Name": "a"}}, "mcpServers.x.headers.Mcp-Name: is set by the broker itself."),
    (HTTP | {"headers": {"HOST": "a"}}, "mcpServers.x.headers.HOST: is set by the broker itself."),
    *[
        (
            STDIO | {"call_timeout_s": seconds},
            "mcpServers.x.call_timeout_s: must be a number of seconds from 0.1 to 3600.",
        )
        for seconds in (0, -1, 3601, True, "5", None)
    ],
    (
        HTTP | {"connect_timeout_s": 121},
        "mcpServers.x.connect_timeout_s: must be a number of seconds from 0.1 to 120.",
    ),
]


@pytest.mark.parametrize(("entry", "sentence"), ENTRIES)
def test_a_mistake_is_one_sentence_with_its_place(entry: object, sentence: str) -> None:
    assert mistakes_of({"x": entry}) == (sentence,)


def test_all_mistakes_are_told_at_once() -> None:
    assert mistakes_of({"a": {"command": ""}, "b": {"url": 1}}) == (
        "mcpServers.a.command: must not be empty.",
        "mcpServers.b.url: must be a text without a NUL.",
    )


def test_names_that_clash_or_say_nothing_are_refused() -> None:
    assert mistakes_of({"Git Hub": STDIO, "git-hub": STDIO, "..": STDIO, "x" * 65: STDIO}) == (
        "mcpServers.git-hub: is called git_hub like another server.",
        "mcpServers...: has a name without letters or digits.",
        f"mcpServers.{'x' * 65}: has a name of more than 64 characters.",
    )


def test_the_number_of_servers_and_the_length_of_the_file_are_bounded(tmp_path: Path) -> None:
    assert (
        len(parse_servers(orjson.dumps({"mcpServers": {f"s{n}": STDIO for n in range(SERVERS_MAX)}}))) == 64
    )
    assert mistakes_of({f"s{n}": STDIO for n in range(SERVERS_MAX + 1)}) == (
        "mcpServers: has more than 64 servers.",
    )
    file = tmp_path / "servers.json"
    file.write_bytes(b'{"mcpServers": {}}' + b" " * FILE_BYTES_MAX)
    with pytest.raises(ServersInvalid) as raised:
        load_servers(file)
    assert raised.value.mistakes == (f"the file: is longer than {FILE_BYTES_MAX} bytes.",)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "line 1, column 1: is not JSON."),
        ('{"mcpServers":\n secret}', "line 2, column 2: is not JSON."),
        ("[]", "mcpServers: must be an object of servers."),
        ('{"mcpServers": []}', "mcpServers: must be an object of servers."),
        ('{"mcpServers": {}, "servers": {}}', "servers: is not known here."),
    ],
)
def test_a_document_of_another_shape_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ServersInvalid) as raised:
        parse_servers(text)
    assert raised.value.mistakes == (sentence,)


def test_a_file_that_cannot_be_read_is_a_mistake_too(tmp_path: Path) -> None:
    with pytest.raises(ServersInvalid) as raised:
        load_servers(tmp_path / "none")
    assert raised.value.mistakes == ("the file: cannot be read (No such file or directory).",)


def test_no_secret_shows_in_a_value_or_in_a_mistake() -> None:
    servers = parse_servers(
        orjson.dumps(
            {
                "mcpServers": {
                    "a": {"command": "run-S3CRET", "args": ["--key=S3CRET"], "env": {"KEY": "S3CRET"}},
                    "b": {"url": "https://example.com/S3CRET", "headers": {"Authorization": "S3CRET"}},
                }
            }
        )
    )
    assert "S3CRET" not in repr(servers)
    wrong = {
        "a": {"url": "https://u:S3CRET@example.com", "headers": {"A": "S3CRET\n"}},
        "b": {"command": "c", "args": ["S3CRET\0"], "env": {"A": "S3CRET\0"}, "cwd": "S3CRET"},
    }
    assert "S3CRET" not in "".join(mistakes_of(wrong))
