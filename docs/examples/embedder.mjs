// A whole embedder without a library: an agent, a run, the run's events as they come (fetch streams), its result.
//
// Start a runtime with `.venv/bin/espalier up`, then in the same folder, with Node 18 or newer:
//     node docs/examples/embedder.mjs

import { readFileSync } from "node:fs";

const { base_url, api_key } = JSON.parse(readFileSync(".espalier/profile.json", "utf8")); // left by `up`
const headers = { Authorization: `Bearer ${api_key}`, "Agent-Protocol-Version": "aep-2026-04-24" };
const ATTEMPTS = 30;
const PAUSE_MS = 500;

async function call(method, params) {
  const response = await fetch(`${base_url}/aep/v1/rpc`, {
    method: "POST",
    headers: { ...headers, "Content-Type": "application/json" },
    body: JSON.stringify({ jsonrpc: "2.0", id: 1, method, params }),
  });
  const { result, error } = await response.json();
  if (error) throw new Error(`${method}: ${error.message} [${error.data.symbol}]`);
  return result;
}

// The events of one connection. A frame ends with an empty line; comments and heartbeats carry no data.
async function* frames(body) {
  let text = "";
  for await (const piece of body.pipeThrough(new TextDecoderStream())) {
    text += piece;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const data = text.slice(0, end).split("\n").filter((line) => line.startsWith("data: "));
      if (data.length) yield JSON.parse(data.map((line) => line.slice(6)).join("\n"));
    }
  }
}

// All events of a run, each once and in order, over as many connections as it takes.
async function* follow(runId) {
  let last;
  for (let failed = 0; failed < ATTEMPTS; failed++) {
    try {
      const place = last ? { "Last-Event-ID": last } : {};
      const response = await fetch(`${base_url}/aep/v1/runs/${runId}/events`, { headers: { ...headers, ...place } });
      if (response.status === 204) return; // everything was read before
      if (response.status >= 400 && response.status < 429) throw new Error(await response.text());
      if (response.ok) {
        for await (const event of frames(response.body)) {
          yield event;
          [last, failed] = [event.event_id, 0];
          if (event.type === "run.ended") return;
        }
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // fetch tells a broken connection by a TypeError
    }
    await new Promise((done) => setTimeout(done, PAUSE_MS));
  }
  throw new Error(`The events of ${runId} could not be followed.`);
}

const session = await call("initialize", {
  client_info: { name: "embedder.mjs", version: "1" },
  requested_versions: ["aep-2026-04-24"],
  requested_capabilities: { "streaming.sse": true },
});
headers["X-AEP-Session-Id"] = session.session_id;

const agent = await call("agent.create", {
  name: "gardener",
  constitution: {
    immutable_directives: "Be kind.",
    mutable_prompt: "Pursue the goal.",
    mutable_prompt_policy: "auto",
  },
  toolset: [],
  ceilings: { max_cycles: 10, max_subagents: 0, max_tool_calls_per_cycle: 10, max_wall_seconds: 600 },
  budgets: { tokens_per_cycle: 10_000, tool_calls_per_cycle: 10, seconds_per_cycle: 60 },
});
const run = await call("run.create", { agent_id: agent.id, goal: "Say ok" });
for await (const event of follow(run.id)) {
  console.log(event.event_id, event.type, JSON.stringify(event.payload));
}
console.log("result:", JSON.stringify((await call("run.get", { run_id: run.id })).result));
