"""Acts on tool calls: taking in what is known of those that a run waits for."""

from typing import Final
from uuid import UUID

from espalier_domain.journal import ToolReturned
from espalier_domain.progress import Progress
from espalier_domain.tool_results import returned, shown
from espalier_store.pool import Connection
from espalier_store.tool_calls import get_calls

DOUBT_GRACE_S: Final = 10.0
"""How long after its deadline a call that nobody has settled counts as in doubt."""

SETTLED: Final = ("done", "failed", "in_doubt")


async def known_outcomes(
    connection: Connection, owner_id: UUID, run_id: UUID, progress: Progress, *, stopping: bool
) -> tuple[ToolReturned, ...]:
    """The outcomes of calls under way that their rows tell of. The run is locked, so none is sent meanwhile.

    For a run that is `stopping`, a call that was sent and has no outcome is in doubt; one that never was sent
    is left to whoever closes the run.
    """
    under_way = progress.under_way()
    if not under_way or progress.cycle is None:
        return ()
    ids = [call.call_id for call in under_way]
    rows = await get_calls(connection, owner_id, run_id, ids, grace_s=DOUBT_GRACE_S)
    known = []
    for call in under_way:
        row = rows[call.call_id]
        if row.state in SETTLED or (stopping and row.state == "sent"):
            content = shown(row.result) if row.result else ""
            known.append(returned(progress.cycle.number, call, row.state, content))
    return tuple(known)
