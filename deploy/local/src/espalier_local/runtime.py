"""The whole runtime of one machine as a context manager: for the tests, the demo, and `espalier up`.

It owns what it starts and leaves nothing running. No signals and no printing here; that is `up.py`. Below it
stand `servers.py` and `children.py`, beside it `first_key.py` and `schema.py`.
"""

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_urlsafe

import anyio.to_thread
import httpx2

from espalier_local.children import Child, ChildPlan, running
from espalier_local.console import OnLine, quiet
from espalier_local.first_key import ensure_profile
from espalier_local.folder import PROFILE, locate_folder
from espalier_local.options import RuntimeOptions
from espalier_local.ports import free_port, require_port
from espalier_local.preflight import require_plan, require_servers, require_settings
from espalier_local.schema import bring_up_to_date
from espalier_local.servers import LocalServers, local_servers

READY_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 2.0
INTERNAL_KEY_BYTES = 32
SECRETS_KEY = "ESPALIER_SECRETS_KEY"
SERVICE_GRACE_S = 2.5  # with Redis' and Postgres' own: within the 5 s that stopping may take
EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to reach a gateway that listens on all


@dataclass(frozen=True, slots=True)
class LocalRuntime:
    """A runtime that answers: where, with which key, and the processes behind it."""

    base_url: str
    api_key: str = field(repr=False)
    profile: Path
    servers: LocalServers
    gateway: Child
    broker: Child
    workers: tuple[Child, ...]


@asynccontextmanager
async def local_runtime(options: RuntimeOptions, *, on_line: OnLine = quiet) -> AsyncIterator[LocalRuntime]:
    """The whole runtime, ready to be called. Enter it from the main thread.

    Raises LocalError when something the person can put right is in the way; by then all is stopped again.
    """
    port = require_port(options.host, options.port)  # before anything is started
    env = _environment(options, port, colour=getattr(on_line, "colour", False))
    if options.script is not None:
        await anyio.to_thread.run_sync(require_plan, options.script)
    if options.mcp_servers is not None:
        await anyio.to_thread.run_sync(require_servers, options.mcp_servers)
    require_settings(env)
    base_url = _base_url(options.host, port)
    async with _servers(options, on_line) as servers:
        await bring_up_to_date(servers.postgres_url)
        api_key = await ensure_profile(servers, base_url)
        plans = _services(options, {**env, **_server_urls(servers), **_secrets(servers, env), **options.env})
        async with (
            running(plans, on_line, restart=options.restart) as (gateway, broker, *workers),
            httpx2.AsyncClient(trust_env=False) as client,
        ):
            for service, url in ((gateway, base_url), (broker, env["ESPALIER_BROKER_URL"])):
                await service.become_ready(partial(_answers_ready, client, url), within_s=READY_TIMEOUT_S)
            for worker in workers:
                worker.mark_ready()  # nobody can ask a worker; alive when the gateway answers is what counts
            profile = servers.folder.path / PROFILE
            yield LocalRuntime(base_url, api_key, profile, servers, gateway, broker, tuple(workers))


def _servers(options: RuntimeOptions, on_line: OnLine) -> AbstractAsyncContextManager[LocalServers]:
    return local_servers(
        locate_folder(options.data_dir),
        postgres_url=options.postgres_url,
        redis_url=options.redis_url,
        postgres_options=options.postgres_options,
        on_line=on_line,
    )


def _base_url(host: str, port: int) -> str:
    reached = EVERY_ADDRESS.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


async def _answers_ready(client: httpx2.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/readyz", timeout=PROBE_TIMEOUT_S)).is_success
    except httpx2.TransportError:
        return False


def _server_urls(servers: LocalServers) -> dict[str, str]:
    return {"ESPALIER_POSTGRES_URL": servers.postgres_url, "ESPALIER_REDIS_URL": servers.redis_url}


def _secrets(servers: LocalServers, env: Mapping[str, str]) -> dict[str, str]:
    """What keys of others are encrypted with: the operator's own, else one that the data folder keeps."""
    return {SECRETS_KEY: env.get(SECRETS_KEY) or servers.folder.password("secrets_key")}


def _services(options: RuntimeOptions, env: Mapping[str, str]) -> list[ChildPlan]:
    names = ["worker"] if options.workers == 1 else [f"worker-{n}" for n in range(1, options.workers + 1)]
    return [
        ChildPlan(
            name=name,
            command=(sys.executable, "-m", module),
            env=env,
            grace_s=SERVICE_GRACE_S,
        )
        for name, module in [
            ("gateway", "espalier_gateway"),
            ("broker", "espalier_mcp_broker"),
            *((name, "espalier_run_worker") for name in names),
        ]
    ]


def _environment(options: RuntimeOptions, port: int, *, colour: bool) -> dict[str, str]:
    broker_port = free_port()
    ours = {
        "ESPALIER_BROKER_PORT": str(broker_port),
        "ESPALIER_BROKER_URL": f"http://127.0.0.1:{broker_port}",
        "ESPALIER_INTERNAL_KEY": token_urlsafe(INTERNAL_KEY_BYTES),
        "ESPALIER_HOST": options.host,
        "ESPALIER_PORT": str(port),
        "ESPALIER_MODELS_SCRIPTED": "on" if options.scripted_plans else "off",
        "PYTHONUNBUFFERED": "1",
        "ESPALIER_LOG_COLOUR": "on" if colour else "off",
        **({"ESPALIER_SCRIPT": str(options.script.absolute())} if options.script else {}),
        **({"ESPALIER_MCP_SERVERS": str(options.mcp_servers.absolute())} if options.mcp_servers else {}),
        **({"ESPALIER_MODEL": options.model} if options.model else {}),
    }
    return {
        **os.environ,
        "ESPALIER_LOG_FORMAT": os.environ.get("ESPALIER_LOG_FORMAT", "console"),
        **ours,
        **options.env,
    }
