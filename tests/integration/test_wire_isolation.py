"""Two owners: what belongs to one does not exist for the other, to the byte."""

from typing import Any

import pytest
from tests.integration.wire import UNKNOWN_TAIL, Gateway, Wire, request
from tests.integration.wire_artifacts import keep_artifact

from espalier_protocol.errors import ErrorCode

pytestmark = pytest.mark.anyio

# Every method that takes an id, with what else it needs.
BY_ID: dict[str, tuple[str, dict[str, Any]]] = {
    "agent.get": ("agent_id", {}),
    "run.create": ("agent_id", {"goal": "nothing"}),
    "run.list": ("agent_id", {}),
    "run.get": ("run_id", {}),
    "run.cancel": ("run_id", {}),
    "run.continue": ("run_id", {}),
    "artifact.get": ("artifact_id", {}),
}
PREFIXES = {"agent_id": "agt", "run_id": "run", "artifact_id": "art"}


async def belongings(wire: Wire, gateway: Gateway) -> dict[str, str]:
    agent_id = await wire.agent()
    run_id = await wire.run(agent_id)
    return {
        "agent_id": agent_id,
        "run_id": run_id,
        "artifact_id": await keep_artifact(gateway.pool, run_id, b"theirs"),
    }


async def test_a_foreign_id_answers_exactly_like_an_unknown_one(wire: Wire, gateway: Gateway) -> None:
    other = await gateway.caller("two")
    foreign = await belongings(other, gateway)
    before = await gateway.rows()
    for method, (member, rest) in BY_ID.items():
        unknown = f"{PREFIXES[member]}_{UNKNOWN_TAIL}"
        about_foreign = await wire.post(request(method, {member: foreign[member], **rest}))
        about_unknown = await wire.post(request(method, {member: unknown, **rest}))
        assert about_foreign.text.replace(foreign[member], unknown) == about_unknown.text
        assert about_foreign.status_code == about_unknown.status_code == 200
        error = about_foreign.json()["error"]
        assert error["code"] == ErrorCode.tool_not_found
        assert error["data"] == {
            "symbol": "tool_not_found",
            "resource": member.removesuffix("_id"),
            "id": foreign[member],
        }
    assert await gateway.rows() == before
    assert (await other.call("run.get", run_id=foreign["run_id"]))["state"] == "running"


async def test_a_malformed_id_is_an_unknown_one(wire: Wire) -> None:
    for method, (member, rest) in BY_ID.items():
        for malformed in (
            "",
            "x",
            "agt_",
            f"xyz_{UNKNOWN_TAIL}",
            f"{PREFIXES[member]}_{'0' * 25}",
            "' or 1=1 --",
        ):
            error = await wire.refused(method, **{member: malformed, **rest})
            assert (error["code"], error["data"]["id"]) == (ErrorCode.tool_not_found, malformed)
        too_long = await wire.refused(method, **{member: "a" * 65, **rest})
        assert too_long["code"] == ErrorCode.invalid_params


async def test_foreign_runs_and_artifacts_are_404_exactly_like_unknown_ones(
    wire: Wire, gateway: Gateway
) -> None:
    other = await gateway.caller("two")
    foreign = await belongings(other, gateway)
    for member, path in (("run_id", "runs/{}/events"), ("artifact_id", "artifacts/{}/bytes")):
        unknown = f"{PREFIXES[member]}_{UNKNOWN_TAIL}"
        theirs = await wire.get("/aep/v1/" + path.format(foreign[member]))
        nobodys = await wire.get("/aep/v1/" + path.format(unknown))
        assert theirs.text.replace(foreign[member], unknown) == nobodys.text
        assert [each.status_code for each in (theirs, nobodys)] == [404, 404]
        malformed = await wire.get("/aep/v1/" + path.format("%00'"))
        assert malformed.status_code == 404


async def test_lists_hold_only_what_is_ones_own_and_take_no_foreign_cursor(
    wire: Wire, gateway: Gateway
) -> None:
    other = await gateway.caller("two")
    foreign = await belongings(other, gateway)
    mine = await wire.agent()
    assert [agent["id"] for agent in (await wire.call("agent.list"))["items"]] == [mine]
    filtered = await wire.call("agent.list", root_agent_id=foreign["agent_id"])
    assert filtered["items"] == []
    for cursor in (foreign["agent_id"], f"agt_{UNKNOWN_TAIL}", "x"):
        error = await wire.refused("agent.list", cursor=cursor)
        assert (error["code"], error["data"]["field"]) == (ErrorCode.invalid_params, "cursor")
    for cursor in (foreign["run_id"], f"run_{UNKNOWN_TAIL}", mine):
        error = await wire.refused("run.list", agent_id=mine, cursor=cursor)
        assert (error["code"], error["data"]["field"]) == (ErrorCode.invalid_params, "cursor")
