"""The conformance kit: holds any AEP runtime to what the protocol asks, over the wire and nothing else.

`requirements.yaml` says what is required, `expected.yaml` which words and shapes are expected, both as data;
`checks` tries each requirement once. Nothing here uses the models that our own runtime answers with, so that
the kit does not agree with our mistakes. Above: the command `espalier conformance`. Below: `httpx2` and
`websockets`.
"""
