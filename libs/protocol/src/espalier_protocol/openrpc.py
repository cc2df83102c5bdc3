"""The contract as documents: an OpenRPC description, and the JSON Schema of everything on the wire.

Both are made from the method table, the event payloads and the error codes; nothing is written here that is
written there. `rpc.discover` answers the first, `docs/protocol` holds both.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from espalier_protocol.errors import MEANINGS, ErrorCode
from espalier_protocol.events import PAYLOADS, Event
from espalier_protocol.methods import METHODS, Method
from espalier_protocol.session import Document

OPENRPC: Final = "1.3.2"
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
DOCUMENTS_MAX: Final = 8
"""A document takes a tenth of a second to make, and a process asks for one or two."""

JsonSchema = dict[str, Any]


@lru_cache(maxsize=DOCUMENTS_MAX)
def document(version: str, build: str, capabilities: frozenset[str]) -> Document:
    """The methods that a runtime with these capabilities serves, in the order of the table.

    `x-capability` must be negotiated by the session and `x-scope` held by the key; null asks for nothing.
    `x-idempotency-key` says that the method heeds one, `x-websocket-only` that only a WebSocket has it.
    """
    served = [each for each in METHODS.values() if each.capability is None or each.capability in capabilities]
    references, components = _schemas([each.params for each in served], [each.result for each in served])
    return Document(
        openrpc=OPENRPC,
        info={"title": f"Agent Execution Protocol {version}, as served by Espalier", "version": build},
        methods=[_method(each, references) for each in served],
        components={"schemas": components, "errors": _errors()},
    )


def bundle() -> JsonSchema:
    """Every shape on the wire as JSON Schema: `$defs` by model, and which of them is what."""
    methods = METHODS.values()
    payloads: list[type[BaseModel]] = [*PAYLOADS, Event]
    references, definitions = _schemas(
        [each.params for each in methods], [*(each.result for each in methods), *payloads], "#/$defs/{model}"
    )
    return {
        "$schema": DIALECT,
        "title": "Agent Execution Protocol, as served by Espalier",
        "params": {each.name: references[each.params, "validation"] for each in methods},
        "results": {each.name: references[each.result, "serialization"] for each in methods},
        "event": references[Event, "serialization"],
        "payloads": {model.type: references[model, "serialization"] for model in PAYLOADS},
        "$defs": definitions,
    }


_Mode = Literal["validation", "serialization"]


def _schemas(
    params: Iterable[type[BaseModel]],
    results: Iterable[type[BaseModel]],
    template: str = "#/components/schemas/{model}",
) -> tuple[dict[tuple[type[BaseModel], _Mode], JsonSchema], JsonSchema]:
    """Parameters as they are read, results as they are written: a reference to each, and all definitions."""
    modes: list[tuple[type[BaseModel], _Mode]] = [
        *((model, "validation") for model in dict.fromkeys(params)),
        *((model, "serialization") for model in dict.fromkeys(results)),
    ]
    references, whole = models_json_schema(modes, ref_template=template)
    found = {each: references[each] for each in modes}
    return found, whole.get("$defs", {})


def _method(method: Method, references: dict[tuple[type[BaseModel], _Mode], JsonSchema]) -> dict[str, Any]:
    return {
        "name": method.name,
        "paramStructure": "by-name",
        "params": [_parameter(method, name) for name in method.params.model_fields],
        "result": {"name": "result", "schema": references[method.result, "serialization"]},
        "errors": [{"$ref": f"#/components/errors/{code.name}"} for code in ErrorCode],
        "x-params": references[method.params, "validation"],
        "x-scope": method.scope,
        "x-capability": method.capability,
        "x-idempotency-key": method.keyed,
        "x-websocket-only": method.duplex,
    }


def _parameter(method: Method, name: str) -> dict[str, Any]:
    field = method.params.model_fields[name]
    schema = f"#/components/schemas/{method.params.__name__}/properties/{name}"
    return {"name": name, "required": field.is_required(), "schema": {"$ref": schema}}


def _errors() -> dict[str, Any]:
    return {code.name: {"code": code.value, "message": MEANINGS[code]} for code in ErrorCode}
