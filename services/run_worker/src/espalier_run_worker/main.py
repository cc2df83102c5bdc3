"""The composition root of a worker process: builds its parts, starts its tasks, and stops them in order."""

import signal
import sys
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final

import anyio
import structlog

from espalier_egress import open_egress
from espalier_embeddings import find_embedder
from espalier_eventlog import open_streams
from espalier_eventlog.publisher import Publisher
from espalier_jobs import Doorbell, QueueNames, open_queue
from espalier_protocol.access import served
from espalier_run_worker.broker_link import open_broker_link
from espalier_run_worker.brokered_calls import BrokeredCalls
from espalier_run_worker.cycle import Workshop, live
from espalier_run_worker.doorbell import listen, look_out
from espalier_run_worker.held import claim
from espalier_run_worker.models.bound import ChosenModel, Providers
from espalier_run_worker.models.choice import SETTINGS_ERRORS, open_model
from espalier_run_worker.models.model import OperatorModel
from espalier_run_worker.models.sparing import SparingModel
from espalier_run_worker.provider_probes import answer_probes
from espalier_run_worker.retention import retain
from espalier_run_worker.self_tools import open_self_tools
from espalier_run_worker.settings import WorkerSettings
from espalier_run_worker.slots import Slots
from espalier_run_worker.supervisor import Supervisor
from espalier_run_worker.sweeper import sweep
from espalier_run_worker.toolbox import Toolbox
from espalier_run_worker.wakes import Wakes
from espalier_secrets.sealing import sealer
from espalier_store.fleet import acknowledge
from espalier_store.pool import open_pool
from espalier_telemetry import set_up_logs

DAY_S: Final = 24 * 3600

log = structlog.get_logger(__name__)


async def work(settings: WorkerSettings, chosen: AbstractAsyncContextManager[OperatorModel]) -> None:
    """Live runs until SIGTERM or SIGINT; then let steps finish for a while and give the rest back."""
    names, offered = QueueNames(settings.redis_prefix), served(settings.capabilities)
    async with (
        chosen as operator,
        open_pool(settings) as pool,
        open_streams(settings) as streams,
        open_queue(settings.redis_url) as queue,
        open_egress(settings) as egress,
        open_self_tools(offered, find_embedder(settings)) as tools,
        open_broker_link(settings.broker_url, settings.internal_key.get_secret_value()) as link,
    ):
        providers = Providers(egress, sealer(settings.secrets_key)) if "runner.byo_llm" in offered else None
        model = SparingModel(ChosenModel(operator, providers), operators_too=bool(settings.model))
        publisher = Publisher(streams, settings.redis_prefix, partial(acknowledge, pool))
        supervisor = Supervisor(settings)
        claim_here = partial(claim, pool, publisher, settings.lease_ttl_s)
        claims = anyio.CapacityLimiter(max(1, settings.postgres_connections_max // 2))
        toolbox, brokered = Toolbox(tools, link), BrokeredCalls(pool, link)
        ring = Doorbell(queue, names).ring
        wakes = Wakes(pool, ring)
        workshop = Workshop(claims, claim_here, ring, model, tools, toolbox, brokered, supervisor, wakes)
        slots = Slots(settings.worker_slots, partial(live, workshop))
        async with anyio.create_task_group() as group:
            group.start_soon(publisher.run)
            group.start_soon(wakes.run)
            group.start_soon(supervisor.run)
            group.start_soon(slots.run)
            group.start_soon(listen, slots, names, queue)
            group.start_soon(look_out, slots, pool)
            if providers:
                group.start_soon(answer_probes, pool, providers)
            group.start_soon(sweep, pool, publisher)
            group.start_soon(retain, pool, settings.log_retention_days * DAY_S)
            log.info("worker.ready", slots=settings.worker_slots)
            await _told_to_stop()
            await _drain(slots, supervisor, settings.worker_drain_s)
            group.cancel_scope.cancel()
    log.info("worker.stopped")


async def _told_to_stop() -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            return


async def _drain(slots: Slots, supervisor: Supervisor, drain_s: float) -> None:
    slots.close()
    supervisor.hand_over()
    with anyio.move_on_after(drain_s):
        await slots.wait_empty()


def main() -> None:
    settings = WorkerSettings()
    set_up_logs(settings)
    try:
        chosen = open_model(settings)
    except SETTINGS_ERRORS as invalid:
        sys.exit(str(invalid))
    anyio.run(work, settings, chosen, backend_options={"use_uvloop": True})
