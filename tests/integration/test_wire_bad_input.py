"""Bad input at the door: each kind gets its documented error, and nothing is half done."""

from typing import Any

import anyio
import httpx2
import pytest
from tests.integration.wire import AGENT, RPC, Gateway, Wire, raw_exchange, request, symbol

pytestmark = pytest.mark.anyio

LONG_INTEGER = "9" * 5_000


def create(members: str) -> bytes:
    """A request to create an agent, as text, so that it may be broken."""
    return b'{"jsonrpc":"2.0","id":1,"method":"agent.create","params":%b}' % members.encode()


def nested(depth: int) -> str:
    return '{"metadata":' * depth + "{}" + "}" * depth


NOT_JSON: dict[str, bytes] = {
    "nothing": b"",
    "blanks": b" \n ",
    "half a request": b'{"jsonrpc":"2.0","id":1,"method":"agent.list"',
    "two values": b"{}{}",
    "single quotes": b"{'jsonrpc':'2.0'}",
    "invalid UTF-8": create('{"name":"').replace(b'"}', b"") + b'\xff\xfe"}}',
    "overlong UTF-8": b'{"jsonrpc":"2.0","id":1,"method":"agent.list","params":{"cursor":"\xc0\xaf"}}',
    "UTF-16": '{"jsonrpc":"2.0","id":1,"method":"agent.list"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"jsonrpc":"2.0","id":1,"method":"agent.list"}',
    "a lone surrogate": create('{"name":"\\ud800"}'),
    "U+0000": create('{"name":"\\u0000"}'),
    "a duplicate method": b'{"jsonrpc":"2.0","id":1,"method":"agent.list","method":"run.create"}',
    "a duplicate spelled otherwise": b'{"jsonrpc":"2.0","id":1,"method":"a","\\u006dethod":"run.create"}',
    "a duplicate inside params": create('{"name":"a","name":"b"}'),
    "NaN": create('{"max_live_runs":NaN}'),
    "an endless number": create('{"max_live_runs":1e999}'),
    "an integer beyond 2^53": create('{"max_live_runs":9007199254740993}'),
    "a 5,000-digit integer": create('{"max_live_runs":' + LONG_INTEGER + "}"),
    "65 levels": create(nested(64)),
    "20,000 levels": create(nested(20_000)),
    "20,000 open brackets": b"[" * 20_000,
    "too many keys": create("{" + ",".join(f'"k{n}":1' for n in range(10_001)) + "}"),
    "a string too long": create('{"name":"%s"}' % ("a" * 600_000)),
}


async def test_what_is_not_strict_json_is_a_parse_error_without_an_id(wire: Wire, gateway: Gateway) -> None:
    before = await gateway.rows()
    told = {}
    for name, body in NOT_JSON.items():
        response = await wire.post(body)
        answer = response.json()
        told[name] = (response.status_code, symbol(answer), answer["id"])
        assert LONG_INTEGER not in response.text and "aaaaaaaa" not in response.text
    assert told == dict.fromkeys(NOT_JSON, (400, "parse_error", None))
    assert await gateway.rows() == before


# name -> (body, the id that is echoed)
NOT_REQUESTS: dict[str, tuple[Any, Any]] = {
    "a number": (7, None),
    "a text": ("agent.list", None),
    "null": (b"null", None),
    "an empty object": ({}, None),
    "another version": ({"jsonrpc": "1.0", "id": 1, "method": "agent.list"}, 1),
    "no version": ({"id": 1, "method": "agent.list"}, 1),
    "a method that is no text": ({"jsonrpc": "2.0", "id": "a", "method": 1}, "a"),
    "no method": ({"jsonrpc": "2.0", "id": 1}, 1),
    "another member": ({**request("agent.list"), "extra": 1}, 1),
    "params that are a text": ({**request("agent.list"), "params": "x"}, 1),
    "params that are null": ({**request("agent.list"), "params": None}, 1),
    "an id that is an object": ({**request("agent.list"), "id": {}}, None),
    "an id that is true": ({**request("agent.list"), "id": True}, None),
    "an id with a fraction": ({**request("agent.list"), "id": 1.5}, None),
    "an id too long": ({**request("agent.list"), "id": "a" * 200}, None),
    "an empty batch": ([], None),
    "21 requests in a batch": ([request("agent.list")] * 21, None),
}


async def test_what_is_no_request_is_invalid_and_keeps_its_id_if_that_was_readable(wire: Wire) -> None:
    told = {}
    for name, (body, _) in NOT_REQUESTS.items():
        response = await wire.post(body)
        told[name] = (response.status_code, symbol(response.json()), response.json()["id"])
    assert told == {name: (400, "invalid_request", kept) for name, (_, kept) in NOT_REQUESTS.items()}


WRONG_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "a member unknown": ({"ceilingz": {}}, "ceilingz"),
    "a member unknown inside": ({"ceilings": {**AGENT["ceilings"], "max_cyclez": 1}}, "ceilings.max_cyclez"),
    "a text for an integer": ({"ceilings": {**AGENT["ceilings"], "max_cycles": "5"}}, "ceilings.max_cycles"),
    "true for an integer": ({"ceilings": {**AGENT["ceilings"], "max_cycles": True}}, "ceilings.max_cycles"),
    "a fraction": ({"max_live_runs": 2.5}, "max_live_runs"),
    "below the least": ({"ceilings": {**AGENT["ceilings"], "max_cycles": 0}}, "ceilings.max_cycles"),
    "beyond a column": (
        {"budgets": {**AGENT["budgets"], "tokens_per_cycle": 2**40}},
        "budgets.tokens_per_cycle",
    ),
    "a number for a text": ({"name": 7}, "name"),
    "null for a text": ({"name": None}, "name"),
    "an empty name": ({"name": ""}, "name"),
    "a name too long": ({"name": "n" * 201}, "name"),
    "a text for an array": ({"toolset": "helix.web_search"}, "toolset"),
    "a number in an array": ({"toolset": [1]}, "toolset.0"),
    "an array too long": ({"toolset": ["t"] * 257}, "toolset"),
    "an array for an object": ({"metadata": []}, "metadata"),
    "a word outside of its set": (
        {"constitution": {**AGENT["constitution"], "mutable_prompt_policy": "sometimes"}},
        "constitution.mutable_prompt_policy",
    ),
}


async def test_params_that_do_not_fit_are_refused_with_the_member_that_is_wrong(
    wire: Wire, gateway: Gateway
) -> None:
    before = await gateway.rows()
    told = {}
    for name, (change, _) in WRONG_PARAMS.items():
        answer = await wire.answer("agent.create", {**AGENT, **change})
        assert answer["error"]["message"].startswith(answer["error"]["data"]["field"])
        told[name] = (symbol(answer), answer["error"]["data"]["field"])
    assert told == {name: ("invalid_params", member) for name, (_, member) in WRONG_PARAMS.items()}
    assert await gateway.rows() == before


async def test_missing_and_positional_params_are_refused(wire: Wire, gateway: Gateway) -> None:
    before = await gateway.rows()
    missing: list[Any] = [None, {}, [], [AGENT]]
    answers = [(await wire.post(request("agent.create", params))).json() for params in missing]
    assert [(symbol(each), each["error"]["data"]["field"]) for each in answers] == [
        ("invalid_params", "name"),
        ("invalid_params", "name"),
        ("invalid_params", "params"),
        ("invalid_params", "params"),
    ]
    assert await gateway.rows() == before


async def test_a_refusal_does_not_repeat_what_was_sent(wire: Wire) -> None:
    secret = "hunter2-hunter2"
    answers = [
        await wire.post(request("agent.create", {**AGENT, "name": [secret]})),
        await wire.post(
            request("agent.create", {**AGENT, "external_mcp_servers": [{"url": 1, "auth": secret}]})
        ),
        await wire.post(b'{"jsonrpc":"2.0","id":1,"method":"%b' % secret.encode()),
        await wire.post(request("agent.list"), wire.headers(Authorization=f"Bearer {secret}")),
        await wire.post(request("agent.list"), wire.headers(X_AEP_Session_Id=secret)),
    ]
    assert [symbol(each.json()) for each in answers] == [
        "invalid_params",
        "invalid_params",
        "parse_error",
        "authn_failed",
        "session_expired",
    ]
    assert not [each.text for each in answers if secret in each.text]


async def test_a_body_beyond_the_limit_is_refused_whatever_its_length_says(
    wire: Wire, gateway: Gateway
) -> None:
    limit = gateway.state.settings.body_bytes_max
    before = await gateway.rows()
    fits = create('{"name":"%s"}' % ("a" * 2_000)).ljust(limit)
    assert symbol((await wire.post(fits)).json()) == "invalid_params"

    async def trickle(size: int) -> Any:
        for _ in range(size // 65_536 + 1):
            yield b" " * 65_536

    told = []
    for content in (fits + b" ", b" " * (3 * limit), trickle(2 * limit)):
        response = await wire.http.post(
            RPC, content=content, headers={**wire.headers(), "Content-Type": "application/json"}
        )
        told.append((response.status_code, symbol(response.json()), response.json()["id"]))
    assert told == [(413, "invalid_request", None)] * 3
    assert await gateway.rows() == before


async def test_a_length_that_lies_runs_nothing(wire: Wire, gateway: Gateway) -> None:
    before = await gateway.rows()
    head = (
        f"POST {RPC} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in wire.headers().items())
    )
    body = create(str(AGENT).replace("'", '"')).decode()
    short = f"{head}Content-Length: {len(body) // 2}\r\n\r\n{body}"
    both = (
        f"{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    )
    negative = f"{head}Content-Length: -1\r\n\r\n{body}"
    statuses = [
        (await raw_exchange(gateway.address, text.encode())).split(b" ")[1]
        for text in (short, both, negative)
    ]
    assert statuses == [b"400"] * 3
    assert await gateway.rows() == before


async def test_a_connection_that_breaks_within_the_body_runs_nothing(wire: Wire, gateway: Gateway) -> None:
    before = await gateway.rows()
    head = f"POST {RPC} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
    async with await anyio.connect_tcp(*gateway.address) as stream:
        await stream.send(head.encode() + b'{"jsonrpc"')
    assert (await wire.get("/healthz")).status_code == 200
    assert await gateway.rows() == before


def health(*headers: str) -> bytes:
    lines = ["GET /healthz HTTP/1.1", "Host: x", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.slow
async def test_the_head_of_a_request_is_bounded_however_it_arrives(gateway: Gateway) -> None:
    for fits in (health(f"X: {'a' * 30_000}"), health(*["X: a"] * 98)):
        assert (await raw_exchange(gateway.address, fits)).startswith(b"HTTP/1.1 200")
    endless = b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 2_000_000
    for refused in (health(f"X: {'a' * 33_000}"), health(*["X: a"] * 99), endless):
        answer = await raw_exchange(gateway.address, refused)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


UNCLEAR_HEADS = {
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "another version": b"GET /healthz HTTP/2.0\r\nHost: a\r\n\r\n",
    "an upgrade": b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    "a body that the upgrade would turn into a request": (
        b"POST /aep/v1/rpc HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: foo\r\n"
        b"Content-Length: 36\r\n\r\n"
        b"GET /healthz HTTP/1.1\r\nHost: inner\r\n\r\n"
    ),
}


@pytest.mark.parametrize("head", UNCLEAR_HEADS.values(), ids=UNCLEAR_HEADS)
async def test_an_unclear_head_is_refused_and_nothing_behind_it_is_read(
    head: bytes, gateway: Gateway
) -> None:
    answer = await raw_exchange(gateway.address, head)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


async def test_a_head_that_does_not_come_is_not_waited_for(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espalier_gateway.server.HEAD_WAIT_S", 0.1)
    assert await raw_exchange(gateway.address, b"GET /healthz HTTP/1.1\r\nHost: x\r\n") == b""


OTHER_MEDIA: dict[str, dict[str, str]] = {
    "a form": {"Content-Type": "application/x-www-form-urlencoded"},
    "plain text": {"Content-Type": "text/plain"},
    "another charset": {"Content-Type": "application/json; charset=utf-16"},
    "nothing said": {"Content-Type": ""},
    "gzip": {"Content-Type": "application/json", "Content-Encoding": "gzip"},
}


async def test_other_media_types_and_encodings_are_refused(wire: Wire, gateway: Gateway) -> None:
    before = await gateway.rows()
    told = {}
    for name, headers in OTHER_MEDIA.items():
        response = await wire.post(request("agent.create", AGENT), {**wire.headers(), **headers})
        told[name] = (response.status_code, symbol(response.json()))
    assert told == dict.fromkeys(OTHER_MEDIA, (415, "invalid_request"))
    spelled = {
        **wire.headers(),
        "Content-Type": 'Application/JSON;charset="UTF-8"',
        "Content-Encoding": "identity",
    }
    assert (await wire.post(request("agent.list"), spelled)).status_code == 200
    assert await gateway.rows() == before


async def test_other_http_methods_and_paths_are_refused(wire: Wire) -> None:
    def told(response: httpx2.Response) -> tuple[int, str | None]:
        return response.status_code, response.headers.get("allow")

    assert [told(await wire.http.request(method, RPC)) for method in ("GET", "PUT", "DELETE")] == [
        (405, "POST")
    ] * 3
    run = f"/aep/v1/runs/{await wire.run()}/events"
    assert [told(await wire.http.request(method, run)) for method in ("POST", "HEAD")] == [(405, "GET")] * 2
    others = ("/", "/docs", "/redoc", "/openapi.json", "/aep/v1/rpc/", "/aep/v2/rpc")
    assert [(await wire.get(path)).status_code for path in others] == [404] * len(others)


async def test_every_answer_names_the_version_and_forbids_sniffing(wire: Wire, gateway: Gateway) -> None:
    answers = [
        await wire.post(request("agent.list")),
        await wire.post(b"{"),
        await wire.post(request("agent.list"), {}),
        await wire.get("/nowhere"),
        await wire.get("/healthz"),
        await wire.get("/readyz"),
        await wire.get("/aep/v1/artifacts/art_x/bytes"),
    ]
    assert {
        (
            each.headers["agent-protocol-version"],
            each.headers["x-content-type-options"],
            "server" in each.headers,
        )
        for each in answers
    } == {(wire.version, "nosniff", False)}
    no_http = (await raw_exchange(gateway.address, b"NONSENSE\r\n\r\n")).lower()
    assert b"x-content-type-options: nosniff" in no_http, "it spoke no version"
