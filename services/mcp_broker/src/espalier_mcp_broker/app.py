"""The composition root: what a broker process holds open, and its few routes.

Workers are the only callers, and every request of theirs is signed. Nothing that goes wrong here is told to
them beyond a status: what a call came to stands in its row.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeVar
from uuid import uuid4

import anyio
import structlog
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from espalier_domain.errors import Unavailable
from espalier_domain.tools import servers_of
from espalier_egress import open_egress
from espalier_mcp_broker.attached import AttachedServers
from espalier_mcp_broker.bundled import bundled_server
from espalier_mcp_broker.calls import CallLimits, Calls
from espalier_mcp_broker.catalog import NO_SERVERS, Catalog, OwnServers, open_catalog
from espalier_mcp_broker.life import Life
from espalier_mcp_broker.servers import ServerSpec
from espalier_mcp_broker.settings import BrokerSettings
from espalier_protocol.access import served
from espalier_protocol.broker import (
    CALL_PATH,
    LIST_PATH,
    SIGNATURE_HEADER,
    CallOrder,
    CallStanding,
    ToolsOffered,
    ToolsWanted,
)
from espalier_secrets import is_signed
from espalier_secrets.sealing import sealer
from espalier_store.pool import Pool, open_pool, reading, schema_ready

BODY_BYTES_MAX: Final = 64 * 1024
MCP_EXTERNAL: Final = "tools.mcp_external"
READY_WAIT_S: Final = 1.0
KEEP_ALIVE_S: Final = 75
LIFE_CONNECTIONS: Final = 2
"""Of their own, so that calls which wait for a lock do not keep a broker from saying that it lives."""


Words = TypeVar("Words", bound=BaseModel)

log = structlog.get_logger(__name__)


class Refused(Exception):
    """A request that is no worker's, or makes no sense."""

    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status = status


class Server(uvicorn.Server):
    """Stops when `should_exit` is set, and only then: signals are `__main__`'s."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Desk:
    """What the routes need."""

    def __init__(
        self, key: str, pool: Pool, calls: Calls, catalog: Catalog, attached: AttachedServers, life: Life
    ) -> None:
        self._key = key
        self._pool, self._calls, self._catalog = pool, calls, catalog
        self._attached, self._life = attached, life

    async def call(self, request: Request) -> Response:
        return await self._answered(request, CallOrder, self._calls.carry_out)

    async def list_(self, request: Request) -> Response:
        return await self._answered(request, ToolsWanted, self._offered)

    async def ready(self, _: Request) -> Response:
        fine = False
        with anyio.move_on_after(READY_WAIT_S):
            try:
                async with reading(self._pool) as connection:
                    fine = self._life.lives and await schema_ready(connection)
            except Unavailable:
                fine = False
        return JSONResponse({"ok": fine}, 200 if fine else 503)

    async def _offered(self, wanted: ToolsWanted) -> ToolsOffered:
        if wanted.agent_id is None:
            return await self._listed(wanted, NO_SERVERS)
        slugs = servers_of(wanted.toolset)
        async with self._attached.of_agent(wanted.owner_id, wanted.agent_id, slugs) as own:
            return await self._listed(wanted, own)

    async def _listed(self, wanted: ToolsWanted, own: OwnServers) -> ToolsOffered:
        tools, troubles = await self._catalog.definitions(wanted.toolset, own)
        return ToolsOffered(tools=tools, troubles=troubles)

    async def _answered(
        self,
        request: Request,
        words: type[Words],
        act: Callable[[Words], Awaitable[CallStanding | ToolsOffered]],
    ) -> Response:
        """The boundary of the process: what goes wrong becomes a status here, and nothing else."""
        try:
            answer = await act(await self._read(request, words))
        except Refused as refused:
            return Response(status_code=refused.status)
        except Unavailable:
            return Response(status_code=503)
        except Exception:
            log.exception("broker.request_failed", path=request.url.path)
            return Response(status_code=500)
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _read(self, request: Request, words: type[Words]) -> Words:
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_BYTES_MAX:
                    raise Refused(413)
        except ClientDisconnect as error:
            raise Refused(400) from error
        given = request.headers.get(SIGNATURE_HEADER, "")
        if not is_signed(self._key, request.url.path, bytes(body), given):
            raise Refused(401)
        try:
            return words.model_validate_json(bytes(body))
        except ValidationError as error:
            raise Refused(400) from error


async def _alive(_: Request) -> Response:
    return JSONResponse({"ok": True})


@asynccontextmanager
async def open_broker(
    settings: BrokerSettings, servers: Sequence[ServerSpec]
) -> AsyncIterator[tuple[Server, Calls]]:
    """A server that is ready to serve, and the calls that it carries out. Waits for Postgres."""
    async with (
        open_pool(settings) as pool,
        open_pool(settings.model_copy(update={"postgres_connections_max": LIFE_CONNECTIONS})) as own,
        open_egress(settings) as egress,
        open_catalog(servers, bundled_server(egress)) as catalog,
        anyio.create_task_group() as background,
    ):
        listed = [server.name for server in servers]
        life = Life(own, uuid4(), settings.broker_ttl_s, listed)
        attached = AttachedServers(
            pool,
            egress,
            sealer(settings.secrets_key),
            background,
            open_max=settings.attached_servers_max if MCP_EXTERNAL in served(settings.capabilities) else 0,
        )
        limits = CallLimits(calls_max=settings.broker_calls_max, call_s_max=settings.call_s_max)
        calls = Calls(pool, catalog, attached, life, limits)
        await background.start(life.run)
        await background.start(calls.run)
        background.start_soon(attached.close_rested)
        desk = Desk(settings.internal_key.get_secret_value(), pool, calls, catalog, attached, life)
        yield _server(desk, settings), calls
        background.cancel_scope.cancel()


def _server(desk: Desk, settings: BrokerSettings) -> Server:
    app = FastAPI(
        routes=[
            Route(CALL_PATH, desk.call, methods=["POST"]),
            Route(LIST_PATH, desk.list_, methods=["POST"]),
            Route("/healthz", _alive),
            Route("/readyz", desk.ready),
        ],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    config = uvicorn.Config(
        app,
        host=settings.broker_host,
        port=settings.broker_port,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    return Server(config)
