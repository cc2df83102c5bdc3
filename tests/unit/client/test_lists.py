"""Lists over as many pages as it takes, and the end of a run."""

from typing import Any

import pytest
from tests.unit.client.loopback import RUN, Loopback, events, frame, result
from tests.unit.client.test_follow import run

from espalier_client import AepClient, TransportError, every, lists
from espalier_protocol.run import RunList

pytestmark = pytest.mark.anyio

EVENTS = f"GET /aep/v1/runs/{RUN}/events"
ENDED = {**run("complete"), "ended_at": "2026-01-01T00:00:01.000Z", "result": {"final_message": "done"}}


def page(ids: list[str], cursor: str | None) -> dict[str, Any]:
    items = [{**run("running"), "id": id_} for id_ in ids]
    return {"items": items, "cursor": cursor, "runs": items, "next_cursor": cursor}


async def listed(client: AepClient) -> list[str]:
    return [each.id async for each in every(client.run_list, RunList(agent_id="agt_1", limit=2))]


async def test_every_item_is_brought_once_in_its_order(runtime: Loopback, client: AepClient) -> None:
    pages = [page(["r5", "r4"], "c1"), page(["r3", "r2"], "c2"), page(["r1"], None)]
    runtime.on("POST run.list", *map(result, pages))

    assert await listed(client) == ["r5", "r4", "r3", "r2", "r1"]

    asked = [request.message["params"] for request in runtime.asked("POST run.list")]
    assert asked == [
        {"agent_id": "agt_1", "limit": 2},
        {"agent_id": "agt_1", "limit": 2, "cursor": "c1"},
        {"agent_id": "agt_1", "limit": 2, "cursor": "c2"},
    ]


async def test_a_page_that_brings_nothing_is_the_last(runtime: Loopback, client: AepClient) -> None:
    runtime.on("POST run.list", result(page(["r1"], "c")), result(page([], "c")))

    assert await listed(client) == ["r1"]


async def test_a_list_without_end_is_an_error(
    runtime: Loopback, client: AepClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "PAGES_MAX", 3)
    runtime.on("POST run.list", result(page(["r1"], "c")))

    with pytest.raises(TransportError, match="does not end after 3 pages"):
        await listed(client)


async def test_a_page_is_asked_for_when_it_is_needed(runtime: Loopback, client: AepClient) -> None:
    runtime.on("POST run.list", result(page(["r1"], "c")))

    runs = every(client.run_list, RunList(agent_id="agt_1"))
    assert (await anext(runs)).id == "r1"
    await runs.aclose()

    assert len(runtime.asked("POST run.list")) == 1


# ---------------------------------------------------------------- the end of a run


async def test_the_result_of_a_run_is_waited_for(runtime: Loopback, client: AepClient) -> None:
    runtime.on("POST run.get", result(run("running")), result(ENDED))
    runtime.on(EVENTS, events(frame(1, "run.started"), frame(2, "run.ended", final_state="complete")))

    ended = await client.run_result(RUN)

    assert (ended.state, ended.result) == ("complete", {"final_message": "done"})
    assert len(runtime.asked(EVENTS)) == 1


async def test_of_a_run_that_has_ended_nothing_is_read_again(runtime: Loopback, client: AepClient) -> None:
    runtime.on("POST run.get", result(ENDED))

    assert (await client.run_result(RUN)).state == "complete"
    assert runtime.asked(EVENTS) == []
