"""The embedder's side of the wire: a typed AEP client, streams that resume, and the commands on them.

    import anyio
    from espalier_client import AepClient
    from espalier_protocol.run import RunCreate

    async def main() -> None:
        async with AepClient("http://127.0.0.1:8787", "esp_...") as client:
            run = await client.run_create(RunCreate(agent_id="agt_...", goal="Say ok"))
            async for event in client.follow(run.id):  # reconnects and resumes by itself
                print(event.event_id, event.type)
            print((await client.run_result(run.id)).result)

    anyio.run(main)

* A method of the protocol is a typed call: `run.create` is `client.run_create(RunCreate(...))`. Parameters
  and results are the models of `espalier_protocol`, one module for each word before the dot.
* A runtime with several gateways: `AepClient(["http://a:8787", "http://b:8787"], key)`. Calls, streams and
  downloads go on at the next one when one dies.
* A list as long as it is: `async for run in every(client.run_list, RunList(agent_id="agt_...")): ...`
* What goes wrong is a `ClientError` with one sentence: an `AepError` if the runtime refused (`symbol` says
  what), a `TransportError` if there is no usable answer (`cause` says whether the request was heard).

It speaks the protocol like any other embedder and knows nothing of how a runtime is built. Below it stands
`espalier_protocol`, above it embedders and the `espalier` command. Start at `client.AepClient`; a person's
view of a run is `timeline`, the commands are in `commands/`.
"""

from espalier_client.client import AepClient
from espalier_client.errors import AepError, Cause, ClientError, TransportError
from espalier_client.lists import every

__all__ = ["AepClient", "AepError", "Cause", "ClientError", "TransportError", "every"]
