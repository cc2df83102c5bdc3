"""The checkers themselves: each invariant is broken by hand and has to say so."""

import anyio
import pytest
from invariants import INVARIANTS, violations
from scripted_runs import DONE, Plan, Reader, note, start_run
from tests.integration.conftest import Start, StartGateway

from espalier_client.client import AepClient
from espalier_store.pool import Pool

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

WAIT_S = 20.0
PLAN: Plan = [note("first"), note("second"), DONE]
A_CALL = "body ->> 'kind' = 'tool_returned' and body ->> 'tool' = 'artifact_create'"
LAST_ASKED = "body ->> 'kind' = 'model_call_started' and body ->> 'cycle' = '3'"
A_MESSAGE = """
insert into messages (id, owner_id, root_id, from_agent_id, to_agent_id, sender, body, read_at, delivered_at)
select gen_random_uuid(), owner_id, id, id, id, 'agent', '1', {} from agents
"""
# The invariant, and what breaks it, perhaps together with others.
DAMAGES = [
    ("INV-1: the events of a run are numbered 1..n", "delete from events where seq = 3"),
    ("INV-1: the events of a run are numbered 1..n", "delete from events"),
    ("INV-1: the events of a run are numbered 1..n", "update events set seq = seq + 100 where seq > 4"),
    (
        "INV-1: later events were written later",
        "update events set emitted_at = emitted_at - interval '1 hour' where seq = 4",
    ),
    ("the journal of a run is numbered 1..n", "delete from journal where entry_no = 2"),
    (
        "INV-3: a run that ended says so once, last, and as its row does",
        "update runs set state = 'error'",
    ),
    (
        "INV-3: a run that ended says so once, last, and as its row does",
        "update events set type = 'run.ended' where seq = 2",
    ),
    (
        "INV-3: a run that ended says so once, last, and as its row does",
        "update runs set ended_at = null, state = 'running'",
    ),
    (
        "INV-3: a run that ended says so once, last, and as its row does",
        "update events set type = 'noise' where type = 'run.ended'",
    ),
    (
        "INV-5: a cycle begins once and ends once at most",
        "update journal set body = jsonb_set(body::jsonb, '{cycle}', '1') where body ->> 'cycle' = '2'",
    ),
    (
        "INV-5: nobody asks the model with an older token than another did before",
        f"update journal set body = jsonb_set(body::jsonb, '{{lease_token}}', '-1') where {LAST_ASKED}",
    ),
    (
        "an answer that is in the journal was asked for",
        "delete from journal where body ->> 'kind' = 'model_call_started'",
    ),
    ("no lease is held where nobody may work", "update runs set lease_until = now()"),
    (
        "a call has an outcome once at most",
        f"update journal set body = jsonb_set(body::jsonb, '{{call_id}}', '\"same\"') where {A_CALL}",
    ),
    (
        "INV-6: a call that is told as in doubt is asked about once, and no other",
        f"update journal set body = jsonb_set(body::jsonb, '{{in_doubt}}', 'true') where {A_CALL}",
    ),
    (
        "INV-6: a call that is told as in doubt is asked about once, and no other",
        """
            insert into approvals (id, owner_id, agent_id, run_id, kind, call_id)
            select gen_random_uuid(), owner_id, agent_id, id, 'in_doubt', 'call_1_1' from runs
        """,
    ),
    (
        "an artifact is there as often as it was made and told",
        "delete from artifacts where name = 'first'",
    ),
    (
        "an artifact is there as often as it was made and told",
        "update events set type = 'noise' where type = 'artifact.created' and seq < 8",
    ),
    (
        "an artifact is there as often as it was made and told",
        f"update journal set body = jsonb_set(body::jsonb, '{{ok}}', 'false') where {A_CALL}",
    ),
    (
        "what begins in the log of a run that ended also ends there",
        "update events set type = 'noise' where type = 'tool.returned' and seq < 8",
    ),
    (
        "what begins in the log of a run that ended also ends there",
        "update events set type = 'tool.called' where type = 'tool.returned'",
    ),
    (
        "memory that a run wrote is told of as often as it was written",
        "update events set type = 'memory.written' where seq = 3",
    ),
    (
        "memory belongs to the root of a tree of its owner",
        """
            insert into memory_records (id, owner_id, root_id, namespace, key, value, created_by_id)
            select gen_random_uuid(), owner_id, id, 'n', 'k', '0', id from agents;
            update agents set root_id = gen_random_uuid()
        """,
    ),
    (
        "INV-10: a message that was read is told of once, by a run of whom it was for",
        A_MESSAGE.format("now(), now()"),
    ),
    (
        "INV-10: a message that was read is told of once, by a run of whom it was for",
        "update events set type = 'message.delivered' where seq = 3",
    ),
    (
        "INV-10: a message of an agent is there as often as its runs tell of it",
        A_MESSAGE.format("now(), now()"),
    ),
    (
        "INV-10: a message of an agent is there as often as its runs tell of it",
        "update events set type = 'message.sent' where seq = 3",
    ),
    (
        "a message is delivered when it is read, after it was sent",
        A_MESSAGE.format("clock_timestamp(), null"),
    ),
    (
        "no run sleeps on a wake that it has not seen",
        """
            update runs set ended_at = null, state = 'sleeping', wait_reason = 'timer', wake_seq = 1,
                due_at = now() + interval '1 minute'
        """,
    ),
    (
        "a wake that was promised is carried out",
        """
            insert into outbox (owner_id, kind, agent_id, created_at)
            select owner_id, 'wake', id, now() - interval '1 minute' from agents
        """,
    ),
    (
        "INV-4: a run that could go on is held by somebody",
        "update runs set ended_at = null, state = 'sleeping', due_at = now() - interval '1 minute'",
    ),
]


async def test_every_invariant_holds_until_it_is_broken(
    start: Start, start_gateway: StartGateway, api_key: str, pool: Pool
) -> None:
    worker = start("worker", ESPALIER_MODELS_SCRIPTED="on")
    gateway = await start_gateway()
    async with AepClient(gateway.base_url, api_key) as client:
        with anyio.fail_after(WAIT_S):
            await Reader((await start_run(client, PLAN)).id).read(client)
    worker.stop()
    assert await violations(pool) == {}

    for invariant, damage in DAMAGES:
        async with pool.acquire() as connection:
            broken = connection.transaction()
            await broken.start()
            await connection.execute(damage)
            assert invariant in await violations(connection), damage
            await broken.rollback()
    assert {invariant for invariant, _ in DAMAGES} == set(INVARIANTS)
