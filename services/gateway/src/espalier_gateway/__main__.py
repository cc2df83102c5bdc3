"""The gateway process: `python -m espalier_gateway`.

The first SIGTERM or SIGINT lets answers under way finish, a second one does not wait for them.
"""

import signal

import anyio
import structlog

from espalier_gateway.app import open_gateway, stop
from espalier_gateway.http import State
from espalier_gateway.server import Server
from espalier_gateway.settings import GatewaySettings
from espalier_telemetry import set_up_logs

log = structlog.get_logger(__name__)


async def serve(settings: GatewaySettings) -> None:
    async with open_gateway(settings) as (serving, state), anyio.create_task_group() as group:
        group.start_soon(_stop_when_told, serving, state)
        log.info("gateway.starting", host=settings.host, port=settings.port)
        await serving.serve()
        group.cancel_scope.cancel()
    log.info("gateway.stopped")


async def _stop_when_told(serving: Server, state: State) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            serving.force_exit = serving.should_exit
            await stop(serving, state)


def main() -> None:
    settings = GatewaySettings()
    set_up_logs(settings)
    anyio.run(serve, settings, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
