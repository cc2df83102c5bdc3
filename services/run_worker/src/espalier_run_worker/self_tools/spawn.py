"""`spawn_subagent`: beginning a helper, out of what the agent's own run may still use.

No argument names another spawner, and the helper gets nothing that its spawner has not. The call does not end
the cycle: several helpers may work at once, and an answer without calls waits for them.
"""

from typing import Any, Final

import orjson

from espalier_acts.spawn import spawn_subagent
from espalier_domain.trees import DEPTH_MAX, Refusal, SpawnOrder
from espalier_protocol import strict_json
from espalier_protocol.agent import INT_MAX, Budgets, Ceilings
from espalier_protocol.shapes import LIST_ENTRIES_MAX, NAME_CHARS_MAX, TEXT_CHARS_MAX
from espalier_run_worker.models.model import ToolDefinition
from espalier_run_worker.self_tools.tool import SelfTool, ToolRefused, Under, object_schema

TAKES: Final = (
    "invalid_params: spawn_subagent takes name, constitution (immutable_directives, mutable_prompt and, if "
    "wanted, mutable_prompt_policy: auto, approval_required or locked), toolset_subset (a list), "
    f"initial_goal, ceilings ({', '.join(Ceilings.model_fields)}), budgets "
    f"({', '.join(Budgets.model_fields)}) and, if wanted, metadata (an object)."
)


async def _spawn_subagent(under: Under, args: dict[str, Any]) -> str:
    draft = under.draft
    spawned = await spawn_subagent(draft.connection, draft.run, draft.facts, _order(args))
    match spawned:
        case Refusal(None, reason):
            raise ToolRefused(f"invalid_params: {reason}")
        case Refusal(symbol, reason):
            raise ToolRefused(reason, symbol=symbol)
    under.entries.append(spawned.entry)
    draft.begun.append(spawned.written)
    entry = spawned.entry
    answer = {"child_agent_id": entry.child_agent_id, "child_run_id": entry.child_run_id}
    return orjson.dumps(answer).decode()


def _order(args: dict[str, Any]) -> SpawnOrder:
    """Text that Postgres cannot store is refused here, and so is what no embedder could have sent."""
    try:
        return SpawnOrder.model_validate(strict_json.loads(strict_json.dumps(args)))
    except ValueError as error:  # of JSON and of the model alike: their words are not for the agent
        raise ToolRefused(TAKES) from error


_COUNT: Final = {"type": "integer", "minimum": 1, "maximum": INT_MAX}
_TEXT: Final = {"type": "string", "maxLength": TEXT_CHARS_MAX}

TOOLS: Final = (
    SelfTool(
        ToolDefinition(
            "spawn_subagent",
            "Begin a helper with a goal of its own. Its directives come after yours; its tools are some of "
            "yours; its cycles and sub-agents are taken from what your run has left, and cycles that it does "
            "not use come back. When its run ends you get a message with the result, and are woken. To wait "
            f"for that, answer without text or calls. A tree has at most {DEPTH_MAX} levels.",
            object_schema(
                ["name", "constitution", "toolset_subset", "initial_goal", "ceilings", "budgets"],
                name={"type": "string", "minLength": 1, "maxLength": NAME_CHARS_MAX},
                constitution=object_schema(
                    ["immutable_directives", "mutable_prompt"],
                    immutable_directives=_TEXT,
                    mutable_prompt=_TEXT,
                    mutable_prompt_policy={
                        "enum": ["auto", "approval_required", "locked"],
                        "default": "auto",
                    },
                ),
                toolset_subset={
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": NAME_CHARS_MAX},
                    "maxItems": LIST_ENTRIES_MAX,
                },
                initial_goal=_TEXT,
                ceilings=object_schema(
                    list(Ceilings.model_fields),
                    **{name: _COUNT for name in Ceilings.model_fields if name != "max_subagents"},
                    max_subagents={**_COUNT, "minimum": 0},
                ),
                budgets=object_schema(
                    list(Budgets.model_fields),
                    tokens_per_cycle=_COUNT,
                    tool_calls_per_cycle=_COUNT,
                    seconds_per_cycle=_COUNT,
                ),
                metadata={"type": "object"},
            ),
        ),
        _spawn_subagent,
    ),
)
