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
    # Only while there is a worker.
    "INV-4: a run that could go on is held by somebody": f"""
        select id from runs where state in ('running', 'sleeping')
            and greatest(due_at, coalesce(lease_until, due_at)) < clock_timestamp() - interval '{SWEEP_S} s'
    """,
}


async def violations(pool: "Pool | Connection") -> dict[str, list[tuple[Any, ...]]]:
    """The invariants that do not hold, each with the rows that break it."""
    found = {name: await pool.fetch(query) for name, query in INVARIANTS.items()}
    return {name: [tuple(row) for row in rows] for name, rows in found.items() if rows}
