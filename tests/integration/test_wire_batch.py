"""Batches and notifications."""

from typing import Any

import pytest
from tests.integration.wire import AGENT, Gateway, Wire, request, symbol

pytestmark = pytest.mark.anyio


def notification(method: str, params: Any) -> dict[str, Any]:
    message = request(method, params)
    del message["id"]
    return message


async def test_a_batch_is_answered_in_the_order_of_its_requests(wire: Wire) -> None:
    response = await wire.post(
        [
            request("agent.create", AGENT, "first"),
            7,
            notification("agent.create", AGENT),
            request("agent.list", {}, 3),
            request("no.such", {}, 4),
            request("agent.get", ["agt_x"], 5),
        ]
    )
    told = [(each["id"], symbol(each)) for each in response.json()]
    assert response.status_code == 200
    assert told == [
        ("first", "result"),
        (None, "invalid_request"),
        (3, "result"),
        (4, "method_not_found"),
        (5, "invalid_params"),
    ]
    listed = response.json()[2]["result"]["items"]
    assert len(listed) == 2, "each request sees what the ones before it did"


@pytest.mark.parametrize("message", [{"id": None}, {}], ids=["a null id", "no id"])
async def test_a_notification_is_carried_out_and_gets_no_answer(
    wire: Wire, gateway: Gateway, message: dict[str, Any]
) -> None:
    before = await gateway.rows()
    response = await wire.post({**notification("agent.create", AGENT), **message})
    assert (response.status_code, response.content) == (204, b"")
    assert await gateway.rows() == {**before, "agents": before["agents"] + 1}


async def test_a_notification_that_fails_gets_no_answer_either(wire: Wire, gateway: Gateway) -> None:
    before = await gateway.rows()
    failing = [
        notification("no.such", {}),
        notification("agent.create", {}),
        notification("initialize", {}),
        notification("memory.read", {}),
    ]
    answers = [await wire.post(each) for each in failing]
    answers.append(await wire.post(failing))
    answers.append(
        await wire.post(notification("agent.create", AGENT), wire.headers(Authorization="Bearer x"))
    )
    answers.append(await wire.post(notification("agent.create", AGENT), wire.headers(X_AEP_Session_Id=None)))
    assert [(each.status_code, each.content) for each in answers] == [(204, b"")] * len(answers)
    assert await gateway.rows() == before


async def test_initialize_does_not_come_in_a_batch(wire: Wire, gateway: Gateway) -> None:
    params = {"client_info": {}, "requested_versions": [wire.version], "requested_capabilities": {}}
    before = await gateway.rows()
    response = await wire.post(
        [request("initialize", params, 1), notification("initialize", params), request("agent.list", {}, 2)]
    )
    assert [(each["id"], symbol(each)) for each in response.json()] == [(1, "invalid_request"), (2, "result")]
    assert await gateway.rows() == before


async def test_an_idempotency_key_cannot_be_used_with_a_batch(wire: Wire, gateway: Gateway) -> None:
    before = await gateway.rows()
    headers = wire.headers(Idempotency_Key="k")
    answer = (await wire.post([request("agent.create", AGENT)], headers)).json()
    assert (symbol(answer), answer["id"], answer["error"]["data"]["field"]) == (
        "invalid_params",
        None,
        "Idempotency-Key",
    )
    assert await gateway.rows() == before


async def test_twenty_requests_are_a_batch_and_their_answers_come_whole(wire: Wire) -> None:
    answers = (await wire.post([request("agent.list", {}, n) for n in range(20)])).json()
    assert [each["id"] for each in answers] == list(range(20))


async def test_ids_come_back_with_their_type(wire: Wire) -> None:
    for request_id in (0, -1, 2**53 - 1, "", "1", 'ä\u2028"', "x" * 128):
        answer = (await wire.post(request("agent.list", {}, request_id))).json()
        assert answer["id"] == request_id and type(answer["id"]) is type(request_id)
