"""`run.create`, `run.get`, `run.list`, `run.cancel`, `run.continue`, `run.subscribe`, `run.unsubscribe`."""

from typing import Final
from uuid import UUID

import anyio

from espalier_acts.runs import RunOrder, cancel_run, continue_run, create_run
from espalier_domain.errors import NotFound
from espalier_gateway.auth import require_scope
from espalier_gateway.methods.call import Call, named, place, unknown_cursor
from espalier_protocol.ids import to_wire
from espalier_protocol.run import (
    Run,
    RunCreate,
    RunDone,
    RunList,
    RunPage,
    RunRef,
    RunSubscribe,
    RunSubscribed,
    RunUnsubscribe,
    RunUnsubscribed,
)
from espalier_store.agents import get_agent
from espalier_store.pool import Connection, reading, transaction
from espalier_store.runs import get_run, list_runs

CANCEL_POLL_S: Final = 0.05
LIVE: Final = ("running", "sleeping")


async def create(call: Call, params: RunCreate) -> Run:
    order = RunOrder(named("agt", params.agent_id), params.goal, params.inputs, params.subject_ids)
    async with call.creating() as creation:
        run, written = await create_run(creation.connection, call.owner_id, order)
        await creation.keep(run)
    # No other writer of this process knows the run yet, so its order needs no lock.
    call.desk.couriers.publish(written)
    call.desk.couriers.ring(written.run_id)
    return run


async def get(call: Call, params: RunRef) -> Run:
    run_id = named("run", params.run_id)
    async with reading(call.pool) as connection:
        return await _run(connection, call, run_id)


async def list_(call: Call, params: RunList) -> RunPage:
    agent_id = named("agt", params.agent_id)
    where = place("run", params)
    async with reading(call.pool) as connection:
        if await get_agent(connection, call.owner_id, agent_id) is None:
            raise NotFound("agent", params.agent_id)
        if where.after is not None:
            last = await get_run(connection, call.owner_id, where.after)
            if last is None or last.agent_id != params.agent_id:
                raise unknown_cursor()
        page = await list_runs(connection, call.owner_id, agent_id, where)
    cursor = page.items[-1].id if page.more else None
    return RunPage(items=page.items, cursor=cursor, runs=page.items, next_cursor=cursor)


async def cancel(call: Call, params: RunRef) -> RunDone:
    """Ended at once when nobody works on the run; otherwise the worker has `patience_s` to end it."""
    run_id = named("run", params.run_id)
    run = await end_run(call, run_id)
    return _done(await _wait_for_end(call, run_id, run))


async def end_run(call: Call, run_id: UUID) -> Run:
    """Cancel the run. When somebody works on it, it still lives afterwards, and is forced to end later.

    Raises NotFound, or LifecycleConflict when it has ended otherwise.
    """
    couriers = call.desk.couriers
    async with couriers.in_order(run_id):
        async with transaction(call.pool) as connection:
            written = await cancel_run(connection, call.owner_id, run_id)
            run = await _run(connection, call, run_id)
        if written is not None:
            couriers.publish(written)
    if run.state in LIVE:
        call.desk.cancels.later(call.owner_id, run_id)
    return run


async def continue_(call: Call, params: RunRef) -> RunDone:
    run_id = named("run", params.run_id)
    async with transaction(call.pool) as connection:
        await continue_run(connection, call.owner_id, run_id)
        run = await _run(connection, call, run_id)
    call.desk.couriers.ring(run_id)
    return _done(run)


async def subscribe(call: Call, params: RunSubscribe) -> RunSubscribed:
    """The ladder lets it pass only where there is a listener."""
    assert call.listener is not None
    require_scope(call.caller, "run.read")
    run_id = named("run", params.run_id)
    return RunSubscribed(
        subscription_id=await call.listener.subscribe(call.caller, call.session, run_id, params.since)
    )


async def unsubscribe(call: Call, params: RunUnsubscribe) -> RunUnsubscribed:
    assert call.listener is not None
    return RunUnsubscribed(ended=call.listener.subscriptions.end(params.subscription_id))


async def _wait_for_end(call: Call, run_id: UUID, run: Run) -> Run:
    """The run as it stands when it has ended or the wait is over."""
    until = anyio.current_time() + call.patience_s
    while run.state in LIVE and anyio.current_time() < until:
        await anyio.sleep(CANCEL_POLL_S)
        async with reading(call.pool) as connection:
            run = await _run(connection, call, run_id)
    return run


async def _run(connection: Connection, call: Call, run_id: UUID) -> Run:
    run = await get_run(connection, call.owner_id, run_id)
    if run is None:
        raise NotFound("run", to_wire("run", run_id))
    return run


def _done(run: Run) -> RunDone:
    return RunDone(**{name: getattr(run, name) for name in Run.model_fields})
