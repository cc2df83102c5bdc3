"""`python -m espalier_local.settings_table` prints docs/settings.md: every setting of every process, once.

The table is made from the settings classes themselves, so it cannot miss one; a test fails when the page on
disk is stale (`make docs` writes it).
"""

import sys
from collections.abc import Iterator
from typing import Final

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from espalier_gateway.settings import GatewaySettings
from espalier_mcp_broker.settings import BrokerSettings
from espalier_run_worker.settings import WorkerSettings

PROCESSES: Final[dict[str, type[BaseSettings]]] = {
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
    "broker": BrokerSettings,
}
COMMAND: Final = (
    (
        "ESPALIER_DATA_DIR",
        "`./.espalier`",
        "Data folder of `espalier up`; the command finds its key there.",
    ),
    (
        "ESPALIER_BASE_URL",
        "from the profile",
        "The runtime that the embedder's commands call; several gateways with commas between them.",
    ),
    ("ESPALIER_API_KEY", "from the profile", "The key that they call it with."),
)
HEAD: Final = """# Settings

Generated from the settings classes by `make docs`; do not edit. Every setting is an environment variable.
"""


def table() -> str:
    """The whole page."""
    lines = [HEAD, "| variable | default | read by | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {default} | {who} | {meaning} |" for name, default, who, meaning in _rows()]
    lines += [f"| `{name}` | {default} | command | {meaning} |" for name, default, meaning in COMMAND]
    return "\n".join(lines) + "\n"


def _rows() -> Iterator[tuple[str, str, str, str]]:
    fields = {name: field for who in PROCESSES.values() for name, field in who.model_fields.items()}
    for name, field in sorted(fields.items()):
        readers = ", ".join(who for who, settings in PROCESSES.items() if name in settings.model_fields)
        yield _variable(name, field), _default(field), readers, _meaning(name, field)


def _variable(name: str, field: FieldInfo) -> str:
    """Its alias where it has one: a few variables are everybody's, such as `OPENAI_API_KEY`."""
    return field.validation_alias if isinstance(field.validation_alias, str) else f"ESPALIER_{name.upper()}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be set"
    default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return "none" if default is None or str(default) == "" else f"`{default}`"


def _meaning(name: str, field: FieldInfo) -> str:
    assert field.description, f"the setting {name} has no docstring"
    return " ".join(field.description.split())


if __name__ == "__main__":
    sys.stdout.write(table())
