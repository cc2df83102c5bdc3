"""The wire: JSON-RPC, server-sent events and artifact bytes over HTTP.

A call is walked by opening files in one direction: `http` -> `dispatcher` -> `methods/` -> the acts below.
`app` puts the parts together, `server` is the HTTP server, `errors` the one table from what happened to what
a client is told. The gateway executes no run and holds no truth: any number of them may stand side by side.
"""
