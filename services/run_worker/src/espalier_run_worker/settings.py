"""Every setting of a worker process."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from espalier_egress import EgressSettings
from espalier_embeddings import EmbeddingSettings
from espalier_eventlog import RedisSettings
from espalier_protocol.access import ServedCapabilities
from espalier_secrets.sealing import SecretsSettings
from espalier_store.pool import PostgresSettings
from espalier_telemetry import LogSettings


class WorkerSettings(
    PostgresSettings, RedisSettings, LogSettings, SecretsSettings, EgressSettings, EmbeddingSettings
):
    capabilities: ServedCapabilities = "all"
    """Capabilities offered: `all`, `none`, or names with commas; the same for all services."""
    worker_slots: int = Field(default=16, ge=1, le=1000)
    """Runs that may live in this process at the same time."""
    worker_drain_s: float = Field(default=1.0, ge=0)
    """How long a stopping worker lets the steps under way finish before it gives their runs back."""
    log_retention_days: float = Field(default=7.0, ge=1, le=3650)
    """How long the log of a run is kept after it has ended: its events, journal and tool calls."""
    broker_url: str = Field(default="http://127.0.0.1:8788", pattern=r"^http://[^/?#]+/?$")
    """The tool broker, `http://host:port`; only agents with tools beyond their own need it."""
    internal_key: SecretStr = SecretStr("")
    """What workers sign requests to the broker with; the same for all of them, 16 characters or more."""
    script: Path | None = None
    """The plan that the scripted model follows; without one it answers "ok"."""
    models_scripted: Literal["on", "off"] = "off"
    """Whether plans may also come over the wire, in a run's inputs or an agent's metadata."""
    model: str = ""
    """The model that a real server is asked for; without one the scripted model answers."""
    openai_base_url: str = Field(default="", validation_alias="OPENAI_BASE_URL")
    """Where an OpenAI-compatible server is, as in `http://127.0.0.1:8080/v1`; empty is OpenAI itself."""
    openai_api_key: SecretStr = Field(default=SecretStr(""), validation_alias="OPENAI_API_KEY")
    """The key for that server. One with a base URL may need none."""
