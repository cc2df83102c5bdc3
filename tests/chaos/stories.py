"""What embedders do during a storm, as a function of the seed: story after story, each around one run.

Pure. A story says who begins it, what its agent may do and will do (the plan), and what its embedder does
meanwhile: repeats the create, sends messages, cancels, looks on late. `workload` lives them.

Every call of a tool with a ledger carries the name that the runtime will give it (`call_<answer>_<place>`),
so that a line of the ledger names one call and no other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

OWNERS: Final = ("ada", "bob", "cyd")
CEILINGS: Final = {
    "max_cycles": 60,
    "max_subagents": 6,
    "max_tool_calls_per_cycle": 40,
    "max_wall_seconds": 130,
}
BUDGETS: Final = {"tokens_per_cycle": 20_000, "tool_calls_per_cycle": 40, "seconds_per_cycle": 60}
HELPER: Final = {**CEILINGS, "max_cycles": 8, "max_subagents": 0, "max_wall_seconds": 60}
TOOLS: Final = ("mcp.ledger.*", "mcp.desk.*")
SCRIPT: Final = "espalier.script"
SLOW_S_MAX: Final = 7.0
"""Longer than a lease, so that a call is still under way when its run has another holder."""

Step = dict[str, Any]
Plan = list[Step]


@dataclass(frozen=True)
class Story:
    """Times are seconds after the run's create was answered."""

    number: int
    kind: str
    owner: str
    label: str
    plan: Plan
    on_provider: bool = False
    messages_at_s: tuple[float, ...] = ()
    cancel_at_s: float | None = None
    cancel_method: str = "run.cancel"
    repeats: bool = False
    """The create is sent again with its key, to the other gateway, although it was answered."""
    other_params: bool = False
    """And once more with the same key and another goal, which must be refused."""
    peeks: bool = False
    """Another owner asks for this run, and must be told what it would be told of any id."""
    joins_at_s: tuple[float, ...] = ()

    @property
    def agent(self) -> dict[str, Any]:
        return {
            "name": self.label,
            "constitution": {
                "immutable_directives": f"You are {self.owner}'s.",
                "mutable_prompt": canary(self.owner),
                "mutable_prompt_policy": "auto",
            },
            "toolset": list(TOOLS),
            "ceilings": CEILINGS,
            "budgets": BUDGETS,
        }

    @property
    def goal(self) -> str:
        return f"[{self.label}] {canary(self.owner)}"

    @property
    def inputs(self) -> dict[str, Any]:
        return {} if self.on_provider else {SCRIPT: {"answers": self.plan}}


def canary(owner: str) -> str:
    """What no other owner may ever be shown."""
    return f"canary-of-{owner}-5f3a"


def story(seed: int, number: int) -> Story:
    """The story of this number under this seed."""
    chance = Random(f"{seed}/{number}")
    kind = chance.choices([*_PLANS], [weight for weight, _ in _PLANS.values()])[0]
    label = f"s{number}-{kind}"
    owner = OWNERS[number % len(OWNERS)]
    cancelled = kind == "victim" or chance.random() < 0.06
    return Story(
        number,
        kind,
        owner,
        label,
        _numbered(_PLANS[kind][1](chance, label, canary(owner))),
        on_provider=kind == "provider",
        messages_at_s=tuple(sorted(chance.uniform(0, 8) for _ in range(chance.randint(1, 4))))
        if kind == "listener" or chance.random() < 0.15
        else (),
        cancel_at_s=chance.uniform(0, 6) if cancelled else None,
        cancel_method=chance.choice(["run.cancel", "run.cancel", "agent.cancel"]),
        repeats=chance.random() < 0.35,
        other_params=chance.random() < 0.1,
        peeks=chance.random() < 0.15,
        joins_at_s=tuple(chance.uniform(0, 15) for _ in range(chance.choice([0, 1, 1, 2]))),
    )


# --- plans -----------------------------------------------------------------------------------------------


def step(*calls: tuple[str, dict[str, Any]], delay_s: float = 0.0, **more: Any) -> Step:
    return {"calls": [{"tool": tool, "args": dict(args)} for tool, args in calls], "delay_s": delay_s, **more}


def sleep(seconds: float) -> tuple[str, dict[str, Any]]:
    return "sleep", {"duration_seconds": seconds}


GO_ON: Final = ("continue_now", dict[str, Any]())
INBOX: Final = ("inbox_read", dict[str, Any]())


def _numbered(plan: Plan) -> Plan:
    """Calls of tools with a ledger are told their own names, in this plan and in those of its helpers."""
    for answer, each in enumerate(plan, start=1):
        for place, call in enumerate(each.get("calls", ()), start=1):
            if call["tool"].startswith("mcp."):
                call["args"]["text"] = f"call_{answer}_{place}"
            if call["tool"] == "spawn_subagent":
                _numbered(call["args"]["metadata"][SCRIPT]["answers"])
    return plan


def _done(text: str) -> Step:
    return step(("complete", {"final_message": text}))


def _pause(chance: Random) -> float:
    return round(chance.choice([0.0, chance.uniform(0, 0.6)]), 3)


def _note(name: str, text: str) -> tuple[str, dict[str, Any]]:
    return "artifact_create", {"name": name, "content": text}


def _tool(chance: Random) -> tuple[str, dict[str, Any]]:
    """A call that has an effect: mostly quick, some slow, some that fail or are refused."""
    server = chance.choice(["ledger", "ledger", "desk"])
    what = chance.choices(["record", "slow", "fail", "refuse"], [7, 3, 1, 1])[0]
    if what == "slow":
        return f"mcp.{server}.record", {"delay_s": round(chance.uniform(1, SLOW_S_MAX), 2)}
    if what == "record":
        return f"mcp.{server}.record", {"delay_s": round(chance.uniform(0, 0.3), 2)}
    return f"mcp.{server}.{what}", {}


def _clerk(chance: Random, label: str, told: str) -> Plan:
    plan: Plan = []
    for turn in range(chance.randint(2, 5)):
        plan.append(step(_note(f"{label}-{turn}", told), GO_ON, delay_s=_pause(chance)))
        if chance.random() < 0.5:
            plan.append(step(sleep(chance.choice([1, 1.5, 2.5])), delay_s=_pause(chance)))
    return [*plan, _done(told)]


def _handy(chance: Random, label: str, told: str) -> Plan:
    plan: Plan = []
    for _ in range(chance.randint(1, 4)):
        tools = [_tool(chance) for _ in range(chance.randint(1, 3))]
        more: Step = {"fault": {"reason": "overloaded", "times": 1}} if chance.random() < 0.1 else {}
        plan.append(step(*tools, delay_s=_pause(chance), **more))
        if chance.random() < 0.4:
            plan.append(step(chance.choice([GO_ON, sleep(1)])))
    return [*plan, _done(told)]


def _parent(chance: Random, label: str, told: str) -> Plan:
    helpers = [_spawn(chance, f"{label}-h{place}", told) for place in range(chance.randint(1, 3))]
    tells = ("send_message", {"to_agent_id": "${/results/0/child_agent_id}", "body": {"told": told}})
    return [
        step(*helpers, delay_s=_pause(chance)),
        *([step(tells)] if chance.random() < 0.6 else []),
        {"text": ""},
        step(INBOX, sleep(1)),
        step(INBOX, _note(f"{label}-end", told), GO_ON),
        _done(told),
    ]


def _spawn(chance: Random, name: str, told: str) -> tuple[str, dict[str, Any]]:
    plan = [
        step(_tool(chance), delay_s=_pause(chance)),
        step(_note(name, told), chance.choice([GO_ON, sleep(1)])),
        step(INBOX, GO_ON),
        _done(told),
    ]
    return "spawn_subagent", {
        "name": name,
        "constitution": {"immutable_directives": "Be brief.", "mutable_prompt": "Help."},
        "toolset_subset": list(TOOLS),
        "initial_goal": f"[{name}] {told}",
        "metadata": {SCRIPT: {"answers": plan}},
        "ceilings": HELPER,
        "budgets": BUDGETS,
    }


def _listener(chance: Random, label: str, told: str) -> Plan:
    waits = [step(sleep(chance.choice([3, 5, 8]))) for _ in range(2)]
    return [waits[0], step(INBOX, GO_ON), waits[1], step(INBOX, GO_ON), _done(told)]


def _keeper(chance: Random, label: str, told: str) -> Plan:
    write = [
        ("learning_memory_write", {"namespace": "storm", "key": f"k{place}", "value": {"told": told}})
        for place in range(chance.randint(1, 3))
    ]
    read = ("learning_memory_read", {"namespace": "storm"})
    return [step(*write, GO_ON), step(read, sleep(1)), step(*write[:1], GO_ON), _done(told)]


def _victim(chance: Random, label: str, told: str) -> Plan:
    """Long enough that its cancel finds it in the middle of something."""
    tools = [("mcp.ledger.record", {"delay_s": round(chance.uniform(0.5, SLOW_S_MAX), 2)}) for _ in range(2)]
    ways: list[Plan] = [
        [step(GO_ON, delay_s=0.3) for _ in range(40)],
        [step(*tools), step(*tools), step(*tools)],
        [step(_spawn(chance, f"{label}-h0", told), _spawn(chance, f"{label}-h1", told)), {"text": ""}],
        [step(sleep(60))],
    ]
    return [*chance.choice(ways), _done(told)]


def _provided(chance: Random, label: str, told: str) -> Plan:
    """Never an answer without calls: a position is counted by the answers that a conversation shows."""
    plan: Plan = []
    for turn in range(chance.randint(2, 4)):
        plan.append(step(*[_tool(chance) for _ in range(chance.randint(1, 2))]))
        plan.append(step(_note(f"{label}-{turn}", told), chance.choice([GO_ON, sleep(1)])))
    return [*plan, _done(told)]


_PLANS: Final[dict[str, tuple[int, Callable[[Random, str, str], Plan]]]] = {
    "clerk": (3, _clerk),
    "handy": (5, _handy),
    "parent": (3, _parent),
    "listener": (2, _listener),
    "keeper": (2, _keeper),
    "victim": (3, _victim),
    "provider": (3, _provided),
}
