"""`python -m espalier_local.protocol_pages FOLDER` writes docs/protocol: the contract, made from its tables.

A test fails when a page on disk is stale (`make docs` writes them).
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from espalier_protocol.access import CAPABILITIES
from espalier_protocol.errors import MEANINGS, ErrorCode
from espalier_protocol.methods import METHODS
from espalier_protocol.openrpc import bundle, document
from espalier_protocol.versions import SERVED_VERSIONS

BUILD: Final = "generated"
HEAD: Final = """# The protocol as served

Generated from the method table by `make docs`; do not edit. [openrpc.json](openrpc.json) is what
`rpc.discover` answers from a runtime with every capability, [schemas.json](schemas.json) has the JSON Schema
of all parameters, results and event payloads.
"""


def pages() -> dict[str, str]:
    """Every page by its file's name."""
    whole = document(SERVED_VERSIONS[0], BUILD, frozenset(CAPABILITIES))
    return {
        "openrpc.json": _json(whole.model_dump()),
        "schemas.json": _json(bundle()),
        "README.md": "\n".join([HEAD, *_methods(), "", *_errors(), ""]),
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _methods() -> list[str]:
    rows = [f"| `{m.name}` | {_code(m.scope)} | {_code(m.capability)} |" for m in METHODS.values()]
    return ["## Methods", "", "| method | scope | capability |", "|---|---|---|", *rows]


def _code(name: str | None) -> str:
    return f"`{name}`" if name else "none"


def _errors() -> list[str]:
    rows = [f"| {code.value} | `{code.name}` | {MEANINGS[code]} |" for code in ErrorCode]
    return ["## Errors", "", "| code | `data.symbol` | told when |", "|---|---|---|", *rows]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
