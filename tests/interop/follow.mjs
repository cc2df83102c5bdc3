// Follows one run with the EventSource of npm and prints, a JSON line each, what it hears; it ends when the
// runtime has nothing left to tell, which a browser's EventSource learns from a 204.
import { EventSource } from "eventsource";

const [url, key, session, version, types] = process.argv.slice(2);
const headers = {
  Authorization: `Bearer ${key}`,
  "Agent-Protocol-Version": version,
  "X-AEP-Session-Id": session,
};
const say = (value) => console.log(JSON.stringify(value));
const source = new EventSource(url, {
  fetch: (input, init) => fetch(input, { ...init, headers: { ...init.headers, ...headers } }),
});
for (const type of types.split(",")) {
  source.addEventListener(type, (event) => {
    if (event.data) say({ id: event.lastEventId, type: event.type, data: JSON.parse(event.data) });
  });
}
const stay = setInterval(() => {}, 1000); // the timer of a reconnection does not keep node running
source.addEventListener("error", (event) => {
  if (source.readyState !== EventSource.CLOSED) return;
  say({ closed: event.code ?? null });
  clearInterval(stay);
});
