"""The embedder's side of the wire: a typed AEP client, streams that resume, and the commands on them.

It speaks the protocol like any other embedder and knows nothing of how a runtime is built. Below it stands
`espalier_protocol`, above it embedders and the `espalier` command. Start at `client.AepClient`; a person's
view of a run is `timeline`, the commands are in `commands/`.
"""

from espalier_client.client import AepClient
from espalier_client.errors import AepError, ClientError, TransportError

__all__ = ["AepClient", "AepError", "ClientError", "TransportError"]
