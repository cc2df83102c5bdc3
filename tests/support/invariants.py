"""What must be true of a database whatever happened to the processes around it.

Each invariant is one query for its violations, so that every test can ask for all of them at its end.
`test_invariants.py` breaks each of them once.
"""

from typing import Any

from espalier_store.pool import Connection, Pool

SWEEP_S = 3.0
"""A run that is due and that nobody holds is found within this long, if there is a worker."""

INVARIANTS = {
    "INV-1: the events of a run are numbered 1..n": """
        select r.id from runs r left join events e on e.run_id = r.id
        group by r.id having count(e.seq) <> r.next_seq - 1 or min(e.seq) <> 1 or max(e.seq) <> r.next_seq - 1
    """,
    "INV-1: later events were written later": """
        select run_id, seq from (
            select *, lag(emitted_at) over (partition by run_id order by seq) as before from events
        ) told where emitted_at < before
    """,
    "the journal of a run is numbered 1..n": """
        select r.id from runs r left join journal j on j.run_id = r.id
        group by r.id having count(j.entry_no) <> r.next_entry_no - 1
            or min(j.entry_no) <> 1 or max(j.entry_no) <> r.next_entry_no - 1
    """,
    "INV-3: a run that ended says so once, last, and as its row does": """
        select r.id from runs r left join events e on e.run_id = r.id and e.type = 'run.ended'
        group by r.id having count(e.seq) <> (r.ended_at is not null)::int or max(e.seq) <> r.next_seq - 1
            or max(e.payload::jsonb ->> 'final_state') <> r.state
    """,
    "INV-5: a cycle begins once and ends once at most": """
        select run_id, body ->> 'cycle' from journal
        where body ->> 'kind' in ('cycle_started', 'cycle_ended')
        group by run_id, body ->> 'kind', body ->> 'cycle' having count(*) > 1
    """,
    "INV-5: nobody asks the model with an older token than another did before": """
        select run_id, entry_no::text from (
            select *, (body ->> 'lease_token')::bigint as token,
                lag((body ->> 'lease_token')::bigint) over (partition by run_id order by entry_no) as before
            from journal where body ->> 'kind' = 'model_call_started'
        ) asked where token < before
    """,
    "an answer that is in the journal was asked for": """
        select run_id from journal group by run_id, body ->> 'cycle'
        having count(*) filter (where body ->> 'kind' in ('model_answered', 'model_failed'))
            > count(*) filter (where body ->> 'kind' = 'model_call_started')
    """,
    "no lease is held where nobody may work": """
        select id from runs where state <> 'running' and lease_until is not null
    """,
    "a call has an outcome once at most": """
        select run_id, body ->> 'call_id' from journal where body ->> 'kind' = 'tool_returned'
        group by run_id, body ->> 'call_id' having count(*) > 1
    """,
    "INV-6: a call that is told as in doubt is asked about once, and no other": """
        select run_id, call_id from (
            select run_id, body ->> 'call_id' as call_id, 1 as told, 0 as asked from journal
            where body ->> 'kind' = 'tool_returned' and (body ->> 'in_doubt')::boolean
            union all select run_id, call_id, 0, 1 from approvals where kind = 'in_doubt'
        ) doubted group by run_id, call_id having sum(told) <> 1 or sum(asked) <> 1
    """,
    "an artifact is there as often as it was made and told": """
        select r.id from runs r
        where (select count(*) from artifacts a where a.run_id = r.id) <> any (array[
            (select count(*) from events e where e.run_id = r.id and e.type = 'artifact.created'),
            (select count(*) from journal j where j.run_id = r.id and j.body ->> 'kind' = 'tool_returned'
                and j.body ->> 'tool' = 'artifact_create' and (j.body ->> 'ok')::boolean)])
    """,
    "what begins in the log of a run that ended also ends there": """
        select run_id, pair from (
            select e.run_id, type in ('cycle.started', 'tool.called') as begins,
                coalesce(payload::jsonb ->> 'call_id', payload::jsonb ->> 'cycle_number') as pair
            from events e join runs r on r.id = e.run_id and r.ended_at is not null
            where type in ('cycle.started', 'cycle.ended', 'tool.called', 'tool.returned')
        ) told group by run_id, pair having count(*) filter (where begins) <> 1 or count(*) <> 2
    """,
    "INV-10: a message that was read is told of once, by a run of whom it was for": """
        select a.id from agents a
        where (select count(*) from messages m where m.to_agent_id = a.id and m.read_at is not null) <> any (
            select unnest(array[count(*), count(distinct e.payload::jsonb ->> 'message_id')])
            from events e join runs r on r.id = e.run_id
            where r.agent_id = a.id and e.type = 'message.delivered')
    """,
    "INV-10: a message of an agent is there as often as its runs tell of it": """
        select a.id from agents a
        where (select count(*) from messages m where m.from_agent_id = a.id and m.sender = 'agent') <> any (
            select unnest(array[count(*), count(distinct e.payload::jsonb ->> 'message_id')])
            from events e join runs r on r.id = e.run_id
            where r.agent_id = a.id and e.type = 'message.sent')
    """,
    "a message is delivered when it is read, after it was sent": """
        select id from messages where delivered_at is distinct from read_at or read_at < created_at
    """,
    "no run sleeps on a wake that it has not seen": """
        select id from runs where state = 'sleeping' and wait_reason in ('timer', 'message', 'child')
            and wake_seq > wake_seen and due_at > clock_timestamp()
    """,
    "memory that a run wrote is told of as often as it was written": """
        select r.id from runs r
        where (
            select count(*) from events e where e.run_id = r.id and e.type = 'memory.written'
        ) <> any (array[
            (select count(*) from journal j where j.run_id = r.id and j.body ->> 'kind' = 'memory_written'),
            (select count(*) from journal j where j.run_id = r.id and j.body ->> 'kind' = 'tool_returned'
                and j.body ->> 'tool' = 'learning_memory_write' and (j.body ->> 'ok')::boolean)])
    """,
    "memory belongs to the root of a tree of its owner": """
        select m.id from memory_records m
        where not exists (
            select from agents a where a.id = m.root_id and a.root_id = a.id and a.owner_id = m.owner_id)
    """,
    # Only while there is a worker.
    "a wake that was promised is carried out": f"""
        select id from outbox
        where kind = 'wake' and created_at < clock_timestamp() - interval '{SWEEP_S} s'
    """,
    "INV-4: a run that could go on is held by somebody": f"""
        select id from runs where state in ('running', 'sleeping')
            and greatest(due_at, coalesce(lease_until, due_at)) < clock_timestamp() - interval '{SWEEP_S} s'
    """,
}


async def violations(pool: "Pool | Connection") -> dict[str, list[tuple[Any, ...]]]:
    """The invariants that do not hold, each with the rows that break it."""
    found = {name: await pool.fetch(query) for name, query in INVARIANTS.items()}
    return {name: [tuple(row) for row in rows] for name, rows in found.items() if rows}
