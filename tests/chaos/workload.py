"""Embedders that live their stories over the wire, and followers who look on; all that they see is recorded.

Plain HTTP and not our client: what a call or a frame was is to be seen as it came, one attempt at a time. An
answer that did not come is `unknown`, and a create is sent again with its key, to the other gateway.
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import Any, Final, Literal

import anyio
import httpx2
from anyio.abc import TaskGroup
from tests.chaos.history import Call, Connection, Frame
from tests.chaos.model_server import KEY, MODEL
from tests.chaos.recording import Recorder
from tests.chaos.stories import Plan, Story, story

from espalier_protocol.access import CAPABILITIES
from espalier_protocol.events import LAST_EVENT
from espalier_protocol.versions import SERVED_VERSIONS

RPC: Final = "/aep/v1/rpc"
PROVIDERS: Final = "/api/me/llm-providers"
ANSWER_S: Final = 12.0
SILENCE_S: Final = (3.0, 20.0)
"""Between these a follower chooses how long it bears silence; a heartbeat comes every 15 s."""

AGAIN_S: Final = 0.3
OPENS_AGAIN_S: Final = (0.1, 0.7)
STORY_S_MAX: Final = 60.0
SETTLES_S: Final = 180.0
UNKNOWN_ID: Final = "run_" + "0" * 26
PASSING: Final = ("unavailable", "rate_limited")
HTTP: Final = (httpx2.HTTPError, httpx2.InvalidURL)


@dataclass
class Embedder:
    """One owner's caller, with a client for each gateway."""

    owner: str
    key: str
    recorder: Recorder
    gateways: Mapping[str, httpx2.AsyncClient]
    session_id: str = ""
    provider_id: str = ""
    _calls: int = 0

    @property
    def headers(self) -> dict[str, str]:
        sent = {"Authorization": f"Bearer {self.key}", "Agent-Protocol-Version": SERVED_VERSIONS[0]}
        return sent | ({"X-AEP-Session-Id": self.session_id} if self.session_id else {})

    async def call(
        self, method: str, params: dict[str, Any], *, gateway: str, client: str, key: str | None = None
    ) -> Call:
        """One attempt."""
        self._calls += 1
        began = self.recorder.now()
        body = {"jsonrpc": "2.0", "id": self._calls, "method": method, "params": params}
        headers = self.headers | ({"Idempotency-Key": key} if key else {})
        outcome: Literal["ok", "error", "unknown"] = "unknown"
        answer = None
        try:
            with anyio.fail_after(ANSWER_S):
                response = await self.gateways[gateway].post(RPC, json=body, headers=headers)
            told = response.json()
            outcome = "ok" if "result" in told else "error"
            answer = told.get("result", told.get("error"))
        except (*HTTP, TimeoutError, ValueError):
            pass
        finally:  # also for a caller who lost patience: what was asked may have been done
            ends = self.recorder.now()
            call = Call(ends, began, client, self.owner, gateway, method, params, outcome, answer, key)
            self.recorder.note(call)
        return call

    async def insist(
        self, method: str, params: dict[str, Any], chance: Random, *, client: str, key: str | None = None
    ) -> Call:
        """Until it is answered for good, at whichever gateway. Raises TimeoutError after SETTLES_S."""
        with anyio.fail_after(SETTLES_S):
            while True:  # bounded by the scope
                call = await self.call(
                    method, params, gateway=chance.choice([*self.gateways]), client=client, key=key
                )
                if call.outcome == "ok" or (call.outcome == "error" and not is_passing(call.answer)):
                    return call
                await anyio.sleep(AGAIN_S)

    async def begin(self, chance: Random, model_url: str) -> None:
        """A session, and a provider of its own. Nothing is wrong yet."""
        params = {
            "client_info": {"name": "storm", "version": "0"},
            "requested_versions": list(SERVED_VERSIONS),
            "requested_capabilities": dict.fromkeys(CAPABILITIES, True),
        }
        begun = await self.insist("initialize", params, chance, client=self.owner)
        self.session_id = begun.answer["session_id"]
        given = {
            "name": "storm",
            "kind": "openai_compat",
            "api_key": KEY,
            "base_url": model_url,
            "default_model": MODEL,
        }
        made = await next(iter(self.gateways.values())).post(PROVIDERS, json=given, headers=self.headers)
        self.provider_id = made.json()["id"]


def is_passing(error: Any) -> bool:
    """Whether a refusal asks to be asked again."""
    data = error.get("data") if isinstance(error, dict) else None
    return isinstance(data, dict) and data.get("symbol") in PASSING


@dataclass
class Follower:
    """Reads a run's events until `run.ended`, over as many connections as that takes, at either gateway."""

    name: str
    embedder: Embedder
    run_id: str
    chance: Random
    ended: anyio.Event = field(default_factory=anyio.Event)
    _since: str | None = None
    _number: int = 0

    async def read(self) -> None:
        while not self.ended.is_set():  # bounded: the bench stops followers that see no end
            self._number += 1
            gateway = self.chance.choice([*self.embedder.gateways])
            opened, since = False, self._since
            try:
                query = {} if since is None else {"since": since}
                async with self.embedder.gateways[gateway].stream(
                    "GET",
                    f"/aep/v1/runs/{self.run_id}/events",
                    params=query,
                    headers=self.embedder.headers,
                    timeout=httpx2.Timeout(self.chance.uniform(*SILENCE_S), connect=2.0),
                ) as response:
                    if response.status_code == 200:
                        opened = True
                        self._note("opened", since)
                        await self._frames(response)
            except HTTP:
                pass
            if opened:
                self._note("ended", self._since)
            await anyio.sleep(0 if self.ended.is_set() else self.chance.uniform(*OPENS_AGAIN_S))

    async def _frames(self, response: httpx2.Response) -> None:
        left = self.chance.choice([3, 10, 10_000, 10_000])
        async for frame in httpx2.EventSource(response):
            if not frame.data:
                continue
            recorder = self.embedder.recorder
            digest = sha256(frame.data.encode()).hexdigest()
            recorder.note(
                Frame(
                    recorder.now(), self.name, self.run_id, self._number, frame.id or "", frame.event, digest
                )
            )
            self._since = frame.id
            left -= 1
            if frame.event == LAST_EVENT:
                return self.ended.set()
            if not left:
                return None
        return None

    def _note(self, act: Any, since: str | None) -> None:
        recorder = self.embedder.recorder
        recorder.note(Connection(recorder.now(), self.name, self.run_id, self._number, act, since))


@dataclass
class Workload:
    """Stories, several at a time, from `run` until `stop`; what they began is in `begun`, by label."""

    seed: int
    embedders: Sequence[Embedder]
    group: TaskGroup
    begun: dict[str, str] = field(default_factory=dict)
    followers: list[Follower] = field(default_factory=list)
    stories: int = 0
    _stopped: bool = False

    def stop(self) -> None:
        """Begin no more stories."""
        self._stopped = True

    def plan_of(self, label: str) -> Plan:
        """What the model server answers for a story."""
        number = label[1:].partition("-")[0]
        return story(self.seed, int(number)).plan if number.isdecimal() else []

    async def run(self, at_once: int) -> None:
        async with anyio.create_task_group() as authors:
            for _ in range(at_once):
                authors.start_soon(self._write)

    async def _write(self) -> None:
        while not self._stopped:  # bounded by `stop`; a story by STORY_S_MAX
            number, self.stories = self.stories, self.stories + 1
            with anyio.move_on_after(STORY_S_MAX):
                await self.live(story(self.seed, number))

    async def live(self, told: Story) -> None:
        """One story to its end, or as long as its author has patience."""
        chance = Random(f"{self.seed}/{told.number}/live")
        embedder = self._embedder(told.owner)
        runner = {"runner": {"provider_id": embedder.provider_id}} if told.on_provider else {}
        made = await embedder.insist(
            "agent.create", {**told.agent, **runner}, chance, client=told.label, key=f"{told.label}/agent"
        )
        if made.outcome != "ok":
            return
        agent_id = made.answer["id"]
        params = {"agent_id": agent_id, "goal": told.goal, "inputs": told.inputs}
        key = f"{told.label}/run"
        created = await embedder.insist("run.create", params, chance, client=told.label, key=key)
        if created.outcome != "ok":
            return
        run_id = self.begun[told.label] = created.answer["id"]
        follower = self._follow(embedder, run_id, f"{told.label}/0")
        for place, wait_s in enumerate(told.joins_at_s, start=1):
            self.group.start_soon(self._join, wait_s, embedder, run_id, f"{told.label}/{place}")
        async with anyio.create_task_group() as meanwhile:
            if told.repeats:
                meanwhile.start_soon(self._repeat, told, embedder, params, key, created.gateway, chance)
            if told.peeks:
                meanwhile.start_soon(self._peek, told, run_id, chance)
            for place, wait_s in enumerate(told.messages_at_s):
                meanwhile.start_soon(self._tell, told, embedder, agent_id, place, wait_s)
            if told.cancel_at_s is not None:
                ref = {"run_id": run_id} if told.cancel_method == "run.cancel" else {"agent_id": agent_id}
                meanwhile.start_soon(self._cancel, told, embedder, ref, chance)
            await follower.ended.wait()

    def join_late(self, many: int) -> None:
        """Some more followers, who come when all is over and want to be told everything."""
        chance = Random(f"{self.seed}/late")
        for label, run_id in chance.sample(sorted(self.begun.items()), min(many, len(self.begun))):
            told = story(self.seed, int(label[1:].partition("-")[0]))
            self._follow(self._embedder(told.owner), run_id, f"{label}/late")

    def _embedder(self, owner: str) -> Embedder:
        return next(each for each in self.embedders if each.owner == owner)

    def _follow(self, embedder: Embedder, run_id: str, name: str) -> Follower:
        follower = Follower(name, embedder, run_id, Random(f"{name}/{self.seed}"))
        self.followers.append(follower)
        self.group.start_soon(follower.read)
        return follower

    async def _join(self, wait_s: float, embedder: Embedder, run_id: str, name: str) -> None:
        await anyio.sleep(wait_s)
        self._follow(embedder, run_id, name)

    async def _repeat(
        self,
        told: Story,
        embedder: Embedder,
        params: dict[str, Any],
        key: str,
        gateway: str,
        chance: Random,
    ) -> None:
        others = [each for each in embedder.gateways if each != gateway] or [gateway]
        await embedder.call(
            "run.create", params, gateway=chance.choice(others), client=f"{told.label}/again", key=key
        )
        if told.other_params:
            other = {**params, "goal": "something else"}
            await embedder.call(
                "run.create", other, gateway=chance.choice(others), client=f"{told.label}/other", key=key
            )

    async def _peek(self, told: Story, run_id: str, chance: Random) -> None:
        stranger = chance.choice([each for each in self.embedders if each.owner != told.owner])
        for asked in (run_id, UNKNOWN_ID):
            await stranger.call(
                "run.get",
                {"run_id": asked},
                gateway=chance.choice([*stranger.gateways]),
                client=f"{told.label}/peek",
            )

    async def _tell(self, told: Story, embedder: Embedder, agent_id: str, place: int, wait_s: float) -> None:
        await anyio.sleep(wait_s)
        params = {"to_agent_id": agent_id, "body": {"n": place, "text": told.goal}}
        chance = Random(f"{told.label}/{place}")
        await embedder.insist(
            "message.send",
            params,
            chance,
            client=f"{told.label}/tell",
            key=f"{told.label}/message/{place}",
        )

    async def _cancel(self, told: Story, embedder: Embedder, ref: dict[str, Any], chance: Random) -> None:
        await anyio.sleep(told.cancel_at_s or 0)
        await embedder.insist(told.cancel_method, ref, chance, client=f"{told.label}/cancel")


async def open_embedders(
    stack: AsyncExitStack, recorder: Recorder, keys: Mapping[str, str], base_urls: Mapping[str, str]
) -> list[Embedder]:
    """A caller for each owner's key, which knows every gateway by its name."""
    found: list[Embedder] = []
    for owner, key in keys.items():
        clients: dict[str, httpx2.AsyncClient] = {}
        for name, base_url in base_urls.items():
            client = httpx2.AsyncClient(
                base_url=base_url,
                timeout=httpx2.Timeout(ANSWER_S, connect=2.0),
                limits=httpx2.Limits(max_connections=1000, max_keepalive_connections=20),
                trust_env=False,
            )
            clients[name] = await stack.enter_async_context(client)
        found.append(Embedder(owner, key, recorder, clients))
    return found
