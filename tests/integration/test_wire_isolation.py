"""Two owners with twin data: what belongs to one does not exist for the other, to the byte.

`REQUESTS` says what an owner may ask about what is its own; `<kind>` stands for an id. Each request is sent
by the other owner too: with the foreign ids, and with ids that nobody has. Both must read the same.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
import pytest
from tests.integration.wire import AGENT, ANSWER_WAIT_S, POLL_S, Gateway, Wire, request, symbol
from tests.integration.wire_artifacts import keep_artifact
from tests.integration.wire_runs import uuid

from espalier_acts.prompts import PromptEdit, Queued, modify_prompt
from espalier_gateway.methods import HANDLERS
from espalier_gateway.settings import GatewaySettings
from espalier_protocol.errors import ErrorCode
from espalier_protocol.ids import IdPrefix, to_wire
from espalier_protocol.methods import METHODS
from espalier_protocol.shapes import ID_CHARS_MAX
from espalier_store.ids import new_id
from espalier_store.pool import transaction
from espalier_store.runs import lock_run

pytestmark = pytest.mark.anyio

TAG, SHARED_TAG = "sub_mine_{:_>21}", "sub_everybodys"
POLICY = {"mutable_prompt_policy": "approval_required"}
TWIN = {
    **AGENT,
    "name": "twin",
    "metadata": {"twin": True},
    "constitution": {**AGENT["constitution"], **POLICY},
}
CONTENT = b"equal bytes"
PROVIDERS = "/api/me/llm-providers"
SUBJECTS = "/api/me/subjects"
KINDS: dict[str, IdPrefix] = {
    "agent": "agt",
    "run": "run",
    "artifact": "art",
    "memory": "mem",
    "message": "msg",
    "subject": "sub",
    "history": "phe",
    "change": "pch",
    "approval": "apr",
    "provider": "prv",
}
# Words that a request gives to what it makes. Nothing is looked up by them.
GIVEN_WORDS = {("agent.create", "subject_ids"), ("run.create", "subject_ids"), ("memory.write", "subject_id")}


@dataclass(frozen=True)
class Rpc:
    """A call. Sent by the owner of the ids it ends as `answer` says."""

    method: str
    params: dict[str, Any]
    answer: str = "result"

    @property
    def text(self) -> str:
        return json.dumps(self.params)

    def __str__(self) -> str:
        return f"{self.method} {self.text}"

    async def send(self, wire: Wire, text: str) -> httpx2.Response:
        return await wire.post(request(self.method, json.loads(text)))

    def outcome(self, response: httpx2.Response) -> Any:
        return symbol(response.json())


@dataclass(frozen=True)
class Get:
    """A request to one of the endpoints that are no methods. Sent by the owner it answers the status."""

    path: str
    headers: dict[str, str] = field(default_factory=dict)
    verb: str = "GET"
    answer: int = 200
    body: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return self.path

    def __str__(self) -> str:
        return f"{self.verb} {self.path} {self.headers}"

    async def send(self, wire: Wire, text: str) -> httpx2.Response:
        path = text if text.startswith("/") else f"/aep/v1/{text}"
        return await wire.http.request(self.verb, path, headers=wire.headers(**self.headers), json=self.body)

    def outcome(self, response: httpx2.Response) -> Any:
        return response.status_code


# In an order in which the owner can do all of it: what ends something comes late.
REQUESTS: tuple[Rpc | Get, ...] = (
    Rpc("agent.create", {**AGENT, "runner": {"provider_id": "<provider>"}}),
    Rpc("provider.list", {}),
    Get(PROVIDERS),
    Get(f"{PROVIDERS}/<provider>"),
    Get(f"{PROVIDERS}/<provider>", verb="PATCH", body={"name": "renamed"}),
    Get(f"{PROVIDERS}/<provider>", verb="DELETE", answer=409),
    Rpc("agent.get", {"agent_id": "<agent>", "include": ["prompt_history"]}),
    Rpc("agent.get", {"agent_id": "<agent>", "prompt_history_cursor": "<history>"}),
    Rpc("agent.list", {}),
    Rpc("agent.list", {"cursor": "<agent>"}),
    Rpc("agent.list", {"root_agent_id": "<agent>"}),
    Rpc("agent.list", {"parent_agent_id": "<agent>"}),
    Rpc("agent.list", {"subject_id": "<subject>"}),
    Rpc("agent.list", {"subject_id": SHARED_TAG}),
    Rpc("agent.list", {"cursor": "<agent>", "root_agent_id": "<agent>", "subject_id": "<subject>"}),
    Rpc("agent.update", {"agent_id": "<agent>", "name": "renamed"}),
    Rpc("agent.update", {"agent_id": "<agent>", "ceilings": {"max_wall_seconds": 1}, "metadata": {}}),
    Rpc("agent.update", {"agent_id": "<agent>", "runner": {"provider_id": "<provider>"}}),
    Rpc("run.create", {"agent_id": "<agent>", "goal": "nothing"}),
    Rpc("run.list", {"agent_id": "<agent>"}),
    Rpc("run.list", {"agent_id": "<agent>", "cursor": "<run>"}),
    Rpc("run.get", {"run_id": "<run>"}),
    Rpc("artifact.get", {"artifact_id": "<artifact>"}),
    Rpc("artifact.list", {}),
    Rpc("artifact.list", {"cursor": "<artifact>"}),
    Rpc("artifact.list", {"run_id": "<run>"}),
    Rpc("artifact.list", {"agent_id": "<agent>"}),
    Rpc("artifact.list", {"subject_id": "<subject>"}),
    Rpc("artifact.list", {"subject_id": SHARED_TAG}),
    Rpc(
        "artifact.list",
        {"run_id": "<run>", "agent_id": "<agent>", "subject_id": "<subject>", "cursor": "<artifact>"},
    ),
    Get("artifacts/<artifact>/bytes"),
    Get("artifacts/<artifact>/bytes", verb="HEAD"),
    Get("artifacts/<artifact>/bytes", {"Range": "bytes=0-3"}, answer=206),
    Rpc("memory.write", {"tree_root_id": "<agent>", "namespace": "n", "key": "k", "value": "new"}),
    Rpc("memory.read", {"tree_root_id": "<agent>", "namespace": "n"}),
    Rpc("memory.read", {"tree_root_id": "<agent>", "namespace": "n", "key": "k"}),
    Rpc("memory.read", {"tree_root_id": "<agent>", "namespace": "n", "cursor": "<memory>"}),
    Rpc("memory.search", {"tree_root_id": "<agent>", "namespace": "n", "query": "the same"}),
    Rpc("message.send", {"to_agent_id": "<agent>", "body": "hello"}),
    Rpc("message.send", {"to_agent_id": "<agent>", "body": "hello", "tree_root_id": "<agent>"}),
    Rpc("message.inbox", {"agent_id": "<agent>"}),
    Rpc("message.list", {}),
    Rpc("message.list", {"cursor": "<message>"}),
    Rpc("message.list", {"agent_id": "<agent>"}),
    Rpc("message.list", {"tree_root_id": "<agent>"}),
    Rpc("message.list", {"agent_id": "<agent>", "tree_root_id": "<agent>", "cursor": "<message>"}),
    Rpc("run.continue", {"run_id": "<run>"}),
    Rpc("run.cancel", {"run_id": "<run>"}),
    Get("runs/<run>/events"),
    Get("runs/<run>/events?since=1"),
    Get("runs/<run>/events?since=999", answer=400),
    Get("runs/<run>/events", {"Last-Event-ID": f"{1:016d}"}),
    Get("runs/<run>/events?since=0", {"Last-Event-ID": "2"}, answer=204),
    Rpc("agent.update", {"agent_id": "<agent>", "constitution": {"mutable_prompt": "another"}}),
    Rpc("agent.get", {"agent_id": "<agent>", "include": ["prompt_history", "pending_prompt_changes"]}),
    Rpc(
        "agent.approve_prompt_change",
        {"agent_id": "<agent>", "pending_change_id": "<change>", "approve": False},
    ),
    Rpc("approval.list", {}),
    Rpc("approval.list", {"agent_id": "<agent>", "cursor": "<approval>", "state": "all"}),
    Rpc("approval.get", {"approval_id": "<approval>"}),
    Rpc("approval.resolve", {"approval_id": "<approval>", "resolution": "deny"}, "lifecycle_conflict"),
    Rpc("memory.delete", {"id": "<memory>", "tree_root_id": "<agent>", "subject_id": SHARED_TAG}),
    Rpc("memory.delete", {"id": "<memory>"}),
    Rpc("memory.delete", {"tree_root_id": "<agent>", "namespace": "n", "subject_id": "<subject>"}),
    Rpc("memory.delete", {"tree_root_id": "<agent>"}),
    Rpc("artifact.delete", {"artifact_id": "<artifact>"}),
    Rpc("agent.cancel", {"agent_id": "<agent>"}),
    Rpc("agent.archive", {"agent_id": "<agent>"}),
    Get(f"{SUBJECTS}/<subject>"),
    Get(f"{SUBJECTS}/<subject>", verb="PATCH", body={"metadata": {"a": 1}}),
    Get(f"{SUBJECTS}/<subject>/export"),
    Rpc("subject.read", {"subject_id": "<subject>"}),
    Rpc("subject.export", {"subject_id": "<subject>"}),
    Rpc("subject.erase", {"subject_id": "<subject>", "mode": "redact"}),
)


@dataclass(frozen=True)
class Twin:
    """An owner, and what it has, by kind."""

    wire: Wire
    ids: dict[str, str]


@pytest.fixture
def gateway_settings(gateway_settings: GatewaySettings) -> GatewaySettings:
    """Patient with callers that ask as much as these tests do."""
    return gateway_settings.model_copy(update={"rpc_burst": 10_000})


@pytest.fixture
async def twins(gateway: Gateway) -> tuple[Twin, Twin]:
    """Two owners who did the same, one after the other; all that tells them apart is ids, times and a tag."""
    made = []
    for owner in ("one", "two"):
        wire, tag = await gateway.caller(owner), TAG.format(owner)
        agent_id = await wire.agent(**{**TWIN, "subject_ids": [tag, SHARED_TAG]})
        await wire.call("agent.update", agent_id=agent_id, constitution={"mutable_prompt": "the same"})
        run_id = await wire.run(agent_id, goal="the same")
        artifact_id = await keep_artifact(gateway.pool, run_id, CONTENT, subject_id=tag)
        await keep_artifact(gateway.pool, run_id, CONTENT, subject_id=SHARED_TAG)
        message = await wire.call("message.send", to_agent_id=agent_id, body="the same")
        mine = {"agent": agent_id, "run": run_id, "artifact": artifact_id, "subject": tag}
        mine["message"] = message["id"]
        shelf = {"tree_root_id": agent_id, "namespace": "n", "value": "the same"}
        mine["memory"] = (await wire.call("memory.write", key="k", **shelf))["id"]
        for subject in (tag, SHARED_TAG):
            await wire.call("memory.write", key=f"of {subject[:8]}", subject_id=subject, **shelf)
        await propose_a_prompt(gateway, run_id)
        include = ["prompt_history", "pending_prompt_changes"]
        agent = await wire.call("agent.get", agent_id=agent_id, include=include)
        (entry,), (change,) = agent["prompt_history"], agent["pending_prompt_changes"]
        mine |= {"history": entry["id"], "change": change["id"], "approval": change["approval_id"]}
        mine["provider"] = (await provider_of(wire))["id"]
        made.append(Twin(wire, mine))
    await gateway.pool.execute(
        "update runs set state = 'sleeping', wait_reason = 'timer', due_at = now() + interval '1 minute'"
    )
    return made[0], made[1]


async def propose_a_prompt(gateway: Gateway, run_id: str) -> None:
    """As a call of `modify_own_prompt` would have."""
    owner_id = await gateway.pool.fetchval("select owner_id from runs where id = $1", uuid("run", run_id))
    async with transaction(gateway.pool) as connection:
        run = await lock_run(connection, owner_id, uuid("run", run_id))
        assert run is not None
        edit = PromptEdit("replace", "another", "the same")
        assert isinstance(await modify_prompt(connection, run, edit, cycle=1), Queued)


async def provider_of(wire: Wire) -> dict[str, Any]:
    given = {"name": "the same", "kind": "anthropic", "api_key": "the-same-key", "default_model": "m"}
    provider: dict[str, Any] = (await wire.http.post(PROVIDERS, json=given, headers=wire.headers())).json()
    return provider


def nobodys(*kinds: str) -> dict[str, str]:
    """Ids as we give them out that nobody has."""
    return {kind: to_wire(KINDS[kind], new_id()) for kind in kinds or KINDS}


TOKEN = re.compile(rf"<({'|'.join(KINDS)})>")


def swaps(text: str) -> Iterator[set[int]]:
    """Which ids of a request to swap: each one alone, and all of them."""
    places = range(len(TOKEN.findall(text)))
    yield from ({place} for place in places)
    if len(places) > 1:
        yield set(places)


def filled(text: str, own: dict[str, str], other: dict[str, str], swapped: set[int]) -> str:
    """The request with the ids of `own`, but those of `other` at the places that are swapped."""
    place = iter(range(len(text)))
    return TOKEN.sub(lambda found: (other if next(place) in swapped else own)[found[1]], text)


def told(response: httpx2.Response, renamed: dict[str, str]) -> tuple[int, dict[str, str], str]:
    """All of an answer but its date, with ids renamed."""
    headers = {name: value for name, value in response.headers.items() if name != "date"}
    return response.status_code, headers, replaced(response.text, renamed)


def replaced(text: str, renamed: dict[str, str]) -> str:
    for name, other in renamed.items():
        text = text.replace(name, other)
    return text


async def contents(gateway: Gateway) -> dict[str, str]:
    """Every row of every table, once the outbox is empty; but not when a key or session was last seen."""
    tables = await gateway.pool.fetch("select tablename from pg_tables where schemaname = 'public'")
    with anyio.fail_after(ANSWER_WAIT_S):
        while await gateway.pool.fetchval("select count(*) from outbox"):
            await anyio.sleep(POLL_S)
    row = "(to_jsonb(t) - 'last_seen_at')::text"
    digest = f"select md5(string_agg({row}, ' ' order by {row})) from {{}} t"
    return {name: await gateway.pool.fetchval(digest.format(name)) for (name,) in tables}


async def test_a_request_of_the_other_owner_answers_like_one_about_ids_that_nobody_has(
    twins: tuple[Twin, Twin], gateway: Gateway
) -> None:
    before = await contents(gateway)
    assert len(before) > 10
    sent = 0
    for asked in REQUESTS:
        for asker, owner in (twins, twins[::-1]):
            for swapped in swaps(asked.text):
                random = nobodys()
                foreign_ids = filled(asked.text, asker.ids, owner.ids, swapped)
                random_ids = filled(asked.text, asker.ids, random, swapped)
                about_foreign = await asked.send(asker.wire, foreign_ids)
                about_nobodys = await asked.send(asker.wire, random_ids)
                renamed = {owner.ids[kind]: random[kind] for kind in KINDS}
                assert told(about_foreign, renamed) == told(about_nobodys, {}), (str(asked), swapped)
                sent += 2
    assert sent > 100
    assert await contents(gateway) == before


async def test_each_owner_can_ask_all_of_it_about_what_is_its_own_and_gets_the_same(
    twins: tuple[Twin, Twin],
) -> None:
    """So the requests above were good ones; and neither answer holds anything of the other owner's."""
    one, two = twins
    neutral = [{twin.ids[kind]: f"<{kind}>" for kind in KINDS if kind != "provider"} for twin in twins]
    for asked in REQUESTS:
        answers = [await asked.send(twin.wire, filled(asked.text, twin.ids, {}, set())) for twin in twins]
        assert [asked.outcome(answer) for answer in answers] == [asked.answer] * 2, str(asked)
        for answer, stranger in zip(answers, (two, one), strict=True):
            whole = f"{answer.text} {answer.headers}"
            assert not [id_ for id_ in stranger.ids.values() if id_ in whole], str(asked)
        shapes = [
            timeless(replaced(answer.text, names)) for answer, names in zip(answers, neutral, strict=True)
        ]
        assert shapes[0] == shapes[1], str(asked)


def timeless(text: str) -> str:
    """Without times and without ids that have no name."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "<time>", text)
    return re.sub(r"[a-z]{3}_[0-9A-Z]{26}", "<other>", text)


def id_paths(schema: dict[str, Any], definitions: dict[str, Any], path: str = "") -> Iterator[str]:
    """The members of params that hold an id, also inside fixed objects and arrays."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if schema.get("type") == "string" and schema.get("maxLength") == ID_CHARS_MAX:
        yield path.removeprefix(".")
    for choice in schema.get("anyOf", ()):
        yield from id_paths(choice, definitions, path)
    if isinstance(schema.get("items"), dict):
        yield from id_paths(schema["items"], definitions, path)
    for name, member in schema.get("properties", {}).items():
        yield from id_paths(member, definitions, f"{path}.{name}")


def ids_of(method: str) -> set[str]:
    schema = METHODS[method].params.model_json_schema()
    return set(id_paths(schema, schema.get("$defs", {})))


def asked_paths(value: Any, path: str = "") -> Iterator[str]:
    """The members of a request that hold the id of something."""
    if isinstance(value, dict):
        for name, member in value.items():
            yield from asked_paths(member, f"{path}.{name}")
    elif isinstance(value, str) and TOKEN.fullmatch(value):
        yield path.removeprefix(".")


def test_every_id_that_a_method_takes_is_asked_about() -> None:
    over_http = [name for name in HANDLERS if not METHODS[name].duplex]  # else `test_subscriptions.py`
    taken = {(name, path) for name in over_http for path in ids_of(name)} - GIVEN_WORDS
    asked = {
        (each.method, path) for each in REQUESTS if isinstance(each, Rpc) for path in asked_paths(each.params)
    }
    assert asked == taken
    assert len(taken) > 20


NOT_BY_AGENT = ("artifact.list", "message.list", "approval.list", "agent.approve_prompt_change")


async def test_an_unknown_or_malformed_id_is_named_as_it_was_sent(wire: Wire) -> None:
    """Of a thing, not of a filter: those find nothing, and a cursor has its own error."""
    for method, member in (
        (each.method, member)
        for each in REQUESTS
        if isinstance(each, Rpc) and each.answer == "result"
        for member in ("agent_id", "run_id", "artifact_id")
        if member in each.params and each.method not in NOT_BY_AGENT
    ):
        rest = {"goal": "nothing"} if method == "run.create" else {}
        for unknown in (*nobodys().values(), "", "x", "agt_", f"agt_{'0' * 25}", "' or 1=1 --"):
            error = await wire.refused(method, **{member: unknown, **rest})
            assert (error["code"], error["data"]) == (
                ErrorCode.tool_not_found,
                {"symbol": "tool_not_found", "resource": member.removesuffix("_id"), "id": unknown},
            )
        too_long = await wire.refused(method, **{member: "a" * (ID_CHARS_MAX + 1), **rest})
        assert too_long["code"] == ErrorCode.invalid_params


async def test_filters_find_nothing_for_ids_that_nobody_has_and_cursors_are_refused(
    twins: tuple[Twin, Twin],
) -> None:
    one, two = twins
    empty: dict[str, Any] = {"items": [], "cursor": None, "next_cursor": None}
    for method, member, filters in (
        ("agent.list", "agents", ("root_agent_id", "parent_agent_id")),
        ("artifact.list", "artifacts", ("run_id", "agent_id")),
        ("message.list", "messages", ("agent_id", "tree_root_id")),
    ):
        strange = (*two.ids.values(), *nobodys().values(), "", "x", "' or 1=1 --")
        for id_ in strange:
            for name in filters:
                assert await one.wire.call(method, **{name: id_}) == {**empty, member: []}
            error = await one.wire.refused(method, cursor=id_)
            assert (error["code"], error["data"]["field"]) == (ErrorCode.invalid_params, "cursor")
    error = await one.wire.refused("run.list", agent_id=one.ids["agent"], cursor=two.ids["run"])
    assert (error["code"], error["data"]["field"]) == (ErrorCode.invalid_params, "cursor")


async def test_foreign_runs_and_artifacts_are_not_found(twins: tuple[Twin, Twin]) -> None:
    one, two = twins
    for path in (
        f"runs/{two.ids['run']}/events",
        f"artifacts/{two.ids['artifact']}/bytes",
        "runs/%00'/events",
    ):
        response = await one.wire.get(f"/aep/v1/{path}")
        assert (response.status_code, response.json()["error"]) == (404, "tool_not_found")
