"""Two owners: to each, what is the other's does not exist; and what OAuth publishes."""

from typing import Any

from espalier_client.conformance.behaviour import calls, completes, tool
from espalier_client.conformance.expected import nobody
from espalier_client.conformance.ground import Trial, agent_params
from espalier_client.conformance.verdicts import brief, expect, same
from espalier_client.conformance.wire import Caller, bytes_path, events_path


async def _like_nobody(
    trial: Trial, method: str, name: str, known: str, unknown: str, /, **more: Any
) -> None:
    """Another owner's id answers exactly like one that was never given out."""
    answers = [
        {
            key: each
            for key, each in (await trial.they.answer(method, {name: one, **more})).items()
            if key != "id"
        }
        for one in (known, unknown)
    ]
    foreign = brief(answers[0]).replace(known, "ID")
    random = brief(answers[1]).replace(unknown, "ID")
    same(foreign, random, f"{method} with another owner's id")
    expect("error" in answers[0], f"{method} with another owner's id succeeded.")


async def owner_01_agents(trial: Trial) -> None:
    agent = await trial.agent()
    for method, more in (
        ("agent.get", {}),
        ("agent.update", {"name": "taken"}),
        ("agent.cancel", {}),
        ("agent.archive", {}),
        ("run.create", {"goal": "x"}),
        ("run.list", {}),
    ):
        await _like_nobody(trial, method, "agent_id", agent["id"], nobody("agt"), **more)
    same(await trial.me.call("agent.get", agent_id=agent["id"]), agent, "the agent afterwards")


async def owner_02_runs(trial: Trial) -> None:
    run, _ = await trial.ended()
    for method in ("run.get", "run.cancel", "run.continue"):
        await _like_nobody(trial, method, "run_id", run["id"], nobody("run"))
    same(await trial.me.call("run.get", run_id=run["id"]), run, "the run afterwards")


async def owner_03_streams(trial: Trial) -> None:
    run = await trial.run()
    await _same_refusal(trial.they, events_path, run["id"], nobody("run"))


async def _same_refusal(caller: Caller, path: Any, known: str, unknown: str) -> None:
    foreign, random = await caller.get(path(known)), await caller.get(path(unknown))
    same(foreign.status, 404, "the status for another owner's id")
    same(random.status, 404, "the status for an unknown id")
    told = foreign.body.replace(known.encode(), b"ID"), random.body.replace(unknown.encode(), b"ID")
    same(told[0].decode(), told[1].decode(), "what is said of another owner's id")


async def owner_04_artifacts(trial: Trial) -> None:
    file = tool("artifact_create", name="f.txt", mime_type="text/plain", content="x")
    run, _ = await trial.ended(calls(file), completes())
    page = await trial.me.call("artifact.list", run_id=run["id"])
    (record,) = page.get("items", page.get("artifacts"))
    for method in ("artifact.get", "artifact.delete"):
        await _like_nobody(trial, method, "artifact_id", record["id"], nobody("art"))
    await _same_refusal(trial.they, bytes_path, record["id"], nobody("art"))
    same(await trial.me.call("artifact.get", artifact_id=record["id"]), record, "the artifact afterwards")


async def owner_05_lists(trial: Trial) -> None:
    subject = trial.subject()
    agent = await trial.agent(subject_ids=[subject])
    run, _ = await trial.ended(agent=agent)
    for method, filters in (
        ("agent.list", {"root_agent_id": agent["id"]}),
        ("agent.list", {"subject_id": subject}),
        ("artifact.list", {"agent_id": agent["id"]}),
        ("artifact.list", {"run_id": run["id"]}),
    ):
        page = await trial.they.call(method, **filters)
        same((page.get("items"), page.get("cursor")), ([], None), f"{method} {filters} of another owner")
    page = await trial.they.call("agent.list", limit=200)
    expect(agent["id"] not in str(page), "agent.list shows an agent of another owner.")


async def owner_06_memory(trial: Trial) -> None:
    root = (await trial.agent())["id"]
    where = {"tree_root_id": root, "namespace": "kit"}
    record = await trial.me.call("memory.write", **where, key="k", value="an apple")
    they = trial.they
    await they.refused("tree_boundary_violation", "memory.write", **where, key="k", value="taken")
    await they.refused("tree_boundary_violation", "memory.read", **where)
    await they.refused("tree_boundary_violation", "memory.search", **where, query="apple")
    await they.refused("tree_boundary_violation", "memory.delete", **where)
    same(await they.call("memory.delete", id=record["id"]), {"deleted": 0}, "deleting another owner's record")
    page = await trial.me.call("memory.read", **where)
    same(page.get("items", page.get("records")), [record], "what is remembered afterwards")


async def owner_07_messages(trial: Trial) -> None:
    agent = await trial.agent()
    sent = await trial.me.call("message.send", to_agent_id=agent["id"], body="x")
    await _like_nobody(trial, "message.send", "to_agent_id", agent["id"], nobody("agt"), body="x")
    await _like_nobody(trial, "message.inbox", "agent_id", agent["id"], nobody("agt"))
    for filters in ({"agent_id": agent["id"]}, {"tree_root_id": agent["id"]}):
        page = await trial.they.call("message.list", **filters)
        same(page.get("items", page.get("messages")), [], f"message.list {filters} of another owner")
    page = await trial.they.call("message.list")
    expect(sent["id"] not in str(page), "message.list shows a message of another owner.")
    inbox = await trial.me.call("message.inbox", agent_id=agent["id"])
    same([each["id"] for each in inbox["messages"]], [sent["id"]], "the inbox afterwards")


async def owner_08_cursors(trial: Trial) -> None:
    agent = await trial.agent()
    await trial.they.refused("invalid_params", "agent.list", cursor=agent["id"])
    run, _ = await trial.ended(agent=agent)
    theirs = await trial.they.call("agent.create", **agent_params())
    await trial.they.refused("invalid_params", "run.list", agent_id=theirs["id"], cursor=run["id"])


# -------------------------------------------------------------------- OAuth


async def oauth_01_server(trial: Trial) -> None:
    await _published(trial, "/.well-known/oauth-authorization-server", ["issuer", "token_endpoint"])


async def oauth_02_resource(trial: Trial) -> None:
    await _published(trial, "/.well-known/oauth-protected-resource", ["resource", "authorization_servers"])


async def _published(trial: Trial, path: str, members: list[str]) -> None:
    answer = await trial.stranger.get(path, Authorization=None)
    same(answer.status, 200, f"the status of {path}")
    document = answer.json()
    same([name for name in members if not document.get(name)], [], f"members that {path} lacks")
