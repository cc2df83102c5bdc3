"""Every setting of a broker process."""

from pathlib import Path

from pydantic import Field, SecretStr

from espalier_egress import EgressSettings
from espalier_protocol.access import ServedCapabilities
from espalier_secrets.sealing import SecretsSettings
from espalier_store.pool import PostgresSettings
from espalier_telemetry import LogSettings


class BrokerSettings(PostgresSettings, EgressSettings, SecretsSettings, LogSettings):
    broker_host: str = "127.0.0.1"
    """Address that the broker listens on; workers alone need to reach it."""
    broker_port: int = Field(default=8788, ge=0, le=65535)
    """Port that the broker listens on; 0 takes any free one."""
    internal_key: SecretStr = Field(min_length=16)
    """What workers sign requests to the broker with; the same for all of them, 16 characters or more."""
    mcp_servers: Path | None = None
    """A JSON file that lists MCP servers (`{"mcpServers": {...}}`); the bundled tools need none."""
    capabilities: ServedCapabilities = "all"
    """Capabilities offered: `all`, `none`, or names with commas; the same for all services."""
    attached_servers_max: int = Field(default=256, ge=1)
    """Servers of embedders that one broker keeps connected; the one not used for longest gives way."""
    broker_ttl_s: float = Field(default=3.0, ge=1)
    """For how long a broker is believed to live after it last said so."""
    broker_calls_max: int = Field(default=200, ge=1)
    """Calls under way in one broker; beyond them workers ask again later."""
    call_s_max: float = Field(default=60.0, gt=0)
    """The most that a tool call may take; then its outcome is unknown."""
    broker_drain_s: float = Field(default=5.0, ge=0)
    """How long a stopping broker lets calls under way finish; those that do not are in doubt."""
