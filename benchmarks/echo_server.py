"""An MCP server that does next to nothing: `echo {text}` answers the text. `python -m benchmarks.echo_server
[PORT]` serves standard input and output, or Streamable HTTP on that port of loopback.
"""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("echo", log_level="WARNING")


@server.tool()
def echo(text: str) -> str:
    """The text."""
    return text


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
