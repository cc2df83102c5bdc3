"""Running the self-tools' calls of an answer, in order, until one ends the cycle or is the broker's."""

from espalier_domain.journal import ToolReturned
from espalier_domain.run import CallSelf
from espalier_run_worker.draft import Draft
from espalier_run_worker.self_tools import SelfTools


async def run_calls(draft: Draft, tools: SelfTools) -> None:
    """Record an outcome for every call, as long as calling a self-tool is what is next.

    On a run whose cancel was asked for, or whose time is over, none is run.
    """
    while not draft.cancelled and isinstance(step := draft.next_step(), CallSelf):  # bounded by the answer
        cycle = draft.progress.cycle
        assert cycle is not None
        outcome = await tools.call(draft, step.call)
        call = step.call
        draft.record(ToolReturned(cycle.number, call.call_id, call.name, outcome.ok, outcome.content))
        draft.record(*outcome.entries)
        draft.wakes += outcome.wakes
