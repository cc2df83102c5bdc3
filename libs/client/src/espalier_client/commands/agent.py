"""`espalier agent ...`: agents, from a few flags or from a file, with limits that suit a first try."""

from typing import Annotated, Any

import typer
from pydantic import BaseModel

from espalier_client.commands import prompt as prompts
from espalier_client.commands.listing import (
    ID_COLUMNS,
    LIMIT_DEFAULT,
    LISTED_MAX,
    TIME_COLUMNS,
    All,
    Limit,
    Listing,
    compact,
    instant,
    moment,
    tell,
)
from espalier_client.commands.mcp_servers import Bearers, Servers, servers_given
from espalier_client.commands.terminal import (
    AsJson,
    Unusable,
    checked,
    chosen,
    document,
    fail,
    line,
    output,
    perform,
    put,
    show_pages,
)
from espalier_client.errors import ClientError
from espalier_protocol.agent import Agent, AgentCreate, AgentList, AgentUpdate, LifecycleState, PromptPolicy

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
STATE_COLUMNS = len("cancelled")

AgentId = Annotated[str, typer.Argument(metavar="AGENT", help="The agent's id.")]


def group() -> typer.Typer:
    app = typer.Typer(help="The agents of a runtime.", no_args_is_help=True)
    app.command("list")(list_)
    for command in (create, get, update, archive, cancel):
        app.command()(command)
    app.add_typer(prompts.group(), name="prompt")
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
    mcp_servers: Servers = None,
    mcp_bearers: Bearers = None,
    as_json: AsJson = False,
) -> None:
    """Make an agent and print its id. What is not given gets a default, limits included."""
    flags: dict[str, Any] = {
        "name": name,
        "constitution": {"immutable_directives": directives, "mutable_prompt": prompt},
        "toolset": tool or None,
        "ceilings": {"max_cycles": max_cycles},
        "budgets": {"tokens_per_cycle": tokens_per_cycle},
    }
    try:
        flags["metadata"] = document(metadata) if metadata else None
        flags["external_mcp_servers"] = servers_given(mcp_servers, mcp_bearers)
        members = merged(merged(DEFAULTS, document(file) if file else {}), _given(flags))
        params = checked(AgentCreate, members)
    except ClientError as error:
        fail(error)
    agent = perform(context, lambda client: client.agent_create(params))
    put(agent, as_json, agent.id)


def list_(
    context: typer.Context,
    *,
    state: Annotated[LifecycleState | None, typer.Option(help="Only those that are in it.")] = None,
    subject: Annotated[str | None, typer.Option(help="Only those with this subject's id.")] = None,
    limit: Limit = LIMIT_DEFAULT,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """List agents, newest first."""
    wanted = chosen(lifecycle_state=state, subject_id=subject)
    listing = Listing(
        output(),
        [("agent", ID_COLUMNS), ("state", STATE_COLUMNS), ("created, UTC", TIME_COLUMNS)],
        "name",
    )

    def show(agent: Agent) -> None:
        if as_json:
            line(agent)
        else:
            listing.row(agent.id, agent.lifecycle_state, moment(agent.created_at), agent.name)

    show_pages(
        context,
        lambda client, page: client.agent_list(checked(AgentList, {**wanted, **page})),
        LISTED_MAX if everything else limit,
        show,
    )


def get(context: typer.Context, *, agent: AgentId, as_json: AsJson = False) -> None:
    """Show an agent: its prompt, its limits, its state."""
    found = perform(context, lambda client: client.agent_get(agent))
    if as_json:
        line(found)
    else:
        tell(output(), _facts(found))


def update(
    context: typer.Context,
    *,
    agent: AgentId,
    name: Annotated[str | None, typer.Option(help="What the agent is called from now on.")] = None,
    metadata: Annotated[
        str | None, typer.Option(help="An object as JSON, or a file with one; it replaces the old one.")
    ] = None,
    max_cycles: Annotated[int | None, typer.Option(help="Cycles after which a run ends.")] = None,
    max_subagents: Annotated[int | None, typer.Option(help="Helpers that a run may have.")] = None,
    max_tool_calls: Annotated[int | None, typer.Option(help="Tool calls that a cycle may make.")] = None,
    max_wall_seconds: Annotated[
        int | None, typer.Option(help="Seconds after which a run ends, sleep included.")
    ] = None,
    tokens_per_cycle: Annotated[int | None, typer.Option(help="Tokens after which a cycle ends.")] = None,
    tool_calls_per_cycle: Annotated[
        int | None, typer.Option(help="Tool calls after which a cycle ends.")
    ] = None,
    seconds_per_cycle: Annotated[int | None, typer.Option(help="Seconds after which a cycle ends.")] = None,
    directives: Annotated[
        str | None, typer.Option(help="What it must always obey; only before its first run.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Its prompt from the next cycle on.")] = None,
    policy: Annotated[PromptPolicy | None, typer.Option(help="Whether it may rewrite its prompt.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change an agent. What is not given stays as it is; ceilings cannot grow while a run lives."""
    blocks = {
        "constitution": chosen(
            immutable_directives=directives, mutable_prompt=prompt, mutable_prompt_policy=policy
        ),
        "ceilings": chosen(
            max_cycles=max_cycles,
            max_subagents=max_subagents,
            max_tool_calls_per_cycle=max_tool_calls,
            max_wall_seconds=max_wall_seconds,
        ),
        "budgets": chosen(
            tokens_per_cycle=tokens_per_cycle,
            tool_calls_per_cycle=tool_calls_per_cycle,
            seconds_per_cycle=seconds_per_cycle,
        ),
    }
    changes = chosen(name=name, **{block: members or None for block, members in blocks.items()})
    try:
        if metadata is not None:
            changes["metadata"] = document(metadata)
        if not changes:
            raise Unusable("Nothing to change was given; `agent update --help` shows what can be.")
        params = checked(AgentUpdate, {"agent_id": agent, **changes})
    except ClientError as error:
        fail(error)
    changed = perform(context, lambda client: client.agent_update(params))
    put(changed, as_json, f"{changed.id} updated")


def archive(context: typer.Context, *, agent: AgentId, as_json: AsJson = False) -> None:
    """Put an agent away, for good: its runs are cancelled, it takes no new one, and what it did stays."""
    archived = perform(context, lambda client: client.agent_archive(agent))
    put(archived, as_json, _standing(archived))


def cancel(context: typer.Context, *, agent: AgentId, as_json: AsJson = False) -> None:
    """Cancel an agent, for good: its runs are cancelled, it takes no new one."""
    cancelled = perform(context, lambda client: client.agent_cancel(agent))
    put(cancelled, as_json, _standing(cancelled))


def _standing(agent: Agent) -> str:
    return f"{agent.id} {agent.lifecycle_state}"


def _facts(agent: Agent) -> list[tuple[str, str]]:
    prompt = agent.constitution
    root = agent.root_agent_id if agent.root_agent_id != agent.id else ""
    return [
        ("agent", agent.id),
        ("name", agent.name),
        ("state", agent.lifecycle_state),
        ("wakes", instant(agent.next_wake_at)),
        ("parent", agent.parent_agent_id or ""),
        ("root", root),
        ("created", instant(agent.created_at)),
        ("updated", instant(agent.updated_at)),
        ("ceilings", _limits(agent.ceilings)),
        ("budgets", _limits(agent.budgets)),
        ("live runs", f"at most {agent.max_live_runs}"),
        ("toolset", "\n".join(agent.toolset)),
        ("servers", "\n".join(f"{server.name} {server.url}" for server in agent.external_mcp_servers)),
        ("subjects", "\n".join(agent.subject_ids)),
        ("metadata", compact(agent.metadata)),
        ("directives", prompt.immutable_directives),
        ("prompt", prompt.mutable_prompt),
        ("prompt policy", prompt.mutable_prompt_policy),
    ]


def _limits(limits: BaseModel) -> str:
    return "\n".join(f"{name} {number}" for name, number in limits.model_dump().items())


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
