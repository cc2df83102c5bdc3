"""The tool broker: the one place from which tool calls leave, and the only one that knows servers' addresses.

A worker names a call; the broker moves its row to `sent` behind the fence, reads what to call from the row,
calls, and commits the whole answer before it tells the worker. Nothing is ever sent twice: where an answer is
missing, the call is in doubt. `app` puts a process together, `calls` carries calls out, `servers` and
`session` reach MCP servers, `catalog` knows which tools there are, `bundled` brings two of its own.
"""
