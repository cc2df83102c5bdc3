"""What an embedder attaches to agents: tool servers and model providers; and the queue of approvals."""

from typing import Any, Final

from espalier_client.conformance.behaviour import calls, completes, sleeps, tool
from espalier_client.conformance.expected import nobody, require_shape
from espalier_client.conformance.ground import PROVIDERS_PATH, Trial, agent_params
from espalier_client.conformance.verdicts import expect, same
from espalier_client.conformance.wire import require_error

URL: Final = "https://example.invalid/mcp"
MODEL: Final = "kit-model"


def _server(name: str, **more: Any) -> dict[str, Any]:
    return {"url": URL, "name": name, **more}


def _view(name: str, url: str = URL) -> dict[str, Any]:
    return {"url": url, "name": name, "enabled": True}


def _views(agent: dict[str, Any]) -> list[dict[str, Any]]:
    require_shape(agent, "Agent", "the agent")
    return [
        {name: each[name] for name in ("url", "name", "enabled")} for each in agent["external_mcp_servers"]
    ]


async def servers_01_shown(trial: Trial) -> None:
    agent = await trial.agent(external_mcp_servers=[_server("smoke-server", auth={"bearer": "x"})])
    same(_views(agent), [_view("smoke-server")], "the servers of a new agent")
    read = await trial.me.call("agent.get", agent_id=agent["id"])
    same(read["external_mcp_servers"], agent["external_mcp_servers"], "agent.get")


async def servers_02_secret(trial: Trial) -> None:
    secret, subject = trial.word(), trial.subject()
    servers = [
        _server("one", auth={"bearer": secret}),
        _server("two", auth={"headers": {"X-Secret": secret}}),
    ]
    agent = await trial.agent(external_mcp_servers=servers, subject_ids=[subject])
    asked = {
        "agent.create": agent,
        "agent.get": await trial.me.call("agent.get", agent_id=agent["id"]),
        "agent.list": await trial.me.call("agent.list", subject_id=subject),
        "agent.update": await trial.me.call("agent.update", agent_id=agent["id"], name="x"),
        "an error": await trial.me.answer(
            "agent.update", {"agent_id": agent["id"], "external_mcp_servers": [{}]}
        ),
        "agent.archive": await trial.me.call("agent.archive", agent_id=agent["id"]),
    }
    for what, answer in asked.items():
        expect(secret not in str(answer), f"{what} shows the secret.")
        expect("'auth'" not in str(answer), f"{what} has a member auth.")


async def servers_03_replaced(trial: Trial) -> None:
    agent = await trial.agent(external_mcp_servers=[_server("one"), _server("two")])
    left = await trial.me.call("agent.update", agent_id=agent["id"], name="x")
    same(_views(left), _views(agent), "servers after an update that does not speak of them")
    other = "https://other.invalid/mcp"
    servers = [{**_server("two"), "url": other}, _server("three")]
    replaced = await trial.me.call("agent.update", agent_id=agent["id"], external_mcp_servers=servers)
    found = sorted(_views(replaced), key=lambda view: str(view["name"]))
    same(found, [_view("three"), _view("two", other)], "servers after they were replaced")
    none = await trial.me.call("agent.update", agent_id=agent["id"], external_mcp_servers=[])
    same(_views(none), [], "servers after they were removed")


async def servers_04_one_name(trial: Trial) -> None:
    params = agent_params(external_mcp_servers=[_server("one"), _server("one")])
    require_error(await trial.me.answer("agent.create", params), "invalid_params", "two servers of one name")


async def servers_05_host(trial: Trial) -> None:
    agent = await trial.agent(external_mcp_servers=[{"url": URL}])
    same(_views(agent), [_view("example.invalid")], "a server without a name")


async def servers_06_unreachable(trial: Trial) -> None:
    secret = trial.word()
    agent = await trial.agent(external_mcp_servers=[_server("gone", auth={"bearer": secret})])
    plan = calls(tool("mcp.gone.anything", x=1)), completes("went on")
    run, events = await trial.ended(*plan, agent=agent)
    same((run["state"], run["result"]), ("complete", "went on"), "state and result")
    expect(secret not in str(events) + str(run), "the secret is in an event or in the run.")


# -------------------------------------------------------------------- providers


async def _provider(trial: Trial, **changes: Any) -> tuple[dict[str, Any], str]:
    """A provider that was made, and its key."""
    key = trial.word()
    body = {
        "name": trial.word(),
        "kind": "openai_compat",
        "api_key": key,
        "base_url": "https://example.invalid/v1",
        "default_model": MODEL,
        **changes,
    }
    answer = await trial.me.send("POST", PROVIDERS_PATH, body)
    same(answer.status, 201, f"the status of POST {PROVIDERS_PATH}")
    made = answer.json()
    require_shape(made, "Provider", "the provider")
    return made, key


async def provider_01_listed(trial: Trial) -> None:
    listed = await trial.me.call("provider.list")
    expect(isinstance(listed.get("providers"), list), "provider.list answers no providers.")
    for each in listed["providers"]:
        require_shape(each, "Provider", "a provider")
    await trial.me.refused("invalid_params", "provider.list", nonsense=1)


async def provider_02_made(trial: Trial) -> None:
    made, key = await _provider(trial)
    listed = (await trial.me.call("provider.list"))["providers"]
    same([each for each in listed if each["id"] == made["id"]], [made], "the provider in the list")
    expect(key not in str(made) + str(listed), "the key of a provider is shown.")
    expect(made["api_key_hint"].endswith(key[-4:]), f"the hint is {made['api_key_hint']!r}.")


async def provider_03_unknown(trial: Trial) -> None:
    agent = await trial.agent()
    runner = {"provider_id": nobody("prv"), "model": MODEL}
    require_error(
        await trial.me.answer("agent.create", agent_params(runner=runner)), "tool_not_found", "agent.create"
    )
    await trial.me.refused("tool_not_found", "agent.update", agent_id=agent["id"], runner=runner)


async def provider_04_default_model(trial: Trial) -> None:
    made, _ = await _provider(trial)
    agent = await trial.agent(runner={"provider_id": made["id"]})
    same(agent["runner"], {"provider_id": made["id"], "model": MODEL}, "the runner of a new agent")
    bare, _ = await _provider(trial, default_model=None)
    params = agent_params(runner={"provider_id": bare["id"]})
    require_error(
        await trial.me.answer("agent.create", params), "lifecycle_conflict", "a runner without a model"
    )
    detached = await trial.me.call("agent.update", agent_id=agent["id"], runner=None)
    same(detached["runner"], None, "the runner after it was detached")


async def provider_05_in_use(trial: Trial) -> None:
    made, _ = await _provider(trial)
    path = f"{PROVIDERS_PATH}/{made['id']}"
    agent = await trial.agent(runner={"provider_id": made["id"]})
    refused = await trial.me.send("DELETE", path)
    same((refused.status, refused.json().get("error")), (409, "provider_in_use"), "deleting one in use")
    await trial.me.call("agent.update", agent_id=agent["id"], runner=None)
    same((await trial.me.send("DELETE", path)).status, 204, "the status of deleting it afterwards")
    same((await trial.me.get(path)).status, 404, "the status of looking at it then")


async def provider_06_of_another(trial: Trial) -> None:
    made, _ = await _provider(trial)
    listed = (await trial.they.call("provider.list"))["providers"]
    same([each for each in listed if each["id"] == made["id"]], [], "what another owner sees of it")
    path = f"{PROVIDERS_PATH}/{made['id']}"
    for verb in ("GET", "DELETE"):
        same((await trial.they.send(verb, path)).status, 404, f"the status of their {verb}")
    params = agent_params(runner={"provider_id": made["id"], "model": MODEL})
    require_error(await trial.they.answer("agent.create", params), "tool_not_found", "binding it")
    same((await trial.me.get(path)).status, 200, "the status of the owner's own look")


# -------------------------------------------------------------------- approvals


async def approval_01_unknown(trial: Trial) -> None:
    for approval_id in (nobody("apr"), "nonsense"):
        await trial.me.refused("tool_not_found", "approval.get", approval_id=approval_id)
        params = {"approval_id": approval_id, "resolution": "deny"}
        await trial.me.refused("tool_not_found", "approval.resolve", **params)


async def approval_02_prompt_change(trial: Trial) -> None:
    trial.require("self.modify_prompt")
    agent = await trial.agent(constitution__mutable_prompt_policy="approval_required")
    asked = calls(tool("modify_own_prompt", mode="replace", content="wanted prompt", reason="wanted"))
    run = await trial.run(asked, sleeps(), agent=agent)
    await trial.heard(run["id"], "prompt.change_queued")
    (waiting,) = (await trial.me.call("approval.list", agent_id=agent["id"]))["items"]
    same((waiting["kind"], waiting["agent_id"]), ("prompt_change", agent["id"]), "what waits")
    same(
        (await trial.me.call("approval.get", approval_id=waiting["id"]))["id"], waiting["id"], "approval.get"
    )
    resolution = {"approval_id": waiting["id"], "resolution": "approve"}
    await trial.me.call("approval.resolve", **resolution)
    await trial.me.refused("lifecycle_conflict", "approval.resolve", **resolution)
    read = await trial.me.call("agent.get", agent_id=agent["id"])
    same(read["constitution"]["mutable_prompt"], "wanted prompt", "the prompt")
    same((await trial.me.call("approval.list", agent_id=agent["id"]))["items"], [], "what waits then")
    await trial.me.call("run.cancel", run_id=run["id"])
