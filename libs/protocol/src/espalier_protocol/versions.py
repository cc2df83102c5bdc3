"""The protocol versions that a runtime serves: a table, so that several can be served at once.

The models of this package are what a version without differences shows; another one says, by method, how its
results differ. Above: the gateway's composition root hands the table down.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from espalier_protocol.strict_json import JsonValue, dumps, loads

Reshape = Callable[[Any], JsonValue]


@dataclass(frozen=True, slots=True)
class Version:
    name: str
    reshaped: Mapping[str, Reshape] = field(default_factory=dict)

    def shown(self, method: str, result: str) -> str:
        """A result, JSON text of this package's model, as this version has it."""
        reshape = self.reshaped.get(method)
        return result if reshape is None else dumps(reshape(loads(result.encode()))).decode()


Versions = Mapping[str, Version]
"""By name, newest first."""

SERVED: Final[Versions] = {"aep-2026-04-24": Version("aep-2026-04-24")}
SERVED_VERSIONS: Final[tuple[str, ...]] = tuple(SERVED)


def choose_version(requested: Iterable[str], served: Versions) -> str | None:
    """The client's first choice that is served, or None."""
    return next((name for name in requested if name in served), None)
