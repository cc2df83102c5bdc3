"""Trying something against the runtime under test: the one place where whatever is raised becomes a verdict.

A runtime may send anything, also what is of no shape that a check has thought of. That is a failure of the
runtime and told as one; it ends no other check, and not the kit.
"""

from collections.abc import Awaitable

import anyio

from espalier_client.conformance.verdicts import Failed, Outcome, Skipped, brief
from espalier_client.conformance.wire import Notes


async def attempted(work: Awaitable[object], notes: Notes, within_s: float) -> tuple[Outcome, str]:
    """What became of it, and why. `notes` say what it waited for last."""
    try:
        with anyio.fail_after(within_s):
            await work
    except Skipped as skipped:
        return "skipped", str(skipped)
    except Failed as failed:
        return "failed", str(failed)
    except TimeoutError:
        return "failed", f"not done within {within_s:g} s; it waited for {notes.last}."
    except Exception as error:
        why = f"{type(error).__name__} {brief(str(error))}"
        return "failed", f"{notes.last}: an answer of an unexpected shape ({why})."
    return "passed", ""
