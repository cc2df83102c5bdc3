"""What the checks stand on: the runtime's address, the keys that were given, and what it said of itself.

`lay` looks once; a `Trial` is what one check works with. A trial makes agents and runs of its own, so that
checks neither see each other nor need an empty runtime.
"""

import re
import shlex
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final
from uuid import uuid4

import anyio
import httpx2
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from espalier_client.conformance.attempts import attempted
from espalier_client.conformance.behaviour import SCRIPT, says
from espalier_client.conformance.expected import expected
from espalier_client.conformance.verdicts import Failed, Requirement, Skipped, brief, expect
from espalier_client.conformance.wire import (
    ANSWER_WAIT_S,
    CONNECT_WAIT_S,
    CONNECTIONS_MAX,
    Caller,
    Notes,
)

POLL_S: Final = 0.05
PROBE_S: Final = 15.0
MINT_S: Final = 30.0
WS_PATH: Final = "/aep/v1/ws"
SUBJECTS_PATH: Final = "/api/me/subjects"
PROVIDERS_PATH: Final = "/api/me/llm-providers"
CEILINGS: Final = {
    "max_cycles": 20,
    "max_subagents": 2,
    "max_tool_calls_per_cycle": 8,
    "max_wall_seconds": 300,
}
BUDGETS: Final = {"tokens_per_cycle": 20_000, "tool_calls_per_cycle": 8, "seconds_per_cycle": 120}
CONSTITUTION: Final = {
    "immutable_directives": "Be brief.",
    "mutable_prompt": "Say ok.",
    "mutable_prompt_policy": "auto",
}
ENDED: Final = ("complete", "cancelled", "error")


@dataclass(frozen=True, slots=True)
class Keys:
    """`limited` are keys of any owner with the scopes that they hold. `mint` is a command, see `_minted`."""

    first: str = field(repr=False)
    second: str | None = field(default=None, repr=False)
    limited: Mapping[str, frozenset[str]] = field(default_factory=dict, repr=False)
    mint: str | None = None


@dataclass
class Ground:
    """`trouble` is why there is no session; `lacking` says of what is not there why not."""

    http: httpx2.AsyncClient
    keys: Keys
    me: Caller | None = None
    they: Caller | None = None
    server: dict[str, Any] = field(default_factory=dict)
    capabilities: dict[str, bool] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)
    trouble: str = ""

    def why_not(self, requirement: Requirement) -> str:
        """Why this requirement cannot be tried here; empty if it can."""
        name = requirement.capability
        if name != "core" and self.capabilities and not self.capabilities.get(name):
            return f"The runtime does not offer {name}."
        return next((self.lacking[need] for need in requirement.needs if need in self.lacking), "")

    @property
    def ws_url(self) -> str:
        return re.sub("^http", "ws", str(self.http.base_url).rstrip("/")) + WS_PATH


@asynccontextmanager
async def lay(base_url: str, keys: Keys) -> AsyncIterator[Ground]:
    """Connect, look around, and hand out the ground. What is missing is noted, not raised."""
    timeout = httpx2.Timeout(ANSWER_WAIT_S, connect=CONNECT_WAIT_S)
    limits = httpx2.Limits(max_connections=CONNECTIONS_MAX)
    async with httpx2.AsyncClient(base_url=base_url, timeout=timeout, limits=limits, trust_env=False) as http:
        ground = Ground(http, keys)
        notes = Notes()
        _, ground.trouble = await attempted(_get_in(ground, notes), notes, PROBE_S)
        if ground.me is not None:
            await _look_around(ground, ground.me)
        yield ground


async def _get_in(ground: Ground, notes: Notes) -> None:
    stranger = Caller(ground.http, ground.keys.first, notes=notes)
    said = await stranger.call("initialize", **_plain_hello())
    ground.server = (isinstance(said, dict) and said.get("server_info")) or {}
    me = await stranger.initialize()
    ground.capabilities = {name: agreed is True for name, agreed in me.capabilities.items()}
    ground.me = me


async def _look_around(ground: Ground, me: Caller) -> None:
    await _mint_missing(ground)
    for need, probe in {
        "script": _follows_scripts(me),
        "websocket": _offers_websocket(ground),
        "subjects": _serves(me, SUBJECTS_PATH),
        "providers": _serves(me, PROVIDERS_PATH),
        "second_key": _second_owner(ground),
    }.items():
        outcome, reason = await attempted(probe, me.notes, PROBE_S)
        if outcome != "passed":
            ground.lacking[need] = reason
    if not ground.keys.limited:
        ground.lacking["limited_keys"] = "No key with fewer scopes was given (--limited-key or --mint-keys)."


async def _follows_scripts(me: Caller) -> None:
    """Whether a run does what its script says; if not, no agent can be made to behave."""
    word = uuid4().hex
    agent = await me.call("agent.create", **agent_params())
    inputs = {SCRIPT: {"answers": [says(word)]}}
    run = await me.call("run.create", agent_id=agent["id"], goal="Say ok.", inputs=inputs)
    while run["state"] not in ENDED:  # bounded by the caller's time limit
        await anyio.sleep(POLL_S)
        run = await me.call("run.get", run_id=run["id"])
    if word not in brief(run["result"]):
        raise Skipped("The runtime does not follow behaviour scripts (see docs/conformance.md).")


async def _offers_websocket(ground: Ground) -> None:
    try:
        async with connect(ground.ws_url, additional_headers=_me(ground).headers(), proxy=None):
            return
    except (OSError, WebSocketException) as err:
        raise Skipped(f"The runtime offers no WebSocket at {WS_PATH} ({type(err).__name__}).") from err


async def _serves(me: Caller, path: str) -> None:
    status = (await me.get(path)).status
    if status != 200:
        raise Skipped(f"The runtime has no {path} (HTTP {status}).")


async def _second_owner(ground: Ground) -> None:
    if ground.keys.second is None:
        raise Skipped("No key of a second owner was given (--second-key or --mint-keys).")
    ground.they = await Caller(ground.http, ground.keys.second).initialize()


def _me(ground: Ground) -> Caller:
    assert ground.me is not None
    return ground.me


def _plain_hello() -> dict[str, Any]:
    return {
        "client_info": {"name": "espalier-conformance", "version": "1"},
        "requested_versions": [expected().version],
        "requested_capabilities": {},
    }


# -------------------------------------------------------------------- keys


def scope_sets() -> list[frozenset[str]]:
    """Sets of scopes of which no two scopes are members of the same ones: so few keys tell all apart."""
    scopes = expected().scopes
    bits = (len(scopes) + 1).bit_length()
    return [
        frozenset(scope for place, scope in enumerate(scopes, start=1) if place >> bit & 1)
        for bit in range(bits)
    ]


async def _mint_missing(ground: Ground) -> None:
    keys = ground.keys
    if keys.mint is None:
        return
    try:
        second = keys.second or await _minted(keys.mint, "kit-second", expected().scopes)
        limited = dict(keys.limited)
        if not limited:
            for number, scopes in enumerate(scope_sets()):
                limited[await _minted(keys.mint, f"kit-limited-{number}", sorted(scopes))] = scopes
    except Failed as failed:
        ground.lacking["limited_keys"] = ground.lacking["second_key"] = str(failed)
        return
    ground.keys = replace(keys, second=second, limited=limited)


async def _minted(command: str, owner: str, scopes: Sequence[str]) -> str:
    """The first word that the command prints."""
    words = minting(command, owner, scopes)
    try:
        with anyio.fail_after(MINT_S):
            process = await anyio.run_process(words, check=False)
    except (OSError, TimeoutError) as err:
        raise Failed(f"--mint-keys: {words[0]} cannot be run ({type(err).__name__}).") from err
    printed = process.stdout.decode(errors="replace").split()
    if process.returncode != 0 or not printed:
        raise Failed(f"--mint-keys: {words[0]} exited with {process.returncode} and printed no key.")
    return printed[0]


def minting(command: str, owner: str, scopes: Sequence[str]) -> list[str]:
    """The command's words. `{owner}` and `{scopes}` (with commas) are filled in.

    A word with `{scope}` is repeated for each scope, with the word before it.
    """
    words = shlex.split(command)
    place = next((number for number, word in enumerate(words) if "{scope}" in word), None)
    if place is not None:
        option = words[max(place - 1, 0) : place + 1]
        repeated = [word.replace("{scope}", scope) for scope in scopes for word in option]
        words = [*words[: max(place - 1, 0)], *repeated, *words[place + 1 :]]
    return [word.replace("{owner}", owner).replace("{scopes}", ",".join(scopes)) for word in words]


# -------------------------------------------------------------------- what one check works with


def agent_params(**changes: Any) -> dict[str, Any]:
    """A plain agent. Members of a block are changed by `ceilings__max_cycles=1`."""
    params: dict[str, Any] = {
        "name": "kit",
        "constitution": dict(CONSTITUTION),
        "toolset": [],
        "ceilings": dict(CEILINGS),
        "budgets": dict(BUDGETS),
    }
    for name, value in changes.items():
        block, _, member = name.partition("__")
        if member:
            params[block][member] = value
        else:
            params[name] = value
    return params


@dataclass
class Trial:
    """One check's own view of the ground."""

    ground: Ground
    notes: Notes = field(default_factory=Notes)
    _words: Iterable[int] = field(default_factory=count)

    @property
    def me(self) -> Caller:
        """The first owner, with every capability that the runtime has."""
        if self.ground.me is None:
            raise Failed(f"there is no session: {self.ground.trouble}")
        return replace(self.ground.me, notes=self.notes)

    @property
    def they(self) -> Caller:
        """Another owner."""
        if self.ground.they is None:
            raise Skipped(self.ground.lacking.get("second_key", "There is no second owner."))
        return replace(self.ground.they, notes=self.notes)

    @property
    def stranger(self) -> Caller:
        """The first owner's key without a session."""
        return Caller(self.ground.http, self.ground.keys.first, notes=self.notes)

    @property
    def scripted(self) -> bool:
        return "script" not in self.ground.lacking

    def has(self, capability: str) -> bool:
        return self.ground.capabilities.get(capability, False)

    def require(self, capability: str) -> None:
        if not self.has(capability):
            raise Skipped(f"The runtime does not offer {capability}.")

    async def limited(self) -> list[tuple[Caller, frozenset[str]]]:
        """Callers with fewer scopes, each with a session."""
        found = []
        for key, scopes in self.ground.keys.limited.items():
            caller = Caller(self.ground.http, key, notes=self.notes)
            found.append((await caller.initialize(), scopes))
        return found

    def word(self) -> str:
        """Something that nobody else says."""
        return f"kit-{uuid4().hex}"

    def subject(self) -> str:
        """A subject that nobody else has."""
        return f"sub_{uuid4().hex[:26].upper().translate(_CROCKFORD)}"

    async def agent(self, **changes: Any) -> dict[str, Any]:
        return await self._made("agent.create", agent_params(**changes))

    async def run(
        self, *answers: dict[str, Any], agent: dict[str, Any] | None = None, **params: Any
    ) -> dict[str, Any]:
        """A run that behaves like this. Without answers it says "ok" and ends, as far as that can be had."""
        agent = agent or await self.agent()
        plan = list(answers) if answers else [says("ok")]
        if self.scripted:
            params["inputs"] = {SCRIPT: {"answers": plan}, **params.get("inputs", {})}
        given = {"agent_id": agent["id"], "goal": "Reply with 'ok'.", **params}
        return await self._made("run.create", given)

    async def ended(
        self, *answers: dict[str, Any], **params: Any
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """A run as it is after its end, and its events."""
        run = await self.run(*answers, **params)
        if self.has("streaming.sse"):
            events = await self.me.events(run["id"])
            return await self.me.call("run.get", run_id=run["id"]), events
        return await self.until(run["id"], *ENDED), []

    async def until(self, run_id: str, *states: str) -> dict[str, Any]:
        """The run once it is in one of these states; bounded by the check's own time."""
        run: dict[str, Any]
        while (run := await self.me.call("run.get", run_id=run_id))["state"] not in states:  # bounded as said
            if run["state"] in ENDED:
                raise Failed(f"the run should become {' or '.join(states)}, it is {brief(run)}.")
            self.notes.last = f"a run that should become {' or '.join(states)} and is {run['state']}"
            await anyio.sleep(POLL_S)
        return run

    async def stop(self, run_id: str) -> None:
        """Tidy up a run that would sleep on; one that has ended meanwhile is as good."""
        await self.me.answer("run.cancel", {"run_id": run_id})

    async def heard(self, run_id: str, event_type: str, number: int = 1) -> list[dict[str, Any]]:
        """The events of a living run, once it has so many of this type; bounded by the check's own time."""
        self.notes.last = f"an event {event_type}"
        frames = 1
        while True:  # bounded by the check's own time
            events = (await self.me.listen(run_id, enough=frames)).events()
            if sum(event.get("type") == event_type for event in events) >= number:
                return events
            expect(events[-1].get("type") != "run.ended", f"the run ended without {number} {event_type}.")
            frames = len(events) + 1

    async def _made(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        made: Any = await self.me.call(method, **params)
        if not isinstance(made, dict) or not isinstance(made.get("id"), str):
            raise Failed(f"{method} should answer an object with an id, got {brief(made)}.")
        return dict(made)


_CROCKFORD: Final = str.maketrans("ILOU", "1100")
