"""The words and shapes that are expected on the wire, read from `expected.yaml`, and judging by them.

Objects are open: members that nobody knows here are not looked at.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

import yaml

from espalier_client.conformance.verdicts import Failed, Requirement, brief

ID_CHARS_MAX: Final = 64
_ID: Final = re.compile(rf"[A-Za-z0-9._~-]{{1,{ID_CHARS_MAX}}}")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_UNKNOWN_TAIL: Final = "0" * 26
_PLAIN: Final = {"text": str, "bool": bool, "object": dict, "any": object}
_FORMATS: Final = {"id": _ID, "time": _TIME, "hex": _HEX}


@dataclass(frozen=True, slots=True)
class Expected:
    """`expected.yaml`, whole."""

    version: str
    codes: dict[str, int]
    capabilities: list[str]
    extensions: list[str]
    scopes: list[str]
    methods: dict[str, dict[str, Any]]
    extension_methods: dict[str, dict[str, Any]]
    shapes: dict[str, dict[str, str]]
    events: dict[str, dict[str, str]]


@cache
def expected() -> Expected:
    return Expected(**_document("expected.yaml"))


@cache
def requirements() -> tuple[Requirement, ...]:
    """The manifest, in its own order."""
    return tuple(
        Requirement(**{**each, "source": str(each["source"]), "needs": tuple(each.get("needs", ()))})
        for each in _document("requirements.yaml")
    )


def allowed_skips(profile: str) -> dict[str, str]:
    """Requirement -> why a runtime of this profile may leave it out."""
    return _document("allowed_skips.yaml")[profile] or {}


def code_of(symbol: str) -> int:
    return expected().codes[symbol]


def symbol_of(code: Any) -> str:
    """The name of a code; a code that AEP does not know is its own name."""
    return next((name for name, each in expected().codes.items() if each == code), str(code))


def all_methods() -> dict[str, dict[str, Any]]:
    return {**expected().methods, **expected().extension_methods}


def nobody(prefix: str) -> str:
    """An id of the usual look that nothing has."""
    return f"{prefix}_{_UNKNOWN_TAIL}"


def sample_params(method: str, **ids: str) -> dict[str, Any]:
    """Params that fit the method. `ids` gives ids by prefix; the others name nothing."""
    params = all_methods()[method]["params"]
    return {
        name: ids.get(value[1:], nobody(value[1:])) if str(value).startswith("$") else value
        for name, value in params.items()
    }


def require_shape(value: Any, shape: str, what: str) -> None:
    """Raises Failed with the first member that does not fit."""
    _require_members(value, expected().shapes[shape], what)


def require_payload(payload: Any, event_type: str) -> None:
    _require_members(payload, expected().events[event_type], f"the payload of {event_type}")


def _require_members(value: Any, members: dict[str, str], what: str) -> None:
    if not isinstance(value, dict):
        raise Failed(f"{what} should be an object, got {brief(value)}.")
    for spelled, kind in members.items():
        name = spelled.removesuffix("~")
        if name not in value:
            if spelled.endswith("~"):
                continue
            raise Failed(f"{what} lacks the member {name!r}: {brief(value)}.")
        _require(value[name], kind, f"{what}: {name}")


def _require(value: Any, kind: str, what: str) -> None:
    if kind.endswith("?"):
        if value is None:
            return
        kind = kind[:-1]
    if kind.startswith("["):
        if not isinstance(value, list):
            raise Failed(f"{what} should be a list, got {brief(value)}.")
        for each in value:
            _require(each, kind[1:-1], what)
    elif kind in expected().shapes:
        _require_members(value, expected().shapes[kind], what)
    elif not _fits(value, kind):
        raise Failed(f"{what} should be {kind}, got {brief(value)}.")


def _fits(value: Any, kind: str) -> bool:
    name, _, floor = kind.partition(">=")
    if name in ("int", "number"):
        numeric = int if name == "int" else (int, float)
        return (
            isinstance(value, numeric) and not isinstance(value, bool) and (not floor or value >= int(floor))
        )
    if kind in _PLAIN:
        return isinstance(value, _PLAIN[kind])
    if not isinstance(value, str):
        return False
    if kind in _FORMATS:
        return _FORMATS[kind].fullmatch(value) is not None
    if kind.endswith("…"):
        return value.startswith(kind[:-1]) and _ID.fullmatch(value) is not None
    return value in kind.split("|")


def _document(name: str) -> Any:
    return yaml.safe_load(files(__package__).joinpath(name).read_text(encoding="utf-8"))
