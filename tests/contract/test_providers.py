"""Model providers that an embedder brings, through the published client and the endpoints beside AEP."""

from typing import Any

import anyio
import httpx2
import pytest
from fake_openai import answer, fake_openai
from tests.contract.conftest import Runtime
from tests.contract.embedder import WAIT_S, Embedder
from tests.contract.requirements import requirement
from tests.integration.wire import POLL_S

pytestmark = pytest.mark.anyio

PATH = "/api/me/llm-providers"
KEY = "sk-canary-0123456789-wxyz"
MEMBERS = [
    *("id", "name", "kind", "api_key_hint", "created_at", "updated_at"),
    *("base_url", "default_model", "last_tested_at", "last_test_status"),
]


async def rest(embedder: Embedder, verb: str, path: str = "", body: Any = None) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {embedder.wire.key}"}
    return await embedder.wire.http.request(verb, PATH + path, headers=headers, json=body, timeout=WAIT_S * 2)


def given(base_url: str) -> dict[str, Any]:
    return {
        "name": "mine",
        "kind": "openai_compat",
        "api_key": KEY,
        "base_url": base_url,
        "default_model": "small",
    }


@requirement("AEP-PROVIDER-01")
async def test_providers_are_listed_without_their_keys(embedder: Embedder) -> None:
    made = await rest(embedder, "POST", "", given("https://example.invalid/v1"))
    listed = await embedder.client.provider.list()
    assert made.status_code == 201
    assert listed["providers"] == [made.json()]
    assert sorted(made.json()) == sorted(MEMBERS)
    assert made.json()["api_key_hint"] == "••••wxyz"
    assert "canary" not in repr(listed) + made.text


@requirement("AEP-SMOKE-04")
async def test_byo_llm_smoke(embedder: Embedder, runtime: Runtime) -> None:
    """The published smoke, step by step, with a strict server in the place of a real provider."""
    client = embedder.client
    assert embedder.capabilities["runner.byo_llm"] is True
    replies = [answer("ok"), answer("ok")]
    async with fake_openai(replies, key=KEY, port=runtime.model_port) as fake:
        created = (await rest(embedder, "POST", "", given(fake.base_url))).json()
        provider = created["id"]
        assert created["api_key_hint"].endswith(KEY[-4:])
        assert (await rest(embedder, "POST", f"/{provider}/test")).json() == {"ok": True}
        (listed,) = (await client.provider.list())["providers"]
        assert (listed["id"], listed["last_test_status"], "api_key" in listed) == (provider, "ok", False)

        agent = await embedder.agent(toolset=[], runner={"provider_id": provider, "model": None})
        assert agent["runner"] == {"provider_id": provider, "model": "small"}
        run = await embedder.run(agent_id=agent["id"])
        with anyio.fail_after(WAIT_S):
            while (run := await client.run.get(run["id"]))["state"] == "running":
                await anyio.sleep(POLL_S)
    assert (run["state"], run["cycle_count"], run["result"]["final_message"]) == ("complete", 1, "ok")
    assert (fake.refusals, [each["model"] for each in fake.requests]) == ([], ["small", "small"])

    refused = await rest(embedder, "DELETE", f"/{provider}")
    assert (refused.status_code, refused.json()["error"]) == (409, "provider_in_use")
    assert refused.json()["agent_count"] == 1
    detached = await client.agent.update(agent["id"], runner=None)
    assert detached["runner"] is None
    assert (await rest(embedder, "DELETE", f"/{provider}")).status_code == 204
    assert (await client.provider.list())["providers"] == []
