"""Running the calls of an answer, in order, until one of them ends the cycle."""

from espalier_domain.journal import ToolReturned
from espalier_domain.run import CallTools, refusal
from espalier_run_worker.draft import Draft
from espalier_run_worker.self_tools import SelfTools


async def run_calls(draft: Draft, tools: SelfTools, step: CallTools) -> None:
    """Record an outcome for every call, as long as calling is still what is next.

    On a run whose cancel was asked for, or whose time is over, none is run.
    """
    for call in step.calls:
        if draft.cancelled or not isinstance(draft.next_step(), CallTools):
            return
        cycle = draft.progress.cycle
        assert cycle is not None
        if refused := refusal(draft.facts, cycle, call):
            draft.record(*refused)
            continue
        outcome = await tools.call(draft, call)
        draft.record(ToolReturned(cycle.number, call.call_id, call.name, outcome.ok, outcome.content))
        draft.record(*outcome.entries)
