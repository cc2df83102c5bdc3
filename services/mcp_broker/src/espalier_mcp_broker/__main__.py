"""The broker process: `python -m espalier_mcp_broker`.

The first SIGTERM or SIGINT lets calls under way finish for a while; what does not finish is in doubt.
"""

import signal
import sys
from collections.abc import Sequence

import anyio
import structlog

from espalier_mcp_broker.app import Server, open_broker
from espalier_mcp_broker.calls import Calls
from espalier_mcp_broker.servers import ServersInvalid, ServerSpec, load_servers
from espalier_mcp_broker.settings import BrokerSettings
from espalier_telemetry import set_up_logs

log = structlog.get_logger(__name__)


async def serve(settings: BrokerSettings, servers: Sequence[ServerSpec]) -> None:
    async with open_broker(settings, servers) as (serving, calls), anyio.create_task_group() as group:
        group.start_soon(_stop_when_told, serving, calls, settings.broker_drain_s)
        log.info("broker.starting", host=settings.broker_host, port=settings.broker_port)
        await serving.serve()
        group.cancel_scope.cancel()
    log.info("broker.stopped")


async def _stop_when_told(serving: Server, calls: Calls, drain_s: float) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            break
    await calls.close(drain_s)
    serving.should_exit = True


def main() -> None:
    settings = BrokerSettings()
    set_up_logs(settings)
    try:
        servers = load_servers(settings.mcp_servers) if settings.mcp_servers else ()
    except ServersInvalid as invalid:
        sys.exit(str(invalid))
    anyio.run(serve, settings, servers, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
