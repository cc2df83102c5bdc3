"""Absence 2: no JSON-RPC, SSE, HTTP or status code in domain, store, eventlog, jobs and acts.

A rule that knows its transport cannot be used by the next one. Docstrings may talk about the wire; names and
string literals may not.
"""

import ast
import re
from collections.abc import Iterator

from tests.architecture.sources import WORDLESS_ROOMS, Source, findings, literals, report, source

WIRE_WORDS = ("jsonrpc", "json_rpc", "rpc", "sse", "http", "https", "status", "status_code", "websocket")
LITERAL = re.compile(
    r"\b(json-?rpc|sse|https?|status[ _-]?codes?|server-sent|websocket|text/event-stream)\b", re.IGNORECASE
)
WORD_EDGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
ESCAPE = "say what happened in the words of the run; gateway/errors and gateway/sse translate"


def spelled(identifier: str) -> str:
    """`JsonRPCError` -> `_json_rpc_error_`, so that a word is found as a whole."""
    return f"_{WORD_EDGE.sub('_', identifier).lower()}_"


def identifiers(module: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(module):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node, name
            case ast.keyword(arg=str(name)) | ast.ImportFrom(module=str(name)):
                yield node, name.replace(".", "_")
            case ast.alias(name=name, asname=alias):
                yield node, f"{name.replace('.', '_')}_{alias or ''}"


def wire_words(module: Source) -> Iterator[str]:
    for node, identifier in identifiers(module.tree):
        word = next((each for each in WIRE_WORDS if f"_{each}_" in spelled(identifier)), None)
        if word:
            yield module.finding(node, f"`{identifier}` says {word} in {module.room}", ESCAPE)
    for literal, text in literals(module.tree):
        if match := LITERAL.search(text):
            yield module.finding(literal, f"a literal says {match[0]!r} in {module.room}", ESCAPE)


def test_the_lower_floors_do_not_know_the_wire() -> None:
    found = findings(wire_words, WORDLESS_ROOMS)
    assert not found, report(found)


def test_the_rule_finds_wire_words_in_names_and_literals() -> None:
    bad = source(
        "acts/bad.py",
        "from espalier_protocol.jsonrpc import Fault\ndef answer(status_code): ...\nclass HTTPFault: ...\n"
        "reply(sse_frame=1)\nlabel = f'HTTP {code}'\n",
    )
    assert len(list(wire_words(bad))) == 5


def test_the_rule_leaves_prose_and_similar_names_alone() -> None:
    good = '"""Knows nothing of HTTP."""\nasset = "classes"\ndef assess(messenger): ...\n'
    assert not list(wire_words(source("acts/good.py", good)))
