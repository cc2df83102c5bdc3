"""An MCP server without a library, for answers that no library would write: `python raw.py LEDGER`.

It serves standard input and output in the handshake era, one request at a time, and notes each call in LEDGER
as `ledger.py` does. Its tools: `nan` answers with NaN, which is no JSON; `huge {delay_s}` with a whole number
of 401 digits, which is.
"""

import json
import sys
import time
from typing import Any

TOOLS = ("nan", "huge")
STRUCTURED = {"nan": '{"x":NaN}', "huge": '{"x":1' + "0" * 400 + "}"}


def result(method: str, params: dict[str, Any], ledger: str) -> str | None:
    match method:
        case "initialize":
            info = {"name": "raw", "version": "1"}
            return json.dumps(
                {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
            )
        case "tools/list":
            return json.dumps({"tools": [{"name": t, "inputSchema": {"type": "object"}} for t in TOOLS]})
        case "tools/call":
            tool = params["name"]
            with open(ledger, "a") as file:  # noqa: PTH123 - one write a line
                file.write(json.dumps({"event": "called", "tool": tool, "argument": tool}) + "\n")
            time.sleep((params.get("arguments") or {}).get("delay_s", 0))
            return f'{{"content":[{{"type":"text","text":"ok"}}],"structuredContent":{STRUCTURED[tool]}}}'
    return None


def main(ledger: str) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        answer = result(message["method"], message.get("params") or {}, ledger)
        told = f'"result":{answer}' if answer else '"error":{"code":-32601,"message":"no such method"}'
        sys.stdout.write(f'{{"jsonrpc":"2.0","id":{json.dumps(message["id"])},{told}}}\n')
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
