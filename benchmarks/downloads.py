"""What large artifacts cost a gateway: its memory while several readers take 50 MB each, and how fast.

The artifact is kept by the act that workers use, as a stream, so that this process shows too what keeping
costs. Readers are the embedder's own client and check the hash; they share the machine with the gateway.
"""

import time
from collections.abc import AsyncIterator
from typing import Final

import anyio
from benchmarks.load import AGENT
from benchmarks.report import Taken
from benchmarks.runtime import Runtime

from espalier_acts.artifacts import ARTIFACT_BYTES_MAX, Content, create_artifact
from espalier_client.client import AepClient
from espalier_protocol.agent import AgentCreate
from espalier_protocol.ids import from_wire
from espalier_protocol.run import RunCreate
from espalier_store.pool import PostgresSettings, open_pool, transaction

READERS: Final = 8
ROUNDS: Final = 3
LOOK_EVERY_S: Final = 0.02
MB: Final = 1_000_000
PIECE: Final = bytes(range(256)) * 400
ORIGIN: Final = "select owner_id, agent_id, id from runs where id = $1"


async def downloads(runtime: Runtime, taken: Taken) -> None:
    async with AepClient(runtime.local.base_url, runtime.local.api_key) as client:
        artifact_id = await _kept(runtime, client, taken)
        await _read(client, artifact_id)
        for _ in range(ROUNDS):
            before = peak = runtime.resident_bytes("gateway")
            began = time.monotonic()
            async with anyio.create_task_group() as group:
                done = anyio.Event()
                group.start_soon(_read_all, client, artifact_id, done)
                while not done.is_set():  # bounded by the scenario's time
                    peak = max(peak, runtime.resident_bytes("gateway"))
                    await anyio.sleep(LOOK_EVERY_S)
            took = time.monotonic() - began
            who = f"{READERS} readers of {ARTIFACT_BYTES_MAX / MB:.0f} MB"
            taken.add(f"{who}: gateway's memory before", before / MB, "MB")
            taken.add(f"{who}: gateway's memory at most", peak / MB, "MB")
            taken.add(f"{who}: together", READERS * ARTIFACT_BYTES_MAX / MB / took, "MB/s")


async def _read_all(client: AepClient, artifact_id: str, done: anyio.Event) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(READERS):
            group.start_soon(_read, client, artifact_id)
    done.set()


async def _read(client: AepClient, artifact_id: str) -> None:
    size = 0
    async for piece in client.artifact_bytes(artifact_id):
        size += len(piece)
    if size != ARTIFACT_BYTES_MAX:
        raise RuntimeError(f"{size} bytes arrived")


async def _kept(runtime: Runtime, client: AepClient, taken: Taken) -> str:
    agent = await client.agent_create(AgentCreate.model_validate(AGENT))
    run = await client.run_create(RunCreate(agent_id=agent.id, goal="nothing"))
    origin = await runtime.sql.fetchrow(ORIGIN, from_wire("run", run.id))
    assert origin is not None
    async with open_pool(PostgresSettings(postgres_url=runtime.local.servers.postgres_url)) as pool:
        began = time.monotonic()
        async with transaction(pool) as connection:
            content = Content("large.bin", "application/octet-stream", _pieces())
            owner_id, agent_id, run_id = origin
            kept = await create_artifact(connection, owner_id, agent_id, run_id, content)
        taken.add("keeping 50 MB as a stream", ARTIFACT_BYTES_MAX / MB / (time.monotonic() - began), "MB/s")
    return kept.artifact_id


async def _pieces() -> AsyncIterator[bytes]:
    for start in range(0, ARTIFACT_BYTES_MAX, len(PIECE)):
        yield PIECE[: ARTIFACT_BYTES_MAX - start]
