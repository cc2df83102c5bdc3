"""Carrying out calls: the fence, the call itself, and its outcome in the row before anybody is told.

A call under way is a task of this process, not of the request that asked for it: a worker that disconnects or
dies changes nothing, and whoever asks for the same call joins it. Above: `app`. Below: `catalog` and its
sessions, and `store.tool_calls`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

import anyio
import anyio.abc
import structlog

from espalier_domain.errors import Conflicted, Unavailable
from espalier_domain.tool_results import DOUBT, SettledState, shown, text_result
from espalier_domain.tools import server_of, servers_of
from espalier_mcp_broker.attached import AttachedServers
from espalier_mcp_broker.catalog import Catalog, Found
from espalier_mcp_broker.life import Life
from espalier_mcp_broker.outcomes import (
    RESULT_BYTES_MAX,
    Answer,
    Answered,
    NotSent,
    TooLarge,
    Unknown,
)
from espalier_protocol.broker import CallOrder, CallStanding
from espalier_protocol.ids import to_wire
from espalier_protocol.strict_json import dumps
from espalier_store.fleet import runs_to_stop
from espalier_store.pool import Pool, reading
from espalier_store.tool_calls import SentCall, get_calls, send_call, settle_call

LOOK_EVERY_S: Final = 0.5
"""Between two looks for runs whose calls are to be stopped."""

SETTLE_AGAIN_S: Final = 0.5
SETTLE_WAIT_S: Final = 10.0
"""How long after its deadline the outcome of a call is still tried to be written down."""

NO_GRACE_S: Final = 0.0
_Settlement = tuple[SettledState, dict[str, Any]]
"""A state and a `CallToolResult`."""

REFUSED: Final = CallStanding(state="refused")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CallLimits:
    calls_max: int
    call_s_max: float


@dataclass(slots=True)
class _Flight:
    """A call under way. `stop` ends it at its server; `over` is set when `standing` is final."""

    order: CallOrder
    deadline: float
    stop: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    over: anyio.Event = field(default_factory=anyio.Event)
    standing: CallStanding = REFUSED


class Calls:
    """All calls of this process. `run` holds the tasks in which they live."""

    def __init__(
        self, pool: Pool, catalog: Catalog, attached: AttachedServers, life: Life, limits: CallLimits
    ) -> None:
        self._pool, self._catalog, self._attached = pool, catalog, attached
        self._life, self._limits = life, limits
        self._under_way: dict[tuple[UUID, str], _Flight] = {}
        self._group: anyio.abc.TaskGroup | None = None
        self._closed = False

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Hold the calls, and stop those whose runs are to stop, for ever."""
        async with anyio.create_task_group() as self._group:
            task_status.started()
            while True:  # bounded: one statement a turn
                await anyio.sleep(LOOK_EVERY_S)
                try:
                    await self._stop_what_is_to_stop()
                except Unavailable:
                    log.warning("calls.store_away")

    async def carry_out(self, order: CallOrder) -> CallStanding:
        """Send the call if it may be, or join it, and wait for how it comes out."""
        key = (order.run_id, order.call_id)
        flight = self._under_way.get(key)
        if flight is None:
            full = len(self._under_way) >= self._limits.calls_max
            if full or self._closed or self._group is None or not self._life.lives:
                return await self._as_it_stands(order)
            seconds = min(order.seconds_max, self._limits.call_s_max)
            flight = self._under_way[key] = _Flight(order, anyio.current_time() + seconds)
            self._group.start_soon(self._fly, flight)
        await flight.over.wait()
        return flight.standing

    async def close(self, drain_s: float) -> None:
        """Take no more calls; let those under way finish for a while, then stop them. They are in doubt."""
        self._closed = True
        with anyio.move_on_after(drain_s):
            await self._all_over()
        for flight in self._under_way.values():
            flight.stop.cancel()
        with anyio.move_on_after(SETTLE_WAIT_S):
            await self._all_over()

    async def _all_over(self) -> None:
        for flight in list(self._under_way.values()):
            await flight.over.wait()

    async def _fly(self, flight: _Flight) -> None:
        """A boundary: whatever goes wrong with one call, the others go on; its row tells how it stands."""
        with self._landing(flight):
            try:
                flight.standing = await self._flown(flight)
            except Unavailable:
                log.warning("calls.store_away", call_id=flight.order.call_id)
            except Exception:
                log.exception("calls.call_failed", call_id=flight.order.call_id)

    async def _flown(self, flight: _Flight) -> CallStanding:
        try:
            sent = await self._send(flight)
        except Unavailable:
            # It may count as sent; but from here not a byte of it leaves, and that can be said.
            return await self._settled(flight, _unmade("The broker could not be sure that it may send it."))
        if sent is None:
            return await self._as_it_stands(flight.order)
        return await self._settled(flight, await self._call(flight, sent))

    @contextmanager
    def _landing(self, flight: _Flight) -> Iterator[None]:
        """However the flight ends, whoever waits for it is told, and it can be asked for again."""
        try:
            yield
        finally:
            del self._under_way[(flight.order.run_id, flight.order.call_id)]
            flight.over.set()

    async def _send(self, flight: _Flight) -> SentCall | None:
        order = flight.order
        async with reading(self._pool) as connection:
            return await send_call(
                connection,
                order.owner_id,
                order.run_id,
                order.call_id,
                lease_token=order.lease_token,
                broker_id=self._life.broker_id,
                deadline_s=flight.deadline - anyio.current_time(),
            )

    async def _call(self, flight: _Flight, sent: SentCall) -> _Settlement:
        server = server_of(sent.tool)
        slugs = servers_of([sent.tool]) if sent.has_servers else []
        try:
            async with self._attached.of_agent(flight.order.owner_id, sent.agent_id, slugs) as own:
                if reason := own.troubles.get(server):
                    return _unmade(reason)
                return await self._asked(flight, sent, self._catalog.find(sent.tool, own))
        except Unavailable:
            return _unmade("The server could not be looked up.")

    async def _asked(self, flight: _Flight, sent: SentCall, found: Found | None) -> _Settlement:
        if found is None:
            return _unmade("There is no such server.")
        seconds = flight.deadline - anyio.current_time()
        with flight.stop:
            meta = _meta(flight.order, sent)
            return settled_by(
                await found.session.call(
                    found.tool, sent.args, meta=meta, seconds=seconds, may_leave=lambda: self._life.lives
                )
            )
        return _in_doubt("It was stopped.")

    async def _settled(self, flight: _Flight, settlement: _Settlement) -> CallStanding:
        """Write the outcome down, however often that takes until its time is over, and only then tell it."""
        order, (state, result, text) = flight.order, _kept(settlement)
        with anyio.move_on_at(flight.deadline + SETTLE_WAIT_S):
            while True:  # bounded by the scope
                try:
                    async with reading(self._pool) as connection:
                        written = await settle_call(
                            connection,
                            order.owner_id,
                            order.run_id,
                            order.call_id,
                            broker_id=self._life.broker_id,
                            state=state,
                            result=text,
                        )
                except Unavailable as error:
                    if not isinstance(error, Conflicted):
                        await anyio.sleep(SETTLE_AGAIN_S)
                    continue
                if written:
                    return CallStanding(state=state, content=shown(result))
                log.warning("calls.late_answer", run_id=str(order.run_id), call_id=order.call_id)
                return await self._as_it_stands(order)
        return REFUSED

    async def _as_it_stands(self, order: CallOrder) -> CallStanding:
        """What the row says of a call that is not under way here."""
        async with reading(self._pool) as connection:
            rows = await get_calls(
                connection, order.owner_id, order.run_id, [order.call_id], grace_s=NO_GRACE_S
            )
        row = rows.get(order.call_id)
        if row is None:
            return REFUSED
        match row.state:
            case "planned" | "skipped":
                return REFUSED
            case "sent":
                return CallStanding(state="elsewhere")
            case settled:
                return CallStanding(state=settled, content=shown(row.result) if row.result else "")

    async def _stop_what_is_to_stop(self) -> None:
        if not self._under_way:
            return
        async with reading(self._pool) as connection:
            stopped = await runs_to_stop(connection, list({run_id for run_id, _ in self._under_way}))
        for (run_id, _), flight in self._under_way.items():
            if run_id in stopped:
                flight.stop.cancel()


def settled_by(answer: Answer) -> _Settlement:
    """How a row is settled by an answer, or by its absence."""
    match answer:
        case Answered(result):
            return ("failed" if result.get("isError") else "done"), result
        case NotSent(reason):
            return _unmade(reason)
        case TooLarge():
            why = f"The tool ran and answered with more than {RESULT_BYTES_MAX} bytes, which were not kept."
            return "failed", text_result(why)
        case Unknown(reason):
            return _in_doubt(reason)


def _kept(settlement: _Settlement) -> tuple[SettledState, dict[str, Any], str]:
    """The settlement with its JSON. What a server calls a number, and JSON does not, cannot be kept."""
    state, result = settlement
    try:
        return state, result, dumps(result).decode()
    except (ValueError, RecursionError):
        why = text_result("The tool ran and answered with what is no JSON and was not kept.")
        return "failed", why, dumps(why).decode()


def _unmade(why: str) -> _Settlement:
    return "failed", text_result(f"unavailable: the call was not made. {why}")


def _in_doubt(why: str) -> _Settlement:
    return "in_doubt", text_result(f"{DOUBT}. {why}")


def _meta(order: CallOrder, sent: SentCall) -> dict[str, Any]:
    """Whom a call is for, as AEP hands it to servers (spec section 9). A session's own id is a secret."""
    meta: dict[str, Any] = {
        "session_id": to_wire("run", sent.root_run_id),
        "agent_id": to_wire("agt", sent.agent_id),
        "run_id": to_wire("run", order.run_id),
        "subject_ids": sent.subject_ids,
    }
    if len(sent.subject_ids) == 1:
        meta["subject_id"] = sent.subject_ids[0]
    return meta
