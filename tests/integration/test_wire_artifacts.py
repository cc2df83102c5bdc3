"""Listing and deleting artifacts: pages, filters, and bytes that stay as long as somebody needs them."""

import json
from typing import Any
from uuid import UUID

import anyio
import pytest
from tests.integration.wire import ANSWER_WAIT_S, POLL_S, Gateway, Wire, symbol
from tests.integration.wire_artifacts import keep_artifact
from tests.integration.wire_runs import event_types, uuid

from espalier_acts.artifacts import Content, create_artifact, delete_artifact
from espalier_gateway.settings import GatewaySettings
from espalier_store.artifacts import CHUNK_BYTES, ArtifactFilter, list_artifacts
from espalier_store.ids import new_id
from espalier_store.paging import Place
from espalier_store.pool import Pool, transaction

pytestmark = pytest.mark.anyio

CONTENT = b"x" * (CHUNK_BYTES + 1)
WAITING = """
select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'advisory'
"""


@pytest.fixture
def gateway_settings(gateway_settings: GatewaySettings) -> GatewaySettings:
    """Patient with callers that ask as much as these tests do."""
    return gateway_settings.model_copy(update={"rpc_burst": 10_000})


async def pages(wire: Wire, **params: Any) -> list[list[str]]:
    """All pages of a list, as ids."""
    found, cursor = [], None
    while True:  # bounded by the artifacts of the test
        page = await wire.call("artifact.list", **params, **({"cursor": cursor} if cursor else {}))
        assert page["items"] == page["artifacts"] and page["cursor"] == page["next_cursor"]
        found.append([item["id"] for item in page["items"]])
        if (cursor := page["cursor"]) is None:
            return found


async def stored(pool: Pool) -> dict[str, int]:
    """How many rows the bytes take."""
    tables = ("artifacts", "blobs", "blob_chunks")
    return {table: await pool.fetchval(f"select count(*) from {table}") for table in tables}


# ------------------------------------------------------------------ artifact.list


async def test_artifacts_are_listed_newest_first_and_page_without_gaps(wire: Wire, gateway: Gateway) -> None:
    assert await pages(wire) == [[]]
    run_id = await wire.run()
    made = [await keep_artifact(gateway.pool, run_id, b"%d" % n) for n in range(5)]
    newest_first = made[::-1]
    assert await pages(wire, limit=2) == [newest_first[:2], newest_first[2:4], newest_first[4:]]
    assert await pages(wire, limit=5) == [newest_first], "a page that is exactly full is the last"
    assert await pages(wire, limit=10_000) == [newest_first]
    listed = (await wire.call("artifact.list"))["items"]
    assert listed == [await wire.call("artifact.get", artifact_id=id_) for id_ in newest_first]
    assert symbol(await wire.answer("artifact.list", {"limit": 0})) == "invalid_params"


async def test_artifacts_of_one_moment_page_without_gaps(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    made = [await keep_artifact(gateway.pool, run_id, b"%d" % n) for n in range(5)]
    await gateway.pool.execute("update artifacts set created_at = now()")
    assert await pages(wire, limit=2) == [made[:2:-1], made[2:0:-1], made[:1]]


async def test_filters_are_all_asked_for(wire: Wire, gateway: Gateway) -> None:
    agents = {"a": await wire.agent(), "b": await wire.agent()}
    runs = {name: await wire.run(agents[name[0]]) for name in ("a1", "a2", "b1")}
    tags = {"t": "sub_t", "u": "sub_u", "-": None}
    made = {
        f"{run} {tag}": await keep_artifact(gateway.pool, run_id, b"x", subject_id=subject)
        for run, run_id in runs.items()
        for tag, subject in tags.items()
    }
    for run in (None, "a1", "a2", "b1"):
        for agent in (None, "a", "b"):
            for tag in (None, "t", "u"):
                asked: dict[str, Any] = {
                    **({"run_id": runs[run]} if run else {}),
                    **({"agent_id": agents[agent]} if agent else {}),
                    **({"subject_id": tags[tag]} if tag else {}),
                }
                expected = [
                    artifact_id
                    for name, artifact_id in reversed(made.items())
                    if name.startswith(run or "")
                    and name[0] in (agent or "ab")
                    and name[-1] in (tag or "tu-")
                ]
                assert await pages(wire, **asked) == [expected], asked
                assert [id_ for page in await pages(wire, **asked, limit=1) for id_ in page] == expected


async def test_a_page_of_large_records_is_shorter_and_says_that_more_follow(
    wire: Wire, gateway: Gateway
) -> None:
    run_id = await wire.run()
    made = [await keep_artifact(gateway.pool, run_id, b"x") for _ in range(5)]
    await gateway.pool.execute("update artifacts set metadata = jsonb_build_object('k', repeat('x', 400000))")
    found = await pages(wire)
    assert [len(page) for page in found] == [3, 2]
    assert [id_ for page in found for id_ in page] == made[::-1]


async def test_a_cursor_that_was_deleted_is_refused(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    for n in range(3):
        await keep_artifact(gateway.pool, run_id, b"%d" % n)
    cursor = (await wire.call("artifact.list", limit=1))["cursor"]
    await wire.call("artifact.delete", artifact_id=cursor)
    for params in ({}, {"run_id": run_id}, {"run_id": "x"}):
        error = await wire.refused("artifact.list", cursor=cursor, **params)
        assert error["data"]["field"] == "cursor"


ROWS = """
insert into artifacts (id, owner_id, agent_id, run_id, name, mime_type, size_bytes, sha256, subject_id,
    metadata, created_at)
select gen_random_uuid(), $1, $2,
    case when n % 1000 = 0 then $3::uuid else gen_random_uuid() end, 'n', 'text/plain', 1, n::text,
    case when n % 1000 = 1 then 'sub_rare' end, '{}', now() - n * interval '1 second'
from generate_series(1, 20000) n
"""
READ_MAX = 60


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_every_list_reads_only_what_it_shows(wire: Wire, gateway: Gateway, mode: str) -> None:
    """Of twenty thousand artifacts: each filter has its index, and the middle is as near as the beginning."""
    run_id, rare_agent = new_id(), await wire.agent()
    agent_id = uuid("agt", await wire.agent())
    owner_id = await gateway.pool.fetchval("select owner_id from agents limit 1")
    await gateway.pool.execute(ROWS, owner_id, agent_id, run_id)
    await gateway.pool.execute(
        "update artifacts set agent_id = $1 where sha256::int % 1000 = 2", uuid("agt", rare_agent)
    )
    await gateway.pool.execute("analyze artifacts")
    middle = await gateway.pool.fetchval("select id from artifacts where sha256 = '10000'")
    filters = {
        "nothing": ArtifactFilter(),
        "run": ArtifactFilter(run_id=run_id),
        "agent": ArtifactFilter(agent_id=uuid("agt", rare_agent)),
        "subject": ArtifactFilter(subject_id="sub_rare"),
        "all": ArtifactFilter(run_id, agent_id, "sub_rare"),
    }
    read = {}
    async with transaction(gateway.pool) as connection:
        await connection.execute(f"set local plan_cache_mode = {mode}")
        explaining = Explaining(connection)
        for name, wanted in filters.items():
            for after in (None, middle):
                await list_artifacts(explaining, owner_id, wanted, Place(after, 50))  # type: ignore[arg-type]
                read[name, after is None] = explaining.rows_read
    assert {place: rows for place, rows in read.items() if rows > READ_MAX} == {}
    assert read["nothing", True] > 50, "what was read was counted"


class Explaining:
    """Asks for the plan of each statement instead of its answer."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.rows_read = 0

    async def fetch(self, statement: str, *values: Any) -> list[Any]:
        """As a prepared statement: EXPLAIN of the text alone always knows the values."""
        literals = ["null" if value is None else f"'{value}'" for value in values]
        await self._connection.execute(f"prepare listing as {statement}")
        analyze = f"explain (analyze, format json) execute listing ({', '.join(literals)})"
        (plan,) = json.loads(await self._connection.fetchval(analyze))
        await self._connection.execute("deallocate listing")
        self.rows_read = sum(rows_of(plan["Plan"]))
        return []


def rows_of(plan: dict[str, Any]) -> list[int]:
    """How many rows each scan of a table or index touched."""
    below = [rows for child in plan.get("Plans", ()) for rows in rows_of(child)]
    if "Scan" not in plan["Node Type"] or plan["Node Type"] == "Subquery Scan":
        return below
    return [*below, (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]]


# ------------------------------------------------------------------ artifact.delete


async def test_a_deleted_artifact_is_unknown_everywhere_and_its_run_does_not_notice(
    wire: Wire, gateway: Gateway
) -> None:
    run_id = await wire.run()
    gone, kept = [await keep_artifact(gateway.pool, run_id, CONTENT + tail) for tail in (b"1", b"2")]
    before = await wire.call("run.get", run_id=run_id)

    assert await wire.call("artifact.delete", artifact_id=gone) == {"deleted": True, "ok": True}

    for method in ("artifact.get", "artifact.delete"):
        error = await wire.refused(method, artifact_id=gone)
        assert error["data"] == {"symbol": "tool_not_found", "resource": "artifact", "id": gone}
    assert (await wire.get(f"/aep/v1/artifacts/{gone}/bytes")).status_code == 404
    assert await pages(wire, run_id=run_id) == [[kept]]
    assert (await wire.get(f"/aep/v1/artifacts/{kept}/bytes")).content == CONTENT + b"2"
    assert await stored(gateway.pool) == {"artifacts": 1, "blobs": 1, "blob_chunks": 2}
    assert await wire.call("run.get", run_id=run_id) == before
    assert await event_types(gateway.pool, run_id) == ["run.started"]


async def test_bytes_stay_until_the_last_artifact_of_the_owner_that_has_them(
    wire: Wire, gateway: Gateway
) -> None:
    other = await gateway.caller("two")
    mine = [await keep_artifact(gateway.pool, await wire.run(), CONTENT) for _ in range(2)]
    theirs = await keep_artifact(gateway.pool, await other.run(), CONTENT)
    told = [await stored(gateway.pool)]
    for artifact_id in mine:
        await wire.call("artifact.delete", artifact_id=artifact_id)
        told.append(await stored(gateway.pool))
        still = dict.fromkeys(mine[len(told) - 1 :], wire) | {theirs: other}
        for kept, reader in still.items():
            assert (await reader.get(f"/aep/v1/artifacts/{kept}/bytes")).content == CONTENT
    assert told == [
        {"artifacts": 3, "blobs": 2, "blob_chunks": 4},
        {"artifacts": 2, "blobs": 2, "blob_chunks": 4},
        {"artifacts": 1, "blobs": 1, "blob_chunks": 2},
    ]


async def origin(pool: Pool, run_id: str) -> tuple[UUID, UUID, UUID]:
    """What `create_artifact` needs of a run: owner, agent and the run's own id."""
    row = await pool.fetchrow("select owner_id, agent_id, id from runs where id = $1", uuid("run", run_id))
    assert row is not None
    return row["owner_id"], row["agent_id"], row["id"]


async def waits_its_turn(pool: Pool) -> None:
    with anyio.fail_after(ANSWER_WAIT_S):
        while not await pool.fetchval(WAITING):
            await anyio.sleep(POLL_S)


async def test_bytes_that_a_writer_found_there_are_not_deleted_under_it(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    old = await keep_artifact(gateway.pool, run_id, CONTENT)
    made = await origin(gateway.pool, run_id)
    async with anyio.create_task_group() as group, transaction(gateway.pool) as connection:
        new = (await create_artifact(connection, *made, Content("n", "text/plain", CONTENT))).artifact_id
        group.start_soon(lambda: wire.call("artifact.delete", artifact_id=old))
        await waits_its_turn(gateway.pool)
    assert await pages(wire) == [[new]]
    assert (await wire.get(f"/aep/v1/artifacts/{new}/bytes")).content == CONTENT


async def test_bytes_that_are_just_being_deleted_are_written_again(wire: Wire, gateway: Gateway) -> None:
    run_id = await wire.run()
    old = await keep_artifact(gateway.pool, run_id, CONTENT)
    owner_id, _, _ = await origin(gateway.pool, run_id)
    made: list[str] = []

    async def write() -> None:
        made.append(await keep_artifact(gateway.pool, run_id, CONTENT))

    async with anyio.create_task_group() as group, transaction(gateway.pool) as connection:
        await delete_artifact(connection, owner_id, uuid("art", old))
        group.start_soon(write)
        await waits_its_turn(gateway.pool)
    assert await pages(wire) == [made]
    assert (await wire.get(f"/aep/v1/artifacts/{made[0]}/bytes")).content == CONTENT


async def test_writers_and_deleters_of_equal_bytes_lose_none_and_leave_none(
    wire: Wire, gateway: Gateway
) -> None:
    run_id = await wire.run()
    kept: list[str] = []

    async def write_and_delete(worker: int) -> None:
        for turn in range(10):
            content = b"%d" % (turn % 2)
            made = [await keep_artifact(gateway.pool, run_id, content) for _ in range(2)]
            await wire.call("artifact.delete", artifact_id=made[worker % 2])
            if turn < 8:
                await wire.call("artifact.delete", artifact_id=made[1 - worker % 2])
            else:
                kept.append(made[1 - worker % 2])

    async with anyio.create_task_group() as group:
        for worker in range(4):
            group.start_soon(write_and_delete, worker)
    for artifact_id in kept:
        response = await wire.get(f"/aep/v1/artifacts/{artifact_id}/bytes")
        assert (response.status_code, len(response.content)) == (200, 1)
    assert await stored(gateway.pool) == {"artifacts": 8, "blobs": 2, "blob_chunks": 2}
    for artifact_id in kept:
        await wire.call("artifact.delete", artifact_id=artifact_id)
    assert await stored(gateway.pool) == {"artifacts": 0, "blobs": 0, "blob_chunks": 0}
