"""The words on the wire: JSON-RPC 2.0 envelopes, AEP methods, resources, events, errors and ids.

The lowest floor. It imports the standard library and pydantic only, does no I/O, reads no clock and
decides nothing: every other room stands on it, and it can be installed alone.

Start at `methods`: it is the whole contract. Names and shapes follow AEP `aep-2026-04-24`; where the
published sources disagree, results carry the union of both dialects.
"""
