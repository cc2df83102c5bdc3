"""One storm: build everything, let stories and faults loose, heal, wait for every run, keep what was seen.

What comes out: `history.jsonl.gz` and `dump.json.gz`, from which alone the checker judges, and
`reliability-report.json`. Nothing here knows what an invariant is.
"""

import json
import shutil
import subprocess
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio
from tests.chaos.cluster import (
    AWAY,
    BROKERS,
    GATEWAYS,
    LEASE_TTL_S,
    WORKERS,
    Cluster,
    errors,
    open_cluster,
    start_all,
)
from tests.chaos.history import Began, Dump, Ended, ToolRan, write_dump, write_history
from tests.chaos.invariants import CHECKER_VERSION, Violation, check
from tests.chaos.model_server import model_server
from tests.chaos.nemesis import KINDS, Nemesis, schedule
from tests.chaos.recording import Recorder
from tests.chaos.report import figures
from tests.chaos.stories import CEILINGS, OWNERS
from tests.chaos.workload import Workload, open_embedders

from espalier_local.keys import create_key
from espalier_protocol.access import SCOPES
from espalier_store.pool import PostgresSettings, open_pool, transaction

SWEEP_S: Final = 3.0
"""Within this a due run that is free is found, and what an outbox promises is done, if there is a worker."""

WARM_UP_S: Final = 8.0
ENDS_S: Final = 150.0
"""After the storm: within this every run ends, and every follower sees it end."""

CALMS_S: Final = 12.0
"""After the last end, before what the services still hold open is counted."""

LEDGER_EVERY_S: Final = 0.25
POLL_S: Final = 0.2
LATE_JOINERS: Final = 20
CLOCK_LOOKS: Final = 20
DUMP_S: Final = 120.0
TABLES: Final = """
select table_name from information_schema.tables
where table_schema = 'public' and table_name <> 'schema_revision' order by 1
"""


@dataclass(frozen=True)
class Plan:
    """What is asked of a storm. `at_once`: how many stories live at a time."""

    seed: int
    seconds: float
    at_once: int = 14


@dataclass(frozen=True)
class Outcome:
    """What became of a storm. `open_runs` are sentences about what did not end in time."""

    report: dict[str, Any]
    violations: tuple[Violation, ...]
    open_runs: tuple[str, ...]


async def storm(plan: Plan, out: Path) -> Outcome:
    """Let it happen, and leave its files in the folder `out`, which is there."""
    recorder = Recorder()
    began = Began(recorder.now(), plan.seed, _settings(plan))
    recorder.note(began)
    dump, unended = await _happened(plan, recorder, out)
    records = recorder.history()
    write_history(out / "history.jsonl.gz", records)
    write_dump(out / "dump.json.gz", dump)
    violations = tuple(check(records, dump))
    report = {
        "checker_version": CHECKER_VERSION,
        "commit": _commit(),
        "seed": plan.seed,
        "minutes": round(plan.seconds / 60, 2),
        "settings": began.settings,
        "violations": [asdict(violation) for violation in violations],
        "not_ended": list(unended),
        **figures(records, dump),
        "errors_logged": _errors_logged(out),
    }
    (out / "reliability-report.json").write_text(json.dumps(report, indent=2) + "\n")
    return Outcome(report, violations, unended)


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "lease_ttl_s": LEASE_TTL_S,
        "sweep_s": SWEEP_S,
        "storm_s": plan.seconds,
        "stories_at_once": plan.at_once,
        "workers": WORKERS,
        "gateways": GATEWAYS,
        "brokers": BROKERS,
        "owners": list(OWNERS),
        "retry_safe_tools": [],
        "max_wall_seconds": CEILINGS["max_wall_seconds"],
        "fault_every_s": {name: kind.every_s for name, kind in KINDS.items()},
    }


async def _happened(plan: Plan, recorder: Recorder, out: Path) -> tuple[Dump, tuple[str, ...]]:
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(anyio.create_task_group())
        workload: Workload | None = None
        model = await stack.enter_async_context(
            model_server(
                recorder,
                lambda label: workload.plan_of(label) if workload else [],
                lambda label: workload.begun.get(label) if workload else None,
            )
        )
        cluster = await stack.enter_async_context(open_cluster(recorder, _port_of(model.base_url)))
        keys = await _keys(cluster)
        embedders = await open_embedders(stack, recorder, keys, cluster.base_urls)
        workload = Workload(plan.seed, embedders, group)
        try:
            await start_all(cluster, group)
            for embedder in embedders:
                await embedder.begin(
                    Random(plan.seed), f"http://127.0.0.1:{cluster.proxies['model'].port}/v1"
                )
            group.start_soon(_read_ledger, cluster)
            await _rage(plan, cluster, workload, Nemesis(cluster, model))
            unended = await _all_ended(cluster, workload)
            await anyio.sleep(CALMS_S)
            cluster.note_usage("after")
            dump = await _dump(cluster)
        finally:
            with anyio.CancelScope(shield=True):
                await cluster.stop()
            _keep_logs(cluster, out)
            group.cancel_scope.cancel()
    return dump, unended


async def _rage(plan: Plan, cluster: Cluster, workload: Workload, nemesis: Nemesis) -> None:
    async with anyio.create_task_group() as stories:
        stories.start_soon(workload.run, plan.at_once)
        await anyio.sleep(WARM_UP_S)
        await cluster.all_connected()
        cluster.note_usage("before")
        await nemesis.rage(schedule(plan.seed, plan.seconds))
        workload.stop()
        await nemesis.heal()
        await cluster.all_ready()


async def _all_ended(cluster: Cluster, workload: Workload) -> tuple[str, ...]:
    """Wait until every run has ended and everybody who follows one knows; what is left is said."""
    workload.join_late(LATE_JOINERS)
    left: list[str] = ["the database did not answer"]
    with anyio.move_on_after(ENDS_S):
        while left:
            await anyio.sleep(POLL_S)
            left = await _open(cluster)
            waiting = [each for each in workload.followers if not each.ended.is_set()]
            left += [f"the follower {each.name} saw no end of {each.run_id}" for each in waiting]
    return tuple(left)


async def _open(cluster: Cluster) -> list[str]:
    try:
        async with cluster.database() as connection:
            rows = await connection.fetch("select id, state, wait_reason from runs where ended_at is null")
            owed = await connection.fetchval("select count(*) from outbox")
    except AWAY:
        return ["the database did not answer"]
    said = [f"run {row['id']} is {row['state']}, waiting for {row['wait_reason']}" for row in rows]
    return [*said, f"{owed} rows are left in the outbox"] if owed else said


async def _keys(cluster: Cluster) -> dict[str, str]:
    async with (
        open_pool(PostgresSettings(postgres_url=cluster.postgres.url)) as pool,
        transaction(pool) as made,
    ):
        return {owner: await create_key(made, owner, SCOPES) for owner in OWNERS}


async def _read_ledger(cluster: Cluster) -> None:
    """Every call that a tool server began, as it comes."""
    place, recorder = 0, cluster.recorder
    while True:  # bounded: one look each LEDGER_EVERY_S
        if cluster.ledger_path.exists():
            with cluster.ledger_path.open("rb") as file:
                file.seek(place)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    place += len(line)
                    told = json.loads(line)
                    if told["event"] == "called":
                        recorder.note(_ran(recorder, told))
        await anyio.sleep(LEDGER_EVERY_S)


def _ran(recorder: Recorder, told: dict[str, Any]) -> ToolRan:
    run_id, call = told["meta"].get("run_id", ""), told["argument"] or ""
    return ToolRan(recorder.at(told["at"]), "ledger", told["tool"], run_id, call)


async def _dump(cluster: Cluster) -> Dump:
    """All rows of all tables, of one moment."""
    async with (
        cluster.database(DUMP_S) as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        tables = [row["table_name"] for row in await connection.fetch(TABLES)]
        dump = {name: await _rows(connection, name) for name in tables}
        cluster.recorder.note(await _ended(cluster.recorder, connection))
    return dump


async def _ended(recorder: Recorder, connection: Any) -> Ended:
    """Both clocks at one moment: of a few looks the quickest, because this process may be kept waiting."""
    looks: list[tuple[float, Ended]] = []
    for _ in range(CLOCK_LOOKS):
        asked_at = recorder.now()
        clock = await connection.fetchval("select extract(epoch from clock_timestamp())::float8")
        took = recorder.now() - asked_at
        looks.append((took, Ended(asked_at + took / 2, clock)))
    return min(looks, key=lambda look: look[0])[1]


async def _rows(connection: Any, table: str) -> list[dict[str, Any]]:
    rows = await connection.fetch(f'select row_to_json(t)::text as row from "{table}" t')
    return [json.loads(row["row"]) for row in rows]


def _port_of(base_url: str) -> int:
    return int(base_url.rpartition(":")[2].partition("/")[0])


def _commit() -> str | None:
    try:
        said = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return said.stdout.strip() or None


def _keep_logs(cluster: Cluster, out: Path) -> None:
    shutil.rmtree(out / "logs", ignore_errors=True)
    shutil.copytree(cluster.folder, out / "logs")


def _errors_logged(out: Path) -> dict[str, int]:
    """How often each error was logged; the lines are beside the report."""
    counted: dict[str, int] = {}
    with (out / "errors.log").open("w") as file:
        for event, line in errors(out / "logs"):
            counted[event] = counted.get(event, 0) + 1
            file.write(line + "\n")
    return counted
