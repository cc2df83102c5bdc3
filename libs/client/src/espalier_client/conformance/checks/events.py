"""The event stream of a run, byte by byte and event by event."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import anyio

from espalier_client.conformance.behaviour import CONTINUES, calls, completes, says, sleeps, tool
from espalier_client.conformance.expected import expected, nobody, require_payload, require_shape
from espalier_client.conformance.ground import Trial
from espalier_client.conformance.verdicts import Failed, brief, expect, same
from espalier_client.conformance.wire import Heard, events_path

NEVER: Final = "9999999999999999"
PREVIEW_CHARS_MAX: Final = 500
READERS: Final = 3
OWN_END_S: Final = 10.0
SMOKE_EVENTS_MAX: Final = 51
REFUSED: Final = (400, 410)
NOTE: Final = tool("artifact_create", name="note.txt", mime_type="text/plain", content="x" * 2000)
BUSY: Final = (
    calls(NOTE, tool("nobody.knows_this", x=1)),
    CONTINUES,
    calls(tool("sleep", duration_seconds=1)),
    calls(NOTE, tool("complete", result="done")),
)
"""Three cycles, four calls of tools, a sleep."""

UNUSUAL: Final = (
    calls(NOTE, tool("modify_own_prompt", mode="replace", content="another prompt", reason="as scripted")),
    completes(),
)
"""What a runtime may tell of in words of its own: that somebody is asked for an approval."""


async def _asking(trial: Trial) -> dict[str, Any]:
    return await trial.agent(constitution__mutable_prompt_policy="approval_required")


async def _busy(trial: Trial) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run with more than one cycle, where agents can be made to behave; else any run."""
    return await trial.ended(*BUSY) if trial.scripted else await trial.ended()


async def _all(trial: Trial, run_id: str, query: str = "") -> Heard:
    return await trial.me.listen(run_id, query, until_closed=True)


async def event_01_published_types(trial: Trial) -> None:
    run, _ = (
        await trial.ended(*UNUSUAL, agent=await _asking(trial)) if trial.scripted else await trial.ended()
    )
    plain = await trial.stranger.initialize(capabilities=expected().capabilities)
    types = {event.get("type") for event in await plain.events(run["id"])}
    same(sorted(types - expected().events.keys()), [], "types that AEP does not know")


async def event_02_first_and_last(trial: Trial) -> None:
    run, _ = await _busy(trial)
    types = [event.get("type") for event in (await _all(trial, run["id"])).events()]
    same((types[0], types[-1]), ("run.started", "run.ended"), "the first and the last event")
    same((types.count("run.started"), types.count("run.ended")), (1, 1), "how often they come")


async def event_03_envelope(trial: Trial) -> None:
    run, events = await _busy(trial)
    for event in events:
        require_shape(event, "Event", "an event")
        same(event["run_id"], run["id"], "the run of an event")


async def event_04_ids_increase(trial: Trial) -> None:
    _, events = await _busy(trial)
    for one, other in pairwise(event["event_id"] for event in events):
        expect(_place(one) < _place(other), f"{other} comes after {one}.")


def _place(event_id: str) -> tuple[int, str]:
    """Counters compare as numbers, other ids as text."""
    return (int(event_id), "") if event_id.isdecimal() else (0, event_id)


async def event_05_cycles(trial: Trial) -> None:
    run, events = await _busy(trial)
    edges = [
        (event["type"], event["payload"]["cycle_number"])
        for event in events
        if event["type"] in ("cycle.started", "cycle.ended")
    ]
    wanted = [(f"cycle.{edge}", number) for number in (1, 2, 3) for edge in ("started", "ended")]
    same(edges, wanted, "the edges of its cycles")
    same(run["cycle_count"], 3, "cycle_count")


async def event_06_since(trial: Trial) -> None:
    run, events = await _busy(trial)
    for place, event in enumerate(events[:-1], start=1):
        resumed = await trial.me.events(run["id"], since=event["event_id"])
        same(resumed, events[place:], f"what comes after event {place}")


async def event_07_content_type(trial: Trial) -> None:
    run = await trial.run()
    heard = await trial.me.listen(run["id"], Accept_Encoding="gzip, br, deflate")
    kind = heard.headers.get("content-type", "").partition(";")[0].strip()
    same(kind, "text/event-stream", "the content type")
    same(heard.headers.get("content-encoding", "identity"), "identity", "the content encoding")


async def event_08_frames(trial: Trial) -> None:
    run = await trial.run(*BUSY) if trial.scripted else await trial.run()
    for heard in (await trial.me.listen(run["id"]), await trial.me.listen(run["id"])):
        expect(b"\r" not in heard.raw, "there is a CR in the stream.")
        expect(heard.raw.endswith(b"\n\n"), "the last frame is not ended by two line feeds.")
        same(
            [frame.data_lines() for frame in heard.frames],
            [1] * len(heard.frames),
            "lines of data in a frame",
        )


async def event_09_own_lines(trial: Trial) -> None:
    run, _ = await _busy(trial)
    for frame in (await _all(trial, run["id"])).frames:
        event = frame.event()
        told = (frame.field("id"), frame.field("event"))
        same(told, (event["event_id"], event["type"]), "id: and event: of a frame")


async def event_10_last_event_id(trial: Trial) -> None:
    run, events = await _busy(trial)
    first = events[0]["event_id"]
    for place, event in enumerate(events[:-1], start=1):
        heard = await trial.me.listen(run["id"], Last_Event_ID=event["event_id"])
        same(heard.events(), events[place:], f"what comes after event {place}")
    heard = await trial.me.listen(run["id"], f"?since={first}", Last_Event_ID=events[-2]["event_id"])
    same(heard.events(), events[-1:], "what a reader hears that says both")


async def event_11_ends(trial: Trial) -> None:
    run, _ = await trial.ended()
    expect((await _all(trial, run["id"])).closed, "the stream of an ended run stays open.")


async def event_12_unknown_run(trial: Trial) -> None:
    for run_id in (nobody("run"), "nonsense"):
        same((await trial.me.get(events_path(run_id))).status, 404, f"the status of the stream of {run_id}")


async def event_13_unknown_since(trial: Trial) -> None:
    run, _ = await trial.ended()
    for since in ("nonsense", NEVER, "-1", "evt_" + "0" * 26):
        for answer in (
            await trial.me.get(f"{events_path(run['id'])}?since={since}"),
            await trial.me.get(events_path(run["id"]), Last_Event_ID=since),
        ):
            expect(answer.status in REFUSED, f"a stream after {since!r} is HTTP {answer.status}.")


async def event_14_pairs(trial: Trial) -> None:
    _, events = await _busy(trial)
    open_calls: list[tuple[Any, ...]] = []
    returned = 0
    for event in events:
        payload = event["payload"]
        call = (payload.get("call_id"), payload.get("tool_name"), payload.get("cycle_number"))
        if event["type"] == "tool.called":
            expect(call not in open_calls or call[0] is None, f"{call} was called twice.")
            open_calls.append(call)
        elif event["type"] == "tool.returned":
            expect(call in open_calls, f"{call} returned without being called, or twice.")
            open_calls.remove(call)
            returned += 1
        elif event["type"] in ("cycle.ended", "run.ended"):
            same(open_calls, [], f"calls that are open at {event['type']}")
    expect(returned >= 3, f"the script makes at least three calls of tools, {returned} returned.")


async def event_15_payloads(trial: Trial) -> None:
    _, events = await _busy(trial)
    for event in events:
        if event["type"] in expected().events:
            require_payload(event["payload"], event["type"])
    types = {event["type"] for event in events}
    wanted = {
        "run.started",
        "cycle.started",
        "tool.called",
        "tool.returned",
        "artifact.created",
        "cycle.ended",
    }
    same(sorted(wanted - types), [], "types that such a run should tell")


async def event_16_preview(trial: Trial) -> None:
    agent, content = await trial.agent(), "x" * 4000
    made = [tool("artifact_create", name=content, mime_type="text/plain", content=content)]
    if trial.has("self.learning_memory"):
        made.append(tool("learning_memory_write", namespace="kit", key="k", value=content))
    _, events = await trial.ended(calls(*made), completes(), agent=agent)
    for event in events:
        if event["type"] == "tool.returned":
            length = len(event["payload"]["result_summary"]["preview"])
            expect(length <= PREVIEW_CHARS_MAX, f"a preview of {length} characters.")


async def event_17_live_is_replay(trial: Trial) -> None:
    run = await trial.run(*BUSY)
    heard: list[list[dict[str, Any]]] = []

    async def read() -> None:
        heard.append(await trial.me.events(run["id"]))

    async with anyio.create_task_group() as tasks:
        for _ in range(READERS):
            tasks.start_soon(read)
    afterwards = await trial.me.events(run["id"])
    for each in heard:
        same(each, afterwards, "what a live reader heard")


async def event_18_cancelled_asleep(trial: Trial) -> None:
    run = await trial.run(sleeps())
    heard: list[dict[str, Any]] = []

    async def read() -> None:
        heard.extend(await trial.me.events(run["id"]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await trial.until(run["id"], "sleeping")
        await trial.me.call("run.cancel", run_id=run["id"])
    same(heard[-1]["type"], "run.ended", "the last event")
    same(heard[-1]["payload"]["final_state"], "cancelled", "final_state")


async def event_19_nothing_left(trial: Trial) -> None:
    run, events = await trial.ended()
    last = events[-1]["event_id"]
    heard = await _until_own_end(trial, run["id"], last)
    same(heard, [], "what comes after the last event")
    status = (await trial.me.get(events_path(run["id"]), Last_Event_ID=last)).status
    expect(status in (200, 204), f"an EventSource that has everything gets HTTP {status}.")


async def _until_own_end(trial: Trial, run_id: str, since: str) -> list[dict[str, Any]]:
    with anyio.move_on_after(OWN_END_S) as limit:
        return (await _all(trial, run_id, f"?since={since}")).events()
    assert limit.cancelled_caught
    raise Failed("the stream stays open though nothing can come any more.")


async def event_20_again(trial: Trial) -> None:
    run, _ = await _busy(trial)
    first, second = [[frame.fields for frame in (await _all(trial, run["id"])).frames] for _ in range(2)]
    same(second, first, "the second reading")


async def event_21_times(trial: Trial) -> None:
    _, events = await _busy(trial)
    times = [event["emitted_at"] for event in events]
    same(times, sorted(times), "emitted_at in order")


async def event_22_leave_and_resume(trial: Trial) -> None:
    run = await trial.run(*BUSY)
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] != "run.ended":  # bounded by the check's own time
        query = f"?since={events[-1]['event_id']}" if events else ""
        events += (await trial.me.listen(run["id"], query, enough=1)).events()
    same(events, await trial.me.events(run["id"]), "what a reader hears that resumes after each event")


async def event_23_budgets(trial: Trial) -> None:
    agent = await trial.agent()
    _, events = await trial.ended(says("ok"), agent=agent)
    snapshots = [
        event["payload"].get("budget_snapshot") for event in events if event["type"] == "cycle.started"
    ]
    same(snapshots, [agent["budgets"]], "the budgets that cycle.started shows")


async def smoke_01_first_program(trial: Trial) -> None:
    asked: Sequence[str] = (
        "self.modify_prompt",
        "self.spawn_subagent",
        "self.learning_memory",
        "messaging.peer",
        "streaming.sse",
    )
    caller = await trial.stranger.initialize(capabilities=asked)
    params = {
        "name": "smoke",
        "constitution": {
            "immutable_directives": "Be brief.",
            "mutable_prompt": "You are a smoke test.",
            "mutable_prompt_policy": "auto",
        },
        "toolset": ["helix.web_search"],
        "ceilings": {
            "max_cycles": 5,
            "max_subagents": 2,
            "max_tool_calls_per_cycle": 4,
            "max_wall_seconds": 300,
        },
        "budgets": {"tokens_per_cycle": 10_000, "tool_calls_per_cycle": 4, "seconds_per_cycle": 60},
    }
    agent = await caller.call("agent.create", **params)
    run = await caller.call("run.create", agent_id=agent["id"], goal="reply with 'ok'")
    events = await caller.events(run["id"])
    same(events[-1]["type"], "run.ended", "the last event")
    expect(len(events) <= SMOKE_EVENTS_MAX, f"{len(events)} events: {brief([e['type'] for e in events])}")
