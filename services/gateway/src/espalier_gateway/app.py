"""The composition root: what a gateway process holds open, put together once and closed in reverse.

The state is built around the server rather than in its lifespan, so that a background task that fails ends
the process instead of leaving a gateway that answers and follows nothing.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

import anyio

from espalier_embeddings import find_embedder
from espalier_eventlog import open_streams
from espalier_eventlog.publisher import Publisher
from espalier_gateway.artifact_bytes import bytes_route
from espalier_gateway.auth import Gatekeeper
from espalier_gateway.cancels import ForcedCancels
from espalier_gateway.couriers import Couriers
from espalier_gateway.dispatcher import Dispatcher
from espalier_gateway.events import events_route
from espalier_gateway.http import State, build_app
from espalier_gateway.methods.call import Desk
from espalier_gateway.providers_rest import provider_routes
from espalier_gateway.rate_limits import RateLimit, RefusalLog
from espalier_gateway.server import Server, server
from espalier_gateway.settings import GatewaySettings
from espalier_gateway.stream_limits import OpenStreams
from espalier_gateway.subjects_rest import subject_routes
from espalier_gateway.tails import Tails
from espalier_gateway.ws import websocket_routes
from espalier_jobs import Doorbell, QueueNames, open_queue
from espalier_protocol.access import served
from espalier_protocol.versions import SERVED, Versions
from espalier_secrets.sealing import sealer
from espalier_store.fleet import acknowledge
from espalier_store.pool import open_pool


@asynccontextmanager
async def open_gateway(
    settings: GatewaySettings, versions: Versions = SERVED
) -> AsyncIterator[tuple[Server, State]]:
    """A server that is ready to serve. Waits for Postgres and its schema, however long; never for Redis."""
    async with (
        open_pool(settings) as pool,
        open_streams(settings) as streams,
        open_queue(settings.redis_url) as queue,
        anyio.create_task_group() as background,
    ):
        publisher = Publisher(streams, settings.redis_prefix, partial(acknowledge, pool))
        couriers = Couriers(pool, publisher, Doorbell(queue, QueueNames(settings.redis_prefix)))
        cancels = ForcedCancels(pool, couriers)
        closing = anyio.Event()
        tails = Tails(pool, settings.redis_url, settings.redis_prefix, closing)
        for task in (publisher.run, couriers.run, cancels.run):
            background.start_soon(task)
        await background.start(tails.run)
        refusals = RefusalLog()
        rate = RateLimit(settings.rpc_rate, settings.rpc_burst, refusals)
        offered, box = served(settings.capabilities), sealer(settings.secrets_key)
        gatekeeper = Gatekeeper(
            pool, rate, offered, versions, session_ttl_s=settings.session_ttl_s, cache_s=settings.cache_s
        )
        build = version("espalier-gateway")
        desk = Desk(
            pool,
            couriers,
            cancels,
            settings.session_ttl_s,
            build,
            offered,
            versions,
            box,
            find_embedder(settings),
        )
        dispatcher = Dispatcher(
            gatekeeper, desk, batch_max=settings.batch_max, json_depth_max=settings.json_depth_max
        )
        open_now = OpenStreams(
            refusals,
            per_key=settings.streams_per_key,
            per_run=settings.streams_per_run,
            per_gateway=settings.streams_per_gateway,
        )
        state = State(settings, pool, gatekeeper, dispatcher, tails, open_now, box, closing)
        beside = provider_routes() if "runner.byo_llm" in offered else []
        beside += subject_routes(desk) if "compliance.gdpr" in offered else []
        serving = server(
            build_app(state, [events_route(), *websocket_routes(), bytes_route(), *beside]), settings
        )
        background.start_soon(serving.config.heads.run)
        yield serving, state
        background.cancel_scope.cancel()


async def stop(serving: Server, state: State) -> None:
    """Begin to stop: streams end and can be resumed elsewhere, answers under way are finished."""
    state.closing.set()
    serving.should_exit = True
