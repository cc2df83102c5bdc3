"""A second AEP runtime, small and whole in memory: one process, no database, agents that follow a script.

It shares nothing with Espalier, so that the conformance kit and the protocol do not depend on us. It offers
`streaming.sse` and no other capability. Arguments: a port, and JSON of each key's owner and scopes. Members
of its objects that begin with `_` are not shown.
"""

import asyncio
import hashlib
import json
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Json = dict[str, Any]
VERSION = "aep-2026-04-24"
SCRIPT = "espalier.script"
FORCED_SLEEP_S = 300.0
BATCH_MAX = 20
PAGE_MAX = 200
CALLS = ("max_tool_calls_per_cycle", "tool_calls_per_cycle")
CALL_LIMITS = (("ceiling_exceeded", "ceilings", CALLS[0]), ("budget_exhausted", "budgets", CALLS[1]))
LIVE = ("running", "sleeping")
CODES = {"authn_failed": -32000, "authz_denied": -32001, "capability_not_supported": -32002}
CODES |= {"ceiling_exceeded": -32003, "budget_exhausted": -32004, "tool_not_found": -32008}
CODES |= {"version_mismatch": -32009, "session_expired": -32010, "lifecycle_conflict": -32011}
CODES |= {"parse_error": -32700, "invalid_request": -32600}
CODES |= {"method_not_found": -32601, "invalid_params": -32602}
STATUSES = {"authn_failed": 401, "session_expired": 401, "authz_denied": 403, "tool_not_found": 404}
RPC_STATUSES = {"parse_error": 400, "invalid_request": 400, "authn_failed": 401}
CAPABILITIES = """auth.oauth2 compliance.gdpr tools.mcp_external self.modify_prompt self.spawn_subagent
self.learning_memory messaging.peer streaming.sse runner.byo_llm""".split()
METHODS_OF = {
    "agent.read": "agent.get agent.list",
    "agent.write": "agent.create agent.update agent.cancel agent.archive",
    "run.create": "run.create run.continue artifact.delete",
    "run.cancel": "run.cancel",
    "run.read": "run.get run.list artifact.get artifact.list",
}
SCOPES = {method: scope for scope, methods in METHODS_OF.items() for method in methods.split()}
ABSENT = """memory.read memory.write memory.search memory.delete message.send message.inbox message.list
subject.read subject.export subject.erase agent.approve_prompt_change provider.list""".split()

# What params look like: a type, the least of an integer, words to choose from, members (`?`: may be absent).
CEILINGS: Json = {"max_cycles": 1, "max_subagents": 0, "max_tool_calls_per_cycle": 1, "max_wall_seconds": 1}
BUDGETS: Json = {"tokens_per_cycle": 1, "tool_calls_per_cycle": 1, "seconds_per_cycle": 1}
POLICIES = ("auto", "approval_required", "locked")
PROMPT: Json = {"immutable_directives": str, "mutable_prompt": str, "mutable_prompt_policy": POLICIES}
BLOCKS: Json = {"ceilings": CEILINGS, "budgets": BUDGETS, "constitution": PROMPT}
PARTS = {f"{name}?": {f"{member}?": kind for member, kind in block.items()} for name, block in BLOCKS.items()}
PAGE: Json = {"cursor?": str, "limit?": 1}
STATES = ("active", "sleeping", "complete", "cancelled", "error", "archived")
BY_SUBJECT: Json = {"subject_id?": str, **PAGE}
PARAMS: dict[str, Json] = {
    "initialize": {"client_info": dict, "requested_versions": [str], "requested_capabilities": dict},
    "agent.create": {"name": str, "toolset": [str], "subject_ids?": [str], "metadata?": dict, **BLOCKS},
    "agent.get": {"agent_id": str, "include?": [str], "prompt_history_cursor?": str},
    "agent.list": {"root_agent_id?": str, "parent_agent_id?": str, "lifecycle_state?": STATES, **BY_SUBJECT},
    "agent.update": {"agent_id": str, "name?": str, "metadata?": dict, **PARTS},
    "run.create": {"agent_id": str, "goal": str, "inputs?": dict, "subject_ids?": [str]},
    "run.list": {"agent_id": str, **PAGE},
    "artifact.list": {"run_id?": str, "agent_id?": str, **BY_SUBJECT},
}


class Fault(Exception):
    def __init__(self, symbol: str, message: str, **data: Any) -> None:
        super().__init__(message)
        self.symbol, self.data = symbol, {"symbol": symbol, **data}

    def body(self, request_id: Any) -> Json:
        error = {"code": CODES[self.symbol], "message": str(self), "data": self.data}
        return {"jsonrpc": "2.0", "id": request_id, "error": error}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown(item: Json) -> Json:
    return {name: value for name, value in item.items() if not name.startswith("_")}


def fits(value: Any, kind: Any) -> bool:
    match kind:
        case int():
            return isinstance(value, int) and not isinstance(value, bool) and value >= kind
        case tuple():
            return value in kind
        case [one]:
            return isinstance(value, list) and all(fits(each, one) for each in value)
        case dict():
            known = {name.removesuffix("?"): each for name, each in kind.items()}
            needed = {name for name in kind if not name.endswith("?")}
            whole = isinstance(value, dict) and needed <= set(value) <= set(known)
            return whole and all(fits(each, known[name]) for name, each in value.items())
        case _:
            return isinstance(value, kind)


def after(items: list[Json], name: str, place: str | None, what: str) -> list[Json]:
    """What comes after the item whose member has this value; all for None."""
    ids = [item[name] for item in items]
    if place is not None and place not in ids:
        raise Fault("invalid_params", f"The {what} is not known.", field=what)
    return items if place is None else items[ids.index(place) + 1 :]


def is_id(value: Any) -> bool:
    return value is None or (isinstance(value, str | int) and not isinstance(value, bool))


def is_request(call: Any) -> bool:
    members = call if isinstance(call, dict) else {}
    plain = members.get("jsonrpc") == "2.0" and is_id(members.get("id"))
    shaped = isinstance(members.get("params", {}), dict | list)
    return plain and shaped and isinstance(members.get("method"), str)


class Runtime:
    """`keys` maps a token to its owner and scopes; `kept` has all objects, by kind and id."""

    def __init__(self, keys: dict[str, list[Any]]) -> None:
        self.keys, self.sessions = keys, dict[str, str]()
        self.kept: dict[str, dict[str, Json]] = {"agent": {}, "run": {}, "artifact": {}}

    # ------------------------------------------------------------ the wire

    def enter(self, headers: Any, *scopes: str, session: bool = True) -> tuple[str, set[str]]:
        """The caller's owner and scopes: version, then token, then session."""
        if headers.get("agent-protocol-version") != VERSION:
            raise Fault("version_mismatch", "That version is not served.", supported_versions=[VERSION])
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or token not in self.keys:
            raise Fault("authn_failed", "The token is not known.")
        owner, held = self.keys[token]
        if session and self.sessions.get(headers.get("x-aep-session-id", "")) != owner:
            raise Fault("session_expired", "The session is not known.")
        if missing := set(scopes) - set(held):
            raise Fault("authz_denied", "The key lacks a scope.", required_scope=min(missing))
        return owner, set(held)

    async def rpc(self, request: Request) -> Response:
        try:
            message = json.loads(await request.body())
        except (ValueError, RecursionError):
            return JSONResponse(Fault("parse_error", "Not JSON.").body(None), 400)
        if isinstance(message, list) and not 0 < len(message) <= BATCH_MAX:
            return JSONResponse(Fault("invalid_request", "1 to 20 requests, please.").body(None), 400)
        several, calls = isinstance(message, list), message if isinstance(message, list) else [message]
        heard = [told for each in calls if (told := self.answer(each, request.headers, several)) is not None]
        if not heard:
            return Response(status_code=204)
        symbol = heard[0].get("error", {}).get("data", {}).get("symbol")
        return JSONResponse(heard) if several else JSONResponse(heard[0], RPC_STATUSES.get(symbol, 200))

    def answer(self, call: Any, headers: Any, in_batch: bool) -> Json | None:
        readable = call.get("id") if isinstance(call, dict) else None
        if not is_request(call):
            return Fault("invalid_request", "Not a request.").body(readable if is_id(readable) else None)
        try:
            result = self.climb(call["method"], call.get("params", {}), headers, in_batch)
        except Fault as fault:
            return None if readable is None else fault.body(readable)
        return None if readable is None else {"jsonrpc": "2.0", "id": readable, "result": result}

    def climb(self, method: str, params: Any, headers: Any, in_batch: bool) -> Json:
        owner, held = self.enter(headers, session=method != "initialize")
        noun, _, verb = method.partition(".")
        if method == "initialize" and in_batch:
            raise Fault("invalid_request", "initialize comes alone.")
        if method not in SCOPES and method not in ABSENT and method != "initialize":
            raise Fault("method_not_found", "No such method.")
        gated = isinstance(params, dict) and {"external_mcp_servers", "runner"} & set(params)
        if method in ABSENT or gated or (verb == "create" and "idempotency-key" in headers):
            raise Fault("capability_not_supported", "This runtime does not offer that.")
        if method != "initialize" and SCOPES[method] not in held:
            raise Fault("authz_denied", "The key lacks a scope.", required_scope=SCOPES[method])
        if not fits(params, PARAMS.get(method, {f"{noun}_id": str})):
            raise Fault("invalid_params", "The params do not fit.")
        if verb == "list":
            return self.page(noun, owner, **params)
        if method in ("initialize", "agent.create", "run.create"):
            return dict(getattr(self, method.replace(".", "_"))(owner, **params))
        item = self.find(noun, owner, params.pop(f"{noun}_id"))
        return dict(getattr(self, f"{noun}_{verb}", self.view)(item, **params))

    def initialize(self, owner: str, requested_versions: list[str], **_: Any) -> Json:
        if VERSION not in requested_versions:
            raise Fault("version_mismatch", "That version is not served.", supported_versions=[VERSION])
        session = f"ses_{secrets.token_urlsafe(24)}"
        self.sessions[session] = owner
        told = {"server_info": {"name": "minimal", "version": "1"}, "protocol_version": VERSION}
        offered = {name: name == "streaming.sse" for name in CAPABILITIES}
        return {**told, "session_id": session, "capabilities": offered}

    async def events(self, request: Request) -> Response:
        owner, _ = self.enter(request.headers, "stream.subscribe", "run.read")
        run = self.find("run", owner, request.path_params["run_id"])
        since = request.headers.get("last-event-id", request.query_params.get("since"))
        place = len(run["_events"]) - len(after(run["_events"], "event_id", since, "since"))
        return StreamingResponse(self.frames(run, place), media_type="text/event-stream")

    async def frames(self, run: Json, place: int) -> AsyncIterator[str]:
        while True:  # bounded by the run's own wall clock
            news = run["_news"]
            while place < len(run["_events"]):
                event, place = run["_events"][place], place + 1
                yield f"id: {event['event_id']}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n"
            if run["ended_at"]:
                return
            await news.wait()

    async def content(self, request: Request) -> Response:
        owner, _ = self.enter(request.headers, "run.read")
        file = self.find("artifact", owner, request.path_params["artifact_id"])
        headers = {"ETag": f'"{file["sha256"]}"', "Content-Type": file["mime_type"]}
        headers |= {"Content-Disposition": "attachment", "X-Content-Type-Options": "nosniff"}
        headers |= {"Content-Security-Policy": "sandbox; default-src 'none'"}
        known = request.headers.get("if-none-match") == headers["ETag"]
        return Response(b"" if known else file["_content"], 304 if known else 200, headers)

    # ------------------------------------------------------------ what is kept

    def find(self, kind: str, owner: str, item_id: str) -> Json:
        found = self.kept[kind].get(item_id)
        if found is None or found["_owner"] != owner:
            raise Fault("tool_not_found", f"There is no such {kind}.", resource=kind, id=item_id)
        return found

    def keep(self, kind: str, owner: str, **members: Any) -> Json:
        item_id = f"{ {'agent': 'agt', 'run': 'run', 'artifact': 'art'}[kind] }_{secrets.token_hex(13)}"
        self.kept[kind][item_id] = {"id": item_id, "_owner": owner, **members}
        return self.kept[kind][item_id]

    def page(self, kind: str, owner: str, cursor: str | None = None, limit: int = 50, **filters: Any) -> Json:
        """Newest first."""
        if kind == "run":
            self.find("agent", owner, filters["agent_id"])
        mine = [self.view(item) for item in self.kept[kind].values() if item["_owner"] == owner][::-1]
        subject = filters.pop("subject_id", None)
        wanted = [item for item in mine if all(item[name] == value for name, value in filters.items())]
        wanted = [item for item in wanted if subject is None or subject in item["subject_ids"]]
        rest = after(wanted, "id", cursor, "cursor")
        items = rest[: min(limit, PAGE_MAX)]
        following = items[-1]["id"] if len(rest) > len(items) else None
        return {"items": items, "cursor": following, f"{kind}s": items, "next_cursor": following}

    def view(self, item: Json) -> Json:
        return self.agent_get(item) if "ceilings" in item else shown(item)

    def artifact_delete(self, file: Json) -> Json:
        return {"deleted": self.kept["artifact"].pop(file["id"]) is file, "ok": True}

    # ------------------------------------------------------------ agents

    def agent_create(self, owner: str, **given: Any) -> Json:
        members = {"subject_ids": [], "metadata": {}, **given, "parent_agent_id": None, "runner": None}
        made: Json = {"external_mcp_servers": [], "created_at": now(), "updated_at": now(), "_closed": None}
        agent = self.keep("agent", owner, **members, **made)
        agent["root_agent_id"] = agent["id"]
        return self.agent_get(agent)

    def runs_of(self, agent: Json) -> list[Json]:
        return [run for run in self.kept["run"].values() if run["agent_id"] == agent["id"]]

    def agent_get(self, agent: Json, include: Any = (), **_: Any) -> Json:
        runs = self.runs_of(agent)
        live = [run for run in runs if run["state"] in LIVE]
        asleep = bool(live) and all(run["state"] == "sleeping" for run in live)
        failed = bool(runs) and not live and runs[-1]["state"] == "error"
        state = agent["_closed"] or ("sleeping" if asleep else "error" if failed else "active")
        wake_at = min(run["_wake_at"] for run in live) if asleep else None
        more: Json = {name: [] for name in include}
        return {**shown(agent), "lifecycle_state": state, "next_wake_at": wake_at, **more}

    def agent_update(self, agent: Json, **change: Any) -> Json:
        runs = self.runs_of(agent)
        wider = any(value > agent["ceilings"][name] for name, value in change.get("ceilings", {}).items())
        if wider and any(run["state"] in LIVE for run in runs):
            raise Fault("lifecycle_conflict", "No ceiling grows while a run lives.")
        if runs and "immutable_directives" in change.get("constitution", {}):
            raise Fault("lifecycle_conflict", "The directives are fixed since the first run.")
        for name, value in change.items():
            agent[name] = {**agent[name], **value} if name in BLOCKS else value
        agent["updated_at"] = now()
        return self.agent_get(agent)

    def agent_cancel(self, agent: Json, state: str = "cancelled") -> Json:
        agent["_closed"] = state
        for run in self.runs_of(agent):
            self.stop(run)
        return {**self.agent_get(agent), "ok": True}

    def agent_archive(self, agent: Json) -> Json:
        return self.agent_cancel(agent, "archived")

    # ------------------------------------------------------------ runs

    def run_create(self, owner: str, agent_id: str, goal: str, inputs: Any = None, **more: Any) -> Json:
        agent = self.find("agent", owner, agent_id)
        if agent["_closed"]:
            raise Fault("lifecycle_conflict", f"The agent is {agent['_closed']}.")
        told = {"agent_id": agent_id, "goal": goal, "metadata": inputs or {}, "state": "running"}
        told |= {"started_at": now(), "ended_at": None, "cycle_count": 0, "result": None}
        subjects = sorted({*agent["subject_ids"], *more.get("subject_ids", ())})
        live = {"_events": [], "_news": asyncio.Event(), "_open": [], "_cycle": False}
        run = self.keep("run", owner, subject_ids=subjects, **told, **live)
        self.tell(run, "run.started", run_id=run["id"], agent_id=agent_id)
        run["_task"] = asyncio.get_running_loop().create_task(self.live(run, agent))
        return shown(run)

    def run_cancel(self, run: Json) -> Json:
        if run["state"] in ("complete", "error"):
            raise Fault("lifecycle_conflict", "The run has ended.")
        return {**shown(self.stop(run)), "ok": True}

    def run_continue(self, run: Json) -> Json:
        if run["state"] != "sleeping":
            raise Fault("lifecycle_conflict", f"The run is {run['state']}.")
        run["state"] = "running"
        run["_wake"].set()
        return {**shown(run), "ok": True}

    def stop(self, run: Json) -> Json:
        if run["state"] in LIVE:
            run["_task"].cancel()
            self.end(run, "cancelled", {"reason": "cancelled"})
        return run

    def tell(self, run: Json, kind: str, **payload: Any) -> None:
        place = {"event_id": f"{len(run['_events']) + 1:08d}", "run_id": run["id"]}
        run["_events"].append({**place, "type": kind, "emitted_at": now(), "payload": payload})
        run["_news"].set()
        run["_news"] = asyncio.Event()

    def end(self, run: Json, state: str, result: Any) -> None:
        if run["_cycle"]:
            self.end_cycle(run, "stopped_mid_cycle")
        run.update(state=state, result=result, ended_at=now())
        self.tell(run, "run.ended", run_id=run["id"], final_state=state, result=result)

    def end_cycle(self, run: Json, outcome: str, reason: str | None = None) -> None:
        while run["_open"]:
            self.returned(run, ok=False, preview="not run")
        run["_cycle"] = False
        told = {"run_id": run["id"], "cycle_number": run["cycle_count"], "tokens_used": run["_tokens"]}
        self.tell(run, "cycle.ended", **told, tool_calls_made=run["_made"], outcome=outcome, reason=reason)

    def returned(self, run: Json, *, ok: bool, preview: str) -> None:
        told = {**run["_open"].pop(0), "result_summary": {"ok": ok, "preview": preview[:500]}}
        self.tell(run, "tool.returned", **told)

    def reached(self, run: Json, symbol: str, limit: str) -> None:
        told = {"code": CODES[symbol], "symbol": symbol, "message": f"{limit} is reached."}
        self.tell(run, "error", **told, cycle_number=run["cycle_count"])

    async def live(self, run: Json, agent: Json) -> None:
        """One run from its beginning to its end, or until it is stopped."""
        script, limit = run["metadata"].get(SCRIPT) or {"answers": []}, "max_cycles"
        answers = chain(script["answers"], iter(lambda: {"text": "ok"}, None))
        try:
            async with asyncio.timeout(agent["ceilings"]["max_wall_seconds"]):
                while run["cycle_count"] < agent["ceilings"]["max_cycles"]:
                    sleep_s = await self.cycle(run, agent, answers)
                    if run["ended_at"]:
                        return
                    if sleep_s:
                        await self.rest(run, sleep_s)
        except TimeoutError:
            limit = "max_wall_seconds"
        self.reached(run, "ceiling_exceeded", limit)
        self.end(run, "error", {"reason": f"ceiling_exceeded:{limit}"})

    async def rest(self, run: Json, seconds: float) -> None:
        wake_at = datetime.fromtimestamp(datetime.now(UTC).timestamp() + seconds, UTC).isoformat()
        run.update(state="sleeping", _wake=asyncio.Event(), _wake_at=wake_at)
        await asyncio.wait([asyncio.ensure_future(run["_wake"].wait())], timeout=seconds)
        run["state"] = "running"

    async def cycle(self, run: Json, agent: Json, answers: Iterator[Json]) -> float:
        """One cycle; the seconds to sleep after it."""
        run.update(cycle_count=run["cycle_count"] + 1, _tokens=0, _made=0, _cycle=True)
        budgets, clock = dict(agent["budgets"]), asyncio.get_running_loop().time
        place = {"run_id": run["id"], "cycle_number": run["cycle_count"]}
        self.tell(run, "cycle.started", **place, budget_snapshot=budgets)
        until = clock() + budgets["seconds_per_cycle"]
        while run["_tokens"] < budgets["tokens_per_cycle"]:
            answer = next(answers)
            await asyncio.sleep(min(answer.get("delay_s", 0), max(until - clock(), 0)))
            if clock() >= until:
                return self.forced(run, "budget_exhausted", "seconds_per_cycle")
            if "fault" in answer:
                self.end(run, "error", {"reason": f"model_failed:{answer['fault']['reason']}"})
                return 0
            run["_tokens"] += answer.get("tokens", 1)
            if (decided := self.carry_out(run, agent, answer)) is not None:
                return decided
        return self.forced(run, "budget_exhausted", "tokens_per_cycle")

    def forced(self, run: Json, symbol: str, limit: str) -> float:
        self.reached(run, symbol, limit)
        self.end_cycle(run, "forced_sleep", f"{symbol}:{limit}")
        return FORCED_SLEEP_S

    def carry_out(self, run: Json, agent: Json, answer: Json) -> float | None:
        """The calls of one answer; the seconds to sleep if they end the cycle."""
        made = [(call["tool"], call.get("args", {})) for call in answer.get("calls", [])]
        for name, args in made:
            called = {"cycle_number": run["cycle_count"], "call_id": secrets.token_hex(8), "tool_name": name}
            run["_open"].append(called)
            self.tell(run, "tool.called", **called, args=args)
        for name, args in made:
            if name in ("sleep", "continue_now", "complete"):
                self.returned(run, ok=True, preview="ok")
                return self.decide(run, name, args)
            for symbol, block, limit in CALL_LIMITS:
                if run["_made"] >= agent[block][limit]:
                    self.returned(run, ok=False, preview=f"{symbol}: {limit}")
                    return self.forced(run, symbol, limit)
            if name == "artifact_create":
                self.leave_file(run, **args)
            else:
                self.returned(run, ok=False, preview=f"tool_not_found: {name}")
        if answer.get("text") and not made:
            return self.decide(run, "complete", {"final_message": answer["text"], "artifact_ids": []})
        return None if made else self.decide(run, "sleep", {"duration_seconds": FORCED_SLEEP_S})

    def decide(self, run: Json, name: str, args: Json) -> float:
        outcomes = {"complete": "completed", "continue_now": "continue", "sleep": "slept"}
        self.end_cycle(run, outcomes[name], args.get("reason"))
        if name == "complete":
            self.end(run, "complete", args.get("result", args))
        if name != "sleep":
            return 0
        until = datetime.fromisoformat(args["until"]).timestamp() if "until" in args else None
        seconds = args["duration_seconds"] if until is None else until - datetime.now(UTC).timestamp()
        return max(float(seconds), 1)

    def leave_file(self, run: Json, name: str, content: str, mime_type: str) -> None:
        run["_made"] += 1
        data, origin = content.encode(), {"agent_id": run["agent_id"], "run_id": run["id"]}
        told = {"name": name, "mime_type": mime_type, "size_bytes": len(data)}
        rest: Json = {"sha256": hashlib.sha256(data).hexdigest(), "created_at": now(), "created_by": origin}
        rest |= {"subject_id": None, "subject_ids": [], "metadata": {}, "_content": data, **origin}
        made = self.keep("artifact", run["_owner"], **told, **rest)
        self.returned(run, ok=True, preview=made["id"])
        self.tell(run, "artifact.created", artifact_id=made["id"], **told)


class Versioned(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        response.headers["Agent-Protocol-Version"] = VERSION
        return response


async def refused(_: Request, fault: Exception) -> Response:
    assert isinstance(fault, Fault)
    told = {"error": fault.symbol, "message": str(fault), "code": CODES[fault.symbol]}
    return JSONResponse(told, STATUSES.get(fault.symbol, 400), {"WWW-Authenticate": "Bearer"})


def main() -> None:
    runtime, port = Runtime(json.loads(sys.argv[2])), int(sys.argv[1])
    routes = [Route("/aep/v1/rpc", runtime.rpc, methods=["POST"])]
    routes.append(Route("/aep/v1/runs/{run_id}/events", runtime.events))
    routes.append(Route("/aep/v1/artifacts/{artifact_id}/bytes", runtime.content))
    app = Starlette(routes=routes, middleware=[Middleware(Versioned)], exception_handlers={Fault: refused})
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
