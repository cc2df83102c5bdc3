"""`rpc.discover`, and that what is described is what is said: a session, held against the schemas."""

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from jsonschema import Draft202012Validator
from scripted_runs import DONE, POLL_S
from tests.integration.conftest import Start
from tests.integration.wire import AGENT, Wire

from espalier_protocol.access import SUPPORTED
from espalier_protocol.methods import METHODS

pytestmark = pytest.mark.anyio

PAGES = Path(__file__).parents[2] / "docs/protocol"
WAIT_S = 40.0
REMEMBER = {"tool": "learning_memory_write", "args": {"namespace": "n", "key": "k", "value": [1]}}
KEEP = {"tool": "artifact_create", "args": {"name": "n", "content": "c"}}
PLAN = {"answers": [{"calls": [REMEMBER, KEEP, {"tool": "inbox_read", "args": {}}]}, DONE]}


async def test_discovery_answers_the_page_that_is_shipped_but_for_what_is_switched_off(wire: Wire) -> None:
    page = json.loads((PAGES / "openrpc.json").read_text())
    told = await wire.call("rpc.discover")
    served = [name for name, method in METHODS.items() if method.capability in {None, *SUPPORTED}]
    assert [each["name"] for each in told["methods"]] == served
    assert told["methods"] == [each for each in page["methods"] if each["name"] in served]
    assert told["components"]["schemas"].items() <= page["components"]["schemas"].items()
    assert told["components"]["errors"] == page["components"]["errors"]
    assert await wire.call("rpc.discover") == told


async def test_everything_that_a_session_is_told_fits_the_schemas(start: Start, wire: Wire) -> None:
    start("worker", ESPALIER_MODELS_SCRIPTED="on")
    said = Recorded(wire)
    await said.call(
        "initialize", client_info={}, requested_versions=[wire.version], requested_capabilities={}
    )
    agent_id = (await said.call("agent.create", **{**AGENT, "toolset": []}))["id"]
    await said.call("message.send", to_agent_id=agent_id, body={"hello": None})
    run = await said.call("run.create", agent_id=agent_id, goal="g", inputs={"espalier.script": PLAN})
    with anyio.fail_after(WAIT_S):
        while (await wire.call("run.get", run_id=run["id"]))["ended_at"] is None:
            await anyio.sleep(POLL_S)
    for method in ("agent.get", "message.inbox", "message.list", "run.list", "artifact.list"):
        await said.call(method, agent_id=agent_id)
    await said.call("run.get", run_id=run["id"])
    await said.call("agent.list")
    tree = {"tree_root_id": agent_id, "namespace": "n"}
    await said.call("memory.read", **tree)
    await said.call("memory.search", **tree, query="k")
    await said.call("memory.delete", **tree)
    response = await wire.get(f"/aep/v1/runs/{run['id']}/events")
    frames = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    types = said.events([json.loads(frame) for frame in frames])
    assert types >= {"run.started", "tool.called", "memory.written", "artifact.created", "run.ended"}
    assert said.faults == []


class Recorded:
    """A caller whose every word, and every answer, is held against docs/protocol/schemas.json."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._bundle = json.loads((PAGES / "schemas.json").read_text())
        self.faults: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        self._hold(method, params, self._bundle["params"][method])
        result = await self._wire.call(method, **params)
        self._hold(method, result, self._bundle["results"][method])
        return result

    def events(self, events: list[dict[str, Any]]) -> set[str]:
        for event in events:
            self._hold("event", event, self._bundle["event"])
            self._hold(event["type"], event["payload"], self._bundle["payloads"][event["type"]])
        return {event["type"] for event in events}

    def _hold(self, what: str, value: Any, schema: dict[str, Any]) -> None:
        whole = {**schema, "$defs": self._bundle["$defs"]}
        errors = Draft202012Validator(whole).iter_errors(value)
        self.faults += [f"{what}: {error.json_path} {error.message}" for error in errors]
