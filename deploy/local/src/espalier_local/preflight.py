"""What can be wrong with a start before anything is started: plan, list of MCP servers, settings.

The processes check both again for themselves; found here they are one sentence at once and not a child that
ends again and again. Above it stand `runtime.py` and `first_key.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from espalier_gateway.settings import GatewaySettings
from espalier_local.errors import LocalError
from espalier_mcp_broker.servers import ServersInvalid, load_servers
from espalier_mcp_broker.settings import BrokerSettings
from espalier_run_worker.models.plan import PlanInvalid, load_plan
from espalier_run_worker.settings import WorkerSettings

PREFIX = "ESPALIER_"

Settings = TypeVar("Settings", bound=BaseSettings)


def require_plan(script: Path) -> None:
    """Raises LocalError with the place in the file if it is no plan. Blocks while it reads."""
    try:
        load_plan(script)
    except PlanInvalid as invalid:
        raise LocalError(f"The plan cannot be used: {str(invalid).rstrip('.')}.") from invalid


def require_servers(listed: Path) -> None:
    """Raises LocalError with the place in the file if it is no list of MCP servers. Blocks while it reads."""
    try:
        load_servers(listed)
    except ServersInvalid as invalid:
        raise LocalError(f"The list of MCP servers cannot be used: {' '.join(invalid.mistakes)}") from invalid


def require_settings(environment: Mapping[str, str]) -> None:
    """Raises LocalError if a gateway, a broker or a worker could not start with this environment."""
    for kind in (GatewaySettings, BrokerSettings, WorkerSettings):
        given = {name: environment.get(PREFIX + name.upper()) for name in kind.model_fields}
        read_settings(kind, **{name: text for name, text in given.items() if text is not None})


def read_settings(kind: type[Settings], **given: Any) -> Settings:
    """Settings from the environment and from what is given; a wrong one is named, its value is not shown."""
    try:
        return kind(**given)
    except ValidationError as err:
        first = err.errors(include_url=False, include_context=False, include_input=False)[0]
        name = PREFIX + "_".join(str(step) for step in first["loc"][:1]).upper()
        raise LocalError(f"The setting {name} cannot be used: {first['msg']}.") from err
