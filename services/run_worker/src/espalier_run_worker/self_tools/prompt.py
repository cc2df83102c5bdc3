"""`modify_own_prompt`: the agent rewrites what may change of its prompt, as far as its policy allows.

There is no argument that names another agent, the directives or the policy. The step that runs this call has
locked the agent before its run.
"""

from typing import Any, Final

import orjson

from espalier_acts.prompts import Applied, Forbidden, PromptEdit, Queued, modify_prompt
from espalier_domain.errors import InvalidInput, LifecycleConflict
from espalier_domain.prompts import PROMPT_CHARS_MAX, REASON_CHARS_MAX
from espalier_run_worker.models.model import ToolDefinition
from espalier_run_worker.self_tools.tool import SelfTool, ToolRefused, Under, object_schema

NAME: Final = "modify_own_prompt"
TAKES: Final = (
    f"invalid_params: {NAME} takes mode (replace or diff), content (at most {PROMPT_CHARS_MAX} characters) "
    f"and reason (1 to {REASON_CHARS_MAX} characters)."
)


async def _modify_own_prompt(under: Under, args: dict[str, Any]) -> str:
    cycle = under.draft.progress.cycle
    assert cycle is not None, "a call is made in a cycle"
    try:
        changed = await modify_prompt(
            under.draft.connection, under.draft.run, _edit(args), cycle=cycle.number
        )
    except InvalidInput as error:
        raise ToolRefused(f"invalid_params: {error.field} {error.reason}.") from error
    except LifecycleConflict as error:
        raise ToolRefused(f"lifecycle_conflict: {error.reason}") from error
    under.entries += changed.entries
    match changed:
        case Applied(entry_id):
            return orjson.dumps({"applied": True, "history_entry_id": entry_id}).decode()
        case Queued(change_id):
            return orjson.dumps({"queued": True, "pending_change_id": change_id}).decode()
        case Forbidden(reason):
            raise ToolRefused(f"constitution_policy_violation: {reason}")


def _edit(args: dict[str, Any]) -> PromptEdit:
    match args:
        case {"mode": "replace" | "diff" as mode, "content": str(content), "reason": str(reason)}:
            if len(args) == 3 and len(content) <= PROMPT_CHARS_MAX and 1 <= len(reason) <= REASON_CHARS_MAX:
                return PromptEdit(mode, content, reason)
    raise ToolRefused(TAKES)


TOOLS: Final[tuple[SelfTool, ...]] = (
    SelfTool(
        ToolDefinition(
            NAME,
            "Rewrite your own prompt: the part after your directives, from your next cycle on. With mode "
            "replace, content is the whole new prompt; with mode diff, a unified diff to the present one, "
            "whose hunks must fit exactly. It is applied at once, waits for a person, or is forbidden, as "
            "your constitution says.",
            object_schema(
                ["mode", "content", "reason"],
                mode={"enum": ["replace", "diff"]},
                content={"type": "string", "maxLength": PROMPT_CHARS_MAX},
                reason={
                    "type": "string",
                    "minLength": 1,
                    "maxLength": REASON_CHARS_MAX,
                    "description": "why, for the people who read the prompt's history",
                },
            ),
        ),
        _modify_own_prompt,
    ),
)
