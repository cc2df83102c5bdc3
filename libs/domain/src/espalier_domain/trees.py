"""What a run may give to a sub-agent, and what comes back: the rules of a tree, pure.

Headroom is what a ceiling still allows a run: the ceiling, less what it has used, less what it has granted. A
child gets its share of it for good, so ceilings compound down the tree without anybody counting the whole.
The same rule stands a second time in the statement that spawns (`espalier_store.trees`), where it holds
against others at the same moment; here it says what was wanted and what there was.
"""

from dataclasses import dataclass
from typing import Any, Final

from espalier_domain.journal import LimitSymbol
from espalier_domain.tools import has_tool
from espalier_protocol.agent import Budgets, Ceilings, PromptPolicy, Toolset
from espalier_protocol.message import BODY_BYTES_MAX
from espalier_protocol.run import EndState
from espalier_protocol.shapes import TEXT_CHARS_MAX, JsonObject, Name, Params, Text
from espalier_protocol.strict_json import dumps

DEPTH_MAX: Final = 8
"""Levels of runs below a run that an embedder began."""

EXCERPT_CHARS_MAX: Final = 8_000
"""Of a result that is too large for a message; every character may take six bytes in JSON."""

SHOWN_CHARS_MAX: Final = 200


class SpawnConstitution(Params):
    immutable_directives: Text
    mutable_prompt: Text
    mutable_prompt_policy: PromptPolicy = "auto"


class SpawnOrder(Params):
    """The arguments of `spawn_subagent`."""

    name: Name
    constitution: SpawnConstitution
    toolset_subset: Toolset
    initial_goal: Text
    ceilings: Ceilings
    budgets: Budgets
    metadata: JsonObject = {}


@dataclass(frozen=True, slots=True)
class Headroom:
    """What the spawner's run may still grant; the last two are not used up by granting."""

    cycles: int
    subagents: int
    wall_seconds: int
    tool_calls_per_cycle: int


@dataclass(frozen=True, slots=True)
class Spawner:
    """A run that wants a helper, as the rules see it."""

    depth: int
    headroom: Headroom
    budgets: Budgets
    toolset: tuple[str, ...]
    immutable_directives: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no helper; without a symbol the order itself is impossible. `reason` is for the model."""

    symbol: LimitSymbol | None
    reason: str


def refusal(spawner: Spawner, order: SpawnOrder) -> Refusal | None:
    """Why the spawner may not have this helper, or None."""
    if missing := [entry for entry in order.toolset_subset if not has_tool(spawner.toolset, entry)]:
        return Refusal("tool_not_found", f"you have no tool {missing[0][:SHOWN_CHARS_MAX]!r} to give")
    if spawner.depth >= DEPTH_MAX:
        return Refusal("ceiling_exceeded", f"a tree has at most {DEPTH_MAX} levels of sub-agents")
    for limit, wanted, left in _limits(spawner, order):
        if wanted > left:
            return Refusal("ceiling_exceeded", f"{limit}: {wanted} wanted, {max(left, 0)} left to give")
    if len(directives(spawner.immutable_directives, order)) > TEXT_CHARS_MAX:
        return Refusal(None, f"with yours, the directives have over {TEXT_CHARS_MAX} characters")
    return None


def _limits(spawner: Spawner, order: SpawnOrder) -> tuple[tuple[str, int, int], ...]:
    """(limit, wanted, left). A helper counts itself and whomever it may spawn."""
    room, ceilings, budgets = spawner.headroom, order.ceilings, order.budgets
    return (
        ("max_cycles", ceilings.max_cycles, room.cycles),
        ("max_subagents", 1 + ceilings.max_subagents, room.subagents),
        ("max_wall_seconds", ceilings.max_wall_seconds, room.wall_seconds),
        ("max_tool_calls_per_cycle", ceilings.max_tool_calls_per_cycle, room.tool_calls_per_cycle),
        *(
            (budget, getattr(budgets, budget), getattr(spawner.budgets, budget))
            for budget in Budgets.model_fields
        ),
    )


def directives(of_spawner: str, order: SpawnOrder) -> str:
    """A helper's immutable directives: its spawner's come first and cannot be left out."""
    own = order.constitution.immutable_directives
    return f"{of_spawner}\n\n{own}" if of_spawner and own else of_spawner or own


def least(budgets: Budgets, above: list[Budgets]) -> Budgets:
    """The budgets of a run whose spawners have those `above`: none of them may be exceeded."""
    if not above:
        return budgets
    every = (budgets, *above)
    return Budgets(**{name: min(getattr(each, name) for each in every) for name in Budgets.model_fields})


def subagent_result(agent_id: str, run_id: str, state: EndState, result: Any) -> str:
    """The message, as JSON, that tells a spawner how a child's run ended. A large result is shortened."""
    told = {"type": "subagent_result", "child_agent_id": agent_id, "child_run_id": run_id, "state": state}
    whole = dumps({**told, "result": result})
    if len(whole) > BODY_BYTES_MAX:
        excerpt = dumps(result).decode()[:EXCERPT_CHARS_MAX]
        whole = dumps({**told, "result": None, "result_excerpt": excerpt})
    return whole.decode()
