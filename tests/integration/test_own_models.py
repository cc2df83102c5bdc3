"""Agents on models that their owners bring: a gateway, a worker, and strict servers to ask, over the wire."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx2
import pytest
from anyio.abc import SocketStream
from fake_openai import FakeOpenAI, Reply, answer, failure, fake_openai
from forked import Service
from tests.integration.conftest import GatewayProcess, Start, StartGateway
from tests.integration.wire import VERSION, Wire

from espalier_gateway import providers_rest
from espalier_store.pool import Pool

# A worker loads the SDK when the first provider is asked, which takes seconds.
pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]

PATH = providers_rest.PATH
WAIT_S = 60.0
POLL_S = 0.05
KEY = "sk-canary-0123456789-wxyz"
DONE = ("complete", {"final_message": "done"})
GOES_ON: tuple[str, dict[str, Any]] = ("continue_now", {})


@dataclass
class Runtime:
    """A gateway, a worker that may reach one port of loopback, and a caller."""

    gateway: GatewayProcess
    worker: Service
    wire: Wire

    async def rest(self, verb: str, path: str = "", body: Any = None) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {self.wire.key}"}
        return await self.wire.http.request(verb, PATH + path, headers=headers, json=body)

    async def provider(self, fake: FakeOpenAI, **changes: Any) -> str:
        given = {"name": "mine", "kind": "openai_compat", "api_key": KEY, "base_url": fake.base_url}
        response = await self.rest("POST", "", {**given, "default_model": fake.model, **changes})
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    async def tested(self, provider: str) -> Any:
        response = await self.rest("POST", f"/{provider}/test")
        assert response.status_code == 200, response.text
        return response.json()

    async def status(self, provider: str) -> Any:
        return (await self.rest("GET", f"/{provider}")).json()["last_test_status"]

    async def ended(self, run_id: str) -> Any:
        with anyio.fail_after(WAIT_S):
            while (run := await self.wire.call("run.get", run_id=run_id))["state"] == "running":
                await anyio.sleep(POLL_S)
        return run

    async def lived(self, **runner: Any) -> Any:
        """The run of a new agent with this runner, as it is when it no longer runs."""
        return await self.ended(
            await self.wire.run(await self.wire.agent(toolset=[], runner=runner), goal="Say it.")
        )


@dataclass
class StartRuntime:
    start: Start
    start_gateway: StartGateway
    key: str

    @asynccontextmanager
    async def __call__(self, *fakes: FakeOpenAI, **settings: str) -> AsyncIterator[Runtime]:
        """The worker may reach the servers that are named, and nothing else on this machine."""
        allowed = ",".join(fake.base_url.removeprefix("http://").removesuffix("/v1") for fake in fakes)
        gateway = await self.start_gateway(ESPALIER_LOG_LEVEL="debug")
        worker = self.start(
            "worker", **{"ESPALIER_EGRESS_ALLOW": allowed, "ESPALIER_LOG_LEVEL": "debug", **settings}
        )
        async with httpx2.AsyncClient(base_url=gateway.base_url, timeout=WAIT_S, trust_env=False) as http:
            wire = Wire(http, self.key, version=VERSION)
            await wire.begin()
            yield Runtime(gateway, worker, wire)


@pytest.fixture
def runtime(start: Start, start_gateway: StartGateway, api_key: str) -> StartRuntime:
    return StartRuntime(start, start_gateway, api_key)


# ---------------------------------------------------------------- living on one


async def test_an_agent_lives_on_its_own_model_and_others_on_the_operators(runtime: StartRuntime) -> None:
    async with fake_openai([answer(None, DONE, usage=(60, 9))], key=KEY) as fake, runtime(fake) as there:
        provider = await there.provider(fake)
        own = await there.lived(provider_id=provider)
        scripted = await there.lived(model="whatever")

    assert (own["state"], own["result"]["final_message"]) == ("complete", "done")
    assert (scripted["state"], scripted["result"]["final_message"]) == ("complete", "ok")
    assert fake.refusals == []
    assert [request["model"] for request in fake.requests] == ["small"]


async def test_the_bound_model_is_asked_and_not_what_is_the_default_by_now(runtime: StartRuntime) -> None:
    async with fake_openai([answer(None, DONE)], key=KEY, model="large") as fake, runtime(fake) as there:
        provider = await there.provider(fake, default_model="large")
        agent_id = await there.wire.agent(toolset=[], runner={"provider_id": provider})
        await there.rest("PATCH", f"/{provider}", {"default_model": "small"})
        run = await there.ended(await there.wire.run(agent_id))
    assert (run["state"], len(fake.requests)) == ("complete", 1)


async def test_a_key_that_changes_while_a_run_is_held_counts_in_its_next_cycle(
    runtime: StartRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address too. Both change before the first cycle has its answer."""
    new = "sk-canary-new-key-7777"
    async with (
        fake_openai([answer(None, GOES_ON)], key=KEY) as first,
        fake_openai([answer(None, DONE)], key=new) as second,
        runtime(first, second) as there,
    ):
        provider, send = await there.provider(first), first._send

        async def change_and_send(stream: SocketStream, reply: Reply) -> None:
            moved = {"base_url": second.base_url, "api_key": new}
            assert (await there.rest("PATCH", f"/{provider}", moved)).status_code == 200
            await send(stream, reply)

        monkeypatch.setattr(first, "_send", change_and_send)
        run = await there.lived(provider_id=provider)

    assert (run["state"], run["cycle_count"]) == ("complete", 2)
    assert (first.refusals, second.refusals) == ([], [])
    assert (len(first.requests), len(second.requests)) == (1, 1)


async def test_a_provider_that_refuses_the_key_ends_the_run_and_nothing_tells_the_key(
    runtime: StartRuntime, pool: Pool
) -> None:
    async with fake_openai(key="sk-another-key-00000") as fake, runtime(fake) as there:
        provider = await there.provider(fake)
        run = await there.lived(provider_id=provider)
        heard = await there.wire.http.get(
            f"/aep/v1/runs/{run['id']}/events", headers=there.wire.headers(), timeout=WAIT_S
        )
        there.worker.stop()

    assert run["state"] == "error"
    assert run["result"] == {"reason": "model_failed:unauthorized: 401 invalid_api_key"}
    told = heard.text + there.worker.output() + there.gateway.service.output() + json.dumps(run)
    for table in ("events", "journal", "runs", "agents", "outbox", "provider_probes"):
        told += str([dict(row) for row in await pool.fetch(f"select * from {table}")])
    assert "canary" not in told
    assert "wxyz" not in told
    assert fake.base_url not in heard.text


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433"])
async def test_a_private_address_is_not_asked_unless_the_operator_lists_it(
    runtime: StartRuntime, host: str
) -> None:
    async with fake_openai([answer(None, DONE)], key=KEY) as fake, runtime() as there:
        port = fake.base_url.removesuffix("/v1").rpartition(":")[2]
        provider = await there.provider(fake, base_url=f"http://{host}:{port}/v1")
        run = await there.lived(provider_id=provider)
        test = await there.tested(provider)

    assert run["state"] == "error"
    assert run["result"]["reason"].startswith("model_failed:address_refused: ")
    assert (test["ok"], test["kind"]) == (False, "unreachable")
    assert test["message"].startswith("address_refused: That ")
    assert (fake.requests, fake.refusals, fake.left) == ([], [], 0), "no connection was made"


async def test_a_redirect_is_not_followed_with_the_key(runtime: StartRuntime) -> None:
    async with fake_openai([], key=KEY) as elsewhere:
        away = Reply(status=307, headers=(("Location", f"{elsewhere.base_url}/chat/completions"),))
        async with fake_openai([away], key=KEY) as fake, runtime(fake, elsewhere) as there:
            test = await there.tested(await there.provider(fake))
    assert (test["ok"], test["kind"]) == (False, "unreachable")
    assert "redirect" in test["message"]
    assert (elsewhere.requests, elsewhere.refusals) == ([], [])


async def test_an_answer_without_end_is_cut(runtime: StartRuntime) -> None:
    endless = Reply(b'{"x": "' + b"x" * 1024 * 1024, times=40)
    async with fake_openai([endless], key=KEY) as fake, runtime(fake) as there:
        test = await there.tested(await there.provider(fake))
    assert test == {"ok": False, "kind": "parse_error", "message": "answer_too_large"}
    assert fake.bytes_sent < 20 * 1024 * 1024


# ---------------------------------------------------------------- the test of a provider


async def test_a_test_says_what_is_wrong_by_kind_and_the_provider_shows_it(runtime: StartRuntime) -> None:
    replies = [
        answer("ok"),
        answer("o", finish="length"),
        failure(429, "slow down", "rate_limit_exceeded"),
        failure(500, "oops"),
        Reply(b"<html>", content_type="text/html"),
    ]
    async with fake_openai(replies, key=KEY) as fake, runtime(fake) as there:
        provider = await there.provider(fake)
        told = []
        for _ in range(len(replies)):
            test = await there.tested(provider)
            status = await there.status(provider)
            assert status == ("ok" if test["ok"] else test["kind"])
            told.append(status)
        (asked,) = {json.dumps(request, sort_keys=True) for request in fake.requests}
        others = {}
        wrong: dict[str, dict[str, Any]] = {
            "key": {"api_key": "sk-canary-wrong-000"},
            "model": {"default_model": "no-such"},
            "no model": {"default_model": None},
            "closed": {"base_url": "http://127.0.0.1:1/v1"},
        }
        for name, changes in wrong.items():
            other = await there.provider(fake, name=name, **changes)
            others[name] = await there.tested(other)
        there.worker.stop()

    assert told == ["ok", "ok", "rate_limited", "upstream_error", "parse_error"]
    assert fake.refusals == []
    assert json.loads(asked)["messages"] == [{"role": "user", "content": "Reply with the word ok."}]
    assert {name: test["kind"] for name, test in others.items()} == {
        "key": "auth_failed",
        "model": "model_invalid",
        "no model": "model_invalid",
        "closed": "unreachable",
    }
    everything = json.dumps(others) + there.worker.output() + there.gateway.service.output()
    assert "canary" not in everything


async def test_a_key_that_does_not_open_says_so_and_a_run_waits_for_its_correction(
    runtime: StartRuntime,
) -> None:
    """The worker was given another secrets key than the gateway."""
    other = "another-secrets-key-0123456789-0123456789"
    async with fake_openai([], key=KEY) as fake, runtime(fake, ESPALIER_SECRETS_KEY=other) as there:
        provider = await there.provider(fake)
        test = await there.tested(provider)
        run = await there.lived(provider_id=provider)
    assert (test["ok"], test["kind"]) == (False, "decrypt_failed")
    assert run["state"] == "sleeping"
    assert fake.requests == []


async def test_a_provider_that_is_silent_is_not_waited_for_longer_than_a_test_lasts(
    runtime: StartRuntime,
) -> None:
    async with fake_openai([Reply(ending="silence")], key=KEY) as fake, runtime(fake) as there:
        test = await there.tested(await there.provider(fake))
    assert (test["ok"], test["kind"]) == (False, "unreachable")
