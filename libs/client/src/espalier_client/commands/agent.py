"""`espalier agent ...`: agents, from a few flags or from a file, with limits that suit a first try."""

from typing import Annotated, Any

import typer

from espalier_client.commands.terminal import AsJson, checked, document, fail, perform, put
from espalier_client.errors import ClientError
from espalier_protocol.agent import AgentCreate

DEFAULT_PROMPT = "Pursue the goal of the run. Leave what you make as artifacts, then complete."
DEFAULTS: dict[str, Any] = {
    "constitution": {
        "immutable_directives": "",
        "mutable_prompt": DEFAULT_PROMPT,
        "mutable_prompt_policy": "auto",
    },
    "toolset": [],
    "ceilings": {
        "max_cycles": 100,
        "max_subagents": 8,
        "max_tool_calls_per_cycle": 24,
        "max_wall_seconds": 7 * 24 * 3600,
    },
    "budgets": {"tokens_per_cycle": 100_000, "tool_calls_per_cycle": 12, "seconds_per_cycle": 300},
}
_BLOCKS = ("constitution", "ceilings", "budgets")


def group() -> typer.Typer:
    app = typer.Typer(help="The agents of a runtime.", no_args_is_help=True)
    app.command("create")(create)
    return app


def create(
    context: typer.Context,
    *,
    name: Annotated[str | None, typer.Option(help="What the agent is called.")] = None,
    file: Annotated[
        str | None, typer.Option(help="The agent as YAML or JSON (- for standard input); flags win over it.")
    ] = None,
    directives: Annotated[str | None, typer.Option(help="What it must always obey.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Its prompt, which it may rewrite.")] = None,
    tool: Annotated[list[str] | None, typer.Option(help="A tool it may use; several times for more.")] = None,
    max_cycles: Annotated[int | None, typer.Option(help="Cycles after which a run ends.")] = None,
    tokens_per_cycle: Annotated[int | None, typer.Option(help="Tokens after which a cycle ends.")] = None,
    metadata: Annotated[str | None, typer.Option(help="An object as JSON, or a file with one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make an agent and print its id. What is not given gets a default, limits included."""
    flags = {
        "name": name,
        "constitution": {"immutable_directives": directives, "mutable_prompt": prompt},
        "toolset": tool or None,
        "ceilings": {"max_cycles": max_cycles},
        "budgets": {"tokens_per_cycle": tokens_per_cycle},
    }
    try:
        flags["metadata"] = document(metadata) if metadata else None
        members = merged(merged(DEFAULTS, document(file) if file else {}), _given(flags))
        params = checked(AgentCreate, members)
    except ClientError as error:
        fail(error)
    agent = perform(context, lambda client: client.agent_create(params))
    put(agent, as_json, agent.id)


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`; of the blocks of limits and of the constitution, member by member."""
    laid = {**under, **over}
    for block in _BLOCKS:
        if isinstance(under.get(block), dict) and isinstance(over.get(block), dict):
            laid[block] = {**under[block], **over[block]}
    return laid


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Without what was not given, also inside the blocks."""
    kept = {name: value for name, value in flags.items() if value is not None}
    for block in _BLOCKS:
        kept[block] = {name: value for name, value in flags[block].items() if value is not None}
    return kept
