"""`local_runtime` makes the key that others' keys are encrypted with, once, and all services have it."""

import json
import stat
from typing import Any

import httpx2
import pytest

from espalier_local.folder import throwaway_folder
from espalier_local.options import RuntimeOptions
from espalier_local.runtime import LocalRuntime, local_runtime

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(180)]

PATH = "/api/me/llm-providers"
WAIT_S = 30.0
KEY = "sk-canary-0123456789"
GIVEN: dict[str, Any] = {
    "name": "mine",
    "kind": "openai_compat",
    "api_key": KEY,
    "base_url": "http://127.0.0.1:1/v1",
    "default_model": "small",
}


async def ask(runtime: LocalRuntime, verb: str, path: str = "", body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {runtime.api_key}"}
    async with httpx2.AsyncClient(base_url=runtime.base_url, timeout=WAIT_S, trust_env=False) as http:
        return (await http.request(verb, PATH + path, headers=headers, json=body)).json()


async def test_a_providers_key_is_opened_by_a_worker_after_a_second_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ESPALIER_SECRETS_KEY", raising=False)
    with throwaway_folder() as folder:
        options = RuntimeOptions(port=0, data_dir=folder)
        async with local_runtime(options) as first:
            provider = (await ask(first, "POST", "", GIVEN))["id"]
        kept = folder / "secrets.json"
        minted = json.loads(kept.read_text())["secrets_key"]
        async with local_runtime(options) as second:
            told = await ask(second, "POST", f"/{provider}/test")
        assert json.loads(kept.read_text())["secrets_key"] == minted
        mode = stat.S_IMODE(kept.stat().st_mode)
    assert len(minted) >= 32
    assert mode == 0o600
    # It could be opened: the address is what is wrong, and it may not even be tried.
    assert (told["ok"], told["kind"]) == (False, "unreachable")
    assert told["message"].startswith("address_refused: ")
