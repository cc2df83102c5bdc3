"""A process that owns one MCP session and makes one call after another, for tests that measure or kill it.

    python owner.py SERVERS.json < lines

SERVERS.json is the operator's list; each line on standard input is `{"tool": "mcp.<server>.<tool>",
"arguments": {...}}`. Each is answered by one line: `{"answer": "Answered", "text": "...", "peak_mib": 71.2}`,
where the last is the most memory that this process ever had.
"""

import json
import resource
import sys
from pathlib import Path

import anyio

from espalier_mcp_broker.catalog import open_catalog
from espalier_mcp_broker.outcomes import Answered
from espalier_mcp_broker.servers import load_servers

CALL_S = 60.0


async def main(servers: Path) -> None:
    async with open_catalog(load_servers(servers), None) as catalog:
        async for line in anyio.wrap_file(sys.stdin):
            order = json.loads(line)
            found = catalog.find(order["tool"])
            assert found is not None
            answer = await found.session.call(found.tool, order["arguments"], seconds=CALL_S)
            content = answer.result["content"] if isinstance(answer, Answered) else []
            said = {
                "answer": type(answer).__name__,
                "text": content[0]["text"][:100] if content else "",
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), backend_options={"use_uvloop": True})
