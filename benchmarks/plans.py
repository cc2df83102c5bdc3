"""What the runs of the benches are told to do, as plans of the scripted model (docs/scripted-models.md)."""

from typing import Any, Final

Plan = list[dict[str, Any]]

COMPLETES: Final = """answers:
  - calls:
      - tool: complete
        args:
          final_message: ok
"""
"""As the shipped plan, but the run ends by a call of a self-tool, which is a step of its own."""

NEXT_CYCLE: Final[dict[str, Any]] = {"tool": "continue_now"}
NOTHING: Final[dict[str, Any]] = {"tool": "nothing"}
"""A tool that nobody knows: two events, and no work for anybody but the log."""


def paced(cycles: int, *, calls: int, delay_s: float, first_s: float = 0.0) -> Plan:
    """Cycles that follow each other at once; each waits, makes `calls` calls, leaves 2 + 2 * `calls` events.

    The first one waits for `first_s`, so that readers can come before there is anything to read. The whole
    run has 4 + `cycles` * (2 + 2 * `calls`) events, its last cycle being the answer "ok".
    """
    each = {"calls": [*[NOTHING] * (calls - 1), NEXT_CYCLE], "delay_s": delay_s}
    return [{**each, "delay_s": first_s or delay_s}, *[each] * (cycles - 1)]
